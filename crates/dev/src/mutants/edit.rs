//! Some lines of a file in the place of others, found by what they say and not by where they are.

use std::path::{Path, PathBuf};

/// Lines that take the place of others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Edit {
    /// From the root of the tree.
    pub file: PathBuf,
    old: Vec<String>,
    new: Vec<String>,
    /// The line, from 0, that is meant where the old ones stand in several places.
    near: Option<usize>,
}

impl Edit {
    /// The lines of `new` in the place of those of `old`, which the file must have once;
    /// indentation is no matter.
    #[must_use]
    pub fn new(file: PathBuf, old: &str, new: &str) -> Edit {
        let lines = |text: &str| text.trim_end().lines().map(str::to_owned).collect();
        Edit {
            file,
            old: lines(old),
            new: lines(new),
            near: None,
        }
    }

    /// A diff of one file as edits, one for each hunk.
    #[must_use]
    pub fn of_diff(file: &Path, diff: &str) -> Vec<Edit> {
        let mut edits: Vec<Edit> = Vec::new();
        for line in diff.lines().skip(2) {
            if let Some(head) = line.strip_prefix("@@ -") {
                let number = head.split([',', ' ']).next();
                let number: Option<usize> = number.and_then(|number| number.parse().ok());
                edits.push(Edit {
                    file: file.to_owned(),
                    old: Vec::new(),
                    new: Vec::new(),
                    near: number.map(|number| number.saturating_sub(1)),
                });
                continue;
            }
            let Some(edit) = edits.last_mut() else {
                continue;
            };
            let (mark, text) = line.split_at_checked(1).unwrap_or((" ", ""));
            if mark != "+" {
                edit.old.push(text.to_owned());
            }
            if mark != "-" {
                edit.new.push(text.to_owned());
            }
        }
        edits
    }

    /// The text after the edit.
    ///
    /// # Errors
    /// Says how often the old lines are there, if not once.
    pub fn apply(&self, text: &str) -> Result<String, String> {
        let lines: Vec<&str> = text.lines().collect();
        let at = self.find(&lines)?;
        let first = lines.get(at).copied().unwrap_or_default();
        let indent = &first[..first.len() - first.trim_start().len()];
        // Diffs bring their own.
        let indent = if self.near.is_some() { "" } else { indent };
        let mut changed: Vec<String> = lines[..at].iter().map(|line| (*line).to_owned()).collect();
        changed.extend(self.new.iter().map(|line| format!("{indent}{line}")));
        let rest = &lines[at + self.old.len()..];
        changed.extend(rest.iter().map(|line| (*line).to_owned()));
        let mut changed = changed.join("\n");
        changed.push('\n');
        Ok(changed)
    }

    fn find(&self, lines: &[&str]) -> Result<usize, String> {
        let file = self.file.display();
        if self.old.is_empty() {
            return Err(format!("{file}: nothing is to be replaced"));
        }
        let same = |window: &[&str]| {
            let mut pairs = window.iter().zip(&self.old);
            pairs.all(|(here, old)| here.trim() == old.trim())
        };
        let windows = lines.windows(self.old.len()).enumerate();
        let found = windows.filter(|(_, window)| same(window));
        let found: Vec<usize> = found.map(|(at, _)| at).collect();
        match (&found[..], self.near) {
            ([at], _) => Ok(*at),
            ([_, ..], Some(near)) => {
                let closest = found.iter().min_by_key(|at| at.abs_diff(near));
                Ok(closest.copied().unwrap_or(near))
            }
            _ => Err(format!(
                "{file}: {} places have the lines that begin with {:?}, 1 is wanted",
                found.len(),
                self.old[0].trim()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "fn a() {\n    one();\n    two();\n}\nfn b() {\n    one();\n}\n";

    #[test]
    fn lines_are_found_by_what_they_say() {
        let edit = Edit::new("a.rs".into(), "one();\ntwo();\n", "two();\n");
        let changed = edit.apply(TEXT).unwrap();
        assert_eq!(
            changed,
            "fn a() {\n    two();\n}\nfn b() {\n    one();\n}\n"
        );
    }

    #[test]
    fn what_is_there_twice_or_not_at_all_is_refused() {
        for old in ["one();", "three();", ""] {
            let edit = Edit::new("a.rs".into(), old, "two();");
            assert!(edit.apply(TEXT).unwrap_err().contains("a.rs"), "{old}");
        }
    }

    #[test]
    fn a_diff_changes_the_place_that_it_names() {
        let diff = "--- a.rs\n+++ b\n@@ -5,3 +5,3 @@\n fn b() {\n-    one();\n+    three();\n }\n";
        let [edit] = &Edit::of_diff(Path::new("a.rs"), diff)[..] else {
            panic!("one hunk");
        };
        let changed = edit.apply(TEXT).unwrap();
        assert!(
            changed.ends_with("fn b() {\n    three();\n}\n"),
            "{changed}"
        );
    }
}
