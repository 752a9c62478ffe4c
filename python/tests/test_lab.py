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
    with pytest.raises(ValueError, match="the kernel has 3 parameters"):
        flashstrata.lab.probe(COPY, 1, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="complex64"):
        flashstrata.lab.probe(COPY, 1, [np.zeros(4, np.complex64)])
    with pytest.raises(ValueError, match="no such kernel"):
        flashstrata.lab.probe(COPY, 1, [], entry="other")
    with pytest.raises(ValueError, match="grid"):
        flashstrata.lab.probe(COPY, 0, [None, None, 0])


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
