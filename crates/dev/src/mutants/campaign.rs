//! The campaign: which mutations are tried, and what was found of them so far.

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::scratch::Scratch;
use super::trial::{self, Outcome, Plan};
use super::{Mutation, Set, draw, folder, named};

/// What was found of one mutation; the last line of each counts.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[non_exhaustive]
pub struct Found {
    /// Of the mutation.
    pub id: String,
    /// Where it comes from: `hand` or `drawn`.
    pub set: String,
    /// `caught`, `hung`, `survived`, `unbuildable` or `doubtful`.
    pub outcome: String,
    /// How long the simulator ran.
    pub seconds: u64,
    /// What it said.
    pub said: String,
    /// The commit that was mutated.
    pub commit: String,
}

impl Found {
    /// Whether the simulator noticed; `None` for what is no mutation.
    #[must_use]
    pub fn is_caught(&self) -> Option<bool> {
        match Outcome::of_name(&self.outcome)? {
            Outcome::Caught | Outcome::Hung => Some(true),
            Outcome::Survived => Some(false),
            Outcome::Unbuildable | Outcome::Doubtful => None,
        }
    }
}

/// How a campaign goes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// How many at a time; at least one.
    pub jobs: usize,
    /// Tries those again that survived.
    pub again_survivors: bool,
    /// Only mutations whose id has this in it, again.
    pub only: Option<String>,
    /// Leaves out the trial of the tree as it is.
    pub no_baseline: bool,
    /// The simulator.
    pub plan: Plan,
}

/// Where results are kept.
#[must_use]
pub fn results_path(root: &Path) -> PathBuf {
    folder(root).join("results.jsonl")
}

/// What was found so far, by mutation.
///
/// # Errors
/// The file is there and cannot be read.
pub fn results(root: &Path) -> io::Result<HashMap<String, Found>> {
    let path = results_path(root);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.map_err(named(&path))?,
    };
    let mut results = HashMap::new();
    for line in text.lines() {
        let found: Found = serde_json::from_str(line)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        results.insert(found.id.clone(), found);
    }
    Ok(results)
}

/// The mutations of a campaign: those made by hand, and of the drawn ones as many as are wanted
/// that compile, as far as it is known, and change something.
///
/// # Errors
/// They cannot be read or drawn.
pub fn chosen(root: &Path, found: &HashMap<String, Found>) -> io::Result<Vec<Mutation>> {
    choose(&proposed(root, root)?, found, root)
}

/// All that could be tried on a copy of the tree, in the order in which it is.
fn proposed(root: &Path, tree: &Path) -> io::Result<Vec<Mutation>> {
    let mut all = super::by_hand(root)?;
    all.extend(draw::draw(tree, draw::SEED)?);
    Ok(all)
}

fn choose(
    proposed: &[Mutation],
    found: &HashMap<String, Found>,
    root: &Path,
) -> io::Result<Vec<Mutation>> {
    let equivalents = super::equivalents(root)?;
    let equivalents: HashSet<String> = equivalents.into_iter().map(|one| one.id).collect();
    let counts = |mutation: &Mutation| {
        let seen = found.get(&mutation.id);
        let is_none = seen.is_some_and(|found| found.outcome == Outcome::Unbuildable.name());
        !is_none && !equivalents.contains(&mutation.id)
    };
    let mut left = [Set::Hand, Set::Drawn].map(Set::wanted);
    let mut chosen = Vec::new();
    for mutation in proposed.iter().filter(|mutation| counts(mutation)) {
        let left = &mut left[usize::from(mutation.set == Set::Drawn)];
        if *left > 0 {
            *left -= 1;
            chosen.push(mutation.clone());
        }
    }
    Ok(chosen)
}

/// The state that the workers share.
struct Campaign<'a> {
    root: &'a Path,
    options: &'a Options,
    /// As they were when it began, like the copies that they are tried on.
    proposed: Vec<Mutation>,
    commit: String,
    results: Mutex<HashMap<String, Found>>,
    /// Begun in this run.
    begun: Mutex<HashSet<String>>,
}

/// Tries what is still to be tried.
///
/// # Errors
/// The tree fails without a mutation, or something cannot be read, written or started.
pub fn run(root: &Path, options: &Options) -> io::Result<()> {
    let mut first = Scratch::new(root, 0)?;
    first.restore()?;
    let campaign = Campaign {
        root,
        options,
        proposed: proposed(root, first.tree())?,
        commit: commit(root),
        results: Mutex::new(results(root)?),
        begun: Mutex::new(HashSet::new()),
    };
    if !options.no_baseline {
        say("the tree as it is")?;
        trial::keep_sound(&first, &options.plan)?;
        let trial = trial::run(&first, &options.plan)?;
        if trial.outcome != Outcome::Survived {
            let why = format!(
                "without a mutation: {}: {}",
                trial.outcome.name(),
                trial.said
            );
            return Err(io::Error::other(why));
        }
    }
    let others = (1..options.jobs.max(1)).map(|number| Scratch::new(root, number));
    let others = others.collect::<io::Result<Vec<Scratch>>>()?;
    std::thread::scope(|scope| {
        let mut workers = vec![scope.spawn(|| campaign.work(first))];
        for scratch in others {
            let campaign = &campaign;
            workers.push(scope.spawn(move || campaign.work(scratch)));
        }
        for worker in workers {
            worker
                .join()
                .map_err(|_| io::Error::other("a worker panicked"))??;
        }
        Ok(())
    })
}

impl Campaign<'_> {
    fn work(&self, mut scratch: Scratch) -> io::Result<()> {
        while let Some(mutation) = self.next()? {
            say(&format!("{}: {}", mutation.set.name(), mutation.id))?;
            let found = self.attempt(&mut scratch, &mutation)?;
            say(&format!(
                "  {} after {} s: {}\n    {}",
                found.outcome, found.seconds, mutation.id, found.said
            ))?;
            self.note(found)?;
        }
        Ok(())
    }

    fn next(&self) -> io::Result<Option<Mutation>> {
        let mut begun = lock(&self.begun);
        let results = lock(&self.results).clone();
        let chosen = choose(&self.proposed, &results, self.root)?;
        let wanted = chosen.into_iter().find(|mutation| {
            let seen = results.get(&mutation.id);
            let again = match &self.options.only {
                Some(only) => mutation.id.contains(only),
                None => {
                    let caught = seen.and_then(Found::is_caught) == Some(true);
                    seen.is_none() || (self.options.again_survivors && !caught)
                }
            };
            again && !begun.contains(&mutation.id)
        });
        begun.extend(wanted.iter().map(|mutation| mutation.id.clone()));
        Ok(wanted)
    }

    fn attempt(&self, scratch: &mut Scratch, mutation: &Mutation) -> io::Result<Found> {
        let found = |outcome: Outcome, seconds, said| Found {
            id: mutation.id.clone(),
            set: mutation.set.name().to_owned(),
            outcome: outcome.name().to_owned(),
            seconds,
            said,
            commit: self.commit.clone(),
        };
        if let Err(error) = scratch.apply(mutation) {
            return Ok(found(Outcome::Unbuildable, 0, error));
        }
        let trial = trial::run(scratch, &self.options.plan);
        scratch.restore()?;
        let trial = trial?;
        Ok(found(trial.outcome, trial.elapsed.as_secs(), trial.said))
    }

    fn note(&self, found: Found) -> io::Result<()> {
        let path = results_path(self.root);
        let line = serde_json::to_string(&found).map_err(io::Error::other)?;
        // In one write, so that lines of several workers do not mix.
        let mut results = lock(&self.results);
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        written.map_err(named(&path))?;
        results.insert(found.id.clone(), found);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn say(text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

fn commit(root: &Path) -> String {
    let mut git = std::process::Command::new("git");
    let named = git
        .current_dir(root)
        .args(["rev-parse", "--short=12", "HEAD"])
        .output();
    let text = named.map(|named| String::from_utf8_lossy(&named.stdout).trim().to_owned());
    text.unwrap_or_default()
}
