//! Doubles of libraries, asked to fail or to count.

use crate::library::Library;
use std::ffi::CString;
use std::path::Path;

/// Calls a function of a double (`crates/testkit`), which takes at most one number and answers at
/// most one.
///
/// # Panics
///
/// When there is no such double, or no such function.
pub fn double(library: &Path, function: &str, argument: i64) -> i64 {
    let function = CString::new(function).unwrap();
    let at = Library::load(library).and_then(|library| library.function(&function));
    // SAFETY: the doubles' functions fit this type on x86-64 and AArch64.
    unsafe {
        let function: unsafe extern "C" fn(i64) -> i64 = std::mem::transmute(at.unwrap());
        function(argument)
    }
}
