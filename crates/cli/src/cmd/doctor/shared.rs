//! What fleets share: 3FS, and stores of objects.

use std::path::Path;

use kvdepot_media::Library;

use super::Check;

/// 3FS's library, as the loader finds it.
const LIBRARY: &str = "libhf3fs_api_shared.so";

/// Where 3FS is mounted, by a table of mounts, and whether its library is there.
pub(super) fn threefs(mounts: &str) -> Check {
    let columns = mounts.lines().map(|line| line.split(' '));
    let found = columns.filter_map(|mut columns| {
        let (at, kind) = (columns.nth(1)?, columns.next()?);
        kind.contains("hf3fs").then_some(at)
    });
    let found: Vec<&str> = found.collect();
    let at = found.join(", ");
    match Library::load(Path::new(LIBRARY)) {
        _ if found.is_empty() => Check::ok("3FS", "not mounted; Ds3fs needs it"),
        Ok(_) => Check::ok("3FS", format!("at {at}, with {LIBRARY}")),
        Err(error) => {
            let hint = "install 3FS's client library, set ds3fs.library to its path, or set \
                        ds3fs.library: posix";
            Check::advice("3FS", format!("at {at}: {error}"), hint)
        }
    }
}

/// Whose credentials `S3` takes where its section names none; `set` says what the environment has.
pub(super) fn objects(set: impl Fn(&str) -> bool) -> Check {
    // In the order in which they are looked for; each needs all of its names.
    const SOURCES: [&[&str]; 4] = [
        &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
        &["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"],
        &["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"],
        &[
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        ],
    ];
    if cfg!(not(feature = "s3")) {
        return Check::ok("S3", "not included in this build");
    }
    let count = |names: &[&str]| names.iter().filter(|name| set(name)).count();
    if let Some(half) = SOURCES.iter().find(|names| !matches!(count(names), 0)) {
        let missing = half.iter().find(|name| !set(name));
        return match missing {
            None => Check::ok("S3", format!("credentials from {}", half[0])),
            Some(name) => Check::advice("S3", "incomplete credentials", format!("set {name}")),
        };
    }
    let none =
        "no credentials in the environment; set s3.credentials, or use the role of the instance";
    Check::ok("S3", none)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_3fs_is_found_by_its_kind_and_its_library_is_named_where_it_is_not_there() {
        assert_eq!(threefs("/dev/vda / ext4 rw 0 0\n").status, "ok");
        let found = threefs("hf3fs.stage /3fs/stage fuse.hf3fs rw,nosuid 0 0\n");
        assert!(found.value.starts_with("at /3fs/stage"), "{}", found.value);
        assert!(found.value.contains(LIBRARY), "{}", found.value);
    }

    #[test]
    #[cfg(feature = "s3")]
    fn the_source_of_credentials_is_named_and_no_secret() {
        let half = objects(|name| name == "AWS_ACCESS_KEY_ID");
        assert_eq!(half.hint.unwrap(), "set AWS_SECRET_ACCESS_KEY");
        let found = objects(|name| name.contains("ACCESS_KEY"));
        assert_eq!(found.value, "credentials from AWS_ACCESS_KEY_ID");
        assert!(objects(|_| false).value.starts_with("no credentials"));
    }
}
