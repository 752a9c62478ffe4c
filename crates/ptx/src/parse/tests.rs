use std::time::{Duration, Instant};

use super::*;

const HEADER: &str = ".version 8.7\n.target sm_80\n.address_size 64\n";

fn kernel(body: &str) -> Kernel {
    let text = format!(
        "{HEADER}.visible .entry k(.param .u64 x) {{\n.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<4>;\n{body}\n}}"
    );
    match parse(&text) {
        Ok(mut kernels) => kernels.remove(0),
        Err(error) => panic!("{}", error.render(&text, "test.ptx")),
    }
}

/// The body's instructions as the printer writes them.
fn printed(body: &str) -> String {
    let kernel = kernel(body);
    let round = parse(&kernel.to_string()).unwrap();
    assert_eq!(round, std::slice::from_ref(&kernel), "{kernel}");
    kernel.instructions().map(|i| kernel.instruction_text(i)).collect::<Vec<_>>().join("; ")
}

fn error(text: &str) -> ParseError {
    parse(text).map(|kernels| kernels.iter().map(Kernel::to_string).collect::<String>()).unwrap_err()
}

fn body_error(body: &str) -> String {
    error(&format!("{HEADER}.entry k() {{ .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<4>;\n{body}\n}}"))
        .to_string()
}

#[test]
fn operands_of_every_kind() {
    for (written, meant) in [
        ("mov.u32 %r1, 0x1F;", "mov.u32 %r1, 31"),
        ("mov.u32 %r1, 017;", "mov.u32 %r1, 15"),
        ("mov.u32 %r1, 0b101U;", "mov.u32 %r1, 5"),
        ("mov.u32 %r1, -(2+3)*4;", "mov.u32 %r1, -20"),
        ("mov.u32 %r1, 1 << 4 | 3;", "mov.u32 %r1, 19"),
        ("mov.u32 %r1, ~0 & 0xff;", "mov.u32 %r1, 255"),
        ("mov.u32 %r1, WARP_SZ - 1;", "mov.u32 %r1, 31"),
        ("mov.u64 %rd1, 18446744073709551615;", "mov.u64 %rd1, -1"),
        ("mov.u64 %rd1, -9223372036854775808;", "mov.u64 %rd1, -9223372036854775808"),
        ("mov.f32 %r1, 0f3f800000;", "mov.f32 %r1, 0f3F800000"),
        ("mov.f32 %r1, -1.5;", "mov.f32 %r1, 0fBFC00000"),
        ("cvt.rn.f32.f64 %r1, 0.5;", "cvt.rn.f32.f64 %r1, 0d3FE0000000000000"),
        ("st.global.v2.f32 [%rd1], {1.0, %r1};", "st.global.v2.f32 [%rd1], {0f3F800000, %r1}"),
        ("atom.global.gpu.acq_rel.add.u32 %r1, [%rd1], 1;", "atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1"),
        ("mov.f64 %rd1, 1e-3;", "mov.f64 %rd1, 0d3F50624DD2F1A9FC"),
        ("mov.f64 %rd1, 0d3FF0000000000000;", "mov.f64 %rd1, 0d3FF0000000000000"),
        ("mov .u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x"),
        ("ld.global.b32 { %r1 }, [ %rd1 + 0 ];", "ld.global.b32 %r1, [%rd1]"),
        ("ld.global.L2::128B.v2.b32 {%r1, %r2}, [%rd1+-8];", "ld.global.L2::128B.v2.b32 {%r1, %r2}, [%rd1+-8]"),
        ("st.shared.b32 [0x10], 7;", "st.shared.b32 [16], 7"),
        ("ld.param.u64 %rd1, [x+4];", "ld.param.u64 %rd1, [x+4]"),
        ("setp.lt.and.s32 %p1|%p2, %r1, -1, !%p3;", "setp.lt.and.s32 %p1|%p2, %r1, -1, !%p3"),
        ("@!%p1 shfl.sync.bfly.b32 %r1|%p0, %r2, 1, 31, -1;", "@!%p1 shfl.sync.bfly.b32 %r1|%p0, %r2, 1, 31, -1"),
        ("mov.b64 {%r1, _}, %rd1;", "mov.b64 {%r1, _}, %rd1"),
        (".shared .b32 s[4]; mov.b32 %r1, s+8;", "mov.b32 %r1, s+8"),
        ("{ .reg .b32 %r<2>; mov.u32 %r1, %r5; }", "mov.u32 %r_s0_1, %r5"),
        ("{ .reg .b32 a; mov.u32 a, 1; } { .reg .b32 a; mov.u32 a, 2; }", "mov.u32 a, 1; mov.u32 a_s0_, 2"),
        ("bra L; { bra L; L: } L: ret;", "bra L_s0_; bra L; ret"),
    ] {
        assert_eq!(printed(written), meant, "{written}");
    }
}

#[test]
fn declarations() {
    let text = r#"
        .version 8.0 // comment
        .target sm_90a, debug
        .address_size 64
        .extern .shared .align 16 .b8 dynamic[];
        .global .align 8 .f32 table[2][2] = {{1.0, 0f40000000}, {3, 4}};
        .const .u16 sizes[] = {1, 2, 65535};
        .visible .global .v4 .f32 pad;
        .shared .b32 unused[4];
        .weak .entry k(
            .param .u64 .ptr .global .align 16 a,
            .param .align 8 .b8 b[24],
            .param .u64 .ptr c
        )
        .maxntid 128, 2 .minnctapersm 3 .maxnreg 64 .reqntid 64 .reqnctapercluster 2, 1, 1 .explicitcluster
        .pragma "nounroll";
        {
            .reg .pred p, q<3>;
            .local .align 8 .b8 stack[32];
            .file 2 "dir\134a \303\251.py", 12, 34
            .loc 2 5 6
            /* a
               comment */ .pragma "x", "y";
            mov.b32 %r1, dynamic; .reg .b32 %r2;
        }"#;
    assert!(error(text).to_string().contains("`%r1` is not declared"));
    let text = text
        .replace("%r1", "%r2")
        .replace("; .reg .b32 %r2;", "; ld.const.u16 %r2, [sizes]; ld.global.f32 %r2, [table+4];");
    let text = text.replace(".reg .pred", ".reg .b32 %r2; .reg .pred");
    let kernels = parse(&text).unwrap();
    let k = &kernels[0];
    assert_eq!((k.target.to_string().as_str(), k.version), ("sm_90a", Version { major: 8, minor: 0 }));
    assert_eq!((k.max_block, k.required_block, k.min_ctas_per_sm), (Some([128, 2, 1]), Some([64, 1, 1]), Some(3)));
    assert_eq!((k.max_registers, k.required_cluster), (Some(64), Some([2, 1, 1])));
    assert_eq!(k.params[0].pointee, Some(Pointee { space: Some(Space::Global), align: 16 }));
    assert_eq!((k.params[1].elements, k.params[1].align), (Some(24), Some(8)));
    assert_eq!(k.params[2].pointee, Some(Pointee { space: None, align: 4 }));
    let names: Vec<_> = k.variables.iter().map(|v| (v.name.as_str(), v.elements, v.align)).collect();
    // A variable of the module that no instruction names is not the kernel's.
    assert_eq!(names, [("dynamic", None, 16), ("table", Some(4), 8), ("sizes", Some(3), 2), ("stack", Some(32), 8)]);
    assert!(k.variables[0].external && k.variables[0].module_level && !k.variables[3].module_level);
    let floats: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|f| f.to_le_bytes()).chain([3, 0, 0, 0, 4, 0, 0, 0]).collect();
    assert_eq!(k.variables[1].init, floats);
    assert_eq!(k.variables[2].init, [1, 0, 2, 0, 255, 255]);
    assert_eq!(k.files, ["dir\\a é.py"]);
    assert_eq!(k.locations, [Location { file: 0, line: 5, column: 6, inlined_at: None }]);
    assert_eq!(parse(&k.to_string()).unwrap(), kernels);
}

#[test]
fn inlined_locations_are_chains() {
    let body = ".loc 1 1 0\nret;\n.loc 1 10 1\n.loc 2 20 2, function_name $f, inlined_at 1 10 1\n\
        .loc 2 30 3, function_name $g+4, inlined_at 2 20 2\nmov.u32 %r1, 1;\n.loc 1 1 0\nmov.u32 %r1, 2;";
    let text = format!("{HEADER}.entry k() {{ .reg .b32 %r<2>;\n{body}\n}} .file 1 \"a\"\n.file 2 \"b\"\n");
    let k = &parse(&text).unwrap()[0];
    let at = |file, line, column, inlined_at: Option<u32>| Location {
        file,
        line,
        column,
        inlined_at: inlined_at.map(LocationId),
    };
    assert_eq!(k.locations, [at(0, 1, 0, None), at(0, 10, 1, None), at(1, 20, 2, Some(1)), at(1, 30, 3, Some(2))]);
    let lines: Vec<_> = k.instructions().map(|i| k.user_location(i).map(|l| l.line)).collect();
    assert_eq!(lines, [Some(1), Some(10), Some(1)]);
    assert_eq!(parse(&k.to_string()).unwrap(), std::slice::from_ref(k));
}

#[test]
fn a_text_without_locations_is_its_own_source() {
    let text = format!(
        "{HEADER}.file 9 \"a\"\n.entry k() {{ .reg .b32 %r<2>;\n  mov.u32 %r1, 1;\n/* é */ ret;\n.loc 9 1 1\nret; }}"
    );
    let k = &parse_file(&text, "k.ptx").unwrap()[0];
    assert_eq!(k.files, ["a", "k.ptx"]);
    let places: Vec<_> = k.locations.iter().map(|l| (l.file, l.line, l.column)).collect();
    assert_eq!(places, [(1, 6, 3), (1, 7, 9), (0, 1, 1)]);
}

#[test]
fn several_entries_have_what_each_names() {
    let text = format!(
        "{HEADER}.shared .b32 a; .shared .b32 b;
        .entry one() {{ .reg .b32 %r<2>; ld.shared.b32 %r0, [a]; }}
        .entry two() {{ .reg .b32 %r<2>; ld.shared.b32 %r0, [b]; }}"
    );
    let kernels = parse(&text).unwrap();
    let names: Vec<_> =
        kernels.iter().map(|k| (k.name.as_str(), k.variables[0].name.as_str(), k.variables.len())).collect();
    assert_eq!(names, [("one", "a", 1), ("two", "b", 1)]);
}

#[test]
fn errors_say_what_and_where() {
    for (body, message) in [
        (
            "hmma.fence.sync.aligned;",
            "line 5, column 1: unknown form `hmma.fence.sync.aligned`: there is no instruction `hmma`",
        ),
        ("  cvt.foo.f32 %r1, %r2;", "line 5, column 3: unknown form `cvt.foo.f32`: `.foo` means nothing"),
        ("fma.f32 %r1, %r1, %r1, %r1;", "unknown form `fma.f32`: after `fma` may follow `$rnd ftz? sat? f32`"),
        ("add.u32 %r1, %r1;", "unknown form: `add.u32` with 2 operand(s)"),
        (
            "add.u32 %r1, %tid.x, 1;",
            "column 14: unknown form: operand 2 of `add.u32` must be a register or a constant, not a special register",
        ),
        ("mov.u32 %r9, 1;", "column 9: `%r9` is not declared"),
        ("mov.u32 %r01, 1;", "`%r01` is not declared"),
        ("bra nowhere;", "column 5: there is no label `nowhere` in scope"),
        ("{ inner: } bra inner;", "there is no label `inner` in scope"),
        ("a: a: ret;", "label `a` stands twice"),
        (".reg .b32 %r<2>;", "`%r` is declared twice"),
        ("mov.u32 %r1, 1/0;", "divides by zero"),
        ("mov.u32 %r1, 18446744073709551616;", "`18446744073709551616` is no integer of 64 bits"),
        ("mov.u32 %r1, 0f3F80;", "`0f3F80` is no integer of 64 bits"),
        ("mov.u32 %r1 1;", "expected `;`, found `1`"),
        ("mov.u32 %r1, 1", "expected `;`, found `}`"),
        ("call f;", "`f` is not declared"),
        ("call %r1, (%r2);", "calls through registers are not supported"),
        (".global .u64 p = q;", "`q` as an initial value"),
        (".global .u32 p[1] = {1, 2};", "`p` has 1 element(s) and is given 2"),
        (".global .align 3 .u32 p;", "an alignment is `3`; it must be a power of two"),
        (".reg .b32 %x<4294967296>;", "a number of registers is `4294967296`; allowed is 0 to 4294967295"),
        (".loc 7 1 1\nret;", "no `.file` has the number 7"),
        ("mov.u32 %r1, é;", "the character `\\u{e9}` has no meaning here"),
        ("/* open", "this comment has no end"),
    ] {
        let found = body_error(body);
        assert!(found.contains(message), "{body}: {found}");
    }
    for (text, message) in [
        ("", "line 1, column 1: `.version` is missing"),
        (".version 8.0\n", "line 2, column 1: `.target` is missing"),
        (".version 8\n", "`8` is no version"),
        (".version 8.0 .target sm_77", "sm_77"),
        (".version 8.0 .target sm_75 .address_size 32", "addresses have 64 bits"),
        (".version 8.0 .target sm_75 .entry k() {", "this body has no closing `}`"),
        (".version 8.0 .target sm_75 .entry k() {} .entry k() {}", "there is a second entry `k`"),
        (".version 8.0 .target sm_75 .file 1 \"x", "no closing quote"),
        (".entry k() {}", "`.version` is missing"),
    ] {
        let found = error(text).to_string();
        assert!(found.contains(message), "{text}: {found}");
    }
}

#[test]
fn an_error_shows_its_line() {
    let text = ".version 8.0\n.target sm_75\n.entry k() {\n\t.reg .b32 r;\n\tmov.u32 r, café;\n}";
    let error = parse(&text.replace("é", "e")).unwrap_err();
    assert_eq!(
        error.render(text, "k.ptx"),
        "error: `cafe` is not declared\n --> k.ptx:5:13\n  |\n5 | \tmov.u32 r, café;\n  | \t           ^^^^\n"
    );
}

/// What a hostile text claims costs nothing, and nothing takes more than time in proportion to its length.
#[test]
fn hostile_text() {
    let huge = kernel(".reg .b32 %x<4294967295>; .shared .b8 s[99999999999]; mov.u32 %x4294967294, 1;");
    assert_eq!(huge.variables[0].elements, Some(99_999_999_999));
    assert!(body_error(".local .b8 s[99999999999][99999999999];").contains("more elements than 64 bits count"));
    assert!(body_error(&"{".repeat(1_000_000)).contains("scopes are nested more than 64 deep"));
    assert!(body_error(&format!("mov.u32 %r1, {}1;", "(".repeat(1_000_000))).contains("nested more than 32 deep"));
    assert!(body_error(&format!("mov.u32 %r1, {}1;", "-".repeat(1_000_000))).contains("nested more than 32 deep"));
    assert!(body_error(&format!("mov.u32 %r{}, 1;", "1".repeat(1_000_000))).contains("is not declared"));
    let start = Instant::now();
    let mut body = String::new();
    for i in 0..20_000 {
        body.push_str(&format!("{{ .reg .b32 a, a{i}, b<{i}>; L: L{i}: bra L; .loc 1 {i} 0\nmov.u32 a, a{i}; }}\n"));
    }
    let text = format!("{HEADER}.file 1 \"x\"\n.entry k() {{ {body} }}");
    assert_eq!(parse(&text).unwrap()[0].instructions().count(), 40_000);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?} for {} bytes", start.elapsed(), text.len());
}

/// Functions before and behind the kernel that calls them, in registers and in parameter space.
const CALLS: &str = r#"
.version 8.7
.target sm_80
.address_size 64
.global .align 4 .b32 counter;
.extern .func (.param .b32 retval) vprintf (.param .b64 format, .param .b64 values);
.func (.param .b32 func_retval0) half(.param .b32 half_param_0);
.func (.reg .b32 sum) plus(.reg .b32 a, .reg .b32 b);
.func nothing();
.func again;
.visible .entry k(.param .u64 k_param_0) {
    .reg .b32 %r<9>;
    .reg .b64 %rd<3>;
    .reg .pred %p<2>;
    .pragma "nounroll";
L:
    {
        .param .b32 param0;
        st.param.b32 [param0], %r1;
        .param .b32 retval0;
        call.uni (retval0), half, (param0);
        ld.param.b32 %r2, [retval0];
    }
    call (%r3), plus, (%r2, 1);
    .pragma "used_bytes_mask 0x3";
    ld.global.b32 %r5, [%rd1];
    table: .branchtargets L, M, N;
    brx.idx %r3, table;
M:  call nothing;
N:  ret;
}
.func nothing() { call again, (); ret; }
.func unused() { this is not read }
.func again { .reg .b32 %r<2>; atom.global.add.u32 %r1, [counter], 1; }
.func (.reg .b32 sum) plus(.reg .b32 a, .reg .b32 b) { add.u32 sum, a, b; ret; }
.func (.param .b32 func_retval0) half(.param .b32 half_param_0) {
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [half_param_0];
    shr.u32 %r2, %r1, 1;
    st.param.b32 [func_retval0], %r2;
    ret;
}
"#;

#[test]
fn functions_tables_and_pragmas() {
    let kernels = parse(CALLS).unwrap();
    let k = &kernels[0];
    k.validate().unwrap();
    let names: Vec<_> = k.functions.iter().map(|f| (f.name.as_str(), f.results.len(), f.params.len())).collect();
    assert_eq!(names, [("half", 1, 1), ("plus", 1, 2), ("nothing", 0, 0), ("again", 0, 0)]);
    assert_eq!(k.used_bytes(), [(4, 3)]);
    let cfg = crate::Cfg::of(k);
    let block_at = |position: usize| cfg.blocks.iter().position(|block| block.instructions.start == position).unwrap();
    let from = |position: usize| {
        let block = cfg.blocks.iter().find(|block| block.instructions.end == position + 1).unwrap();
        block.successors.iter().map(|&next| cfg.blocks[next].instructions.start).collect::<Vec<_>>()
    };
    let [half, plus, nothing, again] = cfg.function_positions[..] else { panic!("{cfg:?}") };
    assert_eq!((from(1), from(3)), (vec![half], vec![plus]));
    assert_eq!(from(5), [0, 6, 7]);
    assert_eq!((from(6), from(nothing)), (vec![nothing], vec![again]));
    assert_eq!(from(half + 3), [2]);
    assert_eq!(cfg.blocks[block_at(7)].successors, []);
    let text = k.to_string();
    assert_eq!(parse(&text).unwrap(), kernels, "{text}");
    for (from, to, message) in [
        (
            "plus, (%r2, 1)",
            "plus, (%r2)",
            "hands over 1 value(s) and takes 1; `plus` has 2 parameter(s) and 1 result(s)",
        ),
        ("[counter]", "[missing]", "`missing` is not declared"),
        ("half_param_0]", "other]", "`other` is not declared"),
    ] {
        let text = CALLS.replace(from, to);
        let found = match parse(&text) {
            Ok(kernels) => kernels[0].validate().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(message), "{found}");
    }
}
