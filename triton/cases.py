"""The cases of the corpus: a kernel with one configuration, its inputs, its launch and what must come out.

References are computed in f64 from the inputs as they were rounded. Shapes are small: a case runs at most a few million warp
instructions.
"""

import math
import zlib
from dataclasses import dataclass, field

import numpy as np

import kernels as K
from formats import Tensor, tensor


@dataclass
class Out:
    """A buffer that the kernel writes, filled with NaN (integers: ones) before."""

    dtype: str
    shape: tuple


@dataclass
class Map:
    """A tensor map over a buffer (row-major), made by the host: `box` elements per copy."""

    of: object
    box: tuple
    layout: object = None


@dataclass
class Expect:
    """What a buffer holds afterwards: |got - want| <= abs + rel |want| for each element."""

    want: np.ndarray
    abs: float = 0.0
    rel: float = 0.0

    def __post_init__(self):
        self.want = np.asarray(self.want)


@dataclass
class Case:
    """One kernel, one configuration. `arguments` are in the order of the kernel's parameters, without constants."""

    name: str
    kernel: object
    arguments: dict
    constants: dict
    grid: tuple
    expect: dict
    warps: int = 4
    stages: int = 3
    options: dict = field(default_factory=dict)
    least: int = 75
    quick: bool = False


CASES = []
# Rounding of one result and of the sums behind it, by the narrowest type on the way.
EPS = {"f64": 2.0**-53, "f32": 2.0**-24, "tf32": 2.0**-11, "f16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4, "e5m2": 2.0**-3}


def close(want, dtype, size=1.0, ulps=4):
    """An expectation whose tolerance is some ulps of the type at the magnitude `size` and of the value."""
    return Expect(want, abs=ulps * EPS[dtype] * size, rel=ulps * EPS[dtype])


def exactly(want):
    """An expectation without tolerance."""
    return Expect(want)


def random(name):
    """A generator that depends on the case's name only."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def case(name, kernel, arguments, constants, grid, expect, **more):
    """Adds a case."""
    if any(c.name == name for c in CASES):
        raise ValueError(f"two cases are named {name}")
    CASES.append(Case(name, kernel, arguments, constants, tuple(grid) + (1, ) * (3 - len(grid)), expect, **more))


def cdiv(a, b):
    return -(-a // b)


def randn(r, dtype, *shape, scale=1.0):
    return tensor(dtype, (r.standard_normal(shape) * scale).astype(np.float32))


def softmax_of(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Elementwise


def elementwise():
    for dtype, n, block in [("f32", 1000, 256), ("f16", 2048, 1024), ("bf16", 1000, 512), ("f64", 500, 128), ("i32", 777, 256),
                            ("i64", 300, 128), ("i8", 1024, 512)]:
        name = f"add-{dtype}"
        r = random(name)
        if dtype[0] == "i":
            x, y = (tensor(dtype, r.integers(-50, 50, n)) for _ in range(2))
            want = exactly(x.values + y.values)
        else:
            x, y = randn(r, dtype, n), randn(r, dtype, n)
            want = exactly(tensor(dtype, x.values + y.values).values)
            if dtype == "bf16":
                want = close(x.values + y.values, dtype, ulps=1)
        case(name, K.add, dict(x=x, y=y, out=Out(dtype, (n, )), n=n), dict(BLOCK=block), (cdiv(n, block), ), dict(out=want),
             quick=dtype == "f32")

    for stride in [1, 2, 8, 33]:
        name = f"copy_strided-{stride}"
        n = 512
        x = randn(random(name), "f32", n * stride)
        case(name, K.copy_strided, dict(x=x, out=Out("f32", (n, )), n=n, stride=stride), dict(BLOCK=128), (4, ),
             dict(out=exactly(x.values[::stride][:n])))
    for dtype, shift in [("f32", 1), ("f16", 3), ("bf16", 8)]:
        name = f"copy_shifted-{dtype}-{shift}"
        x = randn(random(name), dtype, 1024 + 64)
        case(name, K.copy_shifted, dict(x=x, out=Out(dtype, (1000, )), n=1000, shift=shift), dict(BLOCK=256), (4, ),
             dict(out=exactly(x.values[shift:shift + 1000])))

    for dtype in ["f32", "f16"]:
        name = f"scale_3d-{dtype}"
        x = randn(random(name), dtype, 3, 5, 100)
        case(name, K.scale_3d, dict(x=x, out=Out("f32", (3, 5, 100)), factor=0.75, nx=100, ny=5, nz=3), dict(BLOCK=64),
             (2, 5, 3), dict(out=close(x.values * 0.75, "f32", 0, 1)), warps=2)

    name = "elementary-f32"
    n = 500
    x = tensor("f32", random(name).uniform(0.05, 6.0, n))
    v = x.values
    erf = np.array([math.erf(t) for t in v])
    want = np.stack([np.exp(v), np.exp2(v), np.log(v), np.log2(v), np.sin(v), np.cos(v), np.sqrt(v), 1 / np.sqrt(v), erf,
                     np.floor(v), np.ceil(v), np.abs(1 - v), 1 / v, np.sqrt(v), v * v + v, 1 / (1 + np.exp(-v))])
    case(name, K.elementary, dict(x=x, out=Out("f32", want.shape), n=n), dict(BLOCK=256), (2, ),
         dict(out=Expect(want, 4e-6, 4e-6)), quick=True)
    for dtype in ["f32", "f64"]:
        name = f"library_functions-{dtype}"
        n = 128
        x = tensor(dtype, random(name).uniform(0.05, 0.95, n))
        v = x.values
        scaled = (np.float32(v) * np.float32(100)).astype(np.float64) if dtype == "f32" else v * 100
        far = (np.float32(v) * np.float32(1e6)).astype(np.float64) if dtype == "f32" else v * 1e6
        want = np.stack([np.tanh(v), np.arcsin(v), np.arctan2(v, 3.0), v**3, np.log1p(v), np.expm1(v), np.rint(scaled),
                         np.fmod(scaled, 3.0), np.cbrt(v), np.hypot(v, 3.0), np.tan(far)])
        tolerance = 2e-6 if dtype == "f32" else 1e-13
        case(name, K.library_functions, dict(x=x, out=Out(dtype, want.shape), n=n), dict(BLOCK=128), (1, ),
             dict(out=Expect(want, tolerance, tolerance)))

    for dtype in ["i32", "i64"]:
        name = f"integers-{dtype}"
        r = random(name)
        n = 400
        x = tensor(dtype, r.integers(0, 1 << 20, n))
        y = tensor(dtype, r.integers(1, 1000, n))
        a, b = x.values, y.values
        popc = np.array([bin(int(t)).count("1") for t in a])
        clz = np.array([32 - int(t).bit_length() for t in a])
        want = np.stack([a // b, a % b, a << (b & 7), a >> (b & 7), (a & b) | (a ^ 0x55), np.abs(a - b), np.clip(a, -100, 100),
                         a * b + 3, ~a, popc, clz])
        case(name, K.integers, dict(x=x, y=y, out=Out(dtype, want.shape), n=n), dict(BLOCK=128), (4, ), dict(out=exactly(want)))
    name = "high_product-u32"
    r = random(name)
    x, y = (tensor("u32", r.integers(0, 1 << 32, 256)) for _ in range(2))
    want = (x.values.astype(np.uint64) * y.values.astype(np.uint64)) >> np.uint64(32)
    case(name, K.high_product, dict(x=x, y=y, out=Out("u32", (256, )), n=256), dict(BLOCK=128), (2, ), dict(out=exactly(want)))

    for source, target in [("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f32"), ("f32", "e5m2"), ("f32", "e4m3"),
                           ("e5m2", "f16"), ("e4m3", "f16"), ("f16", "e4m3"), ("f16", "e5m2"), ("bf16", "e4m3"), ("e4m3", "bf16"),
                           ("f64", "f32"), ("f32", "f64"), ("f32", "i32"), ("i32", "f32"), ("f16", "i8"), ("i8", "bf16"),
                           ("bf16", "f16"), ("f16", "bf16"), ("i64", "f64")]:
        name = f"convert-{source}-{target}"
        r = random(name)
        n = 512
        x = tensor(source, r.integers(-100, 100, n)) if source[0] == "i" else randn(r, source, n, scale=8.0)
        if (source, target) == ("f16", "e5m2"):
            # No ties: Triton before 3.8 rounds them away from zero, later versions to even.
            x = Tensor("f16", (x.bits.view(np.uint16) | 1).view(np.float16))
        v = np.trunc(x.values) if target[0] == "i" else x.values
        case(name, K.convert, dict(x=x, out=Out(target, (n, )), n=n), dict(BLOCK=512), (1, ),
             dict(out=exactly(tensor(target, v).values)), least=90 if "e4m3" in name else 75)

    name = "rounded_sum_packed"
    r = random(name)
    x, y = randn(r, "f16", 512), randn(r, "f16", 512)
    product = (x.bits * y.bits).astype(np.float16)
    case(name, K.rounded_sum_packed, dict(x=x, y=y, out=Out("f16", (512, )), n=512), dict(BLOCK=256), (2, ),
         dict(out=exactly(np.maximum((product + x.bits).astype(np.float16), y.bits))), least=80)

    name = "bytes_by_assembly"
    x = tensor("i32", random(name).integers(-(1 << 31), 1 << 31, 512))
    v = x.bits.view(np.uint32).astype(np.uint64)
    a = ((v >> 24) & 0xFF) | ((v >> 8) & 0xFF00) | ((v << 8) & 0xFF0000) | ((v << 24) & 0xFF000000)
    f = np.uint64(0x0F0F0F0F)
    b = (a & v) | (a & f) | (v & f)
    c = ((a << np.uint64(5)) | (b >> np.uint64(27))) & np.uint64(0xFFFFFFFF)
    field_ = (c >> np.uint64(4)) & np.uint64(0xFF)
    want = (b & ~np.uint64(0xFF << 20)) | (field_ << np.uint64(20))
    case(name, K.bytes_by_assembly, dict(x=x, out=Out("i32", (512, )), n=512), dict(BLOCK=128), (4, ),
         dict(out=exactly(want.astype(np.uint32).view(np.int32))))

    for dtype in ["f32", "bf16"]:
        name = f"interleave_rotate-{dtype}"
        x = randn(random(name), dtype, 512)
        even, odd = x.values[0::2], x.values[1::2]
        c, s = 0.8660254037844387, 0.5
        v = np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(-1)
        want = np.stack([v, np.concatenate([v[:256][::-1], v[256:][::-1]])])
        case(name, K.interleave_rotate, dict(x=x, out=Out(dtype, (2, 512)), n=512), dict(BLOCK=256), (2, ),
             dict(out=close(want, dtype)))


def philox(seed, counter):
    """The four words of Philox 4x32-10 for a 64-bit key and counters of 32 bits."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counter.astype(np.uint64)] + [np.zeros_like(counter, np.uint64) for _ in range(3)]
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    a, b = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    for _ in range(10):
        p, q = b * c[2], a * c[0]
        c = [(p >> np.uint64(32)) ^ c[1] ^ k0, p & mask, (q >> np.uint64(32)) ^ c[3] ^ k1, q & mask]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return c


def generators():
    seed, n = 1234567, 1000
    words = philox(seed, np.arange(1024))
    name = "dropout"
    x = randn(random(name), "f32", n)
    signed = words[0].astype(np.uint32).view(np.int32).astype(np.int64)
    uniform = np.where(signed < 0, -signed - 1, signed)[:n] * 4.6566127342e-10
    case(name, K.dropout, dict(x=x, out=Out("f32", (n, )), n=n, p=0.3, seed=seed), dict(BLOCK=256), (4, ),
         dict(out=close(np.where(uniform > np.float32(0.3), x.values / (1 - np.float32(0.3)), 0.0), "f32")))
    case("random_integers", K.random_integers, dict(out=Out("i32", (4, 1024)), seed=seed), dict(BLOCK=256), (4, ),
         dict(out=exactly(np.stack([w.astype(np.uint32).view(np.int32) for w in words]))))


def control_flow():
    name = "calls"
    n = 700
    x = randn(random(name), "f32", n)
    first = x.values[[0, 128, 256]]
    once = (0.5 * first - 1) * first + 1
    blocks = np.add.reduceat(x.values, range(0, n, 128))
    case(name, K.calls, dict(x=x, out=Out("f32", (3, )), total=Out("f32", (3, )), n=n), dict(BLOCK=128), (3, ),
         dict(out=Expect((0.25 * once + 2) * once + 1, 1e-5, 1e-5), total=Expect([blocks[i::3].sum() for i in range(3)], 1e-4, 1e-5)),
         quick=True)

    name = "collatz"
    x = tensor("i32", random(name).integers(1, 400, 300))
    steps = []
    for v in x.values:
        count = 0
        while v > 1:
            v = v // 2 if v % 2 == 0 else 3 * v + 1
            count += 1
        steps.append(count)
    case(name, K.collatz, dict(x=x, out=Out("i32", (300, )), n=300), dict(BLOCK=128), (3, ), dict(out=exactly(steps)))

    name = "scalar_search"
    r = random(name)
    keys = np.sort(r.integers(0, 10000, 1000))
    wanted = r.integers(0, 10000, 20)
    case(name, K.scalar_search,
         dict(keys=tensor("i32", keys), wanted=tensor("i32", wanted), out=Out("i32", (20, )), n=1000), {}, (20, ),
         dict(out=exactly(np.searchsorted(keys, wanted))), warps=1)

    name = "newton_root"
    x = tensor("f32", random(name).uniform(0.1, 50, 500))
    case(name, K.newton_root, dict(x=x, out=Out("f32", (500, )), n=500), dict(BLOCK=256), (2, ),
         dict(out=Expect(np.sqrt(x.values), 2e-6, 2e-6)))

    name = "checked_divide"
    r = random(name)
    x, y = tensor("i32", r.integers(0, 1000, 300)), tensor("i32", r.integers(1, 50, 300))
    case(name, K.checked_divide, dict(x=x, y=y, out=Out("i32", (300, )), n=300), dict(BLOCK=128), (3, ),
         dict(out=exactly(x.values // y.values)), options=dict(debug=True))


# Rows


def rows():
    for kind, dtype, columns in [("sum", "f32", 1000), ("max", "f16", 512), ("min", "bf16", 300), ("xor", "i32", 700),
                                 ("argmax", "f32", 1000), ("argmin", "f16", 128)]:
        name = f"row_reduce-{kind}-{dtype}"
        r = random(name)
        x = tensor("i32", r.integers(0, 1 << 30, (6, columns))) if kind == "xor" else randn(r, dtype, 6, columns)
        v = x.values
        want = {"sum": lambda: v.sum(1), "max": lambda: v.max(1), "min": lambda: v.min(1),
                "xor": lambda: np.bitwise_xor.reduce(v, 1), "argmax": lambda: v.argmax(1), "argmin": lambda: v.argmin(1)}[kind]()
        out = "i32" if kind in ("xor", "argmax", "argmin") else "f32"
        case(name, K.row_reduce, dict(x=x, out=Out(out, (6, )), columns=columns),
             dict(KIND=kind, BLOCK=1 << (columns - 1).bit_length()), (6, ),
             dict(out=Expect(want, 1e-4 if kind == "sum" else 0, 1e-5 if kind == "sum" else 0)), quick=kind == "argmax")

    for axis, dtype, warps in [(0, "f32", 4), (1, "f32", 4), (0, "f16", 8), (1, "bf16", 1)]:
        name = f"tile_reduce-{axis}-{dtype}-w{warps}"
        x = randn(random(name), dtype, 2, 64, 32)
        case(name, K.tile_reduce, dict(x=x, out=Out("f32", (2, 64 if axis else 32))), dict(ROWS=64, COLUMNS=32, AXIS=axis),
             (2, ), dict(out=Expect(x.values.sum(1 + axis), 1e-4, 1e-5)), warps=warps)

    name = "total-f32"
    x = randn(random(name), "f32", 3000)
    case(name, K.total, dict(x=x, out=tensor("f32", np.zeros(1)), n=3000), dict(BLOCK=512), (6, ),
         dict(out=Expect([x.values.sum()], 1e-3, 1e-5)))

    for kernel, dtype, columns, block, warps in [
        (K.softmax, "f32", 1000, 1024, 4), (K.softmax, "f16", 256, 256, 1), (K.softmax, "bf16", 777, 1024, 8),
        (K.softmax_online, "f32", 2000, 512, 4), (K.softmax_online, "f16", 1024, 256, 4)]:
        name = f"{kernel.__name__}-{dtype}"
        x = randn(random(name), dtype, 4, columns)
        case(name, kernel, dict(x=x, out=Out(dtype, (4, columns)), columns=columns), dict(BLOCK=block), (4, ),
             dict(out=close(softmax_of(x.values), dtype, 0.02, 8)), warps=warps, quick=dtype == "f16" and block == 256 and warps == 1)

    for dtype, columns in [("f32", 768), ("f16", 500), ("bf16", 1024)]:
        name = f"layer_norm-{dtype}"
        r = random(name)
        n = 6
        x, w, b, g = randn(r, dtype, n, columns), randn(r, dtype, columns), randn(r, dtype, columns), randn(r, dtype, n, columns)
        mean = x.values.mean(1)
        rstd = 1 / np.sqrt(x.values.var(1) + 1e-5)
        hat = (x.values - mean[:, None]) * rstd[:, None]
        block = 1 << (columns - 1).bit_length()
        case(name, K.layer_norm,
             dict(x=x, weight=w, bias=b, out=Out(dtype, (n, columns)), mean_out=Out("f32", (n, )), rstd_out=Out("f32", (n, )),
                  columns=columns, eps=1e-5), dict(BLOCK=block), (n, ),
             dict(out=close(hat * w.values + b.values, dtype, 2), mean_out=Expect(mean, 1e-5, 1e-5),
                  rstd_out=Expect(rstd, 1e-5, 1e-5)), quick=dtype == "f32")
        wg = w.values * g.values
        dx = (wg - hat * (hat * wg).mean(1, keepdims=True) - wg.mean(1, keepdims=True)) * rstd[:, None]
        groups = 2
        dw = np.stack([(g.values * hat)[i::groups].sum(0) for i in range(groups)])
        case(f"layer_norm_backward-{dtype}", K.layer_norm_backward,
             dict(x=x, weight=w, dout=g, mean_in=tensor("f32", mean), rstd_in=tensor("f32", rstd), dx=Out(dtype, (n, columns)),
                  dweight=tensor("f32", np.zeros((groups, columns))), locks=tensor("i32", np.zeros(groups)), columns=columns),
             dict(GROUPS=groups, BLOCK=block), (n, ),
             dict(dx=close(dx, dtype, 4, 8), dweight=Expect(dw, 1e-4, 1e-5), locks=exactly(np.zeros(groups))))
        rms = 1 / np.sqrt((x.values**2).mean(1, keepdims=True) + 1e-5)
        case(f"rms_norm-{dtype}", K.rms_norm, dict(x=x, weight=w, out=Out(dtype, (n, columns)), columns=columns, eps=1e-5),
             dict(BLOCK=256), (n, ), dict(out=close(x.values * rms * w.values, dtype, 2)))

    for reverse, product, columns in [(False, False, 1000), (True, False, 512), (False, True, 300)]:
        name = f"cumulative-{'product' if product else 'sum'}{'-reverse' if reverse else ''}"
        r = random(name)
        x = tensor("f32", r.uniform(0.9, 1.1, (3, columns))) if product else randn(r, "f32", 3, columns)
        if product:
            want = np.cumprod(x.values, 1)
        else:
            want = np.cumsum(x.values[:, ::-1], 1)[:, ::-1] if reverse else np.cumsum(x.values, 1)
        case(name, K.cumulative, dict(x=x, out=Out("f32", (3, columns)), columns=columns),
             dict(REVERSE=reverse, PRODUCT=product, BLOCK=1 << (columns - 1).bit_length()), (3, ),
             dict(out=Expect(want, 2e-4, 2e-5)), quick=not reverse and not product)

    name = "recurrence"
    r = random(name)
    a, b = tensor("f32", r.uniform(0.5, 1.0, (2, 128, 16))), randn(r, "f32", 2, 128, 16)
    h, states = np.zeros((2, 16)), []
    for t in range(128):
        h = a.values[:, t] * h + b.values[:, t]
        states.append(h)
    case(name, K.recurrence, dict(a=a, b=b, out=Out("f32", (2, 128, 16))), dict(T=128, D=16), (2, ),
         dict(out=Expect(np.stack(states, 1), 1e-4, 1e-5)))

    for dtype, columns, descending in [("f32", 256, False), ("f16", 128, True), ("i32", 64, False)]:
        name = f"sort_rows-{dtype}"
        r = random(name)
        x = tensor("i32", r.integers(-1000, 1000, (2, columns))) if dtype == "i32" else randn(r, dtype, 2, columns)
        want = np.sort(x.values, 1)
        case(name, K.sort_rows, dict(x=x, out=Out(dtype, (2, columns))), dict(COLUMNS=columns, DESCENDING=descending), (2, ),
             dict(out=exactly(want[:, ::-1] if descending else want)))
    name = "top_k-f32"
    x = randn(random(name), "f32", 3, 256)
    case(name, K.top_k, dict(x=x, out=Out("f32", (3, 8))), dict(COLUMNS=256, K=8), (3, ),
         dict(out=exactly(-np.sort(-x.values, 1)[:, :8])))

    for dtype, columns in [("f32", 1000), ("bf16", 512)]:
        name = f"cross_entropy-{dtype}"
        r = random(name)
        x = randn(r, dtype, 5, columns)
        labels = r.integers(0, columns, 5)
        p = softmax_of(x.values)
        loss = -np.log(p[np.arange(5), labels])
        gradient = p - np.eye(columns)[labels]
        case(name, K.cross_entropy,
             dict(logits=x, labels=tensor("i64", labels), loss=Out("f32", (5, )), gradient=Out(dtype, (5, columns)),
                  columns=columns), dict(BLOCK=1 << (columns - 1).bit_length()), (5, ),
             dict(loss=Expect(loss, 1e-5, 1e-5), gradient=close(gradient, dtype, 0.02, 8)))


# Data movement


def movement():
    for dtype, br, bc, warps in [("f32", 32, 32, 4), ("f32", 64, 16, 2), ("f16", 64, 64, 4), ("bf16", 32, 128, 8), ("i8", 64, 64, 4)]:
        name = f"transpose_through_shared-{dtype}-{br}x{bc}"
        r = random(name)
        x = tensor("i8", r.integers(-100, 100, (130, 96))) if dtype == "i8" else randn(r, dtype, 130, 96)
        case(name, K.transpose_through_shared, dict(x=x, out=Out(dtype, (96, 130)), rows=130, columns=96),
             dict(BLOCK_R=br, BLOCK_C=bc), (cdiv(130, br), cdiv(96, bc)), dict(out=exactly(x.values.T)), warps=warps,
             quick=dtype == "f16")
    for dtype in ["f32", "f16"]:
        name = f"transpose_direct-{dtype}"
        x = randn(random(name), dtype, 256, 24)
        case(name, K.transpose_direct, dict(x=x, out=Out(dtype, (24, 256)), rows=256, columns=24), dict(BLOCK=128), (24, ),
             dict(out=exactly(x.values.T)))
    for dtype in ["f32", "f16"]:
        name = f"permute_heads-{dtype}"
        x = randn(random(name), dtype, 64, 4, 32)
        case(name, K.permute_heads, dict(x=x, out=Out(dtype, (4, 64, 32)), T=64), dict(H=4, D=32, BLOCK_T=16), (4, ),
             dict(out=exactly(x.values.transpose(1, 0, 2))))

    for dtype in ["f32", "f16", "bf16"]:
        r = random(f"embedding-{dtype}")
        table = randn(r, dtype, 50, 200)
        tokens = r.integers(0, 50, 16)
        case(f"embedding-{dtype}", K.embedding, dict(table=table, tokens=tensor("i64", tokens), out=Out(dtype, (16, 200)), width=200),
             dict(BLOCK=256), (16, ), dict(out=exactly(table.values[tokens])), warps=1)
        tokens = r.integers(0, 5, 16)
        # Multiples of 1/8 below 4: sums of 16 of them are exact in f16 and, up to bf16's eight bits, nearly so in bf16.
        g = tensor(dtype, r.integers(-8, 9, (16, 200)) / 8)
        want = np.zeros((5, 200))
        np.add.at(want, tokens, g.values)
        case(f"embedding_backward-{dtype}", K.embedding_backward,
             dict(gradient=g, tokens=tensor("i64", tokens), table=tensor(dtype, np.zeros((5, 200))), width=200), dict(BLOCK=256),
             (16, ), dict(table=exactly(want)), warps=2, least=90 if dtype == "bf16" else 75, quick=dtype == "f16")

    for rows_, columns in [(32, 64), (64, 4)]:
        name = f"gather_in_row-{rows_}x{columns}"
        r = random(name)
        x = randn(r, "f32", 2, rows_, columns)
        index = r.integers(0, rows_, (2, rows_, columns))
        case(name, K.gather_in_row, dict(x=x, index=tensor("i32", index), out=Out("f32", (2, rows_, columns))),
             dict(ROWS=rows_, COLUMNS=columns), (2, ), dict(out=exactly(np.take_along_axis(x.values, index, 1))))

    name = "histogram"
    x = random(name).integers(0, 64, 2000)
    padded = np.bincount(x, minlength=64)
    padded[0] += 2048 - 2000
    case(name, K.histogram, dict(x=tensor("i32", x), out=tensor("i32", np.zeros(64)), n=2000), dict(BINS=64, BLOCK=512), (4, ),
         dict(out=exactly(padded)), quick=True)

    for dtype in ["i32", "u32", "i64"]:
        name = f"atomic_kinds-{dtype}"
        low = 0 if dtype == "u32" else -(1 << 20)
        x = tensor(dtype, random(name).integers(low, 1 << 20, 512))
        v = x.values
        bins = (v & 0x7FFFFFFF) % 8
        start = dict(sums=0, maxima=low, minima=1 << 20, ands=(1 << 31) - 1, ors=0, xors=0)
        operation = dict(sums=np.add, maxima=np.maximum, minima=np.minimum, ands=np.bitwise_and, ors=np.bitwise_or,
                         xors=np.bitwise_xor)
        buffers, expect = {}, {}
        for key, initial in start.items():
            buffers[key] = tensor(dtype, np.full(8, initial))
            want = np.full(8, initial)
            operation[key].at(want, bins, v)
            expect[key] = exactly(want)
        case(name, K.atomic_kinds, dict(x=x, **buffers), dict(BINS=8, BLOCK=128), (4, ), expect)
    name = "atomic_float_max"
    x = randn(random(name), "f32", 512)
    groups = x.values.reshape(-1, 8)
    case(name, K.atomic_float_max,
         dict(x=x, maxima=tensor("f32", np.full(8, -np.inf)), minima=tensor("f32", np.full(8, np.inf))), dict(BINS=8, BLOCK=128),
         (4, ), dict(maxima=exactly(groups.max(0)), minima=exactly(groups.min(0))))
    n = 12
    squares = np.arange(n)**2
    case("tickets", K.tickets,
         dict(order=tensor("i32", np.zeros(n + 1)), counter=tensor("i32", np.zeros(1)), arrivals=tensor("i32", np.zeros(1)), n=n),
         {}, (n, ), dict(order=exactly(np.append(squares, squares.sum()))), warps=1)

    for dtype in ["f32", "f16", "bf16"]:
        name = f"rope-{dtype}"
        r = random(name)
        x = randn(r, dtype, 8, 4, 64)
        angle = r.uniform(0, 6, (8, 32))
        c, s = tensor("f32", np.cos(angle)), tensor("f32", np.sin(angle))
        a, b = x.values[..., :32], x.values[..., 32:]
        cv, sv = c.values[:, None], s.values[:, None]
        case(name, K.rope, dict(x=x, cosines=c, sines=s, out=Out(dtype, (8, 4, 64)), T=8, H=4), dict(D=64), (8, 4),
             dict(out=close(np.concatenate([a * cv - b * sv, b * cv + a * sv], -1), dtype, 2)), warps=1)

    for target, source in [("e4m3", "f16"), ("e4m3", "f32"), ("e5m2", "bf16"), ("i8", "f32")]:
        name = f"quantise-{target}-{source}"
        x = randn(random(name), source, 4, 300)
        largest = {"e4m3": 448.0, "e5m2": 57344.0, "i8": 127.0}[target]
        scale = np.abs(x.values).max(1) / largest
        scaled = x.values / scale[:, None]
        want = Expect(np.trunc(scaled), 1.0, 0) if target == "i8" else Expect(tensor(target, scaled).values, 2.0**-9, 2 * EPS[target])
        case(name, K.quantise, dict(x=x, out=Out(target, (4, 300)), scales=Out("f32", (4, )), columns=300, largest=largest),
             dict(BLOCK=512), (4, ), dict(out=want, scales=Expect(scale, 0, 1e-6)), least=75 if target == "i8" else 90)
    for source, target in [("e4m3", "f16"), ("e5m2", "bf16"), ("i8", "f32")]:
        name = f"dequantise-{source}-{target}"
        r = random(name)
        x = tensor(source, r.integers(-100, 100, (4, 300))) if source == "i8" else randn(r, source, 4, 300, scale=4.0)
        scale = tensor("f32", r.uniform(0.5, 2, 4))
        case(name, K.dequantise, dict(x=x, scales=scale, out=Out(target, (4, 300)), columns=300), dict(BLOCK=512), (4, ),
             dict(out=close(x.values * scale.values[:, None], target, ulps=1)), least=90 if source == "e4m3" else 75)

    name = "stencil-f32"
    x = randn(random(name), "f32", 50, 70)
    p = np.pad(x.values, 1)
    case(name, K.stencil, dict(x=x, out=Out("f32", (50, 70)), height=50, width=70), dict(BLOCK_Y=16, BLOCK_X=32), (3, 4),
         dict(out=close(p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * x.values, "f32", 8)))
    for dtype in ["f32", "f16"]:
        name = f"causal_convolution-{dtype}"
        r = random(name)
        x, w = randn(r, dtype, 60, 40), randn(r, dtype, 4, 40)
        p = np.pad(x.values, ((3, 0), (0, 0)))
        want = sum(p[i:i + 60] * w.values[i] for i in range(4))
        case(name, K.causal_convolution, dict(x=x, weight=w, out=Out(dtype, (60, 40)), T=60, D=40),
             dict(TAPS=4, BLOCK_T=32, BLOCK_D=32), (2, 2), dict(out=close(want, dtype, 4)))


# Matrix products


def product(want, out, k, step=2.0**-22, size=1.0):
    """A k-long product: `step` is the rounding of operands or partial sums of magnitude `size`, `out` the type of the result."""
    # A partial sum may be as large as the result, and k of them are rounded.
    return Expect(want, abs=8 * step * math.sqrt(k) * size, rel=1.5 * EPS[out] + step / 4 * math.sqrt(k))


# The tensor units truncate partial sums in f32; those of Hopper add 8-bit floats with about 14 bits.
STEP = {"tf32": EPS["tf32"], "e4m3": 2.0**-13, "e5m2": 2.0**-13}


def products():
    # (label, operand type, output type, precision, accumulator, M, N, K, blocks, warps, stages, transposed b, least)
    table = [
        ("f16", "f16", "f16", "ieee", "f32", 128, 128, 192, (64, 64, 64), 4, 3, False, 75),
        ("f16-bt", "f16", "f32", "ieee", "f32", 128, 128, 128, (128, 64, 32), 4, 2, True, 75),
        ("f16-small", "f16", "f16", "ieee", "f32", 48, 40, 70, (16, 16, 16), 1, 2, False, 75),
        ("f16-acc16", "f16", "f16", "ieee", "f16", 64, 64, 64, (64, 64, 32), 4, 2, False, 75),
        ("f16-wide", "f16", "f32", "ieee", "f32", 128, 256, 64, (128, 256, 64), 8, 1, False, 75),
        ("bf16", "bf16", "bf16", "ieee", "f32", 100, 96, 160, (64, 32, 32), 4, 3, False, 75),
        ("bf16-bt", "bf16", "f32", "ieee", "f32", 128, 64, 128, (64, 64, 64), 4, 4, True, 75),
        ("tf32", "f32", "f32", "tf32", "f32", 64, 64, 96, (64, 32, 32), 4, 2, False, 75),
        ("tf32-bt", "f32", "f32", "tf32", "f32", 64, 64, 64, (32, 64, 32), 4, 3, True, 75),
        ("tf32x3", "f32", "f32", "tf32x3", "f32", 64, 64, 64, (32, 32, 32), 4, 2, False, 75),
        ("f32-fma", "f32", "f32", "ieee", "f32", 64, 48, 40, (32, 32, 16), 4, 2, False, 75),
        ("f32-fma-bt", "f32", "f32", "ieee", "f32", 64, 64, 32, (32, 32, 32), 4, 1, True, 75),
        ("f64", "f64", "f64", "ieee", "f64", 32, 32, 32, (16, 16, 16), 2, 2, False, 75),
        ("e4m3", "e4m3", "f32", "ieee", "f32", 64, 64, 128, (64, 64, 64), 4, 2, False, 90),
        ("e4m3-bt", "e4m3", "f16", "ieee", "f32", 64, 64, 128, (64, 64, 64), 4, 3, True, 90),
        ("e5m2", "e5m2", "f32", "ieee", "f32", 64, 64, 128, (64, 64, 64), 4, 2, False, 75),
        ("e5m2-bt", "e5m2", "f32", "ieee", "f32", 64, 64, 64, (32, 32, 32), 4, 2, True, 75),
        ("i8", "i8", "i32", "ieee", "i32", 64, 64, 128, (64, 64, 64), 4, 2, False, 75),
        ("i8-bt", "i8", "i32", "ieee", "i32", 64, 64, 64, (32, 32, 64), 4, 3, True, 75),
    ]
    accumulators = {"f32": K.tl.float32, "f16": K.tl.float16, "f64": K.tl.float64, "i32": K.tl.int32}
    for label, dtype, out, precision, accumulator, m, n, k, blocks, warps, stages, transposed, least in table:
        name = f"matmul-{label}"
        r = random(name)
        if dtype == "i8":
            a, b = tensor("i8", r.integers(-128, 128, (m, k))), tensor("i8", r.integers(-128, 128, (k, n)))
        else:
            a, b = randn(r, dtype, m, k), randn(r, dtype, k, n)
        want = a.values @ b.values
        if out == "i32":
            expect = exactly(want)
        else:
            step = STEP.get("tf32" if precision == "tf32" else dtype, 2.0**-50 if dtype == "f64" else 2.0**-22)
            if accumulator == "f16":
                step = EPS["f16"]
            # Each product rounds a sum in f16, which after j products is about sqrt(j): deviations of 0.22 * k * step all told. Of 80,000
            # such sums none was off by more than 3 * k * step; 4 are allowed.
            expect = product(want, out, k, step, math.sqrt(k) / 2 if accumulator == "f16" else 1.0)
        stored = Tensor(dtype, np.ascontiguousarray(b.bits.T)) if transposed else b
        case(name, K.matmul,
             dict(a=a, b=stored, c=Out(out, (m, n)), M=m, N=n, K=k, am=k, ak=1, bk=1 if transposed else n, bn=k if transposed else 1),
             dict(BLOCK_M=blocks[0], BLOCK_N=blocks[1], BLOCK_K=blocks[2], PRECISION=precision,
                  ACCUMULATOR=accumulators[accumulator]), (cdiv(m, blocks[0]), cdiv(n, blocks[1])), dict(c=expect), warps=warps,
             stages=stages, least=least, quick=label in ("f16", "f32-fma", "tf32"))

    name = "matmul_split_k-f16"
    r = random(name)
    a, b = randn(r, "f16", 64, 256), randn(r, "f16", 256, 64)
    case(name, K.matmul_split_k, dict(a=a, b=b, c=tensor("f32", np.zeros((64, 64))), M=64, N=64, K=256),
         dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32), (2, 1, 4), dict(c=Expect(a.values @ b.values, 1e-4, 1e-4)))

    for dtype in ["f32", "f16"]:
        name = f"matmul_batched-{dtype}"
        r = random(name)
        a, b = randn(r, dtype, 8, 16, 32), randn(r, dtype, 8, 32, 16)
        case(name, K.matmul_batched, dict(a=a, b=b, c=Out(dtype, (8, 16, 16))), dict(M=16, N=16, K=32, BATCH=4), (2, ),
             dict(c=product(a.values @ b.values, dtype, 32, STEP["tf32"] if dtype == "f32" else 2.0**-22)))

    for dtype in ["f16", "bf16"]:
        for kernel, least, extras in [(K.matmul_persistent, 75, [{}]), (K.matmul_device_descriptors, 75, [dict(SPECIALISE=False), dict(SPECIALISE=True)]),
                                      (K.matmul_persistent_descriptors, 75, [dict(SPECIALISE=False), dict(SPECIALISE=True)]),
                                      (K.matmul_host_descriptors, 90, [dict(SPECIALISE=False), dict(SPECIALISE=True)])]:
            for extra in extras:
                label = "-specialised" if extra.get("SPECIALISE") else ""
                name = f"{kernel.__name__}-{dtype}{label}"
                r = random(name)
                m, n, k = (192, 128, 256)
                a, b = randn(r, dtype, m, k), randn(r, dtype, k, n)
                blocks = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
                tiles = (m // 64, n // 64)
                bt = Tensor(dtype, np.ascontiguousarray(b.bits.T))
                if kernel is K.matmul_host_descriptors:
                    arguments = dict(left=Map(a, (64, 64)), right=Map(b, (64, 64)), target=Map(Out(dtype, (m, n)), (64, 64)), K=k)
                    out, grid = "target", tiles
                else:
                    persistent = "persistent" in kernel.__name__
                    arguments = dict(a=a, b=b if kernel is K.matmul_persistent else bt, c=Out(dtype, (m, n)), M=m, N=n, K=k)
                    out, grid = "c", (2, ) if persistent else tiles
                    if persistent:
                        blocks["PROGRAMS"] = 2
                case(name, kernel, arguments, {**blocks, **extra}, grid, {out: product(a.values @ b.values, dtype, k)},
                     least=least, quick=name == "matmul_device_descriptors-f16")

    for name, blocks, warps in [("matmul_device_descriptors-f32", (64, 32, 32), 4), ("matmul_device_descriptors-f16-wide", (128, 128, 32), 8),
                                ("matmul_device_descriptors-e4m3", (64, 64, 64), 4)]:
        dtype = name.split("-")[1]
        r = random(name)
        m, n, k = 128, 128, 128
        a, b = randn(r, dtype, m, k), randn(r, dtype, n, k)
        out = "f16" if dtype == "e4m3" else dtype
        case(name, K.matmul_device_descriptors, dict(a=a, b=b, c=Out(out, (m, n)), M=m, N=n, K=k),
             dict(BLOCK_M=blocks[0], BLOCK_N=blocks[1], BLOCK_K=blocks[2], SPECIALISE=False), (m // blocks[0], n // blocks[1]),
             dict(c=product(a.values @ b.values.T, out, k, STEP.get("tf32" if dtype == "f32" else dtype, 2.0**-22))), warps=warps, least=90 if dtype == "e4m3" else 75)

    for dtype in ["f16", "f32", "i32"]:
        name = f"tile_add_descriptors-{dtype}"
        r = random(name)
        # Small multiples of 1/4: sums are exact.
        a, c = (tensor(dtype, r.integers(-20, 20, (50, 72)) / (1 if dtype == "i32" else 4)) for _ in range(2))
        case(name, K.tile_add_descriptors, dict(a=a, c=c, rows=50, columns=72), dict(BLOCK_R=32, BLOCK_C=32), (2, 3),
             dict(c=exactly(c.values + 2 * a.values)))
    for dtype in ["f16", "f32"]:
        name = f"volume_descriptors-{dtype}"
        x = randn(random(name), dtype, 5, 12, 40)
        case(name, K.volume_descriptors, dict(a=x, c=Out(dtype, (5, 12, 40)), D0=5, D1=12, D2=40), dict(B0=2, B1=8, B2=32), (3, 2, 2),
             dict(c=exactly(2 * x.values)))

    for dtype in ["f16", "bf16", "f32"]:
        name = f"mlp-{dtype}"
        r = random(name)
        x, w1, w2 = randn(r, dtype, 80, 64), randn(r, dtype, 64, 128, scale=0.125), randn(r, dtype, 128, 64, scale=0.1)
        hidden = x.values @ w1.values
        hidden = hidden / (1 + np.exp(-hidden))
        tolerance = 16 * EPS["tf32" if dtype == "f32" else dtype]
        case(name, K.mlp, dict(x=x, w1=w1, w2=w2, out=Out(dtype, (80, 64)), M=80), dict(D=64, H=128, BLOCK_M=64, BLOCK_H=32), (2, ),
             dict(out=Expect(hidden @ w2.values, tolerance, tolerance)), stages=2)

    for left, right in [("e4m3", "e4m3"), ("e5m2", "e4m3")]:
        name = f"matmul_scaled-{left}-{right}"
        r = random(name)
        a, b = randn(r, left, 64, 128), randn(r, right, 128, 64)
        sa, sb = r.integers(124, 131, (64, 4)), r.integers(124, 131, (64, 4))
        fa, fb = np.repeat(2.0**(sa - 127), 32, 1), np.repeat(2.0**(sb - 127), 32, 1)
        want = (a.values * fa) @ (b.values * fb.T)
        case(name, K.matmul_scaled,
             dict(a=Tensor("u8", a.bits) if left == "e4m3" else a, a_scale=tensor("u8", sa), b=Tensor("u8", b.bits), b_scale=tensor("u8", sb),
                  c=Out("f32", (64, 64)), M=64, N=64), dict(K=128, A_TYPE=left, B_TYPE=right, BLOCK_M=32, BLOCK_N=32), (2, 2),
             dict(c=Expect(want, 0.05, 0.01)))


# Attention


def attend(q, k, v, scale, causal):
    """O and the log-sum-exp of [heads, T, D] arrays."""
    s = np.einsum("hqd,hkd->hqk", q, k) * scale
    if causal:
        tq, tk = s.shape[1:]
        s = np.where(np.arange(tk)[None, :] <= np.arange(tq)[:, None] + tk - tq, s, -np.inf)
    most = s.max(-1)
    p = np.exp(s - most[..., None])
    total = p.sum(-1)
    return np.einsum("hqk,hkd->hqd", p / total[..., None], v), most + np.log(total), p / total[..., None]


def attention():
    for dtype, d, bq, bk in [("f32", 32, 16, 16), ("f16", 64, 64, 32), ("bf16", 32, 64, 64)]:
        name = f"attention_v1-{dtype}"
        r = random(name)
        h, t = 2, 128
        q, k, v = (randn(r, dtype, h, t, d) for _ in range(3))
        o, lse, _ = attend(q.values, k.values, v.values, d**-0.5, False)
        zero = np.zeros((h, t))
        case(name, K.attention_v1,
             dict(q=q, k=k, v=v, o=tensor(dtype, np.zeros((h, t, d))), l=tensor("f32", zero), m=tensor("f32", zero - np.inf), T=t,
                  scale=d**-0.5), dict(D=d, BLOCK_Q=bq, BLOCK_K=bk), (h, ),
             dict(o=close(o, dtype, 1, 16)))

    # (label, type, query heads, KV heads, Tq, Tk, D, block q, block k, causal, precision, warps, stages, least)
    table = [
        ("f16", "f16", 2, 2, 128, 192, 64, 64, 64, False, "ieee", 4, 3, 75),
        ("f16-causal", "f16", 2, 2, 192, 192, 64, 64, 32, True, "ieee", 4, 2, 75),
        ("f16-gqa", "f16", 4, 2, 100, 130, 64, 64, 64, True, "ieee", 4, 3, 75),
        ("f16-d128", "f16", 1, 1, 128, 128, 128, 128, 64, False, "ieee", 8, 2, 75),
        ("f16-small", "f16", 1, 1, 64, 80, 32, 16, 16, True, "ieee", 1, 3, 75),
        ("bf16", "bf16", 2, 2, 128, 128, 64, 64, 64, False, "ieee", 4, 3, 75),
        ("bf16-causal-gqa", "bf16", 4, 1, 64, 128, 128, 64, 32, True, "ieee", 4, 2, 75),
        ("f32-tf32", "f32", 1, 1, 64, 128, 32, 64, 32, False, "tf32", 4, 2, 75),
        ("f32-fma", "f32", 1, 1, 64, 64, 32, 32, 32, True, "ieee", 4, 2, 75),
        ("e5m2", "e5m2", 1, 1, 64, 128, 64, 64, 64, False, "ieee", 4, 2, 90),
        ("e4m3", "e4m3", 1, 1, 64, 128, 64, 64, 64, True, "ieee", 4, 3, 90),
    ]
    for label, dtype, heads, kv_heads, tq, tk, d, bq, bk, causal, precision, warps, stages, least in table:
        name = f"attention_v2-{label}"
        r = random(name)
        q, k, v = randn(r, dtype, heads, tq, d), randn(r, dtype, kv_heads, tk, d), randn(r, dtype, kv_heads, tk, d)
        group = heads // kv_heads
        o, lse, _ = attend(q.values, k.values.repeat(group, 0), v.values.repeat(group, 0), d**-0.5, causal)
        out = "f16" if dtype in ("e5m2", "e4m3") else dtype
        rounded = "tf32" if precision == "tf32" else dtype
        # P is rounded to the type of V: its error is averaged by the sum over keys.
        case(name, K.attention_v2,
             dict(q=q, k=k, v=v, o=Out(out, (heads, tq, d)), lse=Out("f32", (heads, tq)), Tq=tq, Tk=tk, scale=d**-0.5, GROUP=group),
             dict(D=d, BLOCK_Q=bq, BLOCK_K=bk, CAUSAL=causal, PRECISION=precision), (cdiv(tq, bq), heads),
             dict(o=close(o, rounded, 1, 4), lse=Expect(lse, 2e-3 if rounded != "f32" else 1e-5, 1e-4)), warps=warps, stages=stages,
             least=least, quick=label in ("f16-causal", "f32-fma"))

    for dtype in ["f16", "bf16"]:
        for specialise in [False, True]:
            name = f"attention_descriptors-{dtype}{'-specialised' if specialise else ''}"
            r = random(name)
            h, t, d = 2, 256, 64
            q, k, v = (randn(r, dtype, h, t, d) for _ in range(3))
            o, _, _ = attend(q.values, k.values, v.values, d**-0.5, False)
            case(name, K.attention_descriptors, dict(q=q, k=k, v=v, o=Out(dtype, (h, t, d)), T=t, scale=d**-0.5),
                 dict(D=d, BLOCK_Q=128, BLOCK_K=64, SPECIALISE=specialise), (2, h), dict(o=close(o, dtype, 1, 4)), stages=2, warps=4)

    for dtype, causal, d in [("f16", True, 64), ("bf16", False, 64), ("f16", False, 32)]:
        label = f"{dtype}{'-causal' if causal else ''}-d{d}"
        r = random(f"attention_backward-{label}")
        h, t = 2, 128
        q, k, v, do = (randn(r, dtype, h, t, d) for _ in range(4))
        scale = d**-0.5
        o, lse, p = attend(q.values, k.values, v.values, scale, causal)
        o_rounded = tensor(dtype, o)
        delta = (o_rounded.values * do.values).sum(-1)
        dp = np.einsum("hqd,hkd->hqk", do.values, v.values)
        ds = p * (dp - delta[..., None])
        dq = np.einsum("hqk,hkd->hqd", ds, k.values) * scale
        dk = np.einsum("hqk,hqd->hkd", ds, q.values) * scale
        dv = np.einsum("hqk,hqd->hkd", p, do.values)
        lse_t, delta_t = tensor("f32", lse), tensor("f32", delta)
        case(f"attention_delta-{label}", K.attention_delta, dict(o=o_rounded, do=do, delta=Out("f32", (h, t))), dict(D=d, BLOCK=64),
             (h * t // 64, ), dict(delta=Expect(delta, 1e-4, 1e-5)))
        case(f"attention_backward_dq-{label}", K.attention_backward_dq,
             dict(q=q, k=k, v=v, do=do, lse=lse_t, delta=delta_t, dq=Out(dtype, (h, t, d)), T=t, scale=scale),
             dict(D=d, BLOCK_Q=64, BLOCK_K=32, CAUSAL=causal), (t // 64, h), dict(dq=close(dq, dtype, 2, 4)), stages=2)
        case(f"attention_backward_dkdv-{label}", K.attention_backward_dkdv,
             dict(q=q, k=k, v=v, do=do, lse=lse_t, delta=delta_t, dk=Out(dtype, (h, t, d)), dv=Out(dtype, (h, t, d)), T=t, scale=scale),
             dict(D=d, BLOCK_Q=32, BLOCK_K=64, CAUSAL=causal), (t // 64, h),
             dict(dk=close(dk, dtype, 2, 4), dv=close(dv, dtype, 4, 4)), stages=2)

    for dtype in ["f16", "bf16"]:
        name = f"decode_split-{dtype}"
        r = random(name)
        groups, heads, t, d, part, parts = 2, 16, 250, 64, 64, 4
        q, k, v = randn(r, dtype, groups, heads, d), randn(r, dtype, groups, t, d), randn(r, dtype, groups, t, d)
        pieces = [attend(q.values, k.values[:, i:i + part], v.values[:, i:i + part], d**-0.5, False) for i in range(0, t, part)]
        po, pl = np.stack([p[0] for p in pieces], 1), np.stack([p[1] for p in pieces], 1)
        case(name, K.decode_split,
             dict(q=q, k=k, v=v, o=Out("f32", po.shape), lse=Out("f32", pl.shape), Tk=t, scale=d**-0.5, PART=part),
             dict(D=d, HEADS=heads, BLOCK_K=32), (groups, parts), dict(o=close(po, dtype, 1, 4), lse=Expect(pl, 2e-3, 1e-4)))
        o, _, _ = attend(q.values, k.values, v.values, d**-0.5, False)
        case(f"decode_combine-{dtype}", K.decode_combine,
             dict(parts_o=tensor("f32", po), parts_lse=tensor("f32", pl), o=Out(dtype, (groups, heads, d))),
             dict(PARTS=parts, HEADS=heads, D=d), (groups, heads), dict(o=close(o, dtype)), warps=1)

    for dtype in ["f16", "f32"]:
        name = f"linear_attention-{dtype}"
        r = random(name)
        h, t, d = 2, 96, 32
        q, k, v = (randn(r, dtype, h, t, d, scale=0.4) for _ in range(3))
        s = np.tril(np.einsum("hqd,hkd->hqk", q.values, k.values))
        tolerance = 16 * EPS["tf32"]
        case(name, K.linear_attention, dict(q=q, k=k, v=v, o=Out(dtype, (h, t, d)), T=t), dict(D=d, BLOCK=32), (h, ),
             dict(o=Expect(np.einsum("hqk,hkd->hqd", s, v.values), tolerance, tolerance)))



def uncommon():
    for dtype in ["f32", "f16"]:
        name = f"copy_hinted-{dtype}"
        x = randn(random(name), dtype, 1000)
        case(name, K.copy_hinted, dict(x=x, out=Out(dtype, (2, 1000)), n=1000), dict(BLOCK=512), (2, ),
             dict(out=exactly(np.stack([2 * x.values] * 2))))
    name = "moments"
    x = randn(random(name), "f16", 4, 500)
    case(name, K.moments, dict(x=x, mean_out=Out("f32", (4, )), variance_out=Out("f32", (4, )), columns=500), dict(BLOCK=512), (4, ),
         dict(mean_out=Expect(x.values.mean(1), 1e-5, 1e-5), variance_out=Expect(x.values.var(1), 1e-5, 1e-5)))
    for dtype in ["f16", "bf16", "f32"]:
        name = f"narrow_arithmetic-{dtype}"
        r = random(name)
        x, y = randn(r, dtype, 512), randn(r, dtype, 512)
        a, b = x.values, y.values
        want = np.stack([a * b, a - b, np.maximum(a, b), np.minimum(a, b), np.where((a > b) & (a != 0) | (b <= -1), a, -b), np.abs(a),
                         np.clip(a, -0.5, 0.5)])
        case(name, K.narrow_arithmetic, dict(x=x, y=y, out=Out(dtype, want.shape), n=512), dict(BLOCK=256), (2, ),
             dict(out=exactly(tensor(dtype, want).values)))
    name = "flags"
    x = tensor("i8", random(name).integers(0, 100, 700))
    v = x.values
    odd, large = (v & 1) != 0, v > 50
    case(name, K.flags, dict(x=x, out=Out("i8", (700, )), count=Out("i32", (3, )), n=700), dict(BLOCK=256), (3, ),
         dict(out=exactly((odd ^ large).astype(int)), count=exactly(np.add.reduceat((odd & large).astype(int), [0, 256, 512]))))
    name = "atomics_scoped"
    x = tensor("i32", random(name).integers(0, 1000, 256))
    bins = x.values % 8
    want = np.concatenate([np.bincount(bins, minlength=8)] * 2 + [np.bincount(bins[x.values % 2 == 0], minlength=8)])
    case(name, K.atomics_scoped, dict(x=x, sums=tensor("i32", np.zeros(24)), places=tensor("i32", np.zeros(257))),
         dict(BINS=8, BLOCK=128), (2, ), dict(sums=exactly(want), places=exactly(np.append(256, np.full(256, 7)))))
    name = "compare_and_swap"
    # Every value of a bin is the same, so the order of arrival does not show.
    per_bin = random(name).integers(1, 1 << 40, 16)
    case(name, K.compare_and_swap, dict(x=tensor("i64", per_bin[np.arange(256) % 16]), slots=tensor("i64", np.zeros(16))),
         dict(BINS=16, BLOCK=128), (2, ), dict(slots=exactly(per_bin)))
    name = "dependent_launch"
    x = tensor("f32", np.arange(500))
    case(name, K.dependent_launch, dict(x=x, out=Out("f32", (500, )), n=500), dict(BLOCK=256), (2, ), dict(out=exactly(x.values + 1)),
         options=dict(launch_pdl=True), least=90)
    name = "printing"
    x = randn(random(name), "f32", 300)
    case(name, K.printing, dict(x=x, out=Out("f32", (300, )), n=300), dict(BLOCK=128), (3, ), dict(out=exactly(2 * x.values)))
    name = "sector_walk"
    # Cycles of 1 to 16 places, all within a block of 128.
    nexts = np.arange(256)
    at = 0
    lengths = []
    for block in range(2):
        free = random(name).permutation(128) + 128 * block
        while len(free):
            cycle, free = free[:at % 16 + 1], free[at % 16 + 1:]
            nexts[cycle] = np.roll(cycle, -1)
            lengths += [(c, len(cycle)) for c in cycle]
            at += 1
    want = np.zeros(256, int)
    for c, length in lengths:
        want[c] = length
    case(name, K.sector_walk, dict(x=tensor("i32", nexts), out=Out("i32", (256, )), n=256), dict(BLOCK=128), (2, ),
         dict(out=exactly(want)))
    name = "volume_5d_descriptors-f32"
    x = randn(random(name), "f32", 2, 3, 3, 5, 20)
    case(name, K.volume_5d_descriptors, dict(a=x, c=Out("f32", x.shape), D0=2, D1=3, D2=3, D3=5, D4=20), dict(B3=8, B4=32), (2, 3, 2),
         dict(c=close(x.values + 1, "f32", 1, 1)))
    name = "reduce_descriptors"
    x = tensor("i32", random(name).integers(-(1 << 20), 1 << 20, (48, 32)))
    tiles = x.values.reshape(3, 16, 32)
    start = dict(low=1 << 20, high=-(1 << 20), ands=-1, ors=0, xors=0)
    final = dict(low=tiles.min(0), high=tiles.max(0), ands=np.bitwise_and.reduce(tiles), ors=np.bitwise_or.reduce(tiles),
                 xors=np.bitwise_xor.reduce(tiles))
    case(name, K.reduce_descriptors, dict(a=x, **{k: tensor("i32", np.full((16, 32), v)) for k, v in start.items()}, rows=48, columns=32),
         dict(BLOCK_R=16, BLOCK_C=32), (3, ), {k: exactly(v) for k, v in final.items()})


def clusters():
    name = "cluster-row_reduce-f32"
    x = randn(random(name), "f32", 3, 2000)
    case(name, K.row_reduce, dict(x=x, out=Out("f32", (3, )), columns=2000), dict(KIND="sum", BLOCK=2048), (3, ),
         dict(out=Expect(x.values.sum(1), 1e-4, 1e-5)), options=dict(num_ctas=2), least=90)
    name = "cluster-softmax-f16"
    x = randn(random(name), "f16", 3, 1000)
    case(name, K.softmax, dict(x=x, out=Out("f16", (3, 1000)), columns=1000), dict(BLOCK=1024), (3, ),
         dict(out=close(softmax_of(x.values), "f16", 0.02, 8)), options=dict(num_ctas=4), least=90)
    name = "cluster-transpose-f32"
    x = randn(random(name), "f32", 128, 128)
    case(name, K.transpose_through_shared, dict(x=x, out=Out("f32", (128, 128)), rows=128, columns=128), dict(BLOCK_R=64, BLOCK_C=64),
         (2, 2), dict(out=exactly(x.values.T)), options=dict(num_ctas=2), least=90)
    for kernel, label in [(K.matmul, "matmul"), (K.matmul_device_descriptors, "matmul_device_descriptors")]:
        name = f"cluster-{label}-f16"
        r = random(name)
        m, n, k = 128, 128, 128
        a, b = randn(r, "f16", m, k), randn(r, "f16", k, n)
        blocks = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32)
        if kernel is K.matmul:
            arguments = dict(a=a, b=b, c=Out("f32", (m, n)), M=m, N=n, K=k, am=k, ak=1, bk=n, bn=1)
            constants = dict(**blocks, PRECISION="ieee", ACCUMULATOR=K.tl.float32)
        else:
            arguments = dict(a=a, b=Tensor("f16", np.ascontiguousarray(b.bits.T)), c=Out("f32", (m, n)), M=m, N=n, K=k)
            constants = dict(**blocks, SPECIALISE=False)
        case(name, kernel, arguments, constants, (1, 1), dict(c=product(a.values @ b.values, "f32", k)), options=dict(num_ctas=2), least=90)



def hand_layouts():
    import layouts as L
    from layouts import gl

    by_rows = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    for dtype in ["f32", "f16", "bf16"]:
        for label, shared in [("conflicts", gl.SwizzledSharedLayout(1, 1, 1, [1, 0])), ("swizzled", gl.SwizzledSharedLayout(1, 1, 32, [1, 0])),
                              ("half", gl.SwizzledSharedLayout(1, 2, 8, [1, 0]))]:
            name = f"transpose_tile-{dtype}-{label}"
            x = randn(random(name), dtype, 4, 64, 32)
            case(name, L.transpose_tile, dict(x=x, out=Out(dtype, (4, 32, 64))),
                 dict(R=64, C=32, BY_ROWS=by_rows, BY_COLUMNS=by_rows, SHARED=shared), (4, ), dict(out=exactly(x.values.transpose(0, 2, 1))))
    wide = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for label, shared in [("conflicts", gl.SwizzledSharedLayout(1, 1, 1, [1, 0])), ("swizzled", gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))]:
        name = f"transpose_async-f32-{label}"
        x = randn(random(name), "f32", 5, 32, 32)
        case(name, L.transpose_async, dict(x=x, out=Out("f32", (5, 32, 32)), n=5),
             dict(R=32, C=32, BY_ROWS=wide, BY_COLUMNS=by_rows, SHARED=shared), (1, ), dict(out=exactly(x.values.transpose(0, 2, 1))), least=80)
    for dtype in ["f16", "bf16"]:
        for label, shared in [("conflicts", gl.SwizzledSharedLayout(1, 1, 1, [1, 0])), ("swizzled", gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))]:
            name = f"product_tile-{dtype}-{label}"
            r = random(name)
            a, b = randn(r, dtype, 64, 64), randn(r, dtype, 64, 64)
            mma = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
            case(name, L.product_tile, dict(a=a, b=b, c=Out("f32", (64, 64))),
                 dict(M=64, N=64, K=64, BLOCKED=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), SHARED_A=shared, SHARED_B=shared, MMA=mma,
                      OPERAND_A=gl.DotOperandLayout(0, mma, 2), OPERAND_B=gl.DotOperandLayout(1, mma, 2)), (1, ),
                 dict(c=product(a.values @ b.values, "f32", 64)), least=80)
    for dtype in ["f16", "bf16"]:
        for kernel in [L.ring, L.specialised]:
            name = f"{kernel.__name__}-{dtype}"
            r = random(name)
            m, n, k, bn = 128, 128, 320, 64 if dtype == "f16" else 128
            a, b = randn(r, dtype, m, k), randn(r, dtype, k, n)
            layout = gl.NVMMASharedLayout(128, 16, 2)
            case(name, kernel,
                 dict(left=Map(a, (64, 64), layout), right=Map(b, (64, bn), layout), c=Out("f32", (m, n)), N=n, K=k),
                 dict(BM=64, BN=bn, BK=64, STAGES=3, MMA=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, bn, 16])), (m // 64, n // bn),
                 dict(c=product(a.values @ b.values, "f32", k)), least=90)
    if "cga_layout" not in gl.BlockedLayout.__dataclass_fields__:
        return
    name = "cluster_exchange-f32"
    x = randn(random(name), "f32", 64, 64)
    case(name, L.cluster_exchange, dict(x=x, out=Out("f32", (64, 64))),
         dict(R=64, C=64, BY_ROWS=gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]]),
              BY_COLUMNS=gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 1]])), (1, ), dict(out=exactly(2 * x.values)),
         options=dict(num_ctas=2), least=90)
    name = "cluster_multicast-f16"
    x = randn(random(name), "f16", 64, 64)
    layout = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 0]])
    case(name, L.cluster_multicast, dict(source=Map(x, (64, 64), layout), out=Out("f16", (64, 64))),
         dict(R=64, C=64, LAYOUT=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 0]])), (1, ),
         dict(out=exactly(x.values)), options=dict(num_ctas=2), least=90)


for build in (elementwise, generators, control_flow, rows, movement, products, attention, uncommon, clusters, hand_layouts):
    build()
