"""Queue orders against an independent enumeration, and their properties."""

import dataclasses
import random

import pytest
from kosmos_heuristics import AgGemmProblem, PlanError, TileShape, load_machine, plan_ag_gemm
from kosmos_heuristics.orders import BuilderUnit, MoverQueue, MoverUnit, Tile, TileQueue
from kosmos_heuristics.plans import ORDERS
from kosmos_heuristics.tiles import tile_ids


def ceil_div(a, b):
    return (a + b - 1) // b


def random_queue(rng, order, world_size=None, **split):
    world_size = world_size or rng.randint(1, 8)
    block_m = rng.choice([1, 2, 16])
    return TileQueue(
        world_size=world_size,
        rank=rng.randrange(world_size),
        chunk_rows=rng.choice([0, 1, rng.randint(1, 200), 64]),
        n=rng.randint(1, 100),
        k=rng.randint(1, 100),
        block_m=block_m,
        block_n=rng.choice([1, 16, 32]),
        block_k=rng.choice([1, 16, 32]),
        tile_row_rows=block_m * rng.choice([1, 2, 4]),
        group_m=rng.randint(1, 9),
        group_rows=rng.randint(1, 9),
        order=order,
        **split,
    )


def walk(queue):
    """The queue as nested loops: no id arithmetic in common with the code under test."""
    columns = ceil_div(queue.n, queue.block_n)
    blocks = queue.tile_row_rows // queue.block_m
    rows = ceil_div(queue.chunk_rows, queue.tile_row_rows)
    ranks = [(queue.rank + step) % queue.world_size for step in range(queue.world_size)]
    tiles = []
    if queue.order != "naive":
        local = list(range(ceil_div(queue.chunk_rows, queue.block_m)))
        while local:
            group, local = local[: queue.group_m], local[queue.group_m :]
            tiles += [Tile(queue.rank, row, col) for col in range(columns) for row in group]
    if queue.order == "local_first":
        sequence = [(src, row) for row in range(rows) for src in ranks[1:]]
    elif queue.order == "chunk_major":
        sequence = [(src, row) for src in ranks[1:] for row in range(rows)]
    else:
        sequence = [(src, row) for src in range(queue.world_size) for row in range(rows)]
    while sequence:
        group, sequence = sequence[: queue.group_rows], sequence[queue.group_rows :]
        for col in range(columns):
            for src, row in group:
                tiles += [Tile(src, row * blocks + block, col) for block in range(blocks)]
    return tiles


@pytest.mark.parametrize("order", ORDERS)
def test_ids_are_the_nested_loops(order):
    rng = random.Random()
    for _ in range(200):
        queue = random_queue(rng, order)
        assert [queue.tile(tile_id) for tile_id in range(queue.num_ids)] == walk(queue)


@pytest.mark.parametrize("order", ORDERS)
def test_every_tile_of_the_output_has_one_id(order):
    rng = random.Random()
    for _ in range(200):
        queue = random_queue(rng, order)
        tiles = [queue.tile(tile_id) for tile_id in range(queue.num_ids)]
        assert len(set(tiles)) == len(tiles)
        full = [tile for tile in tiles if not queue.is_empty(tile)]
        wanted = {
            (src, row, col)
            for src in range(queue.world_size)
            for row in range(ceil_div(queue.chunk_rows, queue.block_m))
            for col in range(ceil_div(queue.n, queue.block_n))
        }
        assert set(full) == wanted
        # Only ragged last tile rows leave empty ids.
        for tile in set(tiles) - set(full):
            assert tile.row_block * queue.block_m >= queue.chunk_rows
            assert tile.row_block < queue.tile_rows * queue.row_blocks_per_tile_row


@pytest.mark.parametrize("order", ["local_first", "chunk_major"])
def test_local_tiles_come_first(order):
    rng = random.Random()
    for _ in range(50):
        queue = random_queue(rng, order)
        sources = [queue.tile(tile_id).src_rank for tile_id in range(queue.num_ids)]
        assert all(src == queue.rank for src in sources[: queue.num_local])
        assert all(src != queue.rank for src in sources[queue.num_local :])


def test_local_first_interleaves_peers_row_by_row():
    queue = TileQueue(4, 2, chunk_rows=96, n=1, k=1, block_m=32, block_n=1, block_k=1,
                      tile_row_rows=32, group_m=1, group_rows=1)  # fmt: skip
    remote = [queue.tile(tile_id) for tile_id in range(queue.num_local, queue.num_ids)]
    assert [(tile.row_block, tile.src_rank) for tile in remote] == [
        (row, src) for row in range(3) for src in (3, 0, 1)
    ]


def test_groups_bound_how_far_ahead_a_builder_waits():
    rng = random.Random()
    for _ in range(50):
        queue = random_queue(rng, "local_first", world_size=rng.randint(2, 8))
        reached = 0
        position = {queue.tile_row(j): j for j in range(queue.tile_rows * (queue.world_size - 1))}
        for tile_id in range(queue.num_local, queue.num_ids):
            tile = queue.tile(tile_id)
            row = tile.row_block // queue.row_blocks_per_tile_row
            at = position[(tile.src_rank, row)]
            reached = max(reached, at)
            assert at > reached - queue.group_rows


@pytest.mark.parametrize("order", ORDERS)
def test_ids_outside_the_queue_are_refused(order):
    queue = random_queue(random.Random(), order)
    for tile_id in (-1, queue.num_ids):
        with pytest.raises(PlanError, match="tile_id"):
            queue.tile(tile_id)


@pytest.mark.parametrize("order", ORDERS)
def test_unsplit_units_are_the_tiles_in_order(order):
    rng = random.Random()
    for _ in range(50):
        # One part a tile is no split, however many tiles it is said of.
        queue = random_queue(rng, order, split_tiles=rng.choice([0, 5]))
        assert queue.num_whole == queue.num_ids
        full = [(i, tile) for i, tile in enumerate(walk(queue)) if not queue.is_empty(tile)]
        assert list(queue.units()) == [BuilderUnit(i, tile, 0, 0, queue.k) for i, tile in full]


@pytest.mark.parametrize("order", ORDERS)
def test_units_are_claimed_from_two_queues(order):
    rng = random.Random()
    for _ in range(50):
        queue = random_queue(
            rng, order, split_k=rng.randint(2, 4), split_tiles=rng.choice([1, rng.randint(1, 90)])
        )
        tiles = walk(queue)
        # As the builders do it: ids of the first queue, then tickets of the second.
        whole = max(len(tiles) - queue.split_tiles, 0)
        claims = [(i, 0, 1) for i in range(whole)]
        for unit in range((len(tiles) - whole) * queue.split_k):
            claims.append((whole + unit // queue.split_k, unit % queue.split_k, queue.split_k))
        claims = [(i, part, parts) for i, part, parts in claims if not queue.is_empty(tiles[i])]
        assert queue.num_whole == whole
        units = list(queue.units())
        assert [(unit.tile_id, unit.part) for unit in units] == [claim[:2] for claim in claims]
        for unit, (tile_id, _, parts) in zip(units, claims, strict=True):
            assert unit.tile == tiles[tile_id]
            if parts == 1:
                assert (unit.k_begin, unit.k_end) == (0, queue.k)


def test_parts_cover_the_contraction_once_in_whole_steps():
    rng = random.Random()
    for _ in range(200):
        queue = random_queue(rng, "local_first", split_k=rng.randint(2, 5), split_tiles=3)
        parts = {}
        for unit in queue.units():
            if unit.tile_id >= queue.num_whole:
                parts.setdefault(unit.tile_id, []).append(unit)
        for units in parts.values():
            assert [unit.part for unit in units] == list(range(queue.split_k))
            columns = [k for unit in units for k in range(unit.k_begin, unit.k_end)]
            assert columns == list(range(queue.k))
            # Whole steps, evenly: no part is longer than the first, only the last may be ragged.
            steps = -(-queue.k // queue.block_k)
            longest = -(-steps // queue.split_k)
            lengths = [unit.k_end - unit.k_begin for unit in units if unit.k_end > unit.k_begin]
            assert all(length == longest * queue.block_k for length in lengths[:-1])
            assert 0 < lengths[-1] <= longest * queue.block_k


def test_k_ranges_of_a_short_contraction():
    # Five steps of 16 in four parts of two: the last part is empty.
    queue = TileQueue(1, 0, chunk_rows=1, n=1, k=70, block_m=1, block_n=1, block_k=16,
                      tile_row_rows=1, group_m=1, group_rows=1,
                      split_k=4, split_tiles=1)  # fmt: skip
    ranges = [(unit.k_begin, unit.k_end) for unit in queue.units()]
    assert ranges == [(0, 32), (32, 64), (64, 70), (70, 70)]


@pytest.mark.parametrize("name", ["h200", "mi350x", "executor"])
def test_units_of_a_plan(name):
    machine, rng = load_machine(name), random.Random()
    for _ in range(20):
        problem = AgGemmProblem(4 * rng.randint(0, 700), 8 * rng.randint(1, 100), 512, 4, "nn")
        split_k = rng.choice([None, 2, 8])
        plan = plan_ag_gemm(problem, machine, split_k=split_k, order=rng.choice(ORDERS))
        queue = TileQueue.of(problem, plan, rank=rng.randrange(4))
        assert queue.num_ids - queue.num_whole == plan.split_tiles
        units = list(queue.units())
        split = [unit for unit in units if unit.tile_id >= queue.num_whole]
        work = sum(unit.k_end - unit.k_begin for unit in units)
        tiles = 4 * ceil_div(problem.chunk_rows, plan.block_m) * ceil_div(problem.n, plan.block_n)
        assert work == tiles * problem.k
        assert len(units) == tiles + len(split) * (plan.split_k - 1) // plan.split_k


@pytest.mark.parametrize("order", ORDERS)
def test_ids_are_counted_as_the_rules_count_them(order):
    rng = random.Random()
    for _ in range(200):
        queue = random_queue(rng, order)
        tile = TileShape(16, 16, 16, 4, 2)
        queue = dataclasses.replace(queue, block_m=16, block_n=16, tile_row_rows=64)
        world_size = queue.world_size
        problem = AgGemmProblem(world_size * queue.chunk_rows, queue.n, queue.k, world_size)
        assert tile_ids(problem, tile, queue.tile_row_rows, order) == queue.num_ids


def test_queue_of_a_plan():
    problem = AgGemmProblem(4 * 70, 100, 128, 4)
    plan = plan_ag_gemm(problem, load_machine("executor"))
    queue = TileQueue.of(problem, plan, rank=3)
    # 70 rows: 5 row blocks of 16 in 3 tile rows of 2; 100 columns: 4 blocks of 32.
    assert queue.num_local == 5 * 4
    assert queue.num_remote == 3 * 3 * 2 * 4
    assert queue.tile(queue.num_local) == Tile(0, 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 4),
        ("rank", -1),
        ("world_size", 0),
        ("n", 0),
        ("k", 0),
        ("block_k", 0),
        ("split_k", 0),
        ("split_tiles", -1),
        ("group_m", 0),
        ("group_rows", 0),
        ("chunk_rows", -1),
        ("tile_row_rows", 24),
        ("order", "sorted"),
    ],
)
def test_bad_queues_are_refused(field, value):
    good = {
        "world_size": 4,
        "rank": 0,
        "chunk_rows": 64,
        "n": 64,
        "k": 64,
        "block_m": 16,
        "block_n": 16,
        "block_k": 16,
        "tile_row_rows": 32,
        "group_m": 2,
        "group_rows": 2,
    }
    with pytest.raises(PlanError, match=field):
        TileQueue(**{**good, field: value})


@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_mover_units_cover_every_slice_once(world_size, transport):
    rng = random.Random()
    rank, tile_rows, slices = rng.randrange(world_size), rng.randint(0, 9), rng.choice([1, 2, 8])
    queue = MoverQueue(world_size, rank, tile_rows, slices, transport)
    units = [queue.unit(unit_id) for unit_id in range(queue.num_units)]
    peers = [peer for peer in range(world_size) if peer != rank]
    assert sorted(units) == [
        MoverUnit(peer, row, part)
        for peer in peers
        for row in range(tile_rows)
        for part in range(slices)
    ]
    # Tile row by tile row, as the builders consume them.
    assert [unit.tile_row for unit in units] == sorted(unit.tile_row for unit in units)
    # Consecutive units use different links.
    for first in range(0, len(units), max(1, world_size - 1)):
        assert len({unit.peer for unit in units[first : first + world_size - 1]}) == len(peers)


def test_pulled_peers_are_in_the_builders_order_and_pushed_ones_in_the_consumers():
    for world_size in range(2, 9):
        for rank in range(world_size):
            pull = MoverQueue(world_size, rank, 1, 1, "pull")
            push = MoverQueue(world_size, rank, 1, 1, "push")
            for step in range(world_size - 1):
                assert pull.unit(step).peer == (rank + 1 + step) % world_size
                # The peer served at this step takes its chunks from its own next rank on, and this
                # rank's chunk is the one it wants at that step.
                consumer = MoverQueue(world_size, push.unit(step).peer, 1, 1, "pull")
                assert consumer.unit(step).peer == rank


def test_bad_mover_queues_are_refused():
    queue = MoverQueue(2, 0, 3, 4, "pull")
    for unit_id in (-1, queue.num_units):
        with pytest.raises(PlanError, match="unit_id"):
            queue.unit(unit_id)
    with pytest.raises(PlanError, match="rank"):
        MoverQueue(2, 2, 3, 4, "pull")
    with pytest.raises(PlanError, match="transport"):
        MoverQueue(2, 0, 3, 4, "carry")
