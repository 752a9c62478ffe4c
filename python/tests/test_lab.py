"""The lab from Python: on an emulated GPU, without torch."""

import flashstrata.lab
import numpy as np
import pytest

COPY = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to, .param .u32 n)
.reqntid 32, 1, 1
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r4, %r3, 32, %r2;
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 bra $done;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r4, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.b32 %r5, [%rd6];
    st.global.b32 [%rd7], %r5;
$done:
    ret;
}
"""


def test_dig_is_the_document_of_strata():
    with pytest.warns(UserWarning, match="v2"):
        document = flashstrata.lab.dig("1x2x64x64 f16 window=8,0", gpu="H200", strata=["v2", "v3"])
    (record,) = document["records"]
    assert document["schema"] == 1 and record["stratum"] == "v3" and record["gpu"] == "H200"
    assert record["counters"] and record["occupancy"] and record["lines"] and isinstance(record["findings"], list)


def test_dig_takes_one_stratum_and_has_no_record_of_what_is_not_covered():
    with pytest.warns(UserWarning, match="v2"):
        document = flashstrata.lab.dig("1x2x64x64 f16 window=8,0", "H200", "v2", seed=None)
    assert document["records"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("nonsense",), "nonsense"), (("1x1x8x8", "RTX 9999"), "RTX 9999"), (("1x1x8x8", "H200", ["v9"]), "v9")],
)
def test_dig_names_what_is_wrong(arguments, says):
    with pytest.raises(ValueError, match=says):
        flashstrata.lab.dig(*arguments)


def test_probe_counts_by_line():
    contents = np.arange(100, dtype=np.float32)
    document = flashstrata.lab.probe(COPY, 4, [contents, "buf:f32:100:uninit", 100], gpu="A100")
    (record,) = document["records"]
    assert record["kernel"] == "copy" and record["gpu"].startswith("A100") and record["hazard"] is None
    assert record["counters"]["global_load_requests"] == 4
    (load,) = (line for line in record["lines"] if line["global_load_requests"])
    assert "ld.global" in COPY.splitlines()[load["line"] - 1]


def test_probe_tells_a_hazard():
    (record,) = flashstrata.lab.probe(COPY, 4, [np.zeros(64, np.float32), "buf:f32:100:uninit", 100])["records"]
    assert "bounds" in str(record["hazard"]) and record["counters"] is None


def test_probe_names_what_is_wrong():
    for args in ([1, 2, 3, 4], [None, None]):
        with pytest.raises(ValueError, match=f"args are {len(args)}: the kernel has 3 parameters"):
            flashstrata.lab.probe(COPY, 1, args)
    with pytest.raises(ValueError, match="complex64"):
        flashstrata.lab.probe(COPY, 1, [np.zeros(4, np.complex64), None, 0])
    with pytest.raises(ValueError, match=">f4.*native byte order"):
        flashstrata.lab.probe(COPY, 1, [np.zeros(4, ">f4"), None, 0])
    with pytest.raises(ValueError, match="args.0. is a masked array"):
        flashstrata.lab.probe(COPY, 1, [np.ma.zeros(4), None, 0])
    for wrong in (1.5, float("nan"), float("inf"), [1]):
        with pytest.raises(ValueError, match="args.2. is .*u32, it must be an integer"):
            flashstrata.lab.probe(COPY, 1, [None, None, wrong])
    for ptx, entry, has in ((COPY, "other", "copy"), (COPY + COPY.replace("copy", "more"), None, "copy, more"), ("", None, "none")):
        with pytest.raises(ValueError, match=f"entry is {entry}: .*, which has {has}"):
            flashstrata.lab.probe(ptx, 1, [], entry=entry)


@pytest.mark.parametrize("grid", [0, -1, (), (1, 2, 3, 4), 1 << 40])
def test_probe_names_a_wrong_grid(grid):
    with pytest.raises(ValueError, match="grid is .*up to three"):
        flashstrata.lab.probe(COPY, grid, [None, None, 0])


@pytest.mark.parametrize("grid", [lambda meta: (1,), 1.0, (1, 2.0), "1", None])
def test_probe_wants_a_grid_of_integers(grid):
    with pytest.raises(TypeError, match="grid is .*must be a number, or a tuple"):
        flashstrata.lab.probe(COPY, grid, [None, None, 0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shared": 1.5}, "^shared: .*`1.5`"),
        ({"policy": "idle"}, "^policy: .*`idle`"),
        ({"block": 64}, r"block is \[64, 1, 1\]"),
        ({"memory": 5}, r"buf:f32:64:@0.npy.*\(memory\)$"),
    ],
)
def test_probe_says_a_setting_as_python_has_it(settings, says):
    with pytest.raises(ValueError, match=says) as raised:
        flashstrata.lab.probe(COPY, 1, [np.zeros(64, np.float32), "buf:f32:64:uninit", 64], **settings)
    assert not any(word in str(raised.value) for word in ("launch.toml", "TOML", "--", "/tmp"))
    with pytest.raises(ValueError, match="^the block is not given: block X,Y,Z"):
        flashstrata.lab.probe(COPY.replace(".reqntid 32, 1, 1", ""), 1, [None, None, 0])


def test_probe_takes_numpys_integers_and_defaults():
    args = [np.zeros(64, np.float32), "buf:f32:64:uninit", 64.0]
    settings = {"block": (np.int32(32), 1), "seed": np.uint8(3), "shake": None, "policy": None}
    for grid in (np.int64(2), (np.int64(2), 1), np.array([2, 1, 1])):
        (record,) = flashstrata.lab.probe(COPY, grid, args, **settings)["records"]
        assert record["hazard"] is None and record["counters"]["global_load_requests"] == 2
    with pytest.raises(TypeError, match="ptx"):
        flashstrata.lab.probe(COPY, 1, args, ptx="other.ptx")


def test_probe_finds_the_entry_among_comments():
    commented = COPY.replace(".param .u32 n", "/* how (many), .param .f32 m */ .param .u32 n // (elements)\n")
    ptx = commented.replace(".visible", "// .entry old(.param .f32 x)\n/* .entry older() */ .visible")
    args = [np.zeros(32, np.float32), "buf:f32:32:uninit", 32]
    (record,) = flashstrata.lab.probe(ptx, 1, args)["records"]
    assert record["kernel"] == "copy" and record["hazard"] is None
    empty = ".version 7.0 .target sm_80 .address_size 64 .visible .entry empty .reqntid 32 { ret; }"
    (record,) = flashstrata.lab.probe(empty, 1, [])["records"]
    assert record["kernel"] == "empty"


def test_probe_of_a_compiled_triton_kernel():
    # The repository has a folder of that name, which is no such package.
    GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
    import triton
    from triton.compiler import ASTSource

    import triton_kernel

    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(triton_kernel.add, signature=signature, constexprs={"BLOCK": 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    x = np.ones(300, np.float32)
    (record,) = flashstrata.lab.probe(compiled, 3, [x, np.zeros_like(x), 300], gpu="A100")["records"]
    assert record["kernel"] == "add" and record["hazard"] is None
    assert any("triton_kernel.py" in str(line) for line in record["lines"])
    with pytest.raises(ValueError, match="args are 2: the kernel has 3 parameters"):
        flashstrata.lab.probe(compiled, 3, [x, np.zeros_like(x)], gpu="A100")
