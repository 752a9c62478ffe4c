//! Whatever a kernel does, running it ends: with a report or an error, within its budget, and never with a panic.

use std::time::{Duration, Instant};

use arch::Sm;
use emulator::{Memory, Options, Policy, RunError, Sample};
use proptest::prelude::*;
use ptx::{Argument, Launch};

/// A kernel that uses a bit of everything; mutations of it go wrong in many ways.
const KERNEL: &str = r"
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry mixed(.param .u64 in, .param .u64 out, .param .u32 n)
{
    .reg .pred %p<4>;
    .reg .b16 %h<3>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 fixed[512];
    ld.param.u64 %rd0, [in];
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r0, [n];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 64, %r1;
    mul.wide.u32 %rd2, %r3, 4;
    add.s64 %rd3, %rd0, %rd2;
    add.s64 %rd4, %rd1, %rd2;
    ld.global.b32 %r4, [%rd3];
    shl.b32 %r5, %r1, 2;
    st.shared.b32 [%r5], %r4;
    and.b32 %r6, %r1, 3;
    setp.eq.s32 %p0, %r6, 0;
    shl.b32 %r7, %r1, 4;
    @%p0 cp.async.cg.shared.global [%r7+512], [%rd3], 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r8, %r5, 128;
    ld.shared.b32 %r9, [%r8];
    bar.sync 0;
    shfl.sync.bfly.b32 %r10|%p1, %r9, 1, 31, -1;
    vote.sync.ballot.b32 %r11, %p1, -1;
    cvt.rn.f16.f32 %h0, %r10;
    cvt.f32.f16 %r12, %h0;
    fma.rn.f32 %r13, %r12, %r12, %r9;
    mov.b32 %r14, 0;
loop:
    add.s32 %r14, %r14, 1;
    setp.lt.s32 %p2, %r14, %r6;
    @%p2 bra loop;
    @%p0 bra even;
    div.s32 %r15, %r14, %r6;
    bra join;
even:
    mov.b64 %rd5, {%r14, %r13};
    mov.b64 {%r16, %r15}, %rd5;
join:
    atom.shared.add.u32 %r17, [%r5], %r15;
    bar.sync 1, 64;
    prmt.b32 %r18, %r17, %r13, %r14;
    st.global.b32 [%rd4], %r18;
    ret;
}
";

fn run(text: &str, policy: Policy) -> Option<Result<emulator::Report, RunError>> {
    let kernels = ptx::parse(text).ok()?;
    let kernel = kernels.first()?;
    let mut memory = Memory::new();
    let input = memory.alloc_bytes(&[0x3f; 4 * 128 + 16]).unwrap();
    let output = memory.alloc(4 * 128).unwrap();
    let all = [Argument::Pointer(input), Argument::Pointer(output), Argument::U32(7)];
    let arguments = all.into_iter().take(kernel.params.len()).collect();
    let launch =
        Launch { kernel, grid: [2, 1, 1], block: [64, 1, 1], cluster: [1, 1, 1], dynamic_shared: 2048, arguments };
    let options = Options { policy, budget_per_cta: 20_000, threads: 1, ..Options::new(Sm::Sm80) };
    let start = Instant::now();
    let result = emulator::run(&memory, &launch, &options);
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?} for\n{text}", start.elapsed());
    Some(result)
}

#[test]
fn the_kernel_itself_runs_under_every_policy() {
    for policy in [Policy::Eager, Policy::Lazy, Policy::Random(1), Policy::Random(2)] {
        run(KERNEL, policy).unwrap().unwrap_or_else(|error| panic!("{policy:?}: {error}"));
    }
}

/// A line of the body, changed.
#[derive(Clone, Debug)]
enum Change {
    Drop(usize),
    Double(usize),
    Swap(usize, usize),
    /// A number in the line becomes another.
    Number(usize, i64),
    /// A register in the line becomes another of the same bank.
    Register(usize, u8),
}

fn change() -> impl Strategy<Value = Change> {
    let line = 0..KERNEL.lines().count();
    prop_oneof![
        line.clone().prop_map(Change::Drop),
        line.clone().prop_map(Change::Double),
        (line.clone(), line.clone()).prop_map(|(a, b)| Change::Swap(a, b)),
        (line.clone(), prop_oneof![Just(0), Just(-1), Just(1), Just(i64::MAX), Just(i64::MIN), -70_000i64..70_000])
            .prop_map(|(at, value)| Change::Number(at, value)),
        (line, 0u8..20).prop_map(|(at, number)| Change::Register(at, number)),
    ]
}

fn apply(lines: &mut Vec<String>, change: &Change) {
    let count = lines.len();
    let replace = |line: &str, mark: char, with: &str| {
        let at = line.rfind(mark)?;
        let rest = line[at + mark.len_utf8()..].trim_start_matches(|c: char| c.is_ascii_digit());
        Some(format!("{}{mark}{with}{rest}", &line[..at]))
    };
    match *change {
        Change::Drop(at) => {
            lines.remove(at % count);
        }
        Change::Double(at) => {
            let line = lines[at % count].clone();
            lines.insert(at % count, line);
        }
        Change::Swap(a, b) => lines.swap(a % count, b % count),
        Change::Number(at, value) => {
            if let Some(line) = replace(&lines[at % count], ' ', &value.to_string()) {
                lines[at % count] = line;
            }
        }
        Change::Register(at, number) => {
            if let Some(line) = replace(&lines[at % count], 'r', &number.to_string()) {
                lines[at % count] = line;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn mutated_kernels_end(changes in prop::collection::vec(change(), 1..5), seed in 0u64..4) {
        let mut lines: Vec<String> = KERNEL.lines().map(str::to_owned).collect();
        changes.iter().for_each(|change| apply(&mut lines, change));
        let policy = [Policy::Eager, Policy::Lazy, Policy::Random(seed)][seed as usize % 3];
        let _ = run(&lines.join("\n"), policy);
    }
}

fn rejects(body: &str, grid: [u32; 3], block: [u32; 3], options: &Options<'_>) -> String {
    let text = format!(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{\n{body}\n}}\n");
    let kernels = ptx::parse(&text).unwrap();
    let memory = Memory::new();
    let launch =
        Launch { kernel: &kernels[0], grid, block, cluster: [1, 1, 1], dynamic_shared: 0, arguments: Vec::new() };
    emulator::run(&memory, &launch, options).unwrap_err().to_string()
}

#[test]
fn an_endless_loop_ends_with_the_budget() {
    let options = Options { budget_per_cta: 1_000_000, ..Options::new(Sm::Sm80) };
    let message = rejects("loop: bra loop;", [1, 1, 1], [32, 1, 1], &options);
    assert!(message.contains("1000000 warp instructions without ending"), "{message}");
}

#[test]
fn what_a_cta_cannot_hold_is_refused_before_it_is_allocated() {
    let options = Options::new(Sm::Sm80);
    let local = ".local .b8 big[50000000];\n.reg .b64 %rd<2>;\nld.local.b64 %rd0, [big];";
    assert!(rejects(local, [1, 1, 1], [1024, 1, 1], &options).contains("the emulator allows"));
    let shared = ".shared .b8 big[50000000];\n.reg .b32 %r<2>;\nld.shared.b32 %r0, [big];";
    assert!(rejects(shared, [1, 1, 1], [32, 1, 1], &options).contains("allows a block 166912"));
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let options = Options::new(Sm::Sm80);
    assert!(rejects("ret;", [1, 1, 1], [2048, 1, 1], &options).contains("2048 threads; allowed are 1 to 1024"));
    assert!(rejects("ret;", [0, 1, 1], [32, 1, 1], &options).contains("every dimension must be at least 1"));
    let sampled = Options { sample: Sample::Ctas(vec![9]), ..Options::new(Sm::Sm80) };
    assert!(rejects("ret;", [4, 1, 1], [32, 1, 1], &sampled).contains("sampled CTA 9 is not in the grid of 4"));
}
