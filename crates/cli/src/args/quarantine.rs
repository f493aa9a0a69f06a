//! The options of `kvdepot quarantine`.

use clap::Subcommand;

/// Options of `quarantine`.
#[derive(clap::Args)]
pub(crate) struct Quarantine {
    #[command(subcommand)]
    pub(crate) command: QuarantineCommand,
}

#[derive(Subcommand)]
pub(crate) enum QuarantineCommand {
    /// The namespaces in quarantine, since when, and why.
    List,
    /// Ends a quarantine: engines use the namespace again from their next start on.
    ///
    /// If the cause is still there, first remove what is stored in the namespace, with `kvdepot rm
    /// --namespace`: otherwise engines are served keys and values that they would not compute.
    Release {
        /// The first digits of the namespace's digest.
        #[arg(value_name = "DIGEST", value_parser = super::hexadecimal, required_unless_present = "all")]
        namespace: Option<String>,
        /// All namespaces in quarantine.
        #[arg(long, conflicts_with = "namespace")]
        all: bool,
    },
}
