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
    /// List the quarantined namespaces with time and reason.
    List,
    /// End a quarantine: engines use the namespace again from their next start on.
    ///
    /// If the cause persists, first remove the namespace's blocks with `kvdepot rm --namespace`.
    /// Otherwise engines load keys and values that differ from those that they compute.
    Release {
        /// A unique prefix of the namespace's digest.
        #[arg(value_name = "DIGEST", value_parser = super::values::hexadecimal, required_unless_present = "all")]
        namespace: Option<String>,
        /// End all quarantines.
        #[arg(long, conflicts_with = "namespace")]
        all: bool,
    },
}
