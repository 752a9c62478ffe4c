"""The library on the processor and on an emulated GPU: no GPU and no torch are needed."""

import os

import flashstrata
import numpy as np
import pytest


def attention(q, k, v, causal):
    """Out and lse of (batch, seqlen, heads, dim), in f64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.astype(np.float64), k.astype(np.float64).repeat(group, 2), v.astype(np.float64).repeat(group, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        i = np.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
        scores = np.where(np.arange(scores.shape[-1])[None] > i, -np.inf, scores)
    largest = scores.max(-1, keepdims=True)
    p = np.exp(scores - largest)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", p / total, v), (largest + np.log(total))[..., 0]


def device_of(name):
    return flashstrata.Device.cpu() if name == "CPU" else flashstrata.Device.emulated(name)


@pytest.mark.parametrize("name", ["CPU", "RTX 2070", "H200"])
@pytest.mark.parametrize("mask", ["", " causal"])
def test_host_tensors(name, mask):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 70, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((1, 90, 2, 64)).astype(np.float16) for _ in range(2))
    device = device_of(name)
    out, lse = device.forward_host(f"1x4/2x70/90x64 f16{mask}", q.tobytes(), k.tobytes(), v.tobytes())
    expected, expected_lse = attention(q, k, v, bool(mask))
    out = np.frombuffer(out, np.float16).reshape(q.shape).astype(np.float64)
    assert np.abs(out - expected).max() < 2e-3
    assert np.abs(np.frombuffer(lse, np.float32).reshape(1, 4, 70) - expected_lse).max() < 1e-3


def test_eight_bits():
    """Numbers that e4m3 has, times what each batch entry and KV head has."""
    rng = np.random.default_rng(11)
    shapes = ((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    bits = [rng.integers(0x28, 0x48, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7 for shape in shapes]
    descales = [rng.uniform(0.25, 0.5, (2, 2)).astype(np.float32) for _ in range(3)]
    out, lse = flashstrata.Device.emulated("H200").forward_host(
        "2x4/2x70/90x64 e4m3 causal", *(x.tobytes() for x in bits), descales=tuple(x.tobytes() for x in descales)
    )
    # Three bits of fraction and four of an exponent that is 7 for 1.
    numbers = [np.where(x >> 7, -1.0, 1.0) * (1 + (x & 7) / 8) * 2.0 ** ((x >> 3 & 15) - 7.0) for x in bits]
    scaled = [x * descale.repeat(x.shape[2] // 2, 1)[:, None, :, None] for x, descale in zip(numbers, descales)]
    expected, expected_lse = attention(*scaled, True)
    out = (np.frombuffer(out, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(expected.shape)
    assert np.abs(out - expected).max() < 0.05 * np.abs(expected).max()
    assert np.abs(np.frombuffer(lse, np.float32).reshape(expected_lse.shape) - expected_lse).max() < 1e-3
    with pytest.raises(ValueError, match="q_descale"):
        flashstrata.Device.emulated("H200").forward_host("2x4/2x70/90x64 e4m3", *(x.tobytes() for x in bits))


def test_the_plan_says_what_runs():
    assert " v3 " in flashstrata.Device.emulated("H200").plan("4x16x1024x128 bf16")
    assert "v2_kt" in flashstrata.Device.emulated("H200").plan("4x16x1024x128 bf16", stratum="v2_kt")


@pytest.mark.parametrize(
    ("problem", "says"), [("nonsense", "nonsense"), ("1x3/2x8x8", "heads"), ("1x1x8x300", "300"), ("1x1x8x8 scale=-1", "scale")]
)
def test_bad_problems_are_named(problem, says):
    with pytest.raises(ValueError, match=says):
        flashstrata.Device.emulated("H200").plan(problem)


def test_wrong_sizes_and_names_are_named():
    device = flashstrata.Device.emulated("H200")
    with pytest.raises(ValueError):
        device.forward_host("1x1x8x8", bytes(4), bytes(4), bytes(4))
    with pytest.raises(ValueError, match="v9"):
        device.plan("1x1x8x8", stratum="v9")
    with pytest.raises(ValueError, match="RTX 9999"):
        flashstrata.Device.emulated("RTX 9999")
    with pytest.raises(ValueError, match="H200.*emulated"):
        device.synchronize(0)


def test_a_forked_process_computes():
    def compute():
        zeros = bytes(2 * 300 * 2 * 64)
        return flashstrata.Device.cpu().forward_host("1x2x300x64 f16", zeros, zeros, zeros)[0] == zeros

    assert compute()
    child = os.fork()
    if child == 0:
        os._exit(0 if compute() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_cpu_has_no_strata():
    device = flashstrata.Device.cpu()
    assert device.name.startswith("CPU (")
    with pytest.raises(ValueError, match="the CPU"):
        device.plan("1x1x8x8")
    with pytest.raises(ValueError, match="the CPU"):
        device.forward_host("1x1x8x8", bytes(256), bytes(256), bytes(256), stratum="v2")
