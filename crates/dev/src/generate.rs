//! Files that are written from code: their content, and whether the tree has it.

use std::fs;
use std::io;
use std::path::Path;

/// A file that is generated.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Page {
    /// Where it lies, from the root of the tree.
    pub path: &'static str,
    /// Writes its content.
    pub content: fn() -> String,
}

/// Every generated file.
pub const PAGES: &[Page] = &[
    Page {
        path: "docs/cli.md",
        content: kvdepot_cli::reference,
    },
    Page {
        path: "docs/configuration.md",
        content: configuration,
    },
];

/// The options of all tiers that the command and the package know.
fn configuration() -> String {
    let kinds = kvdepot_store::Kinds::standard().with(kvdepot_transfer::tier_kind());
    kvdepot_store::config::schema::reference(&kinds)
}

/// Whether a file had to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// It has the content that the code asks for.
    Current,
    /// It has another content, or is missing.
    Stale,
}

impl Page {
    /// Compares the file below `root` with what it should be.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn check(&self, root: &Path) -> io::Result<Verdict> {
        match fs::read_to_string(root.join(self.path)) {
            Ok(text) if text == (self.content)() => Ok(Verdict::Current),
            Ok(_) => Ok(Verdict::Stale),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Verdict::Stale),
            Err(error) => Err(error),
        }
    }

    /// Writes the file below `root` where it is stale.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub fn write(&self, root: &Path) -> io::Result<Verdict> {
        let verdict = self.check(root)?;
        if verdict == Verdict::Stale {
            fs::write(root.join(self.path), (self.content)())?;
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Page = Page {
        path: "page.md",
        content: || "# Page\n".to_owned(),
    };

    #[test]
    fn a_missing_or_changed_file_is_stale_and_writing_mends_it() {
        let root = std::env::temp_dir().join(format!("kvdepot-dev-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        assert_eq!(PAGE.check(&root).unwrap(), Verdict::Stale);
        assert_eq!(PAGE.write(&root).unwrap(), Verdict::Stale);
        assert_eq!(PAGE.check(&root).unwrap(), Verdict::Current);
        fs::write(root.join(PAGE.path), "# Other\n").unwrap();
        assert_eq!(PAGE.check(&root).unwrap(), Verdict::Stale);
        fs::remove_dir_all(&root).unwrap();
    }
}
