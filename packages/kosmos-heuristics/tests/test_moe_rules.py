"""Table B.3 for the MoE kernels, and the readings of docs/decisions/0004."""

import dataclasses
import random

import pytest
from kosmos_heuristics import (
    MACHINE_NAMES,
    MoeProblem,
    PlanError,
    ProblemError,
    load_machine,
    plan_moe_backward,
    plan_moe_forward,
)

MACHINES = [load_machine("mi350x"), load_machine("mi355x")]
H200 = load_machine("h200")
# Hidden, width of an expert, experts, experts a token.
MODELS = {
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Qwen3-235B": (4096, 1536, 128, 8),
    "Qwen3-30B": (2048, 768, 128, 8),
    "Llama 4 Scout": (5120, 8192, 16, 1),
    "GLM-5.2": (6144, 2048, 256, 8),
    "Qwen3.5-397B": (4096, 1024, 512, 10),
    "DeepSeek-V4-Pro": (7168, 3072, 384, 6),
}


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.name)
def machine(request):
    return request.param


def layer(inter, *, hidden=4096, dtype="bf16", world_size=8, tokens=8192):
    return MoeProblem(tokens, hidden, inter, 128, 8, world_size, dtype)


def of_model(name, dtype="bf16"):
    hidden, inter, experts, topk = MODELS[name]
    return MoeProblem(8192, hidden, inter, experts, topk, 8, dtype)


@pytest.mark.parametrize(
    ("inter", "crew"), [(1023, 32), (1024, 24), (3071, 24), (3072, 16), (8192, 16)]
)
def test_row_6_bf16_dispatch_by_expert_width(machine, inter, crew):
    plan = plan_moe_forward(layer(inter), machine)
    assert plan.dispatch_crew == crew
    assert "B.3 row 6" in plan.rule


@pytest.mark.parametrize(
    ("inter", "crew"),
    # Wide experts, whose column-wise input goes with the backward: 24576 / I.
    [(8192, 16), (2048, 16), (1728, 16)],
)
def test_row_6_mxfp8_dispatch_of_wide_experts(machine, inter, crew):
    plan = plan_moe_forward(layer(inter, dtype="mxfp8"), machine)
    assert (plan.column_input, plan.dispatch_crew) == ("backward", crew)


@pytest.mark.parametrize(
    ("inter", "crew"),
    # A5: to the nearest multiple of 8, then clamped to 16..48, then doubled.
    # 18.7 is 16, not 24; 19.7 is 16; 20.2 is 24, not 16; 54.9 is clamped.
    [
        *((1536, 32), (1312, 32), (1248, 32), (1216, 48)),
        *((1024, 48), (768, 64), (448, 96), (32, 96)),
    ],
)
def test_row_6_mxfp8_dispatch_of_narrow_experts_is_doubled(machine, inter, crew):
    plan = plan_moe_forward(layer(inter, dtype="mxfp8"), machine)
    assert (plan.column_input, plan.dispatch_crew) == ("forward", crew)
    assert "doubled" in plan.rule


def test_row_6_on_models(machine):
    crews = {name: plan_moe_forward(of_model(name), machine).dispatch_crew for name in MODELS}
    assert crews == {
        "DeepSeek-V3": 24,
        "Qwen3-235B": 24,
        "Qwen3-30B": 32,
        "Llama 4 Scout": 16,
        "GLM-5.2": 24,
        "Qwen3.5-397B": 24,
        "DeepSeek-V4-Pro": 16,
    }


def test_a6_column_input_goes_forward_where_the_backward_pushes_longer_than_it_computes(machine):
    # Bytes of a row: dY and dX in BF16, X in MXFP8, 7 of 8 to another rank; 12 H I operations.
    for inter in range(32, 4096, 32):
        push = 7 / 8 * (2 + 2 + 33 / 32) / 424e9
        gemm = 12 * inter / 1900e12
        for tokens in (0, 1, 8192):
            problem = layer(inter, dtype="mxfp8", tokens=tokens)
            wanted = "forward" if push > gemm else "backward"
            for planner in (plan_moe_forward, plan_moe_backward):
                assert planner(problem, machine).column_input == wanted
    narrow = {
        name
        for name in MODELS
        if plan_moe_forward(of_model(name, "mxfp8"), machine).column_input == "forward"
    }
    assert narrow == {"Qwen3-235B", "Qwen3-30B", "Qwen3.5-397B"}
    assert plan_moe_forward(layer(512), machine).column_input == "none"


@pytest.mark.parametrize(
    ("cap", "crew"), [(256, 128), (255, 120), (192, 96), (130, 64), (40, 16), (16, 8), (7, 3)]
)
def test_row_7_and_a12_combine_crew_by_cap(machine, cap, crew):
    # The smaller of 128 and the cap, down to a multiple of 8, and at most half the cap.
    plan = plan_moe_forward(layer(2048), machine, cap=cap)
    assert plan.combine_crew == crew
    assert "B.3 row 7" in plan.rule


def test_row_7_has_128_at_most_also_where_half_the_cap_is_more(machine):
    large = dataclasses.replace(machine, num_wgs=512)
    assert plan_moe_forward(layer(2048), large).combine_crew == 128
    assert plan_moe_backward(layer(64), large).combine_crew == 128


def row_8(sent, flops, rate, wgs=256, bounds=(32, 64)):
    push, gemm = sent / 424e9, flops / rate
    crew = -(-wgs * push / (push + gemm) // 8) * 8
    return int(min(max(crew, bounds[0]), bounds[1]))


def row_9(sent, flops, rate, bounds):
    crew = -(-256 * (sent / 424e9) / (flops / rate) // 8) * 8
    return int(min(max(crew, bounds[0]), bounds[1]))


def test_rows_8_and_9_and_a7_backward_crews_by_bytes_and_work(machine):
    seen = set()
    for inter in (256, 512, 768, 1024, 1312, 1536, 2048, 2560, 3072, 4096, 8192):
        for dtype, rate in (("bf16", 1000e12), ("mxfp8", 1900e12)):
            problem = layer(inter, dtype=dtype)
            plan = plan_moe_backward(problem, machine)
            elements = 8192 * 8 * 4096 * 7 // 8
            column = elements * 33 // 32 if plan.column_input == "backward" else 0
            flops = 12 * 8192 * 8 * 4096 * inter
            assert plan.dispatch_crew == row_8(2 * elements + column, flops, rate)
            least = {"bf16": 24, "mxfp8": 32}[dtype]
            assert plan.combine_crew == row_9(2 * elements, flops, rate, (least, 128))
            seen.add((plan.dispatch_crew, plan.combine_crew))
    dispatch, combine = zip(*seen, strict=True)
    # Both clamps and values between them were met.
    assert {32, 64} < set(dispatch)
    assert {24, 32, 128} < set(combine)


def test_a7_256_is_the_constant_and_not_the_cap(machine):
    problem = layer(1024)
    free = plan_moe_backward(problem, machine)
    capped = plan_moe_backward(problem, machine, cap=224)
    assert (free.dispatch_crew, free.combine_crew) == (
        capped.dispatch_crew,
        capped.combine_crew,
    )
    assert plan_moe_backward(problem, machine, cap=64).dispatch_crew == 32


def test_rules_do_not_depend_on_the_model():
    for name in MODELS:
        for dtype in ("bf16", "mxfp8"):
            for planner in (plan_moe_forward, plan_moe_backward):
                plans = [planner(of_model(name, dtype), machine) for machine in MACHINES]
                assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("hidden", "depth"),
    [
        *((7168, 7), (4096, 8), (6144, 6), (2048, 4), (8192, 8), (3072, 6), (3584, 7), (10240, 4)),
        # A3: none of them divides 10 and 5; 11 leaves one of two bursts of 6 empty.
        *((5120, 5), (2560, 5), (5632, 6)),
        # A ragged last piece is a piece; fewer than four are one burst.
        *((4088, 8), (2880, 6), (1536, 3), (1024, 2), (512, 1), (64, 1)),
    ],
)
def test_row_10_and_a3_burst_depth(machine, hidden, depth):
    for planner in (plan_moe_forward, plan_moe_backward):
        for dtype in ("bf16", "mxfp8"):
            if hidden % 32 == 0 or dtype == "bf16":
                plan = planner(layer(2048, hidden=hidden, dtype=dtype), machine)
                assert plan.burst_depth == depth


def test_every_hidden_size_has_a_burst_depth(machine):
    for hidden in range(8, 40000, 248):
        depth = plan_moe_forward(layer(2048, hidden=hidden), machine).burst_depth
        pieces = -(-hidden // 512)
        assert 1 <= depth <= min(8, pieces)
        assert depth >= min(4, pieces)


def test_a4_minimum_over_ranks_is_of_the_dispatch_crew(machine):
    # A rank with the whole GPU beside one with 40 WGs: both dispatch with what fits in 20.
    free = plan_moe_forward(layer(512), machine, smallest_cap=40)
    small = plan_moe_forward(layer(512), machine, cap=40, smallest_cap=40)
    assert free.dispatch_crew == small.dispatch_crew == 16
    assert (free.combine_crew, small.combine_crew) == (128, 16)
    assert "minimum over ranks" in free.rule
    with pytest.raises(PlanError, match="smallest_cap"):
        plan_moe_forward(layer(512), machine, smallest_cap=1)


@pytest.mark.parametrize(
    ("world_size", "crew"), [(8, 32), (7, 32), (6, 24), (4, 16), (3, 16), (2, 8), (1, 8)]
)
def test_a11_dispatch_crew_follows_the_links(machine, world_size, crew):
    forward = plan_moe_forward(MoeProblem(8192, 4096, 512, 840, 8, world_size), machine)
    assert forward.dispatch_crew == crew
    # Dual-role movers build while they wait: their count stays.
    assert forward.combine_crew == 128


def test_mxfp8_lower_clamp_of_the_backward_combine(machine):
    assert plan_moe_backward(layer(16384), machine).combine_crew == 24
    assert plan_moe_backward(layer(16384, dtype="mxfp8"), machine).combine_crew == 32


def test_h200_crews_stay_where_they_were_measured():
    rng = random.Random()
    seen = set()
    for _ in range(300):
        world_size = rng.randint(2, 8)
        problem = MoeProblem(
            rng.randint(1, 16384),
            64 * rng.randint(8, 128),
            32 * rng.randint(8, 256),
            world_size * rng.randint(8, 32),
            rng.randint(1, 8),
            world_size,
        )
        forward = plan_moe_forward(problem, H200)
        assert forward.dispatch_crew in range(16, 49, 8)
        assert forward.combine_crew == 64
        seen.add(forward.dispatch_crew)
    assert len(seen) > 2


def test_h200_dispatch_is_the_share_of_pushing():
    for name in MODELS:
        problem = of_model(name)
        rows = 8192 * problem.topk
        push = rows * problem.hidden * 2 * 7 / 8 / H200.push.gbps.peak / 1e9
        gemm = rows * problem.hidden * problem.inter * 4 / H200.tflops.at(132) / 1e12
        wanted = min(max(round(132 * push / (push + gemm) / 8) * 8, 16), 48)
        assert plan_moe_forward(problem, H200).dispatch_crew == wanted


def test_h200_backward_crews_have_the_form_of_rows_8_and_9():
    for name in MODELS:
        for dtype in ("bf16", "mxfp8"):
            problem = of_model(name, dtype)
            rows = 8192 * problem.topk
            elements = rows * problem.hidden * 7 // 8
            gemm = 12 * rows * problem.hidden * problem.inter / H200.tflops.at(132) / 1e12
            plan = plan_moe_backward(problem, H200)
            column = elements * 33 // 32 if plan.column_input == "backward" else 0
            push = (2 * elements + column) / H200.push.gbps.peak / 1e9
            dispatch = -(-132 * push / (push + gemm) // 8) * 8
            combine = -(-132 * 2 * elements / H200.push.gbps.peak / 1e9 / gemm // 8) * 8
            assert plan.dispatch_crew == min(max(dispatch, 16), 48)
            assert plan.combine_crew == min(max(combine, 24), 64)
    assert plan_moe_backward(of_model("Llama 4 Scout"), H200).combine_crew == 24


def test_h200_says_what_was_not_measured():
    problem = of_model("DeepSeek-V3", "mxfp8")
    backward = plan_moe_backward(problem, H200).explain().splitlines()
    for line in backward:
        if line.startswith(("dispatch_crew", "combine_crew", "burst_depth")):
            assert "extrapolated" in line
    forward = plan_moe_forward(problem, H200).explain().splitlines()
    assert "MXFP8 not measured" in next(f for f in forward if f.startswith("dispatch_crew"))


@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_properties_of_plans(name):
    whole, rng = load_machine(name), random.Random()
    for _ in range(300):
        machine = dataclasses.replace(whole, num_wgs=rng.choice([2, 5, 16, 100, whole.num_wgs]))
        world_size = rng.randint(1, 8)
        dtype = rng.choice(["bf16", "mxfp8"])
        experts = world_size * rng.randint(1, 40)
        problem = MoeProblem(
            rng.choice([0, 1, 77, 8192]),
            32 * rng.randint(1, 300),
            32 * rng.randint(1, 300),
            experts,
            rng.randint(1, min(16, experts)),
            world_size,
            dtype,
        )
        cap = rng.choice([None, rng.randint(2, 300)])
        for planner in (plan_moe_forward, plan_moe_backward):
            plan = planner(problem, machine, cap=cap)
            assert plan == planner(problem, machine, cap=cap)
            assert plan.cap == min(cap or machine.num_wgs, machine.num_wgs)
            for crew in (plan.dispatch_crew, plan.combine_crew):
                assert 1 <= crew <= plan.cap - crew
                # Multiples of 8, unless half the cap or the executor has no room for one.
                assert crew % 8 == 0 or crew == plan.cap // 2 < 8 or name == "executor"
            assert str(plan).startswith(plan.OP + " cap=")
            assert "\n" not in str(plan)
            assert str(plan).endswith(f"rule={plan.rule}")
            explained = plan.explain()
            assert all(f"{field} = " in explained for field in plan.to_dict() if field != "rule")
            assert "derived from" not in explained


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cap": 1}, "cap"),
        ({"cap": "8"}, "cap"),
        ({"transport": "shove"}, "transport"),
        ({"policy": "one_way"}, "policy"),
        ({"order": "local_first"}, "order"),
        ({"dispatch_crew": 0}, "dispatch_crew"),
        ({"dispatch_crew": 129}, "dispatch_crew"),
        ({"combine_crew": 129}, "combine_crew"),
        ({"burst_depth": 9}, "burst_depth"),
        ({"split_k": 2}, "override"),
        ({"movers_per_peer": 2}, "override"),
    ],
)
def test_bad_arguments_are_named(machine, arguments, named):
    for planner in (plan_moe_forward, plan_moe_backward):
        with pytest.raises(PlanError) as caught:
            planner(layer(2048), machine, **arguments)
        assert str(caught.value).startswith(f"{named}: got ")
        assert "\n" not in str(caught.value)


def test_overrides_are_taken_and_explained(machine):
    plan = plan_moe_forward(layer(2048), machine, dispatch_crew=12, burst_depth=3)
    assert (plan.dispatch_crew, plan.burst_depth) == (12, 3)
    for line in plan.explain().splitlines():
        if line.startswith(("dispatch_crew", "burst_depth")):
            assert "given by the caller" in line


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({"topk": 17}, "topk"), ({"topk": 5, "experts": 4}, "topk"), ({"topk": 0}, "topk")),
        *(
            ({"experts": 6}, "experts"),
            ({"world_size": 9}, "world_size"),
            ({"hidden": 0}, "hidden"),
        ),
        ({"inter": 40, "dtype": "mxfp8"}, "inter"),
        ({"tokens": -1}, "tokens"),
    ],
)
def test_bad_problems_are_named(changes, named):
    good = {"tokens": 8, "hidden": 64, "inter": 64, "experts": 64, "topk": 4, "world_size": 4}
    with pytest.raises(ProblemError, match=f"^{named}: got "):
        MoeProblem(**{**good, **changes})
