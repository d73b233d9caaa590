"""The planted defects, in the order of the rules they break (numbers of docs/memory-model.md)."""

from __future__ import annotations

from kosmos_core.device import barrier, flags, queue, roles
from kosmos_core.testing import defects

from kosmos_tpsp.cli.plant_list_bulk_ag import BESIDE_PLANTS
from kosmos_tpsp.cli.plant_list_bulk_rs import BULK_RS_PLANTS
from kosmos_tpsp.cli.plant_list_column import COLUMN_PLANTS
from kosmos_tpsp.cli.plant_list_mx import MX_PLANTS
from kosmos_tpsp.cli.plant_list_pull import PULL_PLANTS
from kosmos_tpsp.cli.plant_list_rs import SCATTER_PLANTS
from kosmos_tpsp.cli.plants import Plant
from kosmos_tpsp.device import build, gather, gathered
from kosmos_tpsp.kernels.ag_gemm import ag_gemm_kernel
from kosmos_tpsp.ops.mx import has_mx

PULL = {"transport": "pull"}
PUSH = {"transport": "push"}
# The same shape over and over: words of earlier calls fit later ones.
SAME = ((40, 32, 32),) * 4
# Few workgroups are resident at a time, and not those with low ids first.
CROWDED = {"slots": 1, "start": "descending"}

_PUBLISH = [
    Plant(*defects.NO_BARRIER),
    Plant(
        *defects.ARRIVAL_RELAXED,
        choices=PULL,
    ),
    Plant(
        "arrival_gpu_scope",
        "scope",
        "an arrival on a peer is released with scope gpu",
        ((gather.carry_unit, '"sys" if CONFIG.TRANSPORT == PUSH else "gpu"', '"gpu"'),),
        choices=PUSH,
    ),
    Plant(
        "flag_before_data",
        "publish",
        "a pushed unit is counted in before its rows are copied",
        (
            (
                gather.transport,
                "sent = sent_rows(",
                "flag_arrive(peer_ptr(ctx, ARRIVAL, peer, tl.int32) "
                "+ call.parity * ctx.ARRIVAL_WORDS + call.rank * ctx.MAX_ROWS + tile_row, "
                '"sys", ctx.TARGET)\n            sent = sent_rows(',
            ),
            (gather.carry_unit, "if standing.ok != 0:", "if standing.ok == 2:"),
        ),
        choices=PUSH,
    ),
    Plant(
        *defects.START_RELAXED,
        choices=PULL,
    ),
    Plant(*defects.START_GPU_SCOPE),
]

_CONSUME = [
    Plant(
        "arrival_polled_relaxed",
        "consume",
        "builders poll arrivals relaxed",
        ((flags.flag_read, 'sem="acquire"', 'sem="relaxed"'),),
    ),
    Plant(
        "arrival_polled_gpu_scope",
        "scope",
        "builders poll arrivals from peers with scope gpu",
        ((gather.await_rows, '"sys" if COUNTED_BY_PEER else "gpu"', '"gpu"'),),
        choices=PUSH,
    ),
    Plant(
        "start_polled_relaxed",
        "consume",
        "start words are polled relaxed",
        ((barrier.start_wait, 'sem="acquire"', 'sem="relaxed"'),),
        choices=PULL,
    ),
    Plant(
        "wrong_flag",
        "consume",
        "builders poll the counter of the neighbouring tile row",
        (
            (
                gather.await_rows,
                "arrival_word(ctx, call, src_rank, tile_row, CONFIG)",
                "arrival_word(ctx, call, src_rank, tl.maximum(tile_row - 1, 0), CONFIG)",
            ),
        ),
        shapes=((72, 32, 32),) * 2,
    ),
    Plant(
        "wrong_source_flag",
        "consume",
        "builders poll the counter of another source",
        (
            (
                gather.await_rows,
                "arrival_word(ctx, call, src_rank, tile_row, CONFIG)",
                "arrival_word(ctx, call, peer_at(call.rank, 1, ctx.WORLD), tile_row, CONFIG)",
            ),
        ),
        ranks=3,
    ),
    Plant(
        "wrong_chunk",
        "consume",
        "builders wait for one source's rows and multiply another's",
        (
            (
                gathered.multiply,
                "chunk = tile.src_rank\n",
                "chunk = 3 - call.rank - tile.src_rank\n",
            ),
        ),
        ranks=3,
    ),
    Plant(
        "count_too_low",
        "consume",
        "builders wait for one slice less than a tile row has",
        ((gather.await_rows, "word_ptr, CONFIG.SLICES, src", "word_ptr, CONFIG.SLICES - 1, src"),),
    ),
    Plant(
        "count_too_high",
        "consume",
        "builders wait for one slice more than a tile row has",
        ((gather.await_rows, "word_ptr, CONFIG.SLICES, src", "word_ptr, CONFIG.SLICES + 1, src"),),
    ),
    Plant(
        "kept_before_arrival",
        "consume",
        "gathered rows are copied to the kept output without waiting for them",
        (
            (
                gather.keep_rows,
                "standing = await_rows(ops, ctx, call, standing, grid, k, peer, tile_row, CONFIG)",
                "pass",
            ),
        ),
        choices={"layout": "nn", **PUSH},
    ),
    Plant(
        "gather_left_early",
        "consume",
        "a launch that only gathers ends before everything has arrived",
        (
            (
                ag_gemm_kernel,
                "standing = await_all(ops, ctx, call, standing, grid, k, CONFIG)",
                "pass",
            ),
        ),
        choices={"policy": "serial", **PUSH},
    ),
]

_EPOCHS = [
    Plant(
        *defects.SET_NOT_ZEROED,
        each=({"cap": 2}, {}, {}),
    ),
    Plant(
        *defects.ARRIVALS_NOT_ZEROED,
        choices=PUSH,
    ),
    Plant(
        "counters_of_earlier_shape",
        "epochs",
        "only queue heads are zeroed, arrival counters are left from an earlier call",
        ((barrier.call_clean, "other_ptr, ctx.SET_WORDS, SET_GRANULE", "other_ptr, 256, 256"),),
        shapes=((40, 32, 32), (24, 24, 16), (72, 24, 24), (40, 40, 16)),
        choices=PULL,
    ),
    Plant(
        "split_tickets_left",
        "epochs",
        "tickets of split tiles are left from an earlier call",
        ((barrier.call_clean, "other_ptr, ctx.SET_WORDS, SET_GRANULE", "other_ptr, 512, 512"),),
        shapes=((24, 32, 128),) * 3,
        each=({"split_k": 2}, {}, {"split_k": 4}),
    ),
    Plant(
        "first_leaver_advances",
        "epochs",
        "the first workgroup to leave moves the epoch on, not the last",
        ((barrier.call_leave, "tl.num_programs(0), ctx.TARGET", "1, ctx.TARGET"),),
    ),
    Plant(
        "stale_epoch",
        "epochs",
        "the epoch of a start word is not compared",
        (
            (
                barrier.start_judge,
                "(seen & EPOCH_MASK) == (wanted & EPOCH_MASK)",
                "(seen >> 32) == (wanted >> 32)",
            ),
        ),
        shapes=SAME,
        choices=PULL,
    ),
    Plant(
        "one_start_slot",
        "epochs",
        "one start slot a peer instead of two by parity",
        (
            (barrier.start_publish, "START + call.parity * MAX_RANKS", "START"),
            (barrier.start_wait, "START + call.parity * MAX_RANKS", "START"),
        ),
        shapes=((8, 16, 16),) * 6,
        ranks=3,
    ),
]

_STARTS = [
    Plant(
        "start_before_copy_in",
        "start and end",
        "the start word is published when the first slice is copied in, not the last",
        ((gather.copy_in, "COPY_DONE, units, ctx.TARGET", "COPY_DONE, 1, ctx.TARGET"),),
        choices=PULL,
    ),
    Plant(
        "start_after_moving",
        "start and end",
        "the start word is published once the own units are moved: too late for everybody",
        (
            (gather.open_gather, "if publishes & (standing.ok != 0):", "if call.ticket < 0:"),
            (
                gather.move,
                "    fence_async_proxy(ctx.TARGET)",
                "    if call.ticket == 0:\n        start_publish(ctx, call)\n"
                "    fence_async_proxy(ctx.TARGET)",
            ),
        ),
        choices=PUSH,
    ),
    Plant(
        "no_end_wait",
        "start and end",
        "the last workgroup to leave does not wait for the peers' starts",
        ((barrier.call_leave, "start_hold_all(ctx, call, standing, PHASE_LEAVE)", "standing"),),
        shapes=SAME,
        ranks=3,
        choices={"policy": "serial", **PULL},
    ),
    Plant(
        "input_overwritten",
        "start and end",
        "one shard instead of two by parity: refilled while a peer still pulls from it",
        (
            (gather.copy_in, "SHARD + call.parity", "SHARD"),
            (gather.transport, "SHARD + call.parity", "SHARD"),
        ),
        shapes=SAME,
        ranks=3,
        choices=PULL,
    ),
    Plant(
        "peer_read_before_start",
        "start and end",
        "a peer's shard is read before its start word",
        ((gather.transport, "start_hold(ctx, call, standing, peer, PHASE_GATHER)", "standing"),),
        choices=PULL,
    ),
    Plant(
        "peer_written_before_start",
        "start and end",
        "a peer's gather region is written before its start word",
        ((gather.transport, "start_hold(ctx, call, standing, peer, PHASE_GATHER)", "standing"),),
        choices=PUSH,
        ranks=3,
    ),
    Plant(
        "pushed_to_wrong_rows",
        "start and end",
        "rows are pushed to where the receiver's own chunk would be",
        ((gather.transport, "call.rank * chunk + offset", "peer * chunk + offset"),),
        choices=PUSH,
        ranks=3,
    ),
]

_ROLES = [
    Plant(
        "roles_by_program_id",
        "roles",
        "movers are chosen by program id, with fewer slots than workgroups",
        ((roles.is_mover_first, "call.ticket < num_movers", "tl.program_id(0) < num_movers"),),
        fixed=CROWDED,
    ),
    Plant(
        "movers_last",
        "roles",
        "the last workgroups to arrive move, the first ones build and wait for them",
        (
            (
                roles.is_mover_first,
                "call.ticket < num_movers",
                "call.ticket >= tl.num_programs(0) - num_movers",
            ),
        ),
        fixed=CROWDED,
    ),
    Plant(
        "start_by_the_last",
        "roles",
        "the last workgroup to arrive publishes the start, not the first",
        (
            (
                gather.open_gather,
                "else:\n        publishes = call.ticket == 0",
                "else:\n        publishes = call.ticket == tl.num_programs(0) - 1",
            ),
        ),
        choices=PUSH,
        fixed=CROWDED,
    ),
    Plant(
        "claim_without_atomic",
        "claims",
        "a queue head is read and advanced by plain accesses",
        (
            (
                queue.queue_claim,
                'return tl.atomic_add(head_ptr, 1, sem="relaxed", scope="gpu")',
                "place = tl.load(head_ptr)\n    tl.store(head_ptr, place + 1)\n    return place",
            ),
        ),
    ),
    Plant(
        "election_without_acquire",
        "claims",
        "the last to arrive does not acquire what the others have stored",
        ((barrier.elect_last, 'sem="acq_rel"', 'sem="release"'),),
        choices={"split_k": 4},
        shapes=((24, 32, 128),) * 2,
    ),
    Plant(
        *defects.ELECTION_WITHOUT_RELEASE,
        choices={"split_k": 4},
        shapes=((24, 32, 128),) * 2,
    ),
    Plant(
        "split_read_without_acquire",
        "claims",
        "the second of two parts sees the first's ticket and reads its sum without an acquire",
        ((flags.flag_read, 'sem="acquire"', 'sem="relaxed"'),),
        choices={"split_k": 2},
        shapes=((24, 64, 64),) * 2,
        ranks=1,
    ),
    Plant(
        "split_ticket_shared",
        "claims",
        "all pairs of a split tile count their parts in one ticket",
        ((build.reduce_splits, "tickets_ptr + place", "tickets_ptr"),),
        choices={"split_k": 4},
        shapes=((24, 32, 128),) * 2,
    ),
    Plant(
        "split_partials_overlap",
        "claims",
        "partial sums of neighbouring split tiles share memory",
        ((build.reduce_splits, "first = split_tile * CONFIG.SPLIT_K", "first = split_tile"),),
        choices={"split_k": 4},
        shapes=((24, 32, 128),) * 2,
    ),
]

_ABORTS = [
    Plant(
        "hash_not_compared",
        "bounded waits",
        "start words are compared by epoch alone, though a rank makes another call",
        ((barrier.start_judge, "(seen >> 32) == (wanted >> 32)", "here"),),
        trouble="other_call",
        ranks=3,
    ),
    Plant(
        "arrival_wait_blind",
        "bounded waits",
        "waits for arrivals do not look at the abort word",
        ((flags.flag_wait, "elif is_aborted(call.signal_ptr):", "elif call.rank < 0:"),),
        trouble="bad_argument",
        ranks=3,
    ),
    Plant(
        "start_wait_blind",
        "bounded waits",
        "waits for start words do not look at the abort word",
        ((barrier.start_wait, "if is_aborted(call.signal_ptr):", "if call.rank < 0:"),),
        trouble="bad_argument",
    ),
    Plant(
        "wait_unbounded",
        "bounded waits",
        "waits have no bound, though a rank never comes",
        (
            (barrier.start_wait, "is_over(begin, call.bound_ns, ctx.TARGET)", "call.rank < 0"),
            (flags.flag_wait, "is_over(begin, call.bound_ns, ctx.TARGET)", "call.rank < 0"),
        ),
        trouble="killed",
    ),
    Plant(
        "abort_not_spread",
        "bounded waits",
        "a rank that gives up sets its own abort word only",
        ((flags.abort_all, "SIGNAL, r, tl.int64) + ABORT", "SIGNAL, rank, tl.int64) + ABORT"),),
        trouble="bad_argument",
    ),
    Plant(
        "zeroed_after_abort",
        "bounded waits",
        "counters that late arrivals may still reach are zeroed once the call is aborted",
        ((barrier.call_clean, "if standing.ok != 0:", "if standing.ok >= 0:"),),
        shapes=((40, 24, 40), (24, 24, 40), (72, 24, 40)),
        ranks=3,
        choices=PUSH,
        trouble="expiry",
    ),
]

PLANTS: dict[str, Plant] = {
    plant.name: plant
    for plants in (
        _PUBLISH,
        _CONSUME,
        _EPOCHS,
        _STARTS,
        _ROLES,
        _ABORTS,
        SCATTER_PLANTS,
        PULL_PLANTS,
        BESIDE_PLANTS,
        BULK_RS_PLANTS,
        COLUMN_PLANTS,
        MX_PLANTS if has_mx() else [],
    )
    for plant in plants
}  # fmt: skip
