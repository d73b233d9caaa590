"""The planted defects of forward and backward, in the order of their steps."""

from __future__ import annotations

from kosmos_core.device import barrier
from kosmos_core.testing import defects

from kosmos_moe.cli.plants import Plant
from kosmos_moe.device import (
    combine,
    dispatch,
    expert_gemm,
    fold,
    gradient,
    plan,
    route,
    router_grad,
)
from kosmos_moe.kernels.backward import moe_backward_kernel
from kosmos_moe.ops.options import MoeOptions
from kosmos_moe.router import RouterOptions

# The same call over and over: words of earlier calls fit later ones.
SAME = ((20, 0, 9),) * 4
# Few workgroups are resident at a time, and not those with low ids first.
CROWDED = {"slots": 1, "start": "descending"}
ONE_EXPERT = {"routing": "one-expert"}

_ROUTE = [
    Plant(
        "routed_after_one_tile",
        "claims",
        "the first tile of a block's logits to be done routes the block",
        ((route.route, "+ BLOCKS + block, columns, ", "+ BLOCKS + block, 1, "),),
        sizes={"experts": 36, "inter": 8},
    ),
    Plant(
        "ties_to_any",
        "plan",
        "equal logits go to any expert",
        (
            (
                route.largest,
                "return_indices_tie_break_left=True",
                "return_indices_tie_break_left=False",
            ),
        ),
        sizes={"routing": "ties"},
    ),
    Plant(
        "nobody_plans",
        "claims",
        "only blocks of tokens count in: a rank without tokens has no last arriver",
        (
            (route.route, "if call.ticket == 0:", "if call.ticket < 0:"),
            (route.route, "arrivals = size.route_blocks + 1", "arrivals = size.route_blocks"),
        ),
    ),
    Plant(*defects.ELECTION_WITHOUT_RELEASE),
]

_PLAN = [
    Plant(
        "counts_one_deep",
        "start and end",
        "counts are written where a peer may still read those of its call before",
        (
            (plan.send_counts, "COUNTS + call.parity", "COUNTS"),
            (plan.lay_out, "COUNTS + call.parity", "COUNTS"),
        ),
        tokens=((9, 0, 0),) * 4,
        sizes={**ONE_EXPERT, "router": RouterOptions(1)},
    ),
    Plant(
        "start_before_counts",
        "publish",
        "the start word is published before the counts are stored",
        (
            (
                plan.plan,
                "send_counts(ctx, call, tables, total, CONFIG)\n        start_publish(ctx, call)",
                "start_publish(ctx, call)\n        send_counts(ctx, call, tables, total, CONFIG)",
            ),
        ),
    ),
    Plant(*defects.START_RELAXED),
    Plant(*defects.START_GPU_SCOPE),
    Plant(
        "counts_not_awaited",
        "start and end",
        "the planner lays out before it holds its peers' starts",
        (
            (
                plan.plan,
                "standing = start_hold(ctx, call, standing, peer, PHASE_PLAN)",
                "standing = standing",
            ),
        ),
    ),
    Plant(
        "tables_not_awaited",
        "consume",
        "workgroups read the tables before the planner is done",
        ((plan.plan_and_list, "LAID_OUT, 1, PHASE_PLAN", "LAID_OUT, 0, PHASE_PLAN"),),
    ),
    Plant(
        "verdict_of_own_arena",
        "plan",
        "a rank looks at its own arena only, and the ranks come to different verdicts",
        (
            (
                plan.lay_out,
                "tl.max(tl.sum(row_blocks, axis=1), axis=0)",
                "tl.sum(tl.where(owners == call.rank, tl.sum(row_blocks, axis=1), 0), axis=0)",
            ),
        ),
        sizes=ONE_EXPERT,
        tokens=((40, 40, 40),) * 2,
        capacity=0.5,
    ),
    Plant(
        *defects.SET_NOT_ZEROED,
        tokens=SAME,
    ),
    Plant(
        *defects.ARRIVALS_NOT_ZEROED,
        tokens=SAME,
    ),
]

_DISPATCH = [
    Plant(*defects.NO_BARRIER),
    Plant(*defects.ARRIVAL_RELAXED),
    Plant(
        "arrival_gpu_scope",
        "scope",
        "dispatched rows are counted in with scope gpu",
        ((dispatch.dispatch_unit, '"sys"', '"gpu"'),),
    ),
    Plant(
        "arrival_before_rows",
        "publish",
        "rows are counted in before they are stored",
        (
            (
                dispatch.dispatch_unit,
                "for i in range(0, rows, CONFIG.COPY_ROWS):",
                "flag_arrive(arrivals_at(ctx, call, owner) + call.rank * ctx.MAX_ROWS + local, "
                '"sys", ctx.TARGET, rows)\n        for i in range(0, rows, CONFIG.COPY_ROWS):',
            ),
            (
                dispatch.dispatch_unit,
                'flag_arrive(word_ptr, "sys", ctx.TARGET, rows)',
                'flag_arrive(word_ptr, "sys", ctx.TARGET, 0)',
            ),
        ),
    ),
    Plant(
        "dispatched_before_listed",
        "consume",
        "dispatchers read the send list before all of it is written",
        ((dispatch.dispatch, "LISTED, size.route_blocks", "LISTED, 0"),),
        tokens=((40, 0, 9), (5, 33, 12)),
    ),
    Plant(
        "rows_of_others_overwritten",
        "plan",
        "a rank puts its rows where the expert's first rows are",
        ((dispatch.dispatch_unit, " + tl.load(tables.before + at) + first", " + first"),),
    ),
]

_BUILD = [
    Plant(
        "roles_by_program_id",
        "roles",
        "who dispatches is decided by the id of the workgroup",
        ((barrier.call_enter, "queue_claim(set_ptr + TICKET)", "tl.program_id(0)"),),
        fixed=CROWDED,
    ),
    Plant(
        "first_source_only",
        "consume",
        "a tile waits for the source of its first row only",
        (
            (
                expert_gemm.await_rows,
                "while (source < past) & (ok != 0):",
                "past = tl.minimum(past, source + 1)\n    while (source < past) & (ok != 0):",
            ),
        ),
    ),
    Plant(
        "first_rows_only",
        "consume",
        "a tile takes the first slice of a source for all of its rows",
        (
            (
                expert_gemm.await_rows,
                "words_ptr + source * ctx.MAX_ROWS, wanted, source",
                "words_ptr + source * ctx.MAX_ROWS, tl.minimum(wanted, 1), source",
            ),
        ),
        sizes=ONE_EXPERT,
    ),
    Plant(
        "arrivals_polled_gpu_scope",
        "scope",
        "tiles poll arrivals from peers with scope gpu",
        ((expert_gemm.await_rows, '"sys"', '"gpu"'),),
    ),
    Plant(
        "gemm2_does_not_wait",
        "consume",
        "a GEMM2 tile does not wait for GEMM1",
        (
            (
                expert_gemm.build_down,
                "await_block(ctx, call, standing, wait_ptr, block, tiles)",
                "await_block(ctx, call, standing, wait_ptr, block, 0)",
            ),
        ),
        sizes={"inter": 64},
    ),
]

_COMBINE = [
    Plant(
        "mover_waits_for_its_unit",
        "roles",
        "a dual-role mover waits for its unit while tiles are left",
        ((combine.build_and_combine, "if builds:", "if unit < 0:"),),
        fixed=CROWDED,
    ),
    Plant(
        "planned_crew_does_not_combine",
        "roles",
        "a planned crew leaves once it has built its tiles",
        ((combine.build_and_combine, "combines = index >= 0", "combines = index < 0"),),
        sizes={"options": MoeOptions(policy="planned_split")},
        fixed={"slots": None},
    ),
    Plant(
        "first_block_only",
        "consume",
        "a unit that reads two row blocks looks at the first only",
        (
            (
                combine.unit_span,
                "(row + rows - 1) // CONFIG.BLOCK_M + 1",
                "tl.minimum((row + rows - 1) // CONFIG.BLOCK_M, first) + 1",
            ),
        ),
        sizes=ONE_EXPERT,
        tokens=((40, 21, 9), (13, 33, 12)),
    ),
    Plant(
        "returned_gpu_scope",
        "scope",
        "returned rows are counted in with scope gpu",
        ((combine.push_unit, '"sys"', '"gpu"'),),
    ),
    Plant(
        "folded_after_the_first_row",
        "consume",
        "the fold begins when the first row has come back",
        (
            (
                fold.await_returned,
                "tl.load(tables.head + OWED)",
                "tl.minimum(tl.load(tables.head + OWED), 1)",
            ),
        ),
    ),
    Plant(
        "shared_not_awaited",
        "consume",
        "the fold does not wait for the shared expert",
        ((fold.await_returned, "SHARED_DONE, shared_tiles", "SHARED_DONE, 0"),),
        sizes={"shared_inter": 40, "router": RouterOptions(1)},
    ),
]

BACK = {"options": MoeOptions(save=True)}

_BACKWARD = [
    Plant(
        "backward_starts_not_awaited",
        "start and end",
        "gradients are pushed before the peers have told that their call before is over",
        (
            (
                moe_backward_kernel,
                "standing = start_hold(ctx, call, standing, peer, PHASE_START)",
                "standing = standing",
            ),
        ),
        sizes=BACK,
    ),
    Plant(
        "pads_not_cleared",
        "plan",
        "pad rows are left as they are and enter the weight gradients",
        (
            (
                gradient.clear_pads,
                "elements = (end - begin - rows) * size.hidden",
                "elements = (end - begin - rows) * 0",
            ),
        ),
        sizes=BACK,
    ),
    Plant(
        "inputs_not_awaited",
        "consume",
        "wgrad1 waits for the arrival of gradients instead of token rows",
        (
            (
                gradient.build_wgrad,
                "word = tl.where(second, 0, CONFIG.LOCAL_EXPERTS)",
                "word = 0",
            ),
        ),
        sizes=BACK,
    ),
    Plant(
        "wgrad_does_not_wait",
        "consume",
        "weight gradients are built before dgrad2 is done with the expert",
        ((gradient.await_expert, "local, blocks * columns)", "local, 0)"),),
        sizes=BACK,
    ),
    Plant(
        "dgrad1_does_not_wait",
        "consume",
        "dgrad1 does not wait for dgrad2 of its row block",
        ((gradient.build_dgrad1, "+ block, block, tiles)", "+ block, block, 0)"),),
        sizes={**BACK, "hidden": 16, "inter": 16, "experts": 3},
    ),
    Plant(
        "dw_sent_early",
        "claims",
        "the first column of a row block sends dw",
        (
            (
                gradient.build_dgrad2,
                "elect_last(built_at(call, size) + block, columns, ctx.TARGET)",
                "elect_last(built_at(call, size) + block, 1, ctx.TARGET)",
            ),
        ),
        sizes=BACK,
    ),
    Plant(
        "dw_gpu_scope",
        "scope",
        "dw is counted in with scope gpu",
        ((gradient.send_dw, '"sys"', '"gpu"'),),
        sizes=BACK,
    ),
    Plant(
        "dw_not_awaited",
        "consume",
        "the router's gradients do not wait for dw",
        (
            (
                router_grad.make_logits,
                "tl.load(tables.head + OWED)",
                "tl.load(tables.head + OWED) * 0",
            ),
        ),
        sizes=BACK,
    ),
    Plant(
        "folded_before_the_router",
        "consume",
        "the fold does not wait for the router's gradients",
        ((fold.await_returned, "num_router_tiles(size, CONFIG)", "0"),),
        sizes=BACK,
    ),
]

PLANTS = {p.name: p for p in (*_ROUTE, *_PLAN, *_DISPATCH, *_BUILD, *_COMBINE, *_BACKWARD)}
