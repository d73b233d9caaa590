"""The race detector: what it must report, what it must not, and what the reports say."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kosmos_core.executor import DataRace, Deadlock, Executor, Random, Starve

I16, I32, I64 = torch.int16, torch.int32, torch.int64
HERE = "test_races.py"


def line_of(text: str) -> str:
    """``file:line`` of the only line of this file that ends with the comment `text`."""
    with open(__file__, encoding="utf-8") as f:
        numbers = [n for n, line in enumerate(f, 1) if line.rstrip().endswith(f"# {text}")]
    assert len(numbers) == 1
    return f"{HERE}:{numbers[0]}"


@triton.jit
def k_message(
    data, flag, out, SEM: tl.constexpr, ACQ: tl.constexpr, BARRIER: tl.constexpr, B: tl.constexpr
):
    i = tl.arange(0, B)
    if tl.program_id(0) == 0:
        tl.store(data + i, i + 1)  # producer
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem=SEM, scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem=ACQ, scope="gpu") == 0:
            pass
        tl.store(out + i, tl.load(data + i))  # consumer


def message(sem="release", acquire="acquire", barrier=True, seed=0, race="report", **modes):
    with Executor(1, policy=Random(seed), seed=seed, race=race, **modes) as ex:
        data, flag, out = (
            ex.symmetric(n, I32, name)[0] for n, name in ((16, "data"), (1, "flag"), (16, "out"))
        )
        k_message[(2,)](data, flag, out, sem, acquire, barrier, 16)
        ex.run()
        return ex.races


@pytest.mark.parametrize("seed", range(8))
def test_correct_message_passing_is_silent(seed):
    for modes in ({}, {"weak": "random", "stale": True}, {"switch": "memory"}):
        for strict in (False, True):
            assert message(seed=seed, strict=strict, race="raise", **modes) == []


@pytest.mark.parametrize("defect", [{"sem": "relaxed"}, {"acquire": "relaxed"}])
def test_missing_release_or_acquire(defect):
    for seed in range(4):
        (race,) = message(seed=seed, **defect)
        assert race.kind == "unsynchronised read"
        assert (race.wg, race.line) == ("rank0.wg1", line_of("consumer"))
        assert (race.other, race.other_line) == ("rank0.wg0", line_of("producer"))
        assert (race.region, race.index, race.rank) == ("data", 0, 0)
        text = str(race)
        for part in ("rank0.wg1", "rank0.wg0", "data[0] (rank 0)", "tl.store(data + i, i + 1)"):
            assert part in text


def test_missing_barrier_only_in_strict_mode():
    for seed in range(4):
        assert message(barrier=False, seed=seed) == []
        (race,) = message(barrier=False, seed=seed, strict=True)
        assert race.region == "data"


def test_raise_stops_at_the_race():
    with pytest.raises(DataRace) as e:
        message(sem="relaxed", race="raise")
    assert e.value.line == line_of("consumer")
    assert e.value.stack[0].startswith(f"{line_of('consumer')} in k_message")


@triton.jit
def k_signal(flag, x, me, SCOPE: tl.constexpr):
    """Two ranks: 0 writes x and raises the flag in the memory of rank 1, which then reads x."""
    if me == 0:
        tl.store(x, 7)
        tl.debug_barrier()
        tl.atomic_add(flag, 1, sem="release", scope=SCOPE)
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE) == 0:
            pass
        tl.store(x + 1, tl.load(x))


@pytest.mark.parametrize(("scope", "clean"), [("sys", True), ("gpu", False)])
def test_scopes_across_ranks(scope, clean):
    with Executor(2, race="report", strict=True, weak="late") as ex:
        flag, x = ex.symmetric(1, I32, "flag"), ex.symmetric(2, I32, "x")
        for rank in (0, 1):
            with ex.on(rank):
                k_signal[(1,)](flag[1], x[0], rank, scope)
        ex.run()
    if clean:
        assert ex.races == []
    else:
        kinds = {r.kind.split(":")[0]: r for r in ex.races}
        assert "scope error" in kinds
        assert (kinds["scope error"].region, kinds["scope error"].rank) == ("flag", 1)


@triton.jit
def k_write(x, value, i):
    tl.store(x + i, value + tl.program_id(0))


def test_write_write_race():
    with Executor(1, race="report") as ex:
        x = ex.symmetric(8, I32, "x")[0]
        k_write[(2,)](x, 1, 3)
        ex.run()
    (race,) = ex.races
    assert (race.kind, race.region, race.index) == ("write/write race", "x", 3)
    assert {race.wg, race.other} == {"rank0.wg0", "rank0.wg1"}


@triton.jit
def k_column(x, out, N: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr):
    """Workgroups read one column block of a matrix and write another one of it."""
    r = tl.arange(0, N)[:, None] * N
    c = tl.program_id(0) * B + tl.arange(0, B)[None, :]
    v = tl.load(x + r + c)
    tl.store(x + r + (c + SHIFT) % N, v + 1)


@pytest.mark.parametrize(("shift", "clean"), [(0, True), (4, False)])
def test_interleaved_blocks_are_told_apart(shift, clean):
    """Column blocks interleave in memory; only those that share elements conflict."""
    with Executor(1, race="report") as ex:
        x = ex.symmetric((8, 8), I32, "x")[0]
        k_column[(2,)](x, x, 8, 4, shift)
        ex.run()
    assert (ex.races == []) == clean
    if not clean:
        kinds = {r.kind for r in ex.races}
        assert kinds <= {"write after unsynchronised read", "unsynchronised read"}


@triton.jit
def k_plain_flag(flag, out):
    if tl.program_id(0) == 0:
        tl.store(flag, 1)
    else:
        while tl.load(flag, volatile=True) == 0:
            pass
        tl.store(out, 1)


def test_plain_store_as_a_flag():
    with Executor(1, race="report") as ex:
        k_plain_flag[(2,)](ex.symmetric(1, I32, "flag")[0], ex.symmetric(1, I32)[0])
        ex.run()
    assert [r.kind for r in ex.races] == ["atomic or volatile access to a plainly written word"]


@triton.jit
def k_mixed(x):
    if tl.program_id(0) == 0:
        tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
    else:
        tl.store(x + 1, tl.load(x))


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (0, "plain read of a word updated by atomics"),
        (1, "atomic write after unsynchronised plain read"),
    ],
)
def test_plain_read_of_an_atomic_word(first, kind):
    """Found whichever comes first."""
    with Executor(1, race="report", policy=Starve(lambda t: t.wg != first)) as ex:
        k_mixed[(2,)](ex.symmetric(2, I32, "x")[0])
        ex.run()
    assert [r.kind for r in ex.races] == [kind]


@triton.jit
def k_lock(lock, count, n, SEM: tl.constexpr):
    for _ in range(n):
        while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") == 1:
            pass
        tl.store(count, tl.load(count) + 1)
        tl.debug_barrier()
        tl.atomic_xchg(lock, 0, sem=SEM, scope="gpu")


@pytest.mark.parametrize("seed", range(3))
def test_spin_lock(seed):
    for sem, clean in (("release", True), ("relaxed", False)):
        with Executor(
            1, policy=Random(seed), race="report", weak="late", stale=True, strict=True
        ) as ex:
            lock, count = ex.symmetric(1, I32, "lock")[0], ex.symmetric(1, I32, "count")[0]
            k_lock[(6,)](lock, count, 4, sem)
            ex.run()
        assert (count.item() == 24) == clean
        assert (ex.races == []) == clean


# ---- between launches, streams and hosts
@triton.jit
def k_fill(x, value, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.full((B,), value, tl.int32))


@triton.jit
def k_copy(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i))


def test_launches_on_one_stream_are_ordered():
    with Executor(1, race="raise") as ex:
        x, y = ex.symmetric(8, I32, "x")[0], ex.symmetric(8, I32, "y")[0]
        for value in range(50):
            k_fill[(1,)](x, value, 8)
            k_copy[(1,)](x, y, 8)
        ex.run()
        assert y.tolist() == [49] * 8


@pytest.mark.parametrize("sync", [False, True])
def test_streams_are_not_ordered_unless_the_host_waits(sync):
    def host(rank):
        with ex.stream(1):
            k_fill[(1,)](x, 3, 8)
        if sync:
            ex.synchronize()
        with ex.stream(2):
            k_copy[(1,)](x, y, 8)
        ex.synchronize()

    with Executor(1, race="report") as ex:
        x, y = ex.symmetric(8, I32, "x")[0], ex.symmetric(8, I32, "y")[0]
        ex.spmd(host)
    assert (ex.races == []) == sync


def exchange(barrier, fill_late=False):
    """Each rank fills its tensor by torch; the next rank's kernel copies it."""

    def host(rank):
        x[rank].fill_(rank + 1)
        if barrier:
            ex.host_barrier()
        k_copy[(1,)](x[(rank + 1) % 3], y[rank], 8)
        if fill_late:
            x[rank].fill_(9)

    with Executor(3, race="report", policy=Random(0)) as ex:
        x, y = ex.symmetric(8, I32, "x"), ex.symmetric(8, I32, "y")
        ex.spmd(host)
    return ex.races


def test_host_writes_need_a_host_barrier():
    assert exchange(barrier=True) == []
    races = exchange(barrier=False)
    assert races
    for race in races:
        assert "host of rank" in race.wg + race.other


def test_host_overwrites_what_a_peer_still_reads():
    races = exchange(barrier=True, fill_late=True)
    assert any(r.kind == "host write after unsynchronised read" for r in races)
    assert all(r.wg.startswith("host of rank") or r.other.startswith("host") for r in races)


def test_tensor_belongs_to_its_ranks_host_and_symmetric_to_nobody():
    with Executor(2, race="report") as ex:
        mine, y = ex.tensor(0, torch.arange(8, dtype=I32), "mine"), ex.symmetric(8, I32, "y")
        shared = ex.symmetric(8, I32, "shared")
        shared[0].fill_(4)  # before the first launch: initial state
        with ex.on(1):
            k_copy[(1,)](shared[0], y[1], 8)
            k_copy[(1,)](mine, y[1], 8)
        ex.run()
        assert y[1].tolist() == list(range(8))
    (race,) = ex.races
    assert (race.region, race.other) == ("mine", "host of rank 0")


def test_host_barrier_outside_spmd_orders_the_ranks():
    with Executor(2, race="raise") as ex:
        mine, y = ex.tensor(0, torch.arange(8, dtype=I32), "mine"), ex.symmetric(8, I32, "y")
        ex.host_barrier()
        with ex.on(1):
            k_copy[(1,)](mine, y[1], 8)
        ex.run()


def test_clocks_do_not_grow_with_the_number_of_launches():
    with Executor(2, race="raise", strict=True) as ex:
        x, y = ex.symmetric(8, I32, "x"), ex.symmetric(8, I32, "y")

        def rounds(n):
            for _ in range(n):
                for rank in (0, 1):
                    with ex.on(rank):
                        k_copy[(1,)](x[rank], y[rank], 8)
            ex.run()
            return ex.race_detector.clocks.width

        assert rounds(2) == rounds(100)


def test_clocks_grow_with_the_grid():
    """Also while clocks of earlier launches, queued ones and flags are in use."""
    with Executor(2, policy=Random(1), race="raise", strict=True, weak="late") as ex:
        counter, data, out = (ex.symmetric(n, I32) for n in (4, 256, 256))
        for step, wgs in enumerate((2, 40, 200)):
            for rank in (0, 1):
                with ex.on(rank):
                    k_meet[(wgs,)](counter[rank] + 0, data[rank], out[rank], step, wgs, 256)
        ex.run()
        assert out[0].tolist()[:200] == [sum(range(1, 201))] * 200


@triton.jit
def k_meet(counter, data, out, step, n, B: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(data + pid, pid + 1)
    tl.debug_barrier()
    tl.atomic_add(counter + step, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter + step, 0, sem="acquire", scope="gpu") < n:
        pass
    i = tl.arange(0, B)
    tl.store(out + pid, tl.sum(tl.load(data + i, mask=i < n, other=0)))


# ---- data polled element by element
POISON = 0x7FA1


@triton.jit
def k_produce(x, flag, value, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, tl.full((B,), value, tl.int16))


@triton.jit
def poll(x, B: tl.constexpr, PATTERN: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i, volatile=True, cache_modifier=".cv")
    while tl.sum((v == PATTERN).to(tl.int32)) > 0:
        v = tl.load(x + i, volatile=True, cache_modifier=".cv")
    return v


@triton.jit
def k_polled(x, out, start, me, REPOISON: tl.constexpr, WAIT: tl.constexpr, B: tl.constexpr):
    """Rank 0 sends two generations in the data; rank 1 poisons the region in between."""
    i = tl.arange(0, B)
    if me == 0:
        tl.store(x + i, tl.full((B,), 1, tl.int16))
        if WAIT:
            while tl.atomic_add(start, 0, sem="acquire", scope="sys") == 0:
                pass
        tl.store(x + i, tl.full((B,), 2, tl.int16))
    else:
        tl.store(out + i, poll(x, B, 0x7FA1))
        tl.debug_barrier()
        if REPOISON:
            tl.store(x + i, tl.full((B,), 0x7FA1, tl.int16))
            tl.debug_barrier()
        tl.atomic_xchg(start, 1, sem="release", scope="sys")
        tl.store(out + B + i, poll(x, B, 0x7FA1))


def polled(repoison=True, wait=True, coherent=True, seed=0, race="report", **modes):
    with Executor(2, policy=Random(seed), seed=seed, race=race, **modes) as ex:
        x, out, start = ex.symmetric(16, I16, "x"), ex.symmetric(32, I16), ex.symmetric(1, I32)
        for t in x:
            t.fill_(POISON)
            ex.sentinel(t, POISON, coherent=coherent)
        for rank in (0, 1):
            with ex.on(rank):
                k_polled[(1,)](x[1], out[1], start[1], rank, repoison, wait, 16)
        ex.run()
        return ex.races, out[1].tolist()


@pytest.mark.parametrize("seed", range(8))
def test_polled_data_with_poison_between_generations(seed):
    for modes in ({}, {"weak": "random", "stale": True, "strict": True}):
        races, out = polled(seed=seed, **modes)
        assert races == []
        assert out == [1] * 16 + [2] * 16


def test_polled_data_needs_coherence_to_be_assumed():
    races, _ = polled(coherent=False)
    assert any(r.kind == "write/write race" for r in races)


def test_polled_data_overwritten_too_early():
    ends = []
    for seed in range(12):
        with pytest.raises((DataRace, Deadlock)) as e:
            polled(wait=False, seed=seed, race="raise", switch="memory")
        assert e.value.region == "x"
        ends.append(e.type)
    # A generation that nobody saw is not a race: the reader then waits for ever.
    assert DataRace in ends


def test_polled_data_appears_element_by_element():
    """In random mode a poll may see some of a store's elements and not the others."""

    @triton.jit
    def k_partial(x, counts, B: tl.constexpr):
        i = tl.arange(0, B)
        if tl.program_id(0) == 0:
            tl.store(x + i, tl.full((B,), 1, tl.int16))
            for _ in range(40):
                tl.atomic_add(counts + B + 1, 1, sem="relaxed", scope="gpu")
        else:
            for _ in range(40):
                v = tl.load(x + i, volatile=True)
                tl.atomic_add(counts + tl.sum((v == 1).to(tl.int32)), 1)

    partial = 0
    for seed in range(6):
        with Executor(1, policy=Random(seed), seed=seed, weak="random") as ex:
            x, counts = ex.symmetric(16, I16)[0], ex.symmetric(18, I32)[0]
            x.fill_(POISON)
            ex.sentinel(x, POISON)
            k_partial[(2,)](x, counts, 16)
            ex.run()
            partial += sum(counts.tolist()[1:16])
    assert partial > 0


def test_lints_name_suspicious_lines():
    @triton.jit
    def k_sloppy(x, flag, out):
        tl.store(x, 1)
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")

    @triton.jit
    def k_tma(x, flag, out, B: tl.constexpr):
        tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        d = tl.make_tensor_descriptor(x, shape=[B, B], strides=[B, 1], block_shape=[B, B])
        e = tl.make_tensor_descriptor(out, shape=[B, B], strides=[B, 1], block_shape=[B, B])
        e.store([0, 0], d.load([0, 0]))

    with Executor(1) as ex:
        x, flag, out = (
            ex.symmetric((16, 16), I32)[0],
            ex.symmetric(1, I32)[0],
            ex.symmetric((16, 16), I32)[0],
        )
        k_sloppy[(1,)](x, flag, out)
        k_tma[(1,)](x, flag, out, 16)
        ex.run()
    barrier, proxy = sorted(ex.lints)
    assert "without tl.debug_barrier()" in barrier
    assert "without a proxy fence" in proxy
    assert "e.store([0, 0], d.load([0, 0]))" in proxy
