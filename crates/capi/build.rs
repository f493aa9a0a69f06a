//! What the loader looks for, so that a library of another major version is not taken for this one;
//! and that it stays loaded after `dlclose`, for the signal handlers that it has set.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvdepot.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
