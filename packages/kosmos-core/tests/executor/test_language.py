"""Language features of the executor, compared with torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import Executor, KernelFault
from triton.language import load as load_by_name
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

MODES = {
    "plain": {},
    "checked": {"weak": "late", "stale": True, "race": "raise", "strict": True},
}
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


@pytest.fixture(params=list(MODES))
def launch(request):
    def run(kernel, grid, *args, keep=(), **kwargs):
        with Executor(1, **MODES[request.param]) as ex:
            for i, t in enumerate(keep):
                ex.register(t, 0, f"kept{i}")
            kernel[grid](*args, **kwargs)
            ex.run()

    return run


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(0)


@triton.jit
def k_add(a, b, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(a + i) + tl.load(b + i))


@triton.jit
def k_dot(a, b, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(o + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def k_cast(a, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(a + i).to(o.dtype.element_ty))


@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16])
def test_addition_rounds_like_torch(launch, gen, dtype):
    a, b = (torch.randn(64, generator=gen).to(dtype) for _ in range(2))
    o = torch.empty_like(a)
    launch(k_add, (1,), a, b, o, 64)
    assert torch.equal(o, a + b)


@pytest.mark.parametrize(
    "dtype", [F32, torch.float16, BF16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_dot(launch, gen, dtype):
    a, b = (torch.randn(32, 32, generator=gen).to(dtype) for _ in range(2))
    o = torch.empty(32, 32)
    launch(k_dot, (1,), a, b, o, 32, 32, 32)
    torch.testing.assert_close(o, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_dot_int8(launch, gen):
    a, b = (torch.randint(-8, 8, (32, 32), dtype=torch.int8, generator=gen) for _ in range(2))
    o = torch.empty(32, 32, dtype=I32)
    launch(k_dot, (1,), a, b, o, 32, 32, 32)
    assert torch.equal(o, (a.int() @ b.int()))


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_casts(launch, gen, dtype):
    a = torch.randn(4096, generator=gen) * 20
    o = torch.empty(4096, dtype=dtype)
    launch(k_cast, (1,), a, o, 4096)
    assert torch.equal(o.float(), a.to(dtype).float())
    back = torch.empty(4096)
    launch(k_cast, (1,), o, back, 4096)
    assert torch.equal(back, o.float())


def test_fp8_cast_saturates(launch):
    a = torch.tensor([1e9, -1e9, 449.0, float("inf")])
    o = torch.empty(4, dtype=torch.float8_e4m3fn)
    launch(k_cast, (1,), a, o, 4)
    assert o.float().tolist() == [448.0, -448.0, 448.0, 448.0]


@triton.jit
def k_reduce(x, s, m, mi, am, N: tl.constexpr, M: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + i)
    r = tl.arange(0, M)
    tl.store(s + r, tl.sum(v.to(tl.float32), axis=1))
    tl.store(m + r, v.max(axis=1))
    tl.store(mi + r, tl.min(v, axis=1))
    tl.store(am + r, tl.argmax(v, axis=1))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reductions(launch, gen, dtype):
    x = torch.randn(8, 32, generator=gen).to(dtype)
    s, m, mi = torch.empty(8), torch.empty(8, dtype=dtype), torch.empty(8, dtype=dtype)
    am = torch.empty(8, dtype=I32)
    launch(k_reduce, (1,), x, s, m, mi, am, 32, 8)
    torch.testing.assert_close(s, x.float().sum(1))
    assert torch.equal(m, x.amax(1))
    assert torch.equal(mi, x.amin(1))
    assert torch.equal(am, x.float().argmax(1).int())


@triton.jit
def k_places(x, low, high, N: tl.constexpr, M: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    _, place = tl.max(v, axis=1, return_indices=True, return_indices_tie_break_left=True)
    tl.store(high + tl.arange(0, M), place)
    tl.store(low + tl.arange(0, M), tl.argmin(v, axis=1))


def test_ties_between_places_go_to_the_lowest(launch, gen):
    x = torch.randint(0, 3, (8, 32), generator=gen).float()
    low, high = torch.empty(8, dtype=I32), torch.empty(8, dtype=I32)
    launch(k_places, (1,), x, low, high, 32, 8)
    assert high.tolist() == [row.index(max(row)) for row in x.tolist()]
    assert low.tolist() == [row.index(min(row)) for row in x.tolist()]


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def k_scan(x, cs, cm, rev, so, top, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(cs + i, tl.cumsum(v, axis=0))
    tl.store(cm + i, tl.associative_scan(v, 0, larger))
    tl.store(rev + i, tl.associative_scan(v, 0, larger, reverse=True))
    tl.store(so + i, tl.sort(v))
    tl.store(top, tl.reduce(v, 0, larger))


def test_scans_sort_and_custom_reduce(launch, gen):
    x = torch.randn(64, generator=gen)
    cs, cm, rev, so = (torch.empty(64) for _ in range(4))
    top = torch.empty(1)
    launch(k_scan, (1,), x, cs, cm, rev, so, top, 64)
    torch.testing.assert_close(cs, x.cumsum(0))
    assert torch.equal(cm, x.cummax(0)[0])
    assert torch.equal(rev, x.flip(0).cummax(0)[0].flip(0))
    assert torch.equal(so, x.sort()[0])
    assert top.item() == x.max().item()


@triton.jit
def k_descriptor(a, o, M, K, BM: tl.constexpr, BK: tl.constexpr):
    x = tl.make_tensor_descriptor(a, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    y = tl.make_tensor_descriptor(o, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    for i in tl.range(0, tl.cdiv(M, BM), num_stages=3):
        y.store([i * BM, 0], x.load([i * BM, 0]))


@triton.jit
def k_host_descriptor(x, y, NB, BM: tl.constexpr):
    for i in range(NB):
        y.store([i * BM, 0], x.load([i * BM, 0]))


@triton.jit
def k_descriptor_edge(a, o, M, K, B: tl.constexpr):
    x = tl.make_tensor_descriptor(a, shape=[M, K], strides=[K, 1], block_shape=[B, B])
    i = tl.arange(0, B)
    tl.store(o + i[:, None] * B + i[None, :], x.load([M - 4, 0]))


def test_descriptors(launch, gen):
    a = torch.randn(48, 64, generator=gen).to(BF16)
    o = torch.zeros_like(a)
    launch(k_descriptor, (1,), a, o, 48, 64, 32, 64)
    assert torch.equal(o, a)
    o.zero_()
    x, y = (TensorDescriptor.from_tensor(t, [16, 64]) for t in (a, o))
    launch(k_host_descriptor, (1,), x, y, 3, 16)
    assert torch.equal(o, a)
    edge = torch.empty(16, 16)
    f = torch.randn(20, 16, generator=gen)
    launch(k_descriptor_edge, (1,), f, edge, 20, 16, 16)
    assert torch.equal(edge[:4], f[16:])
    assert torch.equal(edge[4:], torch.zeros(12, 16))


@triton.jit
def k_atomics(a, cas, o, hits, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(a + i, 1.0, sem="relaxed", scope="sys")
    old = tl.atomic_cas(cas, 0, 7, sem="acq_rel", scope="sys")
    tl.atomic_max(cas + 1, 5)
    tl.atomic_min(cas + 2, -3)
    tl.atomic_or(cas + 3, 4)
    tl.atomic_add(hits + i % 2, 1)
    tl.store(o + tl.program_id(0), old)


def test_atomics(launch):
    a, cas = torch.zeros(8), torch.zeros(4, dtype=I32)
    o, hits = torch.empty(3, dtype=I32), torch.zeros(2, dtype=I32)
    launch(k_atomics, (3,), a, cas, o, hits, 8)
    assert torch.equal(a, torch.full((8,), 3.0))
    assert cas.tolist() == [7, 5, -3, 4]
    assert o.tolist() == [0, 7, 7]
    assert hits.tolist() == [12, 12]


@triton.jit
def k_peer(table, o, R: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    for r in tl.static_range(R):
        p = tl.load(table + r).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(o + r * N + i, tl.load(tl.multiple_of(p, 16) + i))


def test_pointers_from_a_table(launch, gen):
    peers = [torch.randn(64, generator=gen).to(BF16) for _ in range(4)]
    table = torch.tensor([p.data_ptr() for p in peers])
    o = torch.empty(4, 64, dtype=BF16)
    launch(k_peer, (1,), table, o, 4, 64, keep=peers)
    assert torch.equal(o, torch.stack(peers))


@triton.jit
def k_masked(a, o, rows, cols, other, B: tl.constexpr):
    i = tl.arange(0, B)
    offsets = i[:, None] * cols + i[None, :]
    mask = (i < rows)[:, None] & (i < cols)[None, :]
    x = tl.load(a + offsets, mask=mask, other=other)
    tl.store(o + i[:, None] * B + i[None, :], x)
    y = tl.load(a + offsets, mask=mask & ((i[:, None] + i[None, :]) % 3 == 0), other=-1.0)
    tl.store(o + B * B + i[:, None] * B + i[None, :], y)


def test_masks(launch, gen):
    a = torch.randn(5, 7, generator=gen)
    o = torch.empty(2, 8, 8)
    launch(k_masked, (1,), a, o, 5, 7, 3.5, 8)
    want = torch.full((8, 8), 3.5)
    want[:5, :7] = a
    assert torch.equal(o[0], want)
    i = torch.arange(8)
    holes = ((i[:, None] + i[None, :]) % 3 == 0) & (i < 5)[:, None] & (i < 7)[None, :]
    assert torch.equal(o[1], torch.where(holes, want, torch.tensor(-1.0)))


@triton.jit
def k_control(a, o, n, flag, nothing, x: tl.constexpr):
    total = 0
    i = 0
    while i < n:
        total += tl.load(a + i)
        i = n if total > 10 else i + 1
    tl.store(o, total)
    if flag:
        tl.store(o + 1, 1)
    else:
        tl.store(o + 1, 2)
    if nothing is None:
        tl.store(o + 2, x)
    tl.store(o + 3, (-7) // n + (-7) % n)
    for j in range(n):
        wide = j.to(tl.int64)
        if j == 3:
            tl.store(o + 4, wide)


def test_control_flow_and_scalar_arguments(launch):
    a, o = torch.arange(20, dtype=I32), torch.zeros(5, dtype=I32)
    launch(k_control, (1,), a, o, 20, False, None, 9, num_warps=8, num_stages=3, maxnreg=64)
    assert o.tolist() == [15, 2, 9, -7, 3]


@triton.jit
def k_annotated_while(o, n):
    i = n * 0
    while tl.condition(i * i < n, disable_licm=True):
        i += 1
    tl.store(o, i)


def test_a_condition_may_tell_the_compiler_about_its_loop(launch):
    o = torch.zeros(1, dtype=I32)
    launch(k_annotated_while, (1,), o, 17)
    assert o.item() == 5


@triton.jit
def k_division(x, y, q, r, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(q + i, a // b)
    tl.store(r + i, a % b)
    s = tl.load(x)
    t = tl.load(y)
    tl.store(q + N, s // t)
    tl.store(r + N, s % t)


def test_integer_division_truncates(launch):
    x = torch.tensor([-7, 7, -7, 8], dtype=I32)
    y = torch.tensor([2, -2, -2, 3], dtype=I32)
    q, r = torch.empty(5, dtype=I32), torch.empty(5, dtype=I32)
    launch(k_division, (1,), x, y, q, r, 4)
    assert q.tolist() == [-3, -3, 3, 2, -3]
    assert r.tolist() == [-1, 1, -1, 2, -1]


@triton.jit
def k_shapes(a, tr, jo, pe, hi, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    tl.store(tr + i[:, None] * N + i[None, :], tl.trans(x))
    row = tl.load(a + i)
    u, v = tl.split(tl.join(row, row + 1.0))
    tl.store(jo + tl.arange(0, 2 * N), tl.interleave(u, v))
    y = tl.permute(tl.reshape(row, (2, 2, N // 4)), (1, 0, 2))
    tl.store(pe + i, tl.reshape(y, (N,)))
    tl.store(hi + tl.arange(0, 4), tl.histogram(i % 4, 4))


def test_shape_operations(launch, gen):
    a = torch.randn(16, 16, generator=gen)
    tr, jo, pe = torch.empty(16, 16), torch.empty(32), torch.empty(16)
    hi = torch.empty(4, dtype=I32)
    launch(k_shapes, (1,), a, tr, jo, pe, hi, 16)
    assert torch.equal(tr, a.T)
    assert torch.equal(jo, torch.stack([a[0], a[0] + 1], 1).flatten())
    assert torch.equal(pe, a[0].reshape(2, 2, 4).permute(1, 0, 2).flatten())
    assert hi.tolist() == [4, 4, 4, 4]


@triton.jit
def k_names(a, o, N: tl.constexpr):
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, N), 16), 16)
    x = load_by_name(a + i, eviction_policy="evict_first", cache_modifier=".cg")
    tl.static_assert(N > 0)
    tl.assume(N > 0)
    tl.debug_barrier()
    tl.store(o + i, libdevice.tanh(x) + tl.exp(x) + tl.sigmoid(x))


def test_builtins_by_name_and_libdevice(launch, gen):
    a, o = torch.randn(16, generator=gen), torch.empty(16)
    launch(k_names, (1,), a, o, 16)
    torch.testing.assert_close(o, a.tanh() + a.exp() + a.sigmoid())
    assert load_by_name is tl.load


@triton.jit
def k_scaled(a, sa, b, sb, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    s = tl.arange(0, K // 32)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    xs = tl.load(sa + m[:, None] * (K // 32) + s[None, :])
    ys = tl.load(sb + n[:, None] * (K // 32) + s[None, :])
    tl.store(o + m[:, None] * N + n[None, :], tl.dot_scaled(x, xs, "e4m3", y, ys, "e4m3"))


def test_dot_scaled(launch, gen):
    a = torch.randn(32, 64, generator=gen).to(torch.float8_e4m3fn)
    b = torch.randn(64, 32, generator=gen).to(torch.float8_e4m3fn)
    sa, sb = (torch.randint(120, 134, (32, 2), dtype=torch.uint8, generator=gen) for _ in range(2))
    o = torch.empty(32, 32)
    launch(k_scaled, (1,), a, sa, b, sb, o, 32, 32, 64)
    left = a.float() * torch.exp2(sa.float() - 127).repeat_interleave(32, 1)
    right = b.float() * torch.exp2(sb.float() - 127).repeat_interleave(32, 1).T
    torch.testing.assert_close(o, left @ right, rtol=1e-5, atol=1e-4)


@triton.jit
def k_assert(a):
    tl.device_assert(tl.load(a) == 12345, "boom")


def test_device_assert_is_a_fault(launch):
    with pytest.raises(KernelFault, match=r"test_language.py:\d+ in k_assert.*boom"):
        launch(k_assert, (1,), torch.zeros(1, dtype=I32))


@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def k_auto(a, o, n, B: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(a + i, mask=i < n, other=0.0) + 1 + EVEN, mask=i < n)


def test_autotuner_takes_its_first_configuration(launch):
    a, o = torch.arange(40.0), torch.zeros(40)
    launch(k_auto, lambda meta: (triton.cdiv(meta["n"], meta["B"]),), a, o, 40)
    assert torch.equal(o, a + 2)


@triton.jit
def k_grid(o, B: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
    tl.store(o + i, 100 * x + 10 * y + z + B)


def test_three_dimensional_grid(launch):
    o = torch.zeros(24, dtype=I32)
    launch(k_grid, (2, 3, 4), o, B=0)
    want = [100 * x + 10 * y + z for z in range(4) for y in range(3) for x in range(2)]
    assert o.tolist() == want


SCALE = tl.constexpr(3)


@triton.jit
def k_constexprs(o, N: tl.constexpr):
    i = tl.arange(0, N)
    x = SCALE * i
    tl.store(o + i, (SCALE - x).to(tl.int32) + (SCALE < i).to(tl.int32))  # noqa: SIM300


def test_constexpr_operators_with_tensors(launch):
    o = torch.empty(8, dtype=I32)
    launch(k_constexprs, (1,), o, 8)
    i = torch.arange(8)
    assert torch.equal(o, (3 - 3 * i + (i > 3)).int())


def test_kernel_that_closes_over_a_variable():
    shift = tl.constexpr(5)

    @triton.jit
    def k_closure(o):
        tl.store(o, shift + tl.program_id(0))

    o = torch.zeros(1, dtype=I32)
    with Executor(1) as ex:
        k_closure[(1,)](o)
        ex.run()
    assert o.item() == 5
