"""Kernels with layouts chosen by hand (Gluon): shared memory with and without conflicts, rings of asynchronous copies, clusters."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# Newer versions call the copies loads.
load_tensor = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def transpose_tile(x, out, R: gl.constexpr, C: gl.constexpr, BY_ROWS: gl.constexpr, BY_COLUMNS: gl.constexpr, SHARED: gl.constexpr):
    """Writes a tile by rows into shared memory and reads it by columns: SHARED decides how many lanes meet in a bank."""
    base = gl.program_id(0) * R * C
    r = gl.arange(0, R, layout=gl.SliceLayout(1, BY_ROWS))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, BY_ROWS))
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [R, C], SHARED)
    tile.store(gl.load(x + base + r[:, None] * C + c[None, :]))
    turned = tile.permute((1, 0)).load(BY_COLUMNS)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, BY_COLUMNS))
    r = gl.arange(0, R, layout=gl.SliceLayout(0, BY_COLUMNS))
    gl.store(out + base + c[:, None] * R + r[None, :], turned)


@gluon.jit
def transpose_async(x, out, n, R: gl.constexpr, C: gl.constexpr, BY_ROWS: gl.constexpr, BY_COLUMNS: gl.constexpr, SHARED: gl.constexpr):
    """As transpose_tile, for n tiles through two buffers that asynchronous copies fill ahead."""
    r = gl.arange(0, R, layout=gl.SliceLayout(1, BY_ROWS))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, BY_ROWS))
    at = r[:, None] * C + c[None, :]
    tc = gl.arange(0, C, layout=gl.SliceLayout(1, BY_COLUMNS))
    tr = gl.arange(0, R, layout=gl.SliceLayout(0, BY_COLUMNS))
    turned_at = tc[:, None] * R + tr[None, :]
    tiles = gl.allocate_shared_memory(x.dtype.element_ty, [2, R, C], SHARED)
    load_elements(tiles.index(0), x + at)
    async_copy.commit_group()
    for i in range(n):
        if i + 1 < n:
            load_elements(tiles.index((i + 1) % 2), x + (i + 1) * R * C + at)
        async_copy.commit_group()
        async_copy.wait_group(1)
        turned = tiles.index(i % 2).permute((1, 0)).load(BY_COLUMNS)
        gl.store(out + i * R * C + turned_at, turned)


@gluon.jit
def product_tile(a, b, c, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCKED: gl.constexpr, SHARED_A: gl.constexpr,
                 SHARED_B: gl.constexpr, MMA: gl.constexpr, OPERAND_A: gl.constexpr, OPERAND_B: gl.constexpr):
    """One tile's product by the warp-level matrix instruction; operands come from shared memory as SHARED_A and SHARED_B lay them."""
    m = gl.arange(0, M, layout=gl.SliceLayout(1, BLOCKED))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, BLOCKED))
    ka = gl.arange(0, K, layout=gl.SliceLayout(0, BLOCKED))
    kb = gl.arange(0, K, layout=gl.SliceLayout(1, BLOCKED))
    left = gl.allocate_shared_memory(a.dtype.element_ty, [M, K], SHARED_A, gl.load(a + m[:, None] * K + ka[None, :]))
    right = gl.allocate_shared_memory(b.dtype.element_ty, [K, N], SHARED_B, gl.load(b + kb[:, None] * N + n[None, :]))
    s = ampere.mma_v2(left.load(OPERAND_A), right.load(OPERAND_B), gl.zeros([M, N], gl.float32, layout=MMA))
    m = gl.arange(0, M, layout=gl.SliceLayout(1, MMA))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
    gl.store(c + m[:, None] * N + n[None, :], s)


@gluon.jit
def ring(left, right, c, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):
    """Tensor copies STAGES - 1 ahead of the asynchronous matrix instruction, one instruction group in flight. right is [K, N]."""
    element: gl.constexpr = left.dtype
    a = gl.allocate_shared_memory(element, [STAGES, BM, BK], left.layout)
    b = gl.allocate_shared_memory(element, [STAGES, BK, BN], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    m = gl.program_id(0) * BM
    n = gl.program_id(1) * BN
    for early in gl.static_range(STAGES - 1):
        mbarrier.expect(full.index(early), left.block_type.nbytes + right.block_type.nbytes)
        load_tensor(left, [m, early * BK], full.index(early), a.index(early))
        load_tensor(right, [early * BK, n], full.index(early), b.index(early))
    acc = gl.zeros((BM, BN), gl.float32, layout=MMA)
    for i in range(K // BK):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        acc = warpgroup_mma(a.index(slot), b.index(slot), acc, is_async=True)
        # The product before this one is done: its buffers are the next to fill.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc, ))
        ahead = i + STAGES - 1
        free = ahead % STAGES
        more = ahead < K // BK
        mbarrier.expect(full.index(free), left.block_type.nbytes + right.block_type.nbytes, pred=more)
        load_tensor(left, [m, ahead * BK], full.index(free), a.index(free), pred=more)
        load_tensor(right, [ahead * BK, n], full.index(free), b.index(free), pred=more)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc, ))
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(s))
    rows = m + gl.arange(0, BM, layout=gl.SliceLayout(1, MMA))
    columns = n + gl.arange(0, BN, layout=gl.SliceLayout(0, MMA))
    gl.store(c + rows[:, None] * N + columns[None, :], acc)


@gluon.jit
def consume(a, b, full, free, c, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):
    """The warps that multiply."""
    acc = gl.zeros((BM, BN), gl.float32, layout=MMA)
    for i in range(K // BK):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        acc = warpgroup_mma(a.index(s), b.index(s), acc, is_async=False)
        mbarrier.arrive(free.index(s), count=1)
    rows = gl.program_id(0) * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, MMA))
    columns = gl.program_id(1) * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, MMA))
    gl.store(c + rows[:, None] * N + columns[None, :], acc)


@gluon.jit
def produce(left, right, a, b, full, free, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """The warp that copies."""
    m = gl.program_id(0) * BM
    n = gl.program_id(1) * BN
    for i in range(K // BK):
        s = i % STAGES
        mbarrier.wait(free.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), left.block_type.nbytes + right.block_type.nbytes)
        load_tensor(left, [m, i * BK], full.index(s), a.index(s))
        load_tensor(right, [i * BK, n], full.index(s), b.index(s))


@gluon.jit
def specialised(left, right, c, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):
    """A producer warp and a consumer warpgroup, with barriers for full and for free buffers. right is [K, N]."""
    element: gl.constexpr = left.dtype
    a = gl.allocate_shared_memory(element, [STAGES, BM, BK], left.layout)
    b = gl.allocate_shared_memory(element, [STAGES, BK, BN], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize([(consume, (a, b, full, free, c, N, K, BM, BN, BK, STAGES, MMA)),
                        (produce, (left, right, a, b, full, free, K, BM, BN, BK, STAGES))], [1], [40])


@gluon.jit
def cluster_exchange(x, out, R: gl.constexpr, C: gl.constexpr, BY_ROWS: gl.constexpr, BY_COLUMNS: gl.constexpr):
    """The CTAs of a cluster hold rows of a tile, then columns: the change goes through distributed shared memory."""
    r = gl.arange(0, R, layout=gl.SliceLayout(1, BY_ROWS))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, BY_ROWS))
    v = gl.convert_layout(gl.load(x + r[:, None] * C + c[None, :]), BY_COLUMNS)
    r = gl.arange(0, R, layout=gl.SliceLayout(1, BY_COLUMNS))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, BY_COLUMNS))
    gl.store(out + r[:, None] * C + c[None, :], v * 2.0)


@gluon.jit
def cluster_multicast(source, out, R: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """One tensor copy fills the same tile in every CTA of the cluster; each writes its own part of the output."""
    tile = gl.allocate_shared_memory(source.dtype, [R, C], source.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, source.nbytes_per_cta)
    load_tensor(source, [0, 0], full, tile, multicast=True)
    mbarrier.wait(full, 0)
    r = gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + r[:, None] * C + c[None, :], tile.load(LAYOUT))
