//! Linker options of the shared library: a soname with the major version, and `nodelete`, because
//! the signal handlers that the library sets must outlive `dlclose`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvdepot.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
