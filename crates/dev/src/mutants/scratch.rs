//! A copy of the tree that is changed and built in the place of the tree itself.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Mutation, named, output_of};

/// A copy with objects of its own, which the next run builds on.
#[derive(Debug)]
pub struct Scratch {
    tree: PathBuf,
    target: PathBuf,
    /// Files that differ from the original, with what stood there.
    changed: Vec<(PathBuf, String)>,
    /// Nobody else has it.
    _lock: fs::File,
}

impl Scratch {
    /// The copy of this number below `build/`, as the tree is now.
    ///
    /// # Errors
    /// Files cannot be listed, read or written; another run has it.
    pub fn new(root: &Path, number: usize) -> io::Result<Scratch> {
        let folder = root.join("build/mutants");
        let (tree, target) = (
            folder.join(format!("tree-{number}")),
            folder.join(format!("target-{number}")),
        );
        fs::create_dir_all(&tree).map_err(named(&tree))?;
        let lock = tree.with_extension("lock");
        let lock = fs::File::create(&lock).map_err(named(&lock))?;
        if lock.try_lock().is_err() {
            let why = format!("{} is in use by another run", tree.display());
            return Err(io::Error::other(why));
        }
        mirror(root, &tree)?;
        Ok(Scratch {
            tree,
            target,
            changed: Vec::new(),
            _lock: lock,
        })
    }

    /// The root of the copy.
    #[must_use]
    pub fn tree(&self) -> &Path {
        &self.tree
    }

    /// Where the copy is built.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Changes the copy.
    ///
    /// # Errors
    /// An edit that does not apply; the copy is then as it was.
    pub fn apply(&mut self, mutation: &Mutation) -> Result<(), String> {
        for edit in &mutation.edits {
            let path = self.tree.join(&edit.file);
            let text = fs::read_to_string(&path);
            let text = text.map_err(|error| format!("{}: {error}", edit.file.display()));
            let written = text.and_then(|text| {
                let changed = edit.apply(&text)?;
                fs::write(&path, changed).map_err(|error| error.to_string())?;
                self.changed.push((path, text));
                Ok(())
            });
            if let Err(error) = written {
                let _restored = self.restore();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes all changes back.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn restore(&mut self) -> io::Result<()> {
        while let Some((path, text)) = self.changed.pop() {
            fs::write(&path, text).map_err(named(&path))?;
        }
        Ok(())
    }
}

/// Files of the tree, those too that nobody has committed yet.
fn files(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(root).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let listed = output_of(&mut git)
        .map_err(|error| io::Error::new(error.kind(), format!("git ls-files: {error}")))?;
    let names = String::from_utf8_lossy(&listed).into_owned();
    let names = names.split('\0').filter(|name| !name.is_empty());
    let paths = names.map(PathBuf::from);
    Ok(paths.filter(|path| root.join(path).is_file()).collect())
}

/// Makes the copy the same, and touches only what differs: the rest need not be built again.
fn mirror(root: &Path, tree: &Path) -> io::Result<()> {
    let files = files(root)?;
    for file in &files {
        let (from, to) = (root.join(file), tree.join(file));
        let bytes = fs::read(&from).map_err(named(&from))?;
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).map_err(named(folder))?;
        }
        fs::write(&to, bytes).map_err(named(&to))?;
    }
    let known: HashSet<PathBuf> = files.into_iter().map(|file| tree.join(file)).collect();
    remove_others(tree, &known)
}

fn remove_others(folder: &Path, known: &HashSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder).map_err(named(folder))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, known)?;
        } else if !known.contains(&path) {
            fs::remove_file(&path).map_err(named(&path))?;
        }
    }
    Ok(())
}
