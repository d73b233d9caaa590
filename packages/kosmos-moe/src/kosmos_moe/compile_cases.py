"""Every kind of configuration that plans can choose, for the GPU-less compile guard.

`python -m kosmos_core.testing.compile_guard kosmos_moe.compile_cases:compile_cases`
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from kosmos_core.device.layout import Context
from kosmos_core.device.target import AMD, NVIDIA
from kosmos_core.testing.compile_guard import CompileCase, Expectations
from kosmos_core.workspace import control_sizes
from kosmos_heuristics import (
    Machine,
    MoeProblem,
    load_machine,
    plan_moe_backward,
    plan_moe_forward,
)

from kosmos_moe.device.config import BackwardOperands, Factors, ForwardOperands
from kosmos_moe.kernels.backward import moe_backward_kernel
from kosmos_moe.kernels.forward import moe_forward_kernel
from kosmos_moe.memory import MoeLimits, needs_of
from kosmos_moe.ops.call import Layer, make_config
from kosmos_moe.router import RouterOptions

# Machine model whose tiles and settings a target compiles with.
TARGETS = {"sm_90": "h200", "gfx950": "mi350x"}
CONTEXT_POINTERS = ("table_ptr", "control_ptr", "status_ptr", "trace_ptr")
TOKENS = 8192
# Bytes a thread of sm_90 may spill in a backward with a shared expert, and why.
SPILLS = 96
SPILL_REASON = (
    "its assembly has two local stores and two loads, once a launch and outside all loops: the "
    "number of workgroups and the state of a branch, kept from the first step to the last"
)
# The same in a forward that saves what its backward needs.
FORWARD_SPILLS = 16
FORWARD_REASON = "two scalars beside the sums of a tile, with a shared expert and saved products"
# (world size, hidden, inter, experts, k, width of the shared expert): of known models, and odd.
DEEPSEEK_V3 = (8, 7168, 2048, 256, 8, 2048)
QWEN3_30B = (2, 2048, 768, 128, 8, 0)
LLAMA4 = (8, 5120, 8192, 16, 1, 8192)
NARROW = (2, 1024, 768, 32, 6, 768)
ODD = (3, 1032, 360, 12, 5, 0)
GROUPED = RouterOptions(8, score="sigmoid", normalize=True, groups=8, group_topk=4, scaling=2.5)

Variant = tuple[tuple[int, int, int, int, int, int], RouterOptions, dict[str, Any]]


def _variants() -> list[Variant]:
    """Few, since each takes ten seconds: what they are made of is spread over them."""
    losses = RouterOptions(8, aux_coefficient=0.01, z_coefficient=0.001)
    after = {"policy": "dedicated_combine", "order": "destination_major", "trace": 1024}
    back = {"backward": True, "save": True}
    grouped = replace(GROUPED, aux_coefficient=0.1)
    sigmoid = RouterOptions(6, score="sigmoid", aux_coefficient=0.01, z_coefficient=0.001)
    return [
        (DEEPSEEK_V3, grouped, {"biased": True, "padded": True, "save": True}),
        (QWEN3_30B, losses, {"save": True}),
        (QWEN3_30B, RouterOptions(8, score_first=False), after),
        ((1, *QWEN3_30B[1:]), RouterOptions(8), {"given": True, "policy": "planned_split"}),
        (LLAMA4, RouterOptions(1, score="sigmoid"), {"save": True}),
        (ODD, RouterOptions(5, forced="uniform"), {"bf16_router": True}),
        (DEEPSEEK_V3, grouped, {**back, "padded": True}),
        (QWEN3_30B, losses, {**back, "main_grad": True}),
        (NARROW, sigmoid, {**back, "biased": True}),
        ((1, *QWEN3_30B[1:]), RouterOptions(8), {**back, "given": True}),
        (ODD, RouterOptions(5, normalize=True, score_first=False), {**back, "bf16_router": True}),
    ]


def compile_cases() -> list[CompileCase]:
    """Forward and backward, on both vendors."""
    return [
        _case(target, load_machine(machine), *variant)
        for target, machine in TARGETS.items()
        for variant in _variants()
    ]


def _context(target: str, limits: MoeLimits, machine: Machine, trace: int) -> Context:
    needs = needs_of(limits, machine)
    stride, set_words, arrival_words = control_sizes(needs.max_tile_rows, needs.num_counters)
    vendor = AMD if target.startswith("gfx") else NVIDIA
    constants = (limits.world_size, set_words, arrival_words, stride, int(vendor.value), trace)
    return Context("*i64", "*i32", "*i64", "*i64", *(tl.constexpr(c) for c in constants))


FP32 = (
    "bias", "loss", "weights", "logits", "sums", "dloss", "drouter", "dweights", "partials",
    "dlogits", "router_dx",
)  # fmt: skip
INT32 = ("ids", "places", "counts", "list", "tables", "verdict")


def _operands(kind: Any, router: str, adds: bool) -> Any:
    types = {**dict.fromkeys(FP32, "*fp32"), **dict.fromkeys(INT32, "*i32")}
    if adds:
        types.update(dict.fromkeys(("dw1", "dw2", "dshared1", "dshared2"), "*fp32"))
    types.update(router=router, padding="*u8")
    return kind(*(types.get(name.removesuffix("_ptr"), "*bf16") for name in kind._fields))


def _case(
    target: str,
    machine: Machine,
    sizes: tuple[int, int, int, int, int, int],
    router: RouterOptions,
    choices: dict[str, Any],
) -> CompileCase:
    world, hidden, inter, experts, topk, shared = sizes
    policy = choices.get("policy", "two_way")
    order = choices.get("order", "destination_minor")
    bf16_router = choices.get("bf16_router", False)
    problem = MoeProblem(TOKENS, hidden, inter, experts, topk, world)
    backward = choices.get("backward", False)
    make = plan_moe_backward if backward else plan_moe_forward
    plan = make(problem, machine, policy=policy, order=order)
    kind: Any = BackwardOperands if backward else ForwardOperands
    limits = MoeLimits(world, TOKENS, hidden, inter, experts, topk, shared, training=backward)
    layer = Layer(
        hidden, inter, experts, shared, router, torch.bfloat16 if bf16_router else torch.float32,
        choices.get("biased", False), choices.get("padded", False), choices.get("given", False),
    )  # fmt: skip
    adds = choices.get("main_grad", False)
    config = make_config(layer, plan, machine, world, choices.get("save", False), backward, adds)
    words = [f"{name}={value}" for name, value in choices.items() if name != "backward"]
    factors = Factors(*("fp32",) * len(Factors._fields))
    ints = ("tokens", "hidden", "inter", "shared_inter", "arena_blocks", "dispatch_crew")
    aligned = [name for name, size in (("hidden", hidden), ("inter", inter)) if size % 16 == 0]
    peers = world > 1
    spills, reason = 0, ""
    if shared > 0 and target == "sm_90":
        spills, reason = (SPILLS, SPILL_REASON) if backward else (FORWARD_SPILLS, FORWARD_REASON)
    name = "moe_backward" if backward else "moe_forward"
    return CompileCase(
        name=f"{name} {layer} ep={world} score={router.score} {' '.join(words)}".strip(),
        kernel=moe_backward_kernel if backward else moe_forward_kernel,
        signature={
            "ops": _operands(kind, "*bf16" if bf16_router else "*fp32", adds),
            "ctx": _context(target, limits, machine, choices.get("trace", 0)),
            "factors": factors,
            **dict.fromkeys((*ints, "combine_crew", "call_hash"), "i32"),
            "CONFIG": config,
        },
        divisible_by_16=(
            *(f"ops.{f}" for f in kind._fields),
            *(f"ctx.{f}" for f in CONTEXT_POINTERS),
            *aligned,
            *(("shared_inter",) if shared % 16 == 0 and shared else ()),
        ),
        target=target,
        # What `World.launch` passes, and no more.
        options={"num_warps": plan.num_warps, "num_stages": plan.num_stages},
        expect=Expectations(
            # Start word; dispatched and returned rows.
            release_sys=2 + peers,
            release_gpu=5,
            acquire_sys=2 + peers,
            acquire_gpu=4,
            wide_load=2,
            mma=2,
            tma_load=4 if target == "sm_90" else 0,
            tma_store=2 if target == "sm_90" else 0,
            allow_spills=spills,
            reason=reason,
        ),
    )
