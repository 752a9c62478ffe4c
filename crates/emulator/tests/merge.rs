//! The predicted merge against what `ptxas` 13.5 made of the same kernels. A comment before each kernel in `merge/` says it;
//! that it is so is checked with the real `ptxas` by the lab's test of the same name.

use std::fs;
use std::path::Path;

use emulator::merge;
use ptx::Kernel;

/// The accesses to shared memory that are predicted, as `LDS.128x2 STSx1`.
fn predicted(kernel: &Kernel) -> String {
    let counts = merge::shared_accesses(kernel);
    if counts.is_empty() {
        return "nothing".into();
    }
    counts.iter().map(|(name, count)| format!("{name}x{count}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn prediction_is_what_ptxas_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/merge");
    let mut kernels = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        for kernel in ptx::parse(&text).unwrap() {
            let prefix = format!("// {}: ", kernel.name);
            let expected = text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap();
            assert_eq!(predicted(&kernel), expected, "{} of {}", kernel.name, path.display());
            kernels += 1;
        }
    }
    assert!(kernels >= 80, "{kernels} kernels");
}

/// A kernel with these instructions after `%r1 = shared memory + 16 * thread`.
fn kernel(body: &str) -> Kernel {
    let text = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 memory[];\n\
         .visible .entry k(.param .u64 out)\n{{\n.reg .b32 %r<20>;\n.reg .b64 %rd<4>;\n\
         ld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\nshl.b32 %r1, %r1, 4;\nmov.u32 %r2, memory;\nadd.s32 %r1, %r1, %r2;\n\
         {body}\nret;\n}}\n"
    );
    ptx::parse(&text).unwrap().remove(0)
}

#[test]
fn the_first_load_leads_and_says_where_the_access_is() {
    let kernel = kernel(
        "ld.shared.b32 %r10, [%r1+24];\nld.shared.b32 %r11, [%r1+20];\nld.shared.b32 %r12, [%r1+28];\n\
         st.global.v4.b32 [%rd1], {%r10, %r11, %r12, %r10};",
    );
    let groups = merge::groups(&kernel);
    let [group] = groups.as_slice() else { panic!("{groups:?}") };
    assert_eq!((group.leader, group.delta, group.bytes_per_lane), (5, -8, 16));
    assert_eq!(group.members, [5, 6, 7]);
}

#[test]
fn unused_words_of_a_load_split_it() {
    let kernel = kernel(
        "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r1];\nld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd1];\n\
         st.global.v4.b32 [%rd1+16], {%r11, %r13, %r16, %r17};",
    );
    let groups = merge::groups(&kernel);
    let found: Vec<_> = groups.iter().map(|group| (group.leader, group.delta, group.bytes_per_lane)).collect();
    assert_eq!(found, [(5, 4, 4), (5, 12, 4), (6, 8, 8)]);
}
