//! What the loader looks for, so that a library of another major version is not taken for this one.

#![expect(clippy::print_stdout, reason = "that is how Cargo is told")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvdepot.so.1");
}
