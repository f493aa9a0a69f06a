//! Sessions that are written chunk by chunk: whole once they are committed, and until then nothing.

use std::ops::Range;

use crate::common::{
    self, PIECE, ROW, blocks, longest, of_files, restore, rows, save, sessions, tokens,
};
use kvdepot_session::{Checkpoint, Ending, Error, Reason, Saved, Sessions, Sink, Stream};
use kvdepot_store::Buffer;
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;

fn ending(count: usize) -> Ending<'static> {
    Ending {
        text: b"",
        reason: Reason::Asked,
        context_tokens: 4096,
        objects: vec![(
            "logits".into(),
            Buffer::from_vec(content(count as u64, 500)),
        )],
        note: String::new(),
        created: 1_700_000_000,
    }
}

/// Adds the next tokens of a text, their rows in some buffers.
fn append(stream: &mut Stream, text: &[u32], count: usize) -> Result<(), Error> {
    let run = stream.tokens().len()..stream.tokens().len() + count;
    let all = rows(text, &run);
    let (one, other) = all.split_at(all.len() / 3);
    let buffers = [one, other].map(|some| Buffer::from_vec(some.to_vec()));
    stream.append(&text[run], &buffers)
}

fn commit(stream: &mut Stream) -> Saved {
    let count = stream.tokens().len();
    stream.commit(ending(count)).unwrap()
}

#[test]
fn a_stream_in_any_chunks_is_the_session_that_a_save_makes() {
    let mut rng = Rng::for_test("streams::a_stream_in_any_chunks_is_the_session_that_a_save_makes");
    for round in 0..20 {
        let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (streamed, saved) = (sessions(home.path()), of_files(other.path()));
        let count = 1 + rng.below(1000) as usize;
        let text = tokens(count, round);
        let mut stream = streamed.stream(&[]).unwrap();
        while stream.tokens().len() < count {
            let left = count - stream.tokens().len();
            let most = *rng.pick(&[1, PIECE, 5 * PIECE]);
            append(
                &mut stream,
                &text,
                left.min(1 + rng.below(most as u64) as usize),
            )
            .unwrap();
            assert!(longest(&streamed, &text).is_none());
        }
        let one = commit(&mut stream);
        let other = save(&saved, &text);
        assert_eq!((one.cached_tokens, one.cache_write_tokens), (0, count));
        let found = longest(&streamed, &text).unwrap();
        assert_eq!(
            (found.id, restore(&streamed, &found)),
            (one.id, (true, count))
        );
        let bytes = |sessions: &Sessions| sessions.list()[0].bytes;
        assert_eq!(bytes(&streamed), bytes(&saved));
        assert!(
            one.bytes_written.abs_diff(other.bytes_written) <= 8,
            "{one:?} {other:?}"
        );
    }
}

#[test]
fn a_stream_goes_on_behind_what_is_there() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(500, 1);
    save(&sessions, &text[..200]);
    // Three pieces are full.
    let mut stream = sessions.stream(&text[..300]).unwrap();
    assert_eq!(
        (stream.cached_tokens(), stream.tokens().len()),
        (3 * PIECE, 3 * PIECE)
    );
    append(&mut stream, &text, 500 - 3 * PIECE).unwrap();
    let saved = commit(&mut stream);
    assert_eq!((saved.cached_tokens, saved.cache_write_tokens), (192, 308));
    let found = longest(&sessions, &text).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 500));
    // What another has saved meanwhile is not written again.
    let mut stream = sessions.stream(&[]).unwrap();
    append(&mut stream, &text, 500).unwrap();
    assert_eq!(stream.bytes_written(), 0);
    let again = commit(&mut stream);
    assert_eq!((again.cached_tokens, again.cache_write_tokens), (500, 0));
}

#[test]
fn nothing_is_left_of_a_stream_that_ends_without_a_session() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(1000, 1);
    let mut stream = sessions.stream(&[]).unwrap();
    append(&mut stream, &text, 900).unwrap();
    assert!(blocks(home.path()) >= 13);
    stream.abort().unwrap();
    assert_eq!(blocks(home.path()), 0);
    assert!(
        append(&mut stream, &text, 1)
            .unwrap_err()
            .to_string()
            .contains("ended")
    );
    assert!(stream.commit(ending(900)).is_err());
    // But for what a session names: what was there, and what another has saved meanwhile.
    save(&sessions, &text[..200]);
    let mut stream = sessions.stream(&text[..128]).unwrap();
    append(&mut stream, &text, 700).unwrap();
    let other = of_files(home.path());
    save(&other, &text[..400]);
    drop(stream);
    // Six full pieces and two short ones, and an object and a manifest of each.
    assert_eq!(blocks(home.path()), 6 + 2 + 2 + 2);
    for count in [200, 400] {
        let found = longest(&other, &text[..count]).unwrap();
        assert_eq!(restore(&other, &found), (true, count));
    }
    assert_eq!(other.sweep().unwrap(), 0);
}

#[test]
fn a_stream_says_what_it_does_not_take_and_goes_on() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(300, 1);
    let mut stream = sessions.stream(&[]).unwrap();
    append(&mut stream, &text, 60).unwrap();
    assert_eq!(stream.room(), 4);
    let some = |len: usize| [Buffer::from_vec(vec![1; len])];
    for (count, len, reason) in [
        (0, 1, "tokens"),
        (1, 0, "rows"),
        (5, 501, "only 4 of the tokens"),
    ] {
        let refused = stream
            .append(&text[60..60 + count], &some(len))
            .unwrap_err();
        assert!(refused.to_string().contains(reason), "{refused}");
        assert!(matches!(refused, Error::Input { .. }));
    }
    let one = || ("logits".to_owned(), Buffer::from_vec(vec![1]));
    let mut twice = ending(60);
    twice.objects = vec![one(), one()];
    assert!(matches!(stream.commit(twice), Err(Error::Input { .. })));
    // Within a piece, a chunk may have any bytes.
    append(&mut stream, &text, 4).unwrap();
    append(&mut stream, &text, 100).unwrap();
    commit(&mut stream);
    let found = longest(&sessions, &text).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 164));
}

#[test]
fn a_stream_that_finds_no_room_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let posix = serde_json::json!({"path": home.path().join("posix"), "capacity": "8MiB"});
    let settings = serde_json::json!({"socket": "off", "lanes": 1, "posix": posix});
    let config = kvdepot_store::Config::new("Posix", &settings).unwrap();
    let depot = kvdepot_service::open(&config).unwrap();
    let sessions = Sessions::open(depot, &common::spec("w")).unwrap();
    let text = tokens(10 * PIECE, 1);
    let mut stream = sessions.stream(&[]).unwrap();
    // More than all room: what came first goes for what comes behind.
    for piece in text.chunks(PIECE) {
        let rows = [Buffer::from_vec(content(piece[0].into(), 2 << 20))];
        if stream.append(piece, &rows).is_err() {
            break;
        }
    }
    assert!(stream.commit(ending(1)).is_err());
    assert!(sessions.list().is_empty());
    drop(stream);
    assert_eq!(blocks(home.path()), 0);
}

/// Saves by a serializer that writes so many bytes more, or fewer, than were predicted.
fn serialize(sessions: &Sessions, text: &[u32], more: i64) -> Result<Saved, Error> {
    let checkpoint = Checkpoint {
        tokens: text,
        text: b"",
        reason: Reason::Asked,
        context_tokens: 4096,
        objects: vec![(
            "logits".into(),
            Buffer::from_vec(content(text.len() as u64, 500)),
        )],
        note: String::new(),
        created: 1,
        exact: false,
    };
    let size = |run: Range<usize>| (run.len() * ROW) as u64;
    sessions.save_serialized(checkpoint, size, |runs, sink: &mut Sink| {
        let mut all: Vec<u8> = runs.iter().flat_map(|run| rows(text, run)).collect();
        assert_eq!(sink.left(), all.len() as u64);
        all.resize((all.len() as i64 + more) as usize, 9);
        for chunk in all.chunks(777) {
            // Whatever it makes of what it is told, the save has failed.
            let _told = sink.write(chunk);
        }
        Ok(())
    })
}

#[test]
fn a_payload_that_is_longer_or_shorter_than_predicted_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(500, 1);
    for more in [1, 5000, -1, -5000, -50_000] {
        let failed = serialize(&sessions, &text, more);
        let Err(Error::Predicted { predicted, written }) = failed else {
            panic!("{failed:?}");
        };
        assert_eq!(predicted, 50_000);
        assert!((written > predicted) == (more > 0));
        assert!(sessions.list().is_empty());
        assert_eq!(blocks(home.path()), 0, "{more}");
    }
    let saved = serialize(&sessions, &text, 0).unwrap();
    assert_eq!((saved.cached_tokens, saved.cache_write_tokens), (0, 500));
    let found = longest(&sessions, &text).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 500));
    // With a count of its restores.
    assert_eq!(blocks(home.path()), 11);
    // What is there stays when a longer one fails.
    let longer = [text.clone(), tokens(300, 2)].concat();
    assert!(serialize(&sessions, &longer, -1).is_err());
    assert_eq!(restore(&sessions, &found), (true, 500));
    assert_eq!(blocks(home.path()), 11);
    // Where all is there nobody is asked.
    assert_eq!(
        serialize(&sessions, &text, 7).unwrap().cache_write_tokens,
        0
    );
}

#[test]
fn what_no_session_names_can_be_swept() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(300, 1);
    save(&sessions, &text);
    // As a stream that was killed leaves it.
    let mut stream = sessions.stream(&[]).unwrap();
    append(&mut stream, &tokens(300, 2), 300).unwrap();
    append(&mut stream, &tokens(900, 2), 200).unwrap();
    std::thread::spawn(move || {
        let _never_dropped = std::mem::ManuallyDrop::new(stream);
    })
    .join()
    .unwrap();
    // The last of its three pieces is still on its way.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while blocks(home.path()) < 10 && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(sessions.sweep().unwrap(), 3);
    assert_eq!(blocks(home.path()), 7);
    let found = longest(&sessions, &text).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 300));
}
