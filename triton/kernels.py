"""Triton kernels for proving the emulator on PTX that this project did not write.

Plain kernels as people write them, one per pattern of memory access or family of instructions. `cases.py` gives each its
inputs, launches and references.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Elementwise and copies


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y over n elements; the last block is partial."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def copy_strided(x, out, n, stride, BLOCK: tl.constexpr):
    """out[i] = x[i * stride]: one sector per lane once stride is 8 floats or more."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at * stride, mask=inside, other=0.0), mask=inside)


@triton.jit
def copy_shifted(x, out, n, shift, BLOCK: tl.constexpr):
    """out[i] = x[i + shift]: loads that straddle one sector more than they need."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at + shift, mask=inside, other=0.0), mask=inside)


@triton.jit
def scale_3d(x, out, factor, nx, ny, nz, BLOCK: tl.constexpr):
    """A 3-D grid: z picks the slab, y the row, x a block of the row."""
    row = (tl.program_id(2) * ny + tl.program_id(1)) * nx
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < nx
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    # What the grid's size says must agree with nz.
    tl.store(out + row + at, value * factor + (tl.num_programs(2) - nz), mask=inside)


@triton.jit
def elementary(x, out, n, BLOCK: tl.constexpr):
    """One row per function of one positive argument."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=1.0)
    tl.store(out + 0 * n + at, tl.exp(v), mask=inside)
    tl.store(out + 1 * n + at, tl.exp2(v), mask=inside)
    tl.store(out + 2 * n + at, tl.log(v), mask=inside)
    tl.store(out + 3 * n + at, tl.log2(v), mask=inside)
    tl.store(out + 4 * n + at, tl.sin(v), mask=inside)
    tl.store(out + 5 * n + at, tl.cos(v), mask=inside)
    tl.store(out + 6 * n + at, tl.sqrt(v), mask=inside)
    tl.store(out + 7 * n + at, tl.rsqrt(v), mask=inside)
    tl.store(out + 8 * n + at, tl.erf(v), mask=inside)
    tl.store(out + 9 * n + at, tl.floor(v), mask=inside)
    tl.store(out + 10 * n + at, tl.ceil(v), mask=inside)
    tl.store(out + 11 * n + at, tl.abs(1.0 - v), mask=inside)
    tl.store(out + 12 * n + at, tl.div_rn(1.0, v), mask=inside)
    tl.store(out + 13 * n + at, tl.sqrt_rn(v), mask=inside)
    tl.store(out + 14 * n + at, tl.fma(v, v, v), mask=inside)
    tl.store(out + 15 * n + at, tl.sigmoid(v), mask=inside)


@triton.jit
def library_functions(x, out, n, BLOCK: tl.constexpr):
    """Functions of the device library: long straight code with branches, tables and f64 parts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0.5)
    three = tl.full((BLOCK, ), 3.0, v.dtype)
    tl.store(out + 0 * n + at, libdevice.tanh(v), mask=inside)
    tl.store(out + 1 * n + at, libdevice.asin(v), mask=inside)
    tl.store(out + 2 * n + at, libdevice.atan2(v, three), mask=inside)
    tl.store(out + 3 * n + at, libdevice.pow(v, three), mask=inside)
    tl.store(out + 4 * n + at, libdevice.log1p(v), mask=inside)
    tl.store(out + 5 * n + at, libdevice.expm1(v), mask=inside)
    tl.store(out + 6 * n + at, libdevice.rint(v * 100.0), mask=inside)
    tl.store(out + 7 * n + at, libdevice.fmod(v * 100.0, three), mask=inside)
    tl.store(out + 8 * n + at, libdevice.cbrt(v), mask=inside)
    tl.store(out + 9 * n + at, libdevice.hypot(v, three), mask=inside)
    tl.store(out + 10 * n + at, libdevice.tan(v * 1.0e6), mask=inside)


@triton.jit
def integers(x, y, out, n, BLOCK: tl.constexpr):
    """Integer arithmetic: division and remainder, shifts, high products, counting, selection. y is positive."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0)
    b = tl.load(y + at, mask=inside, other=1)
    tl.store(out + 0 * n + at, a // b, mask=inside)
    tl.store(out + 1 * n + at, a % b, mask=inside)
    tl.store(out + 2 * n + at, a << (b & 7), mask=inside)
    tl.store(out + 3 * n + at, a >> (b & 7), mask=inside)
    tl.store(out + 4 * n + at, (a & b) | (a ^ 0x55), mask=inside)
    tl.store(out + 5 * n + at, tl.where(a > b, a - b, b - a), mask=inside)
    tl.store(out + 6 * n + at, tl.minimum(tl.maximum(a, -100), 100), mask=inside)
    tl.store(out + 7 * n + at, a * b + 3, mask=inside)
    tl.store(out + 8 * n + at, ~a, mask=inside)
    tl.store(out + 9 * n + at, libdevice.popc(a.to(tl.int32)).to(a.dtype), mask=inside)
    tl.store(out + 10 * n + at, libdevice.clz(a.to(tl.int32)).to(a.dtype), mask=inside)


@triton.jit
def high_product(x, y, out, n, BLOCK: tl.constexpr):
    """The high half of an unsigned product."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0)
    b = tl.load(y + at, mask=inside, other=0)
    tl.store(out + at, tl.umulhi(a, b), mask=inside)


@triton.jit
def convert(x, out, n, BLOCK: tl.constexpr):
    """out = x in out's type."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rounded_sum_packed(x, y, out, n, BLOCK: tl.constexpr):
    """Packed 16-bit arithmetic by inline assembly: two elements of each argument per instruction."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0.0)
    b = tl.load(y + at, mask=inside, other=0.0)
    both = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t;
        mul.rn.f16x2 t, $1, $2;
        add.rn.f16x2 t, t, $1;
        max.f16x2 $0, t, $2;
        }
        """, "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2)
    tl.store(out + at, both, mask=inside)


@triton.jit
def bytes_by_assembly(x, out, n, BLOCK: tl.constexpr):
    """Four bytes per register: prmt reverses them, lop3 and shf mix them, bfe and bfi move a field."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0)
    r = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c;
        prmt.b32 a, $1, 0, 0x0123;
        lop3.b32 b, a, $1, 0x0f0f0f0f, 0xe8;
        shf.l.wrap.b32 c, b, a, 5;
        bfe.u32 a, c, 4, 8;
        bfi.b32 $0, a, b, 20, 8;
        }
        """, "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + at, r, mask=inside)


@triton.jit
def interleave_rotate(x, out, n, BLOCK: tl.constexpr):
    """Split pairs, rotate them by 30 degrees, interleave again; then the same block flipped."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at).to(tl.float32)
    even, odd = tl.split(tl.reshape(v, (BLOCK // 2, 2)))
    r = tl.interleave(even * 0.8660254037844387 - odd * 0.5, even * 0.5 + odd * 0.8660254037844387)
    tl.store(out + at, r.to(out.dtype.element_ty))
    tl.store(out + n + at, tl.flip(r, 0).to(out.dtype.element_ty))


@triton.jit
def dropout(x, out, n, p, seed, BLOCK: tl.constexpr):
    """Dropout from a counter-based generator (Philox): keeps an element when its uniform number exceeds p."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0.0)
    keep = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(keep, v / (1.0 - p), 0.0), mask=inside)


@triton.jit
def random_integers(out, seed, BLOCK: tl.constexpr):
    """The four words of Philox, each in its row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(seed, at)
    n = tl.num_programs(0) * BLOCK
    tl.store(out + 0 * n + at, a.to(tl.int32, bitcast=True))
    tl.store(out + 1 * n + at, b.to(tl.int32, bitcast=True))
    tl.store(out + 2 * n + at, c.to(tl.int32, bitcast=True))
    tl.store(out + 3 * n + at, d.to(tl.int32, bitcast=True))


# Calls and loops


@triton.jit(noinline=True)
def polynomial(v, a, b):
    """A function that stays one, of numbers: a v^2 + b v + 1."""
    return (a * v + b) * v + 1.0


@triton.jit(noinline=True)
def block_sum(x, start, n, BLOCK: tl.constexpr):
    """A function with loads and a block reduction inside, which needs shared memory."""
    at = start + tl.arange(0, BLOCK)
    return tl.sum(tl.load(x + at, mask=at < n, other=0.0), axis=0)


@triton.jit
def calls(x, out, total, n, BLOCK: tl.constexpr):
    """Three calls of two functions, the second also in a loop of data-dependent length."""
    start = tl.program_id(0) * BLOCK
    first = polynomial(tl.load(x + start), 0.5, -1.0)
    s = 0.0
    while start < n:
        s += block_sum(x, start, n, BLOCK)
        start += tl.num_programs(0) * BLOCK
    tl.store(total + tl.program_id(0), s)
    tl.store(out + tl.program_id(0), polynomial(first, 0.25, 2.0))


@triton.jit
def collatz(x, out, n, BLOCK: tl.constexpr):
    """Steps until every lane of the block has reached 1: a loop whose end the data decide."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=1)
    steps = tl.zeros((BLOCK, ), dtype=tl.int32)
    while tl.max(v, axis=0) > 1:
        steps += (v > 1).to(tl.int32)
        v = tl.where(v > 1, tl.where(v % 2 == 0, v // 2, 3 * v + 1), v)
    tl.store(out + at, steps, mask=inside)


@triton.jit
def scalar_search(keys, wanted, out, n):
    """Binary search by one scalar loop per program: uniform branches on loaded values."""
    target = tl.load(wanted + tl.program_id(0))
    low = 0
    high = n
    while low < high:
        middle = (low + high) // 2
        if tl.load(keys + middle) < target:
            low = middle + 1
        else:
            high = middle
    tl.store(out + tl.program_id(0), low)


@triton.jit
def newton_root(x, out, n, BLOCK: tl.constexpr):
    """Square roots by Newton's iteration until the block's largest step is small."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=1.0)
    r = v * 0.5 + 0.5
    change = 1.0
    while change > 1e-6:
        better = 0.5 * (r + v / r)
        change = tl.max(tl.abs(better - r), axis=0)
        r = better
    tl.store(out + at, r, mask=inside)


# Rows: reductions, norms, softmax, scans, order


@triton.jit
def row_reduce(x, out, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: sum, max, min, xor or the place of the largest."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    inside = at < columns
    if KIND == "sum":
        r = tl.sum(tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32), axis=0)
    elif KIND == "max":
        r = tl.max(tl.load(x + row * columns + at, mask=inside, other=-float("inf")).to(tl.float32), axis=0)
    elif KIND == "min":
        r = tl.min(tl.load(x + row * columns + at, mask=inside, other=float("inf")).to(tl.float32), axis=0)
    elif KIND == "xor":
        r = tl.xor_sum(tl.load(x + row * columns + at, mask=inside, other=0), axis=0)
    elif KIND == "argmax":
        r = tl.argmax(tl.load(x + row * columns + at, mask=inside, other=-float("inf")), axis=0)
    else:
        r = tl.argmin(tl.load(x + row * columns + at, mask=inside, other=float("inf")), axis=0)
    tl.store(out + row, r)


@triton.jit
def tile_reduce(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """The sums of one tile along one axis: within warps or across them."""
    tile = tl.program_id(0)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    r = tl.sum(tl.load(x + tile * ROWS * COLUMNS + at).to(tl.float32), axis=AXIS)
    if AXIS == 0:
        tl.store(out + tile * COLUMNS + tl.arange(0, COLUMNS), r)
    else:
        tl.store(out + tile * ROWS + tl.arange(0, ROWS), r)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    """The sum of everything: a block reduction, then one atomic addition per CTA."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32), axis=0))


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    """One row per program, held in registers."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    v = tl.load(x + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row + at, (e / tl.sum(e, axis=0)).to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def softmax_online(x, out, columns, BLOCK: tl.constexpr):
    """One row per program, streamed twice: running maximum and sum, then the quotients."""
    row = tl.program_id(0) * columns
    m = tl.full((BLOCK, ), -float("inf"), tl.float32)
    s = tl.zeros((BLOCK, ), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(m, v)
        s = s * tl.where(m == -float("inf"), 0.0, tl.exp(m - larger)) + tl.where(v == -float("inf"), 0.0, tl.exp(v - larger))
        m = larger
    most = tl.max(m, axis=0)
    s_all = tl.sum(s * tl.exp(m - most), axis=0)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(out + row + at, (tl.exp(v - most) / s_all).to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def layer_norm(x, weight, bias, out, mean_out, rstd_out, columns, eps, BLOCK: tl.constexpr):
    """Layer norm of one row per program; keeps mean and 1/sigma for the backward pass."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, axis=0) / columns
    centred = tl.where(inside, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (centred * rstd * w + b).to(out.dtype.element_ty), mask=inside)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


@triton.jit
def layer_norm_backward(x, weight, dout, mean_in, rstd_in, dx, dweight, locks, columns, GROUPS: tl.constexpr,
                        BLOCK: tl.constexpr):
    """dx of one row; the row's share of dweight is added to its group's sums under a spin lock."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dout + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_in + row)
    hat = tl.where(inside, (v - tl.load(mean_in + row)) * rstd, 0.0)
    wg = tl.where(inside, w * g, 0.0)
    projection = tl.sum(hat * wg, axis=0) / columns
    average = tl.sum(wg, axis=0) / columns
    tl.store(dx + row * columns + at, ((wg - hat * projection - average) * rstd).to(dx.dtype.element_ty), mask=inside)
    group = row % GROUPS
    while tl.atomic_cas(locks + group, 0, 1) == 1:
        pass
    sums = dweight + group * columns + at
    tl.store(sums, tl.load(sums, mask=inside, other=0.0) + g * hat, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(locks + group, 0)


@triton.jit
def rms_norm(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    """Root-mean-square norm of a row in several blocks."""
    row = tl.program_id(0) * columns
    squares = tl.zeros((BLOCK, ), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, mask=at < columns, other=0.0).to(tl.float32)
        squares += v * v
    r = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, mask=at < columns, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(out + row + at, (v * r * w).to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def cumulative(x, out, columns, REVERSE: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr):
    """Running sums or products of a row, from either end."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    v = tl.load(x + row + at, mask=at < columns, other=0.0).to(tl.float32)
    r = tl.cumprod(v, axis=0, reverse=REVERSE) if PRODUCT else tl.cumsum(v, axis=0, reverse=REVERSE)
    tl.store(out + row + at, r, mask=at < columns)


@triton.jit
def compose(a1, b1, a2, b2):
    """Two steps of h -> a h + b after one another."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def recurrence(a, b, out, T: tl.constexpr, D: tl.constexpr):
    """h[t] = a[t] h[t-1] + b[t] per column, by an associative scan along the rows of a tile."""
    base = tl.program_id(0) * T * D
    at = tl.arange(0, T)[:, None] * D + tl.arange(0, D)[None, :]
    _, h = tl.associative_scan((tl.load(a + base + at), tl.load(b + base + at)), 0, compose)
    tl.store(out + base + at, h)


@triton.jit
def sort_rows(x, out, COLUMNS: tl.constexpr, DESCENDING: tl.constexpr):
    """Bitonic sort of each row."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + at, tl.sort(tl.load(x + at), descending=DESCENDING))


@triton.jit
def top_k(x, out, COLUMNS: tl.constexpr, K: tl.constexpr):
    """The K largest of each row, largest first."""
    row = tl.program_id(0)
    v = tl.topk(tl.load(x + row * COLUMNS + tl.arange(0, COLUMNS)), K)
    tl.store(out + row * K + tl.arange(0, K), v)


@triton.jit
def cross_entropy(logits, labels, loss, gradient, columns, BLOCK: tl.constexpr):
    """Loss and gradient of one row of logits."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    label = tl.load(labels + row)
    v = tl.load(logits + row * columns + at, mask=inside, other=-float("inf")).to(tl.float32)
    most = tl.max(v, axis=0)
    s = tl.sum(tl.exp(v - most), axis=0)
    own = tl.load(logits + row * columns + label).to(tl.float32)
    tl.store(loss + row, tl.log(s) + most - own)
    g = tl.exp(v - most) / s - tl.where(at == label, 1.0, 0.0)
    tl.store(gradient + row * columns + at, g.to(gradient.dtype.element_ty), mask=inside)


# Data movement


@triton.jit
def transpose_through_shared(x, out, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Both sides coalesced: the layouts are exchanged through shared memory."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    v = tl.load(x + r[:, None] * columns + c[None, :], mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0)
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(v), mask=(c[:, None] < columns) & (r[None, :] < rows))


@triton.jit
def transpose_direct(x, out, rows, columns, BLOCK: tl.constexpr):
    """One column per program: coalesced on one side only, nothing in shared memory."""
    c = tl.program_id(0)
    for start in range(0, rows, BLOCK):
        r = start + tl.arange(0, BLOCK)
        tl.store(out + c * rows + r, tl.load(x + r * columns + c, mask=r < rows, other=0.0), mask=r < rows)


@triton.jit
def permute_heads(x, out, T, H: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr):
    """[T, H, D] to [H, T, D] of one block of T, through a three-dimensional permutation."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    v = tl.load(x + (t[:, None, None] * H + h[None, :, None]) * D + d[None, None, :])
    tl.store(out + (h[:, None, None] * T + t[None, :, None]) * D + d[None, None, :], tl.permute(v, (1, 0, 2)))


@triton.jit
def embedding(table, tokens, out, width, BLOCK: tl.constexpr):
    """Rows of a table by index."""
    at = tl.arange(0, BLOCK)
    token = tl.load(tokens + tl.program_id(0))
    v = tl.load(table + token * width + at, mask=at < width, other=0.0)
    tl.store(out + tl.program_id(0) * width + at, v, mask=at < width)


@triton.jit
def embedding_backward(gradient, tokens, table, width, BLOCK: tl.constexpr):
    """Adds each token's row to its place in the table, atomically: rows collide."""
    at = tl.arange(0, BLOCK)
    token = tl.load(tokens + tl.program_id(0))
    g = tl.load(gradient + tl.program_id(0) * width + at, mask=at < width, other=0.0)
    tl.atomic_add(table + token * width + at, g, mask=at < width, sem="relaxed")


@triton.jit
def gather_in_row(x, index, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[i, j] = x[index[i, j], j] within a tile: a lookup through shared memory or shuffles."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    base = tl.program_id(0) * ROWS * COLUMNS
    tl.store(out + base + at, tl.gather(tl.load(x + base + at), tl.load(index + base + at), 0))


@triton.jit
def histogram(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts per block in shared memory, then added atomically."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x + at, mask=at < n, other=0), BINS)
    tl.atomic_add(out + tl.arange(0, BINS), counts)


@triton.jit
def atomic_kinds(x, sums, maxima, minima, ands, ors, xors, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Each atomic operation of integers on a bin that the value picks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    bin = (v & 0x7fffffff) % BINS
    tl.atomic_add(sums + bin, v)
    tl.atomic_max(maxima + bin, v)
    tl.atomic_min(minima + bin, v)
    tl.atomic_and(ands + bin, v)
    tl.atomic_or(ors + bin, v)
    tl.atomic_xor(xors + bin, v)


@triton.jit
def atomic_float_max(x, maxima, minima, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest and smallest floats per bin: done on the bits, by sign."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.atomic_max(maxima + at % BINS, v)
    tl.atomic_min(minima + at % BINS, v)


@triton.jit
def tickets(order, counter, arrivals, n):
    """Each program draws a ticket and the last to arrive adds up what the others left (acquire and release)."""
    ticket = tl.atomic_add(counter, 1)
    tl.store(order + ticket, ticket * ticket)
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == n - 1:
        s = 0
        for i in range(0, n):
            s += tl.load(order + i, volatile=True)
        tl.store(order + n, s)


@triton.jit
def rope(x, cosines, sines, out, T, H, D: tl.constexpr):
    """Rotary embedding of one token and head: the halves of the head's vector are rotated against each other."""
    t = tl.program_id(0)
    row = (t * H + tl.program_id(1)) * D
    half = tl.arange(0, D // 2)
    c = tl.load(cosines + t * (D // 2) + half)
    s = tl.load(sines + t * (D // 2) + half)
    a = tl.load(x + row + half).to(tl.float32)
    b = tl.load(x + row + D // 2 + half).to(tl.float32)
    tl.store(out + row + half, (a * c - b * s).to(out.dtype.element_ty))
    tl.store(out + row + D // 2 + half, (b * c + a * s).to(out.dtype.element_ty))


@triton.jit
def quantise(x, out, scales, columns, largest, BLOCK: tl.constexpr):
    """A row to 8-bit floats, scaled so that its largest magnitude is `largest`."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(v), axis=0) / largest
    tl.store(out + row * columns + at, (v / scale).to(out.dtype.element_ty), mask=at < columns)
    tl.store(scales + row, scale)


@triton.jit
def dequantise(x, scales, out, columns, BLOCK: tl.constexpr):
    """8-bit floats or integers times their row's scale."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (v * tl.load(scales + row)).to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def stencil(x, out, height, width, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr):
    """Five-point stencil with zeros outside: overlapping loads."""
    y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)[:, None]
    c = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)[None, :]
    at = y * width + c
    inside = (y < height) & (c < width)
    s = -4.0 * tl.load(x + at, mask=inside, other=0.0)
    s += tl.load(x + at - 1, mask=inside & (c > 0), other=0.0)
    s += tl.load(x + at + 1, mask=inside & (c < width - 1), other=0.0)
    s += tl.load(x + at - width, mask=inside & (y > 0), other=0.0)
    s += tl.load(x + at + width, mask=inside & (y < height - 1), other=0.0)
    tl.store(out + at, s, mask=inside)


@triton.jit
def causal_convolution(x, weight, out, T, D, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Depthwise convolution along time with TAPS taps."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    s = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for tap in tl.static_range(TAPS):
        then = t - (TAPS - 1 - tap)
        v = tl.load(x + then * D + d, mask=(then >= 0) & (t < T) & (d < D), other=0.0).to(tl.float32)
        s += v * tl.load(weight + tap * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + t * D + d, s.to(out.dtype.element_ty), mask=(t < T) & (d < D))


# Matrix products


@triton.jit
def matmul(a, b, c, M, N, K, am, ak, bk, bn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           PRECISION: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """c = a b by tiles, any strides, edges masked."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    s = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * am + (start + k)[None, :] * ak, mask=(m[:, None] < M) & ((start + k)[None, :] < K),
                       other=0.0)
        right = tl.load(b + (start + k)[:, None] * bk + n[None, :] * bn,
                        mask=((start + k)[:, None] < K) & (n[None, :] < N), other=0.0)
        s = tl.dot(left, right, s, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    tl.store(c + m[:, None] * N + n[None, :], s.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def matmul_split_k(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each program of the third grid axis adds its part of K atomically."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(2) * BLOCK_K, K, tl.num_programs(2) * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        s = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]), s)
    tl.atomic_add(c + m[:, None] * N + n[None, :], s, sem="relaxed")


@triton.jit
def matmul_batched(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BATCH: tl.constexpr):
    """Several small products per program, as one three-dimensional dot."""
    batch = tl.program_id(0) * BATCH + tl.arange(0, BATCH)[:, None, None]
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    left = tl.load(a + (batch * M + m[None, :, None]) * K + k[None, None, :])
    right = tl.load(b + (batch * K + k[None, :, None]) * N + n[None, None, :])
    tl.store(c + (batch * M + m[None, :, None]) * N + n[None, None, :], tl.dot(left, right).to(c.dtype.element_ty))


@triton.jit
def matmul_persistent(a, b, c, M, N, K, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      BLOCK_K: tl.constexpr):
    """A fixed number of programs walks all tiles; loops over tiles and K are one pipeline."""
    across = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, PROGRAMS, flatten=True):
        m = (tile // across) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = (tile % across) * BLOCK_N + tl.arange(0, BLOCK_N)
        s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            s = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]), s)
        tl.store(c + m[:, None] * N + n[None, :], s.to(c.dtype.element_ty))


@triton.jit
def matmul_device_descriptors(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                              SPECIALISE: tl.constexpr):
    """Tensor copies through descriptors that the kernel makes itself; b is [N, K]."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    target = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    m = tl.program_id(0) * BLOCK_M
    n = tl.program_id(1) * BLOCK_N
    s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALISE):
        s = tl.dot(left.load([m, start]), right.load([n, start]).T, s)
    target.store([m, n], s.to(c.dtype.element_ty))


@triton.jit
def matmul_host_descriptors(left, right, target, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                            SPECIALISE: tl.constexpr):
    """Tensor copies through descriptors that the host made; right is [K, N]."""
    m = tl.program_id(0) * BLOCK_M
    n = tl.program_id(1) * BLOCK_N
    s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALISE):
        s = tl.dot(left.load([m, start]), right.load([start, n]), s)
    target.store([m, n], s.to(target.dtype))


@triton.jit
def matmul_persistent_descriptors(a, b, c, M, N, K, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr,
                                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALISE: tl.constexpr):
    """Persistent and with device descriptors; the epilogue stores two halves. b is [N, K]."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    target = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N // 2])
    across = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, PROGRAMS, flatten=not SPECIALISE,
                         warp_specialize=SPECIALISE):
        m = (tile // across) * BLOCK_M
        n = (tile % across) * BLOCK_N
        s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            s = tl.dot(left.load([m, start]), right.load([n, start]).T, s)
        low, high = tl.split(tl.permute(tl.reshape(s, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        target.store([m, n], low.to(c.dtype.element_ty))
        target.store([m, n + BLOCK_N // 2], high.to(c.dtype.element_ty))


@triton.jit
def tile_add_descriptors(a, c, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Adds a tile of a to c by a reducing tensor copy; edges are cut by the descriptor."""
    source = tl.make_tensor_descriptor(a, [rows, columns], [columns, 1], [BLOCK_R, BLOCK_C])
    target = tl.make_tensor_descriptor(c, [rows, columns], [columns, 1], [BLOCK_R, BLOCK_C])
    at = [tl.program_id(0) * BLOCK_R, tl.program_id(1) * BLOCK_C]
    target.atomic_add(at, source.load(at) * 2)


@triton.jit
def volume_descriptors(a, c, D0, D1, D2, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    """A three-dimensional tensor copy in and out, edges filled with zeros and cut."""
    source = tl.make_tensor_descriptor(a, [D0, D1, D2], [D1 * D2, D2, 1], [B0, B1, B2])
    target = tl.make_tensor_descriptor(c, [D0, D1, D2], [D1 * D2, D2, 1], [B0, B1, B2])
    at = [tl.program_id(0) * B0, tl.program_id(1) * B1, tl.program_id(2) * B2]
    target.store(at, source.load(at) * 2.0)


@triton.jit
def mlp(x, w1, w2, out, M, D: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    """Two chained products with a SiLU between: the first one's result is an operand of the second."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    v = tl.load(x + m[:, None] * D + d[None, :], mask=m[:, None] < M, other=0.0)
    s = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        hidden = tl.dot(v, tl.load(w1 + d[:, None] * H + h[None, :]))
        hidden = hidden * tl.sigmoid(hidden)
        s = tl.dot(hidden.to(x.dtype.element_ty), tl.load(w2 + h[:, None] * D + d[None, :]), s)
    tl.store(out + m[:, None] * D + d[None, :], s.to(out.dtype.element_ty), mask=m[:, None] < M)


@triton.jit
def matmul_scaled(a, a_scale, b, b_scale, c, M, N, K: tl.constexpr, A_TYPE: tl.constexpr, B_TYPE: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A product of 8-bit floats with a power-of-two scale per 32 elements of K; a is [M, K], b [K, N]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, K)
    g = tl.arange(0, K // 32)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    left_scale = tl.load(a_scale + m[:, None] * (K // 32) + g[None, :])
    right_scale = tl.load(b_scale + n[:, None] * (K // 32) + g[None, :])
    s = tl.dot_scaled(left, left_scale, A_TYPE, right, right_scale, B_TYPE)
    tl.store(c + m[:, None] * N + n[None, :], s)


# Attention: tensors are [batch * heads, T, D] unless said otherwise


@triton.jit
def attention_v1(q, k, v, o, l, m, T, scale, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """K and V blocks outside, Q blocks inside: O, l and m go to memory and back each time (l = 0, m = -inf before)."""
    head = tl.program_id(0)
    d = tl.arange(0, D)
    for k0 in range(0, T, BLOCK_K):
        kt = k0 + tl.arange(0, BLOCK_K)
        keys = tl.load(k + (head * T + kt[None, :]) * D + d[:, None])
        values = tl.load(v + (head * T + kt[:, None]) * D + d[None, :])
        for q0 in range(0, T, BLOCK_Q):
            qt = q0 + tl.arange(0, BLOCK_Q)
            at = (head * T + qt[:, None]) * D + d[None, :]
            s = tl.dot(tl.load(q + at), keys, input_precision="ieee") * scale
            m_old = tl.load(m + head * T + qt)
            l_old = tl.load(l + head * T + qt)
            m_new = tl.maximum(m_old, tl.max(s, axis=1))
            p = tl.exp(s - m_new[:, None])
            shrink = tl.exp(m_old - m_new)
            l_new = l_old * shrink + tl.sum(p, axis=1)
            acc = tl.load(o + at).to(tl.float32) * (l_old * shrink)[:, None]
            acc += tl.dot(p.to(values.dtype), values, input_precision="ieee")
            tl.store(o + at, (acc / l_new[:, None]).to(o.dtype.element_ty))
            tl.store(m + head * T + qt, m_new)
            tl.store(l + head * T + qt, l_new)
            tl.debug_barrier()


@triton.jit
def attention_v2(q, k, v, o, lse, Tq, Tk, scale, GROUP, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """One Q block per program, K and V streamed; GROUP query heads share a KV head; causal from the lower right."""
    head = tl.program_id(1)
    qt = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    queries = tl.load(q + (head * Tq + qt[:, None]) * D + d[None, :], mask=qt[:, None] < Tq, other=0.0)
    base = (head // GROUP) * Tk
    m = tl.full((BLOCK_Q, ), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_Q, ), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    end = Tk
    if CAUSAL:
        end = tl.minimum(Tk, (tl.program_id(0) + 1) * BLOCK_Q + Tk - Tq)
    for start in range(0, end, BLOCK_K):
        kt = start + tl.arange(0, BLOCK_K)
        keys = tl.load(k + (base + kt[None, :]) * D + d[:, None], mask=kt[None, :] < Tk, other=0.0)
        s = tl.dot(queries, keys, input_precision=PRECISION) * (scale * 1.4426950408889634)
        visible = kt[None, :] < Tk
        if CAUSAL:
            visible = visible & (kt[None, :] <= qt[:, None] + Tk - Tq)
        s = tl.where(visible, s, -float("inf"))
        larger = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(m - larger)
        values = tl.load(v + (base + kt[:, None]) * D + d[None, :], mask=kt[:, None] < Tk, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        l = l * shrink + tl.sum(p, axis=1)
        m = larger
    tl.store(o + (head * Tq + qt[:, None]) * D + d[None, :], (acc / l[:, None]).to(o.dtype.element_ty),
             mask=qt[:, None] < Tq)
    tl.store(lse + head * Tq + qt, m * 0.6931471805599453 + tl.log(l), mask=qt < Tq)


@triton.jit
def attention_descriptors(q, k, v, o, T, scale, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                          SPECIALISE: tl.constexpr):
    """As attention_v2, with tensor copies; the loop may be split among specialised warps."""
    rows = tl.num_programs(1) * T
    qd = tl.make_tensor_descriptor(q, [rows, D], [D, 1], [BLOCK_Q, D])
    kd = tl.make_tensor_descriptor(k, [rows, D], [D, 1], [BLOCK_K, D])
    vd = tl.make_tensor_descriptor(v, [rows, D], [D, 1], [BLOCK_K, D])
    od = tl.make_tensor_descriptor(o, [rows, D], [D, 1], [BLOCK_Q, D])
    base = tl.program_id(1) * T
    queries = qd.load([base + tl.program_id(0) * BLOCK_Q, 0])
    m = tl.full((BLOCK_Q, ), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_Q, ), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for start in tl.range(0, T, BLOCK_K, warp_specialize=SPECIALISE):
        s = tl.dot(queries, kd.load([base + start, 0]).T) * (scale * 1.4426950408889634)
        larger = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(m - larger)
        values = vd.load([base + start, 0])
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        l = l * shrink + tl.sum(p, axis=1)
        m = larger
    od.store([base + tl.program_id(0) * BLOCK_Q, 0], (acc / l[:, None]).to(o.dtype.element_ty))


@triton.jit
def attention_delta(o, do, delta, D: tl.constexpr, BLOCK: tl.constexpr):
    """delta = rowsum(O dO)."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = t[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(delta + t, tl.sum(tl.load(o + at).to(tl.float32) * tl.load(do + at).to(tl.float32), axis=1))


@triton.jit
def attention_backward_dq(q, k, v, do, lse, delta, dq, T, scale, D: tl.constexpr, BLOCK_Q: tl.constexpr,
                          BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr):
    """dQ of one block: K and V streamed."""
    head = tl.program_id(1)
    qt = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    at = (head * T + qt[:, None]) * D + d[None, :]
    queries = tl.load(q + at)
    gradient = tl.load(do + at)
    row_lse = tl.load(lse + head * T + qt)
    row_delta = tl.load(delta + head * T + qt)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    end = (tl.program_id(0) + 1) * BLOCK_Q if CAUSAL else T
    for start in range(0, end, BLOCK_K):
        kt = start + tl.arange(0, BLOCK_K)
        rows = (head * T + kt[:, None]) * D + d[None, :]
        keys = tl.load(k + rows)
        p = tl.exp(tl.dot(queries, tl.trans(keys)) * scale - row_lse[:, None])
        if CAUSAL:
            p = tl.where(kt[None, :] <= qt[:, None], p, 0.0)
        dp = tl.dot(gradient, tl.trans(tl.load(v + rows)))
        ds = p * (dp - row_delta[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc)
    tl.store(dq + at, (acc * scale).to(dq.dtype.element_ty))


@triton.jit
def attention_backward_dkdv(q, k, v, do, lse, delta, dk, dv, T, scale, D: tl.constexpr, BLOCK_Q: tl.constexpr,
                            BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr):
    """dK and dV of one block: Q and dO streamed."""
    head = tl.program_id(1)
    kt = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, D)
    at = (head * T + kt[:, None]) * D + d[None, :]
    keys = tl.load(k + at)
    values = tl.load(v + at)
    acc_k = tl.zeros((BLOCK_K, D), tl.float32)
    acc_v = tl.zeros((BLOCK_K, D), tl.float32)
    begin = (tl.program_id(0) * BLOCK_K) // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    for start in range(begin, T, BLOCK_Q):
        qt = start + tl.arange(0, BLOCK_Q)
        rows = (head * T + qt[:, None]) * D + d[None, :]
        queries = tl.load(q + rows)
        gradient = tl.load(do + rows)
        pt = tl.exp(tl.dot(keys, tl.trans(queries)) * scale - tl.load(lse + head * T + qt)[None, :])
        if CAUSAL:
            pt = tl.where(kt[:, None] <= qt[None, :], pt, 0.0)
        acc_v = tl.dot(pt.to(gradient.dtype), gradient, acc_v)
        dpt = tl.dot(values, tl.trans(gradient))
        dst = pt * (dpt - tl.load(delta + head * T + qt)[None, :])
        acc_k = tl.dot(dst.to(queries.dtype), queries, acc_k)
    tl.store(dk + at, (acc_k * scale).to(dk.dtype.element_ty))
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty))


@triton.jit
def decode_split(q, k, v, o, lse, Tk, scale, PART, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr):
    """One query token for HEADS query heads of a KV head; each program takes PART keys and leaves a partial result."""
    group = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    queries = tl.load(q + (group * HEADS + h[:, None]) * D + d[None, :])
    m = tl.full((HEADS, ), -float("inf"), tl.float32)
    l = tl.zeros((HEADS, ), tl.float32)
    acc = tl.zeros((HEADS, D), tl.float32)
    end = tl.minimum(Tk, (part + 1) * PART)
    for start in range(part * PART, end, BLOCK_K):
        kt = start + tl.arange(0, BLOCK_K)
        keys = tl.load(k + (group * Tk + kt[None, :]) * D + d[:, None], mask=kt[None, :] < end, other=0.0)
        s = tl.where(kt[None, :] < end, tl.dot(queries, keys) * scale, -float("inf"))
        larger = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - larger[:, None])
        shrink = tl.exp(m - larger)
        values = tl.load(v + (group * Tk + kt[:, None]) * D + d[None, :], mask=kt[:, None] < end, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values)
        l = l * shrink + tl.sum(p, axis=1)
        m = larger
    row = (group * parts + part) * HEADS + h
    tl.store(o + row[:, None] * D + d[None, :], acc / l[:, None])
    tl.store(lse + row, m + tl.log(l))


@triton.jit
def decode_combine(parts_o, parts_lse, o, PARTS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """Weighs the partial results of decode_split by their sums."""
    group = tl.program_id(0)
    h = tl.program_id(1)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, D)
    row = (group * PARTS + part) * HEADS + h
    s = tl.load(parts_lse + row)
    w = tl.exp(s - tl.max(s, axis=0))
    w = w / tl.sum(w, axis=0)
    mixed = tl.sum(tl.load(parts_o + row[:, None] * D + d[None, :]) * w[:, None], axis=0)
    tl.store(o + (group * HEADS + h) * D + d, mixed.to(o.dtype.element_ty))


@triton.jit
def linear_attention(q, k, v, o, T, D: tl.constexpr, BLOCK: tl.constexpr):
    """Causal attention without softmax, by chunks: a state carried from chunk to chunk in registers."""
    head = tl.program_id(0)
    d = tl.arange(0, D)
    t = tl.arange(0, BLOCK)
    state = tl.zeros((D, D), tl.float32)
    for start in range(0, T, BLOCK):
        at = (head * T + start + t[:, None]) * D + d[None, :]
        queries = tl.load(q + at)
        keys = tl.load(k + at)
        values = tl.load(v + at)
        inner = tl.where(t[:, None] >= t[None, :], tl.dot(queries, tl.trans(keys)), 0.0)
        out = tl.dot(inner.to(values.dtype), values) + tl.dot(queries, state.to(queries.dtype))
        state += tl.dot(tl.trans(keys), values)
        tl.store(o + at, out.to(o.dtype.element_ty))


@triton.jit
def checked_divide(x, y, out, n, BLOCK: tl.constexpr):
    """With an assertion on the device: a call of the runtime's function on the failing path."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    divisor = tl.load(y + at, mask=at < n, other=1)
    tl.device_assert(divisor != 0, "divisor is zero")
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0) // divisor, mask=at < n)


# Less common instructions


@triton.jit
def copy_hinted(x, out, n, BLOCK: tl.constexpr):
    """Loads and stores with cache operators and eviction policies; three results that must agree."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    first = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first")
    last = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last")
    global_level = tl.load(x + at, mask=inside, other=0.0, cache_modifier=".cg")
    volatile = tl.load(x + at, mask=inside, other=0.0, cache_modifier=".cv", volatile=True)
    tl.store(out + at, first + last, mask=inside, cache_modifier=".cs")
    tl.store(out + n + at, global_level + volatile, mask=inside, cache_modifier=".wt")


@triton.jit
def join_moments(mean1, m1, n1, mean2, m2, n2):
    """Mean, sum of squared differences and count of two disjoint samples."""
    n = n1 + n2
    d = mean2 - mean1
    share = tl.where(n == 0, 0.0, n2 / n)
    return mean1 + d * share, m1 + m2 + d * d * n1 * share, n


@triton.jit
def moments(x, mean_out, variance_out, columns, BLOCK: tl.constexpr):
    """Mean and variance of a row by a reduction over three values with an operation of its own."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + tl.program_id(0) * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean, m, n = tl.reduce((v, tl.zeros_like(v), inside.to(tl.float32)), 0, join_moments)
    tl.store(mean_out + tl.program_id(0), mean)
    tl.store(variance_out + tl.program_id(0), m / n)


@triton.jit
def narrow_arithmetic(x, y, out, n, BLOCK: tl.constexpr):
    """Arithmetic that stays in 16 bits, comparisons and booleans."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=1.0)
    b = tl.load(y + at, mask=inside, other=1.0)
    tl.store(out + 0 * n + at, a * b, mask=inside)
    tl.store(out + 1 * n + at, a - b, mask=inside)
    tl.store(out + 2 * n + at, tl.maximum(a, b), mask=inside)
    tl.store(out + 3 * n + at, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL), mask=inside)
    tl.store(out + 4 * n + at, tl.where((a > b) & (a != 0.0) | (b <= -1.0), a, -b), mask=inside)
    tl.store(out + 5 * n + at, tl.abs(a), mask=inside)
    tl.store(out + 6 * n + at, tl.clamp(a, -0.5, 0.5), mask=inside)


@triton.jit
def flags(x, out, count, n, BLOCK: tl.constexpr):
    """Bytes as booleans: loads, logic, a vote over the block, stores."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0)
    odd = (v & 1) != 0
    large = v > 50
    tl.store(out + at, (odd ^ large).to(tl.int8), mask=inside)
    tl.store(count + tl.program_id(0), tl.sum((odd & large).to(tl.int32), axis=0))


@triton.jit
def atomics_scoped(x, sums, places, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Atomics with every order and scope; a scalar one and one per lane with the old value used."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.atomic_add(sums + v % BINS, 1, sem="release", scope="gpu")
    tl.atomic_add(sums + BINS + v % BINS, 1, sem="acquire", scope="sys")
    tl.atomic_add(sums + 2 * BINS + v % BINS, 1, mask=(v & 1) == 0, sem="acq_rel", scope="gpu")
    place = tl.atomic_add(places + tl.zeros_like(at), 1, sem="relaxed", scope="gpu")
    tl.store(places + 1 + place, 7)


@triton.jit
def compare_and_swap(x, slots, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """The first value to reach a bin stays: a block of compare-and-swap operations on 64 bits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    empty = tl.zeros_like(v)
    tl.atomic_cas(slots + at % BINS, empty, v)


@triton.jit
def dependent_launch(x, out, n, BLOCK: tl.constexpr):
    """Waits for the kernel before and releases the one after (programmatic dependent launch)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.extra.cuda.gdc_wait()
    v = tl.load(x + at, mask=inside, other=0.0)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + at, v + 1.0, mask=inside)


@triton.jit
def printing(x, out, n, BLOCK: tl.constexpr):
    """Prints from the device when a value is far out (none is): calls of the runtime's print function."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0)
    if tl.max(v, axis=0) > 1000.0:
        tl.device_print("far out", v)
    tl.store(out + at, v * 2.0, mask=at < n)


@triton.jit
def sector_walk(x, out, n, BLOCK: tl.constexpr):
    """A chain of dependent loads: each lane follows indices until it meets its own place again."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(x + at)
    length = tl.full((BLOCK, ), 1, tl.int32)
    while tl.sum((place != at).to(tl.int32), axis=0) > 0:
        moving = place != at
        length += moving.to(tl.int32)
        place = tl.where(moving, tl.load(x + place, mask=moving, other=0), place)
    tl.store(out + at, length)


@triton.jit
def volume_5d_descriptors(a, c, D0, D1, D2, D3, D4, B3: tl.constexpr, B4: tl.constexpr):
    """A five-dimensional tensor copy in and out."""
    s3 = D4
    s2 = D3 * s3
    s1 = D2 * s2
    s0 = D1 * s1
    source = tl.make_tensor_descriptor(a, [D0, D1, D2, D3, D4], [s0, s1, s2, s3, 1], [1, 1, 2, B3, B4])
    target = tl.make_tensor_descriptor(c, [D0, D1, D2, D3, D4], [s0, s1, s2, s3, 1], [1, 1, 2, B3, B4])
    at = [tl.program_id(0), tl.program_id(1), tl.program_id(2) * 2, 0, 0]
    target.store(at, source.load(at) + 1.0)


@triton.jit
def reduce_descriptors(a, low, high, ands, ors, xors, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Reducing tensor copies of every integer operation; all programs meet in one tile."""
    source = tl.make_tensor_descriptor(a, [rows, columns], [columns, 1], [BLOCK_R, BLOCK_C])
    v = source.load([tl.program_id(0) * BLOCK_R, 0])
    tl.make_tensor_descriptor(low, [BLOCK_R, columns], [columns, 1], [BLOCK_R, BLOCK_C]).atomic_min([0, 0], v)
    tl.make_tensor_descriptor(high, [BLOCK_R, columns], [columns, 1], [BLOCK_R, BLOCK_C]).atomic_max([0, 0], v)
    tl.make_tensor_descriptor(ands, [BLOCK_R, columns], [columns, 1], [BLOCK_R, BLOCK_C]).atomic_and([0, 0], v)
    tl.make_tensor_descriptor(ors, [BLOCK_R, columns], [columns, 1], [BLOCK_R, BLOCK_C]).atomic_or([0, 0], v)
    tl.make_tensor_descriptor(xors, [BLOCK_R, columns], [columns, 1], [BLOCK_R, BLOCK_C]).atomic_xor([0, 0], v)
