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
                                running depot); or a path with a / or a dot: a directory of the \
                                tier Posix, a session file, or a directory of session files";

/// The help of an argument that may be left out.
pub(crate) fn or_default(allowed: &str) -> String {
    let text = sentence(allowed);
    format!("{text} [default: the default arena of Dax, else that of Nvme]")
}

/// The text with a capital letter.
pub(crate) fn sentence(allowed: &str) -> String {
    let (first, rest) = allowed.split_at(1);
    first.to_uppercase() + rest
}
