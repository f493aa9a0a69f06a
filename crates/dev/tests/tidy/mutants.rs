//! What is written by hand about the tree's code is still so.

use kvdepot_dev::generate::Verdict;
use kvdepot_dev::mutants::{self, Mutation, Set, report};
use kvdepot_dev::root;

fn stale(all: &[Mutation]) -> Vec<String> {
    let one = |one: &Mutation| {
        let error = one.applies(root()).err()?;
        Some(format!("{}: {error}", one.id))
    };
    all.iter().filter_map(one).collect()
}

#[test]
fn every_fix_can_be_taken_back() {
    let fixes = mutants::fixes(root()).unwrap();
    let names: Vec<&str> = fixes.iter().map(|fix| fix.id.as_str()).collect();
    assert_eq!(names, ["D1", "D2", "D6"]);
    assert_eq!(stale(&fixes), [] as [String; 0]);
}

#[test]
fn every_fault_made_by_hand_can_be_made() {
    let faults = mutants::by_hand(root()).unwrap();
    assert_eq!(faults.len(), Set::Hand.wanted());
    assert_eq!(stale(&faults), [] as [String; 0]);
}

#[test]
fn the_table_is_that_of_the_results() {
    assert_eq!(report::update(root(), true).unwrap(), Verdict::Current);
}
