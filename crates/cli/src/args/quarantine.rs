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
    /// List the quarantined namespaces, each with the time and the reason.
    List,
    /// End the quarantine of a namespace: engines use the namespace again from their next start on.
    ///
    /// If the cause of the quarantine persists, first remove the blocks of the namespace with
    /// `kvdepot rm --namespace`. Otherwise, engines load stored keys and values that differ from
    /// computed keys and values.
    Release {
        /// Digest of the namespace, or a unique prefix of the digest, in hexadecimal digits.
        #[arg(value_name = "DIGEST", value_parser = super::values::hexadecimal, required_unless_present = "all")]
        namespace: Option<String>,
        /// End the quarantines of all namespaces.
        #[arg(long, conflicts_with = "namespace")]
        all: bool,
    },
}
