//! Any text either is refused or gives kernels that print to text that gives the same kernels.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match ptx::parse_file(text, "fuzz.ptx") {
        Err(error) => drop(error.render(text, "fuzz.ptx")),
        Ok(kernels) => {
            for kernel in kernels {
                let _ = kernel.validate();
                let printed = kernel.to_string();
                assert_eq!(ptx::parse(&printed), Ok(vec![kernel]), "{printed}");
            }
        }
    }
});
