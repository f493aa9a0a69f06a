//! The tree's text files, and what a rule is.

use std::fs;
use std::path::{Path, PathBuf};

use kvdepot_dev::root;

/// Folders that are built or installed, not written.
const NOT_OURS: [&str; 6] = [
    "target",
    "build",
    "dist",
    "node_modules",
    "corpus",
    "artifacts",
];

/// A text file of the tree; the path is relative to its root.
pub(crate) struct File {
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    pub(crate) fn new(path: &str, text: &str) -> File {
        File {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub(crate) fn is_test(&self) -> bool {
        self.path.split('/').any(|folder| folder == "tests")
    }

    /// The text before the unit tests, which stand at the bottom.
    pub(crate) fn code(&self) -> &str {
        let end = self
            .text
            .find("\n#[cfg(test)]\nmod ")
            .unwrap_or(self.text.len());
        &self.text[..end]
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line))
    }
}

fn collect(folder: &Path, files: &mut Vec<File>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let hidden = name.starts_with('.') && name != ".ci" && name != ".gitignore";
        if hidden || path.is_symlink() || NOT_OURS.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let path = path
                .strip_prefix(root())
                .unwrap()
                .to_string_lossy()
                .into_owned();
            files.push(File { path, text });
        }
    }
}

pub(crate) fn tree() -> Vec<File> {
    let mut files = Vec::new();
    collect(root(), &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

pub(crate) type Rule = fn(&[File]) -> Vec<String>;

pub(crate) fn holds(rule: Rule) {
    let offences = rule(&tree());
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
}

pub(crate) fn notices(rule: Rule, canary: &[File]) {
    assert!(!rule(canary).is_empty(), "the rule does not see its canary");
}
