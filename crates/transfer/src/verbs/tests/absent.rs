//! What is said where there is no library or no device, as on most machines.

use super::*;

#[test]
fn a_machine_without_library_or_device_says_so() {
    let (listed, opened) = (devices(), Device::open("kvdepot-none"));
    let said = opened.map(drop).unwrap_err().to_string();
    match listed {
        Err(error) => {
            assert!(matches!(error, Error::Library(_)), "{error}");
            assert!(
                said.contains("libibverbs.so.1") && said.contains("libibverbs1"),
                "{said}"
            );
            println!("no library: {said}");
        }
        Ok(names) => {
            let found = match &names[..] {
                [] => "none".to_owned(),
                names => names.join(", "),
            };
            assert_eq!(
                said,
                format!("no RDMA device kvdepot-none; available: {found}")
            );
            println!("no such device: {said}");
            for name in names {
                assert_eq!(Device::open(&name).unwrap().name(), name);
            }
        }
    }
}
