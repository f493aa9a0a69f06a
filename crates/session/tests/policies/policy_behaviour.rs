//! What an engine sees of the policy, event by event; ds4's documented faults among it.

use std::time::Duration;

use kvdepot_session::policy::{
    Answer, Declined, Origin, Policy, Prompt, Reason, Save, Settings, Writes,
};

const GIB: u64 = 1 << 30;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(1_800_000_000 + seconds)
}

/// A small state, so that disk space bounds nothing.
fn settings() -> Settings {
    Settings {
        fixed_bytes: 1000,
        token_bytes: 10,
        ..Settings::default()
    }
}

fn policy(settings: Settings) -> Policy {
    Policy::new(settings).unwrap()
}

fn start(policy: &mut Policy, tokens: u64, origin: Origin, anchor: Option<u64>) {
    let prompt = Prompt {
        tokens,
        origin,
        anchor,
    };
    policy.start(0, &prompt);
}

fn save(answer: Answer) -> Save {
    answer.save().unwrap_or_else(|| panic!("{answer:?}"))
}

/// Carries a save out, as predicted.
fn done(policy: &mut Policy, answer: Answer) -> (u64, Reason) {
    let save = save(answer);
    policy.saved(save.id, save.bytes, at(0)).unwrap();
    (save.tokens, save.reason)
}

fn declined(why: Declined) -> Answer {
    Answer::Declined(why)
}

#[test]
fn an_interval_is_not_missed_after_an_unaligned_restore() {
    let mut policy = policy(settings());
    start(&mut policy, 60_000, Origin::Restored(9001), None);
    // Chunks of 2,048 from 9,001 never meet a multiple of 10,240.
    let mut saved = Vec::new();
    for chunk in 1..24 {
        if let Some(save) = policy.prefill(0, 9001 + 2048 * chunk, at(0)).save() {
            policy.saved(save.id, save.bytes, at(0)).unwrap();
            saved.push((save.tokens, save.base));
        }
    }
    let expected = [
        (11_049, 9001),
        (21_289, 11_049),
        (31_529, 21_289),
        (41_769, 31_529),
    ];
    assert_eq!(saved, [&expected[..], &[(52_009, 41_769)]].concat());
}

#[test]
fn an_engine_that_stops_where_it_is_told_saves_exact_multiples() {
    let mut policy = policy(settings());
    start(&mut policy, 40_000, Origin::Restored(9001), None);
    let (mut live, mut saved) = (9001, Vec::new());
    while live < 40_000 {
        let stop = policy.next_stop(0).unwrap_or(40_000);
        live = stop.min(live + 2048).min(40_000);
        if let Some(save) = policy.prefill(0, live, at(0)).save() {
            policy.saved(save.id, save.bytes, at(0)).unwrap();
            saved.push(save.tokens);
        }
    }
    assert_eq!(saved, [10_240, 20_480, 30_720]);
}

#[test]
fn an_engine_that_saves_prefixes_saves_exact_multiples_without_stopping() {
    let mut policy = policy(Settings {
        saves_prefixes: true,
        ..settings()
    });
    start(&mut policy, 40_000, Origin::Restored(9001), None);
    let answer = policy.prefill(0, 23_000, at(0));
    assert_eq!(done(&mut policy, answer), (20_480, Reason::Continued));
}

#[test]
fn decoding_crosses_intervals_too() {
    let mut policy = policy(settings());
    start(&mut policy, 10_000, Origin::Restored(10_000), None);
    assert_eq!(policy.decode(0, 10_239, at(0)), Answer::Nothing);
    let answer = policy.decode(0, 10_240, at(0));
    assert_eq!(done(&mut policy, answer), (10_240, Reason::Continued));
    assert_eq!(policy.decode(0, 10_241, at(0)), Answer::Nothing);
}

#[test]
fn a_cold_prompt_is_saved_at_its_anchor() {
    let mut policy = policy(settings());
    start(&mut policy, 9000, Origin::Empty, Some(7001));
    assert_eq!(policy.next_stop(0), Some(7001));
    assert_eq!(policy.prefill(0, 6000, at(0)), Answer::Nothing);
    let answer = policy.prefill(0, 7001, at(0));
    assert_eq!(done(&mut policy, answer), (7001, Reason::Cold));
    assert_eq!(policy.prefill(0, 9000, at(0)), Answer::Nothing);
}

#[test]
fn a_cold_checkpoint_at_a_multiple_is_no_continued_one_as_well() {
    let mut policy = policy(settings());
    start(&mut policy, 20_600, Origin::Empty, None);
    let answer = policy.prefill(0, 10_240, at(0));
    assert_eq!(done(&mut policy, answer), (10_240, Reason::Continued));
    let answer = policy.prefill(0, 20_480, at(0));
    assert_eq!(done(&mut policy, answer), (20_480, Reason::Cold));
    assert_eq!(policy.prefill(0, 20_600, at(0)), Answer::Nothing);
}

#[test]
fn one_step_over_both_places_gets_both_checkpoints() {
    let mut policy = policy(Settings {
        saves_prefixes: true,
        ..settings()
    });
    start(&mut policy, 20_000, Origin::Empty, Some(7001));
    let answer = policy.prefill(0, 12_000, at(0));
    assert_eq!(done(&mut policy, answer), (7001, Reason::Cold));
    let answer = policy.prefill(0, 12_000, at(0));
    assert_eq!(done(&mut policy, answer), (10_240, Reason::Continued));
    assert_eq!(policy.prefill(0, 12_000, at(0)), Answer::Nothing);
}

#[test]
fn a_cold_checkpoint_that_is_declined_does_not_hold_up_an_interval() {
    let mut policy = policy(Settings {
        saves_prefixes: true,
        writes: Writes::Whole,
        ..settings()
    });
    start(&mut policy, 20_000, Origin::Restored(6900), Some(7001));
    let answer = policy.prefill(0, 12_000, at(0));
    assert_eq!(done(&mut policy, answer), (10_240, Reason::Continued));
    assert_eq!(policy.metrics().declined(Declined::LittleNew), 1);
}

#[test]
fn an_engine_that_went_far_beyond_the_place_of_a_cold_checkpoint_takes_none() {
    let mut policy = policy(Settings {
        cold_max_tokens: 8000,
        ..settings()
    });
    start(&mut policy, 20_000, Origin::Empty, Some(7001));
    assert_eq!(policy.prefill(0, 9000, at(0)), Answer::Nothing);
    start(&mut policy, 20_000, Origin::Empty, Some(7001));
    let answer = policy.prefill(0, 7400, at(0));
    assert_eq!(
        done(&mut policy, answer),
        (7400, Reason::Cold),
        "a little later"
    );
}

#[test]
fn what_is_decoded_is_in_no_cold_checkpoint() {
    let mut policy = policy(settings());
    start(&mut policy, 3000, Origin::Empty, None);
    assert_eq!(policy.decode(0, 3001, at(0)), Answer::Nothing);
    assert_eq!(policy.prefill(0, 3500, at(0)), Answer::Nothing);
}

#[test]
fn the_same_tokens_are_not_saved_again() {
    let mut policy = policy(settings());
    start(&mut policy, 9000, Origin::Restored(9000), None);
    assert_eq!(
        policy.switch(0, 9000, at(0)),
        declined(Declined::NothingNew)
    );
    assert_eq!(policy.prefill(0, 9001, at(0)), Answer::Nothing);
    let evict = save(policy.switch(0, 9001, at(0)));
    assert_eq!((evict.tokens, evict.base), (9001, 9000));
    let again = policy.shutdown(0, 9001, at(0));
    assert_eq!(again, declined(Declined::NothingNew), "it is on its way");
}

#[test]
fn the_same_count_of_other_tokens_is_saved() {
    let mut policy = policy(settings());
    start(&mut policy, 9000, Origin::Restored(9000), None);
    start(&mut policy, 9000, Origin::Live(4000), None);
    assert_eq!(policy.prefill(0, 9000, at(0)), Answer::Nothing);
    let evict = save(policy.switch(0, 9000, at(0)));
    assert_eq!((evict.tokens, evict.base), (9000, 0));
}

#[test]
fn live_tokens_that_stay_keep_what_was_saved_of_them() {
    let mut policy = policy(settings());
    start(&mut policy, 9000, Origin::Restored(9000), None);
    start(&mut policy, 9600, Origin::Live(9000), None);
    assert_eq!(policy.prefill(0, 9600, at(0)), Answer::Nothing);
    let evict = save(policy.switch(0, 9600, at(0)));
    assert_eq!((evict.base, evict.bytes), (9000, 1000 + 600 * 10));
}

#[test]
fn short_sessions_are_not_saved() {
    let mut policy = policy(settings());
    start(&mut policy, 400, Origin::Empty, None);
    assert_eq!(policy.prefill(0, 400, at(0)), Answer::Nothing);
    assert_eq!(policy.switch(0, 511, at(0)), declined(Declined::TooShort));
    assert_eq!(done_reason(policy.switch(0, 512, at(0))), Reason::Evict);
    assert_eq!(policy.metrics().declined(Declined::TooShort), 1);
}

fn done_reason(answer: Answer) -> Reason {
    save(answer).reason
}

#[test]
fn a_whole_file_is_not_written_again_for_a_few_tokens() {
    let mut policy = policy(Settings {
        writes: Writes::Whole,
        ..settings()
    });
    start(&mut policy, 10_400, Origin::Restored(10_000), None);
    assert_eq!(
        policy.prefill(0, 10_400, at(0)),
        Answer::Nothing,
        "the interval waits"
    );
    assert_eq!(
        policy.switch(0, 10_400, at(0)),
        declined(Declined::LittleNew)
    );
    let whole = save(policy.decode(0, 10_512, at(0)));
    assert_eq!((whole.tokens, whole.bytes), (10_512, 1000 + 10_512 * 10));
}

#[test]
fn what_cannot_fit_on_disk_is_not_begun() {
    let mut policy = policy(Settings {
        disk_space: 100_000,
        ..settings()
    });
    assert_eq!(policy.switch(0, 9901, at(0)), declined(Declined::TooLarge));
    assert_eq!(save(policy.switch(0, 9900, at(0))).tokens, 9900);
}

#[test]
fn a_storm_of_evict_saves_stays_within_the_budgets() {
    // Conversations of 100,000 tokens, 1.4 GB each in ds4, take turns every ten seconds.
    let mut policy = policy(Settings {
        writes: Writes::Whole,
        write_budget_hour: Some(8 * GIB),
        write_budget_day: Some(20 * GIB),
        ..Settings::default()
    });
    for turn in 0..8640 {
        start(&mut policy, 101_000, Origin::Restored(100_000), None);
        let now = at(turn * 10);
        let _ = policy.prefill(0, 101_000, now);
        if let Some(save) = policy.switch(0, 101_000, now).save() {
            policy.saved(save.id, save.bytes, now).unwrap();
        }
    }
    let metrics = policy.metrics();
    assert!(metrics.bytes_written <= 20 * GIB && metrics.bytes_written > 18 * GIB);
    assert!(metrics.of(Reason::Evict).saved >= 12);
    assert!(metrics.declined(Declined::WriteBudget) > 8000);
    assert!(
        metrics.write_amplification().unwrap() > 50.0,
        "what whole files cost"
    );
}

#[test]
fn deltas_of_the_same_storm_fit_into_the_budgets() {
    let mut policy = policy(Settings {
        fixed_bytes: 0,
        write_budget_hour: Some(8 * GIB),
        ..Settings::default()
    });
    for turn in 0..360 {
        start(&mut policy, 101_000, Origin::Restored(100_000), None);
        let answer = policy.switch(0, 101_000, at(turn * 10));
        assert_eq!(done(&mut policy, answer).1, Reason::Evict);
    }
    assert_eq!(policy.metrics().write_amplification(), Some(1.0));
}

#[test]
fn a_continued_checkpoint_waits_for_the_budget_and_says_so_once() {
    let mut policy = policy(Settings {
        write_budget_hour: Some(120_000),
        ..settings()
    });
    policy.recall(100_000, at(0));
    start(&mut policy, 12_000, Origin::Empty, None);
    let answer = policy.decode(0, 10_300, at(60));
    assert_eq!(answer, declined(Declined::WriteBudget));
    assert_eq!(policy.decode(0, 10_301, at(61)), Answer::Nothing);
    assert_eq!(policy.metrics().declined(Declined::WriteBudget), 1);
    let later = save(policy.decode(0, 10_302, at(3700)));
    assert_eq!((later.tokens, later.reason), (10_302, Reason::Continued));
}

#[test]
fn a_save_that_no_budget_can_have_room_for_is_told_from_one_that_waits() {
    let mut policy = policy(Settings {
        write_budget_hour: Some(60_000),
        write_budget_day: Some(80_000),
        ..settings()
    });
    // 10 bytes a token and 1,000 for each save: the hour has room for 5,900 tokens.
    assert_eq!(
        policy.switch(0, 5901, at(0)),
        declined(Declined::OverBudget)
    );
    let fits = save(policy.switch(0, 5900, at(0)));
    assert_eq!(
        policy.switch(1, 5900, at(0)),
        declined(Declined::WriteBudget)
    );
    policy.saved(fits.id, 100, at(0)).unwrap();
    // Behind what is on disk it is small enough.
    assert_eq!(save(policy.switch(0, 9000, at(0))).base, 5900);
    // A continued one says so once.
    assert_eq!(
        policy.decode(2, 10_240, at(0)),
        declined(Declined::OverBudget)
    );
    assert_eq!(policy.decode(2, 10_241, at(0)), Answer::Nothing);
}

#[test]
fn what_two_saves_under_way_have_in_common_is_new_once() {
    let mut policy = policy(settings());
    let first = save(policy.decode(0, 10_240, at(0)));
    let second = save(policy.switch(0, 10_300, at(0)));
    assert_eq!(
        second.base, 0,
        "the first may fail, so the second is granted all of it"
    );
    policy.saved(first.id, 102_400, at(1)).unwrap();
    policy.saved(second.id, 600, at(1)).unwrap();
    assert_eq!(policy.metrics().bytes_new, 103_000);
    assert_eq!(policy.metrics().write_amplification(), Some(1.0));
}

#[test]
fn what_a_save_did_not_write_is_given_back() {
    let mut policy = policy(Settings {
        write_budget_hour: Some(100_000),
        ..settings()
    });
    let evict = save(policy.switch(0, 9000, at(0)));
    assert_eq!((evict.bytes, policy.bytes_left(at(0))), (91_000, 9000));
    policy.saved(evict.id, 1000, at(1)).unwrap();
    assert_eq!(policy.bytes_left(at(1)), 99_000);
}

#[test]
fn a_save_that_failed_is_tried_again_at_the_next_multiple_or_the_next_switch() {
    let mut policy = policy(settings());
    let first = save(policy.decode(0, 10_240, at(0)));
    policy.failed(first.id, 5000, at(0)).unwrap();
    assert_eq!(policy.decode(0, 10_241, at(0)), Answer::Nothing);
    let evict = save(policy.switch(0, 10_240 + 2, at(0)));
    assert_eq!((evict.base, evict.reason), (0, Reason::Evict));
    policy.failed(evict.id, 0, at(0)).unwrap();
    assert_eq!(save(policy.decode(0, 20_480, at(0))).base, 0);
    assert_eq!(policy.metrics().of(Reason::Continued).failed, 1);
    assert_eq!(policy.metrics().bytes_written, 5000);
}

#[test]
fn a_save_that_ends_after_the_switch_says_nothing_of_the_next_conversation() {
    let mut policy = policy(settings());
    let evict = save(policy.switch(0, 9000, at(0)));
    start(&mut policy, 9000, Origin::Empty, Some(8000));
    policy.saved(evict.id, evict.bytes, at(1)).unwrap();
    let cold = save(policy.prefill(0, 8000, at(1)));
    assert_eq!((cold.base, cold.reason), (0, Reason::Cold));
}

#[test]
fn what_was_lost_from_disk_is_saved_again() {
    let mut policy = policy(settings());
    start(&mut policy, 9000, Origin::Restored(9000), None);
    policy.lost(0, 0);
    let shutdown = save(policy.shutdown(0, 9000, at(0)));
    assert_eq!((shutdown.base, shutdown.reason), (0, Reason::Shutdown));
}

#[test]
fn the_end_of_a_save_is_taken_once() {
    let mut policy = policy(settings());
    let evict = save(policy.switch(0, 9000, at(0)));
    policy.saved(evict.id, 0, at(0)).unwrap();
    let error = policy.saved(evict.id, 0, at(0)).unwrap_err().to_string();
    assert_eq!(error, "save 1 is not in progress");
}

#[test]
fn slots_have_their_own_conversations_and_one_budget() {
    let mut policy = policy(Settings {
        write_budget_day: Some(100_000),
        ..settings()
    });
    assert_eq!(save(policy.switch(0, 6000, at(0))).tokens, 6000);
    assert_eq!(
        policy.switch(1, 6000, at(0)),
        declined(Declined::WriteBudget)
    );
    assert_eq!(save(policy.switch(1, 3000, at(0))).base, 0);
}
