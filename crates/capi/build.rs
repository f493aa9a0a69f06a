//! What the loader looks for, so that a library of another major version is not taken for this one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvdepot.so.1");
}
