//! Allowed kinds of each command's positional argument, one text for help and errors.

/// `PATH` of `ls` and `stat`.
pub(crate) const READ: &str = "an arena (a file, a DAX or a block device), or unix:SOCKET (a \
                               running depot)";

/// `PATH` of `verify`.
pub(crate) const VERIFY: &str = "an arena (a file, a DAX or a block device), a directory of the \
                                 tier Posix, or the file of one block";

/// `PATH` of `rm`.
pub(crate) const RM: &str = "an arena (a file, a DAX or a block device); with --namespace or --key \
                             also unix:SOCKET (a running depot)";

/// `PATH` of `doctor`.
pub(crate) const DOCTOR: &str = "a path on this machine, which may not exist yet";

/// `DEPOT` of `session`.
pub(crate) const DEPOT: &str = "a pipeline, such as \"Posix\" with -o options; unix:SOCKET (a \
                                running depot); a directory of the tier Posix; a session file; or \
                                a directory of session files";

/// The arena that is read without `PATH`.
const DEFAULT: &str = "the default arena of the tier Dax or, if this arena is missing, of the tier \
                       Nvme";

/// The help of an argument that may be left out.
pub(crate) fn or_default(allowed: &str) -> String {
    let text = sentence(allowed);
    format!("{text} [default: {DEFAULT}]")
}

/// The help of the argument of `rm`, which may be left out only where blocks are removed.
pub(crate) fn or_default_blocks(allowed: &str) -> String {
    let text = sentence(allowed);
    format!(
        "{text}. PATH or --instance is required to delete an arena [default with --namespace or \
         --key: {DEFAULT}]"
    )
}

/// The help of the argument of `ls`, which lists running depots without it.
pub(crate) fn or_running(allowed: &str) -> String {
    let text = sentence(allowed);
    format!(
        "{text} [default: the command lists the running depots; with --instance, --namespace, \
         --blocks, --limit or --before, {DEFAULT}]"
    )
}

/// The text with a capital letter.
pub(crate) fn sentence(allowed: &str) -> String {
    let (first, rest) = allowed.split_at(1);
    first.to_uppercase() + rest
}
