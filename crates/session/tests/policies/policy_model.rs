//! Random histories of engines: distances between checkpoints, budgets, and what is removed.

use std::collections::HashSet;
use std::time::Duration;

use kvdepot_session::policy::{
    Answer, Entry, Origin, Policy, Prompt, Reason, Save, Settings, Writes, choose, score,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const EPOCH: Duration = Duration::from_secs(1_800_000_000);
const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// Something that an engine does, in tokens.
#[derive(Clone, Copy, Debug)]
enum Step {
    Empty { anchor: Option<u64> },
    Restore { tokens: u64 },
    GoBack { part: f64 },
    Prefill { tokens: u64 },
    Decode { tokens: u64 },
    Switch,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        1 => option::of(0..40_000_u64).prop_map(|anchor| Step::Empty { anchor }),
        1 => (1..60_000_u64).prop_map(|tokens| Step::Restore { tokens }),
        1 => (0.0..1.0).prop_map(|part| Step::GoBack { part }),
        12 => (1..5000_u64).prop_map(|tokens| Step::Prefill { tokens }),
        6 => (1..50_u64).prop_map(|tokens| Step::Decode { tokens }),
        1 => Just(Step::Switch),
    ];
    vec(step, 1..200)
}

prop_compose! {
    fn settings()(
        interval in 1..20_000_u64,
        align in 0..3000_u64,
        min in 0..3000_u64,
        is_whole in any::<bool>(),
        saves_prefixes in any::<bool>(),
    ) -> Settings {
        Settings {
            min_tokens: min.min(interval),
            continued_interval_tokens: interval,
            boundary_align_tokens: align,
            writes: if is_whole { Writes::Whole } else { Writes::Delta },
            saves_prefixes,
            disk_space: u64::MAX,
            fixed_bytes: 100,
            token_bytes: 1,
            ..Settings::default()
        }
    }
}

/// An engine of one slot, which knows its live tokens and the checkpoints of them.
struct Engine {
    policy: Policy,
    live: u64,
    saved: Vec<u64>,
    saves_prefixes: bool,
}

impl Engine {
    fn new(settings: Settings) -> Engine {
        Engine {
            policy: Policy::new(settings).unwrap(),
            live: 0,
            saved: Vec::new(),
            saves_prefixes: settings.saves_prefixes,
        }
    }

    fn last(&self) -> u64 {
        self.saved.last().copied().unwrap_or(0)
    }

    fn start(&mut self, origin: Origin, anchor: Option<u64>) {
        let (kept, saved) = match origin {
            Origin::Restored(tokens) => (tokens, vec![tokens]),
            Origin::Live(tokens) => (tokens, self.left(tokens)),
            _ => (0, Vec::new()),
        };
        (self.live, self.saved) = (kept, saved);
        let prompt = Prompt {
            tokens: kept + 30_000,
            origin,
            anchor,
        };
        self.policy.start(0, &prompt);
    }

    /// What is left of the checkpoints when the conversation goes back.
    fn left(&self, tokens: u64) -> Vec<u64> {
        let mut left = self.saved.clone();
        left.retain(|saved| *saved <= tokens);
        let is_cut = left.len() < self.saved.len() && self.saves_prefixes;
        if is_cut && tokens > 0 && left.last() != Some(&tokens) {
            left.push(tokens);
        }
        left
    }

    /// The engine does something, and the save it is told to take if any.
    fn step(&mut self, step: Step, now: Duration) -> Option<Save> {
        let answer = match step {
            Step::Empty { anchor } => {
                self.start(Origin::Empty, anchor);
                Answer::Nothing
            }
            Step::Restore { tokens } => {
                self.start(Origin::Restored(tokens), None);
                Answer::Nothing
            }
            Step::GoBack { part } => {
                let tokens = (self.live as f64 * part) as u64;
                self.start(Origin::Live(tokens), None);
                Answer::Nothing
            }
            Step::Prefill { tokens } => {
                self.live += tokens;
                self.policy.prefill(0, self.live, now)
            }
            Step::Decode { tokens } => {
                self.live += tokens;
                self.policy.decode(0, self.live, now)
            }
            Step::Switch => self.policy.switch(0, self.live, now),
        };
        answer.save()
    }
}

/// The same histories every time, unless `PROPTEST_RNG_SEED=n` asks for others; a failure prints
/// the history itself, shrunk.
fn fixed_seed() -> ProptestConfig {
    let mut config = ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(7);
    }
    config
}

proptest! {
    #![proptest_config(fixed_seed())]

    #[test]
    fn checkpoints_are_never_further_apart_than_the_interval_and_one_step(
        settings in settings(),
        steps in steps(),
        delay in 0..4_usize,
    ) {
        let interval = settings.continued_step().unwrap();
        let mut engine = Engine::new(settings);
        let mut under_way: Vec<(usize, Save)> = Vec::new();
        // An engine that goes back has what it had not saved; its next step saves it.
        let mut due_late = false;
        for (place, step) in steps.into_iter().enumerate() {
            let chunk = match step {
                Step::Prefill { tokens } | Step::Decode { tokens } => tokens,
                Step::GoBack { .. } => { due_late = true; 0 }
                Step::Empty { .. } | Step::Restore { .. } => { due_late = false; 0 }
                Step::Switch => 0,
            };
            let first = engine.step(step, EPOCH);
            let is_cold = first.is_some_and(|save| save.reason == Reason::Cold);
            let ask_again = Step::Prefill { tokens: 0 };
            let second = is_cold.then(|| engine.step(ask_again, EPOCH)).flatten();
            for save in first.into_iter().chain(second) {
                let last_before = engine.last();
                prop_assert!(save.tokens > last_before, "{save:?} again");
                prop_assert!(save.tokens <= engine.live && save.tokens >= settings.min_tokens);
                prop_assert!(save.base <= last_before);
                prop_assert!(settings.saves_prefixes || save.tokens == engine.live);
                if save.reason == Reason::Continued && !due_late {
                    prop_assert!(save.tokens - last_before <= interval + chunk);
                }
                engine.saved.push(save.tokens);
                under_way.push((place + delay, save));
            }
            if chunk > 0 {
                let gap = engine.live - engine.last();
                prop_assert!(gap <= interval + chunk, "{gap} of {interval}");
                due_late = false;
            }
            let over = |(end, _): &(usize, Save)| *end <= place;
            for (_, save) in under_way.extract_if(.., |save| over(save)) {
                engine.policy.saved(save.id, save.bytes, EPOCH).unwrap();
            }
        }
    }

    #[test]
    fn no_hour_and_no_day_has_more_than_its_budget(
        mut settings in settings(),
        hour in option::of(1000..200_000_u64),
        day in option::of(1000..800_000_u64),
        history in vec((step_of_many(), 0..2000_u64, 0..5000_u64, 0.0..=1.0, 0.0..=1.0,
            any::<bool>()), 1..400),
    ) {
        (settings.write_budget_hour, settings.write_budget_day) = (hour, day);
        let mut engine = Engine::new(settings);
        let mut under_way: Vec<(u64, u64, bool, Save, u64)> = Vec::new();
        let mut written: Vec<(u64, u64)> = Vec::new();
        let (mut now, mut all) = (0, 0);
        for (step, pause, takes, part, when, fails) in history {
            now += pause;
            under_way.sort_unstable_by_key(|save| save.0);
            let over = |save: &(u64, u64, bool, Save, u64)| save.0 <= now;
            for (end, at, fails, save, bytes) in under_way.extract_if(.., |save| over(save)) {
                let end_at = EPOCH + Duration::from_secs(end);
                match fails {
                    true => engine.policy.failed(save.id, bytes, end_at).unwrap(),
                    false => engine.policy.saved(save.id, bytes, end_at).unwrap(),
                }
                written.push((at, bytes));
                all += bytes;
            }
            if let Some(save) = engine.step(step, EPOCH + Duration::from_secs(now)) {
                engine.saved.push(save.tokens);
                let bytes = (save.bytes as f64 * part) as u64;
                let at = now + (takes as f64 * when) as u64;
                under_way.push((now + takes, at, fails, save, bytes));
            }
        }
        let last = under_way.iter().map(|(_, at, _, _, bytes)| (*at, *bytes));
        written.extend(last);
        for (span, most) in [(HOUR, hour), (DAY, day)] {
            for (last, _) in &written {
                let lately = written.iter().filter(|(at, _)| at <= last && at + span > *last);
                let bytes: u64 = lately.map(|(_, bytes)| bytes).sum();
                prop_assert!(bytes <= most.unwrap_or(u64::MAX), "{bytes} in {span} s");
            }
        }
        prop_assert_eq!(engine.policy.metrics().bytes_written, all);
        for (end, _, _, save, _) in under_way {
            engine.policy.failed(save.id, 0, EPOCH + Duration::from_secs(end)).unwrap();
        }
        let left = engine.policy.bytes_left(EPOCH + Duration::from_secs(now + 2 * DAY));
        let most = hour.into_iter().chain(day).min().unwrap_or(u64::MAX);
        prop_assert_eq!(left, most, "all comes back");
    }

    #[test]
    fn what_is_removed_is_enough_and_needed_and_not_pinned(
        entries in vec(entry(), 0..40),
        needed in 0..5000_u64,
    ) {
        let entries: Vec<Entry> = (0..).zip(entries).map(|(id, entry)| {
            let parent = entry.parent.filter(|parent| *parent < id);
            Entry { id, parent, ..entry }
        }).collect();
        let loose = entries.iter().filter(|entry| entry.pins == 0);
        let most: u64 = loose.clone().map(|entry| entry.bytes).sum();
        let chosen = choose(&entries, needed, EPOCH);
        prop_assert_eq!(chosen.is_some(), needed <= most);
        let chosen = chosen.unwrap_or_default();
        let is_chosen: HashSet<u64> = chosen.iter().copied().collect();
        prop_assert_eq!(is_chosen.len(), chosen.len());
        let gone = || loose.clone().filter(|entry| is_chosen.contains(&entry.id));
        prop_assert_eq!(gone().count(), chosen.len(), "none that is pinned or not there");
        let freed: u64 = gone().map(|entry| entry.bytes).sum();
        prop_assert!(chosen.is_empty() || freed >= needed);
        prop_assert!(gone().all(|entry| freed - entry.bytes < needed), "all are needed");
        // What stays though it is worth less than the best that goes does not make up for it.
        let parents: HashSet<u64> = entries.iter().filter_map(|entry| entry.parent).collect();
        let worth = |entry: &Entry| {
            let superseded = entry.reason == Reason::Continued && parents.contains(&entry.id);
            (!superseded, score(entry, EPOCH))
        };
        let best = chosen.last().and_then(|id| entries.iter().find(|entry| entry.id == *id));
        if let Some(best) = best {
            prop_assert!(gone().all(|entry| worth(entry) <= worth(best)), "in order");
            let stays = loose.clone().filter(|entry| !is_chosen.contains(&entry.id));
            let worse = stays.filter(|entry| worth(entry) < worth(best));
            let worse: u64 = worse.map(|entry| entry.bytes).sum();
            prop_assert!(worse + freed - needed < best.bytes);
        }
    }
}

/// Steps with more switches than a usual engine makes.
fn step_of_many() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => option::of(0..40_000_u64).prop_map(|anchor| Step::Empty { anchor }),
        2 => (1..60_000_u64).prop_map(|tokens| Step::Restore { tokens }),
        3 => (1..9000_u64).prop_map(|tokens| Step::Prefill { tokens }),
        3 => Just(Step::Switch),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    let numbers = (0..1000_u64, 0..50_000_u64, 0..20_u64, 0..100_000_u64);
    (numbers, 0..4_usize, option::of(0..40_u64), 0..2_u32).prop_map(
        |((bytes, tokens, hits, age), reason, parent, pins)| Entry {
            id: 0,
            parent,
            reason: Reason::ALL[reason],
            tokens,
            bytes,
            hits,
            used: EPOCH - Duration::from_secs(age),
            pins,
        },
    )
}
