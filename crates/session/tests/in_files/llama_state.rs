//! llama.cpp's sequence states: cut and put together again to the byte, and no bytes panic.

use kvdepot_session::llama::{Error, Layout};
use proptest::prelude::*;

const MAGIC: u32 = 0xaf14_3cd8;

/// What `llama_state_seq_get_data` would write, by the module's table.
#[derive(Clone, Debug)]
struct Model {
    tokens: u32,
    sequence: i32,
    transposed: bool,
    /// Element type and bytes of a row of keys; bytes of an element and elements of a row of
    /// values.
    layers: Vec<(i32, u64, u32, u32)>,
    latent: bool,
    rest: Rest,
}

#[derive(Clone, Copy, Debug)]
enum Rest {
    None,
    Window(u32),
    Recurrent,
}

/// A byte that says which token, table and place it is of.
fn fill(table: usize, token: u32, place: u64) -> u8 {
    (table as u64 * 131 + u64::from(token) * 31 + place * 7) as u8
}

fn number(state: &mut Vec<u8>, number: u32) {
    state.extend(number.to_le_bytes());
}

impl Model {
    fn write(&self) -> Vec<u8> {
        let mut state = Vec::new();
        number(&mut state, MAGIC);
        number(&mut state, self.sequence.cast_unsigned());
        self.attention(&mut state, 0);
        match self.rest {
            Rest::None => {}
            Rest::Window(window) => self.attention(&mut state, self.tokens.saturating_sub(window)),
            Rest::Recurrent => {
                for each in [1, self.tokens - 1, 0, 0, 3] {
                    number(&mut state, each);
                }
                state.extend([7; 33]);
            }
        }
        state
    }

    /// An attention of the tokens from `first` on.
    fn attention(&self, state: &mut Vec<u8>, first: u32) {
        number(state, 1);
        number(state, self.tokens - first);
        for position in first..self.tokens {
            number(state, position);
            number(state, 1);
            number(state, self.sequence.cast_unsigned());
        }
        number(state, u32::from(self.transposed));
        number(state, self.layers.len() as u32);
        for (table, (kind, row, _, _)) in self.layers.iter().enumerate() {
            number(state, kind.cast_unsigned());
            state.extend(row.to_le_bytes());
            for token in first..self.tokens {
                state.extend((0..*row).map(|place| fill(table, token, place)));
            }
        }
        if self.latent {
            return;
        }
        for (layer, (kind, _, element, width)) in self.layers.iter().enumerate() {
            let table = self.layers.len() + layer;
            let (element, width) = (u64::from(*element), u64::from(*width));
            number(state, kind.cast_unsigned());
            if !self.transposed {
                state.extend((element * width).to_le_bytes());
                for token in first..self.tokens {
                    state.extend((0..element * width).map(|place| fill(table, token, place)));
                }
                continue;
            }
            number(state, element as u32);
            number(state, width as u32);
            for row in 0..width {
                for token in first..self.tokens {
                    let places = row * element..(row + 1) * element;
                    state.extend(places.map(|place| fill(table, token, place)));
                }
            }
        }
    }

    fn rows(&self, tokens: std::ops::Range<u32>) -> Vec<u8> {
        let mut piece = Vec::new();
        let keys = self.layers.iter().map(|layer| (layer.1, 1, false));
        let values = self.layers.iter().map(|(_, _, element, width)| {
            (u64::from(*element), u64::from(*width), self.transposed)
        });
        let values = values.take(if self.latent { 0 } else { usize::MAX });
        for (table, (unit, units, transposed)) in keys.chain(values).enumerate() {
            match transposed {
                false => {
                    for token in tokens.clone() {
                        piece.extend((0..unit * units).map(|place| fill(table, token, place)));
                    }
                }
                true => {
                    for row in 0..units {
                        for token in tokens.clone() {
                            let places = row * unit..(row + 1) * unit;
                            piece.extend(places.map(|place| fill(table, token, place)));
                        }
                    }
                }
            }
        }
        piece
    }
}

fn models() -> impl Strategy<Value = Model> {
    let layer = (
        0..32i32,
        1..40u64,
        prop_oneof![Just(2u32), Just(4)],
        1..9u32,
    );
    let rest = prop_oneof![
        Just(Rest::None),
        (1..40u32).prop_map(Rest::Window),
        Just(Rest::Recurrent)
    ];
    let layers = prop::collection::vec(layer, 1..5);
    (
        1..40u32,
        0..3i32,
        any::<bool>(),
        layers,
        any::<bool>(),
        rest,
    )
        .prop_map(
            |(tokens, sequence, transposed, layers, latent, rest)| Model {
                tokens,
                sequence,
                transposed,
                layers,
                latent: latent && layers_are_told(&rest),
                rest,
            },
        )
}

/// Behind keys without values, what begins a window could be a table of short rows.
fn layers_are_told(rest: &Rest) -> bool {
    !matches!(rest, Rest::Window(_))
}

/// Ends of pieces.
fn cuts(tokens: u32, each: u32) -> impl Iterator<Item = std::ops::Range<u32>> {
    (0..tokens)
        .step_by(each as usize)
        .map(move |first| first..(first + each).min(tokens))
}

fn wide(tokens: &std::ops::Range<u32>) -> std::ops::Range<usize> {
    tokens.start as usize..tokens.end as usize
}

proptest! {
    #[test]
    fn a_state_is_cut_and_put_together_to_the_byte(model in models(), each in 1..20u32) {
        let state = model.write();
        let layout = Layout::read(&state).unwrap();
        prop_assert_eq!(layout.tokens(), model.tokens as usize);
        prop_assert_eq!(layout.sequence(), model.sequence);
        prop_assert_eq!(layout.state_bytes(), state.len());
        let rest = layout.rest();
        prop_assert_eq!(rest.is_empty(), matches!(model.rest, Rest::None));
        let mut made = vec![0xee; state.len()];
        layout.write_head(&mut made).unwrap();
        made[rest.clone()].copy_from_slice(&state[rest]);
        for tokens in cuts(model.tokens, each) {
            let mut piece = vec![0; layout.piece_bytes(wide(&tokens)).unwrap()];
            layout.gather(&state, wide(&tokens), &mut piece).unwrap();
            prop_assert_eq!(&piece, &model.rows(tokens.clone()));
            layout.scatter(&piece, wide(&tokens), &mut made).unwrap();
        }
        prop_assert_eq!(made, state);
    }

    #[test]
    fn pieces_of_a_longer_sequence_make_a_shorter_one(model in models(), short in 1..40u32) {
        let short = short.min(model.tokens);
        let long = Model { rest: Rest::None, ..model };
        let of = Model { tokens: short, sequence: 2, ..long.clone() };
        let from = long.write();
        let layout = Layout::read(&from).unwrap();
        let to = layout.resized(short as usize, 0).unwrap().of_sequence(2);
        let mut piece = vec![0; layout.piece_bytes(0..short as usize).unwrap()];
        layout.gather(&from, 0..short as usize, &mut piece).unwrap();
        let mut made = vec![0; to.state_bytes()];
        to.write_head(&mut made).unwrap();
        to.scatter(&piece, 0..short as usize, &mut made).unwrap();
        prop_assert_eq!(&made, &of.write());
        let read = Layout::read(&made).unwrap();
        prop_assert_eq!(read.shape(), layout.shape());
    }

    #[test]
    fn bytes_that_changed_are_read_or_refused(
        model in models(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut state = model.write();
        for (at, byte) in changes {
            // Most of what matters is in front.
            let at = at.index(state.len().min(600));
            state[at] = byte;
        }
        if is_cut {
            state.truncate(cut.index(state.len()));
        }
        if let Ok(layout) = Layout::read(&state) {
            prop_assert_eq!(layout.state_bytes(), state.len());
            let all = 0..layout.tokens();
            let mut made = state.clone();
            let mut piece = vec![0; layout.piece_bytes(all.clone()).unwrap()];
            layout.gather(&state, all.clone(), &mut piece).unwrap();
            layout.write_head(&mut made).unwrap();
            layout.scatter(&piece, all, &mut made).unwrap();
            prop_assert_eq!(made, state);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Layout::read(&bytes).is_err());
        let mut begun = MAGIC.to_le_bytes().to_vec();
        begun.extend(bytes);
        drop(Layout::read(&begun));
    }
}

fn plain() -> Model {
    Model {
        tokens: 3,
        sequence: 0,
        transposed: false,
        layers: vec![(1, 8, 2, 4), (1, 8, 2, 4)],
        latent: false,
        rest: Rest::None,
    }
}

fn refused(state: &[u8]) -> Error {
    Layout::read(state).unwrap_err()
}

#[test]
fn shapes_that_are_not_known_are_refused_by_name() {
    let with = |at: usize, value: u32| {
        let mut state = plain().write();
        state[at..at + 4].copy_from_slice(&value.to_le_bytes());
        refused(&state).field
    };
    assert_eq!(with(0, 1), "magic");
    assert_eq!(with(8, 4), "streams");
    assert_eq!(with(12, 0), "tokens");
    assert_eq!(with(12, u32::MAX), "tokens");
    // The second cell is at 28: its position, how many sequences it is of, and which.
    assert_eq!(with(28, 2), "position");
    assert_eq!(with(32, 2), "sequences of a cell");
    assert_eq!(with(36, 1), "sequence of a cell");
    assert_eq!(with(52, 2), "flag for transposed values");
    assert_eq!(with(56, 0), "layers");
    assert_eq!(with(60, 999), "element type");
    assert_eq!(with(64, 0), "bytes of a row");
    let said = refused(&[0; 4]).to_string();
    assert_eq!(said, "llama.cpp state: magic is 0; allowed: 2937339096");
}

/// Cells of M-RoPE have two more positions and a token.
#[test]
fn cells_with_more_than_a_position_are_refused() {
    let plain = plain().write();
    let mut state = plain[..16].to_vec();
    for position in 0..3u32 {
        for each in [position, 1, position, position, 17, 0] {
            number(&mut state, each);
        }
    }
    state.extend(&plain[52..]);
    assert_eq!(refused(&state).field, "position");
}

#[test]
fn a_torn_state_is_refused_wherever_it_ends() {
    for model in [
        plain(),
        Model {
            transposed: true,
            ..plain()
        },
    ] {
        let state = model.write();
        // Where keys end: this is a whole state of latent attention.
        let keys = 60 + 2 * (12 + 3 * 8);
        for end in (0..state.len()).filter(|end| *end != keys) {
            assert!(
                Layout::read(&state[..end]).is_err(),
                "{end} of {}",
                state.len()
            );
        }
        let latent = Layout::read(&state[..keys]).unwrap();
        assert_ne!(latent.shape(), Layout::read(&state).unwrap().shape());
    }
}

#[test]
fn memory_and_tokens_that_do_not_fit_are_refused() {
    let state = plain().write();
    let layout = Layout::read(&state).unwrap();
    let field = |made: Result<(), Error>| made.unwrap_err().field;
    let mut piece = vec![0; layout.piece_bytes(0..2).unwrap()];
    assert_eq!(piece.len(), 2 * layout.shape().token_bytes());
    assert_eq!(field(layout.gather(&state[1..], 0..2, &mut piece)), "state");
    assert_eq!(field(layout.gather(&state, 0..3, &mut piece)), "piece");
    assert_eq!(field(layout.gather(&state, 2..4, &mut piece)), "tokens");
    assert_eq!(field(layout.gather(&state, 2..2, &mut piece)), "tokens");
    assert_eq!(field(layout.write_head(&mut piece)), "state");
    assert!(layout.resized(0, 0).is_err());
    assert!(layout.resized(usize::MAX, 0).is_err());
    assert!(layout.resized(1, usize::MAX).is_err());
}

#[test]
fn the_name_of_a_shape_tells_types_rows_and_order() {
    let name = |model: Model| Layout::read(&model.write()).unwrap().shape().to_string();
    let plain_name = name(plain());
    assert_eq!(plain_name, "v_trans=0 k 1:8x1 1:8x1 v 1:8x1 1:8x1");
    let turned = Model {
        transposed: true,
        ..plain()
    };
    assert_eq!(name(turned), "v_trans=1 k 1:8x1 1:8x1 v 1:2x4 1:2x4");
    let longer = Model {
        tokens: 9,
        sequence: 1,
        ..plain()
    };
    assert_eq!(name(longer), plain_name);
}
