"""The oracle itself: FP64, against a dense layer that computes every expert for every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World, reference_world
from kosmos_moe.reference import Experts, MoeOutput, choose, moe_layer, route
from kosmos_moe.router import RouterOptions

HIDDEN, INTER, EXPERTS = 24, 20, 12
OPTIONS = {
    "softmax": RouterOptions(3),
    "after": RouterOptions(3, score_first=False),
    "sigmoid": RouterOptions(4, score="sigmoid", normalize=True, scaling=2.5),
    "sigmoid after": RouterOptions(2, score="sigmoid", score_first=False),
    "groups": RouterOptions(4, score="sigmoid", groups=4, group_topk=2, normalize=True),
    "best of group": RouterOptions(2, groups=3, group_topk=2, group_best=3),
    "losses": RouterOptions(2, aux_coefficient=0.3, z_coefficient=0.1),
    "sigmoid loss": RouterOptions(2, score="sigmoid", aux_coefficient=0.3),
    "all": RouterOptions(12),
    "one": RouterOptions(1),
    "uniform": RouterOptions(5, forced="uniform"),
}


def draw(*shape: int, seed: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
    return t.requires_grad_(grad)


def tokens_of(rank: int, size: int) -> int:
    """Different on every rank, and none on the second of several."""
    return 0 if rank == 1 and size > 1 else 7 + 3 * rank


class Dense:
    """All weights of a layer, and the layer computed without any routing of rows."""

    def __init__(self) -> None:
        self.router = draw(EXPERTS, HIDDEN, seed=1, grad=True)
        self.w1 = draw(EXPERTS, 2 * INTER, HIDDEN, seed=2, grad=True)
        self.w2 = draw(EXPERTS, HIDDEN, INTER, seed=3, grad=True)
        self.shared = Experts(
            draw(2 * INTER, HIDDEN, seed=4, grad=True), draw(HIDDEN, INTER, seed=5, grad=True)
        )

    def every_expert(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, experts, hidden]."""
        gate, up = torch.einsum("th,eih->tei", x, self.w1).chunk(2, dim=2)
        return torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, self.w2)

    def weights(self, x: torch.Tensor, o: RouterOptions, bias: torch.Tensor | None) -> Any:
        """([tokens, experts] weights, 0 where not chosen; loss), written another way."""
        logits = x @ self.router.t()
        scores = logits.softmax(1) if o.score == "softmax" else logits.sigmoid()
        keys = (scores if o.score_first else logits) + (0 if bias is None else bias)
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        for t in range(len(x)):
            if o.forced:
                ids = [(t + j * (EXPERTS // o.topk)) % EXPERTS for j in range(o.topk)]
            else:
                groups = keys[t].detach().chunk(o.groups)
                best = sorted(
                    range(o.groups),
                    key=lambda g: (
                        -float(groups[g].sort(descending=True)[0][: o.best_of_group].sum())
                    ),
                )[: o.group_topk]
                size = EXPERTS // o.groups
                allowed = [e for e in range(EXPERTS) if e // size in best]
                ids = sorted(allowed, key=lambda e: (-float(keys[t, e].detach()), e))[: o.topk]
            chosen[t, ids] = True
        if o.score_first:
            weights = torch.where(chosen, scores, 0)
        elif o.score == "softmax":
            weights = torch.where(chosen, logits, -torch.inf).softmax(1)
        else:
            weights = torch.where(chosen, scores, 0)
        if o.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        loss = logits.new_zeros(())
        if len(x):
            share = scores if o.score == "softmax" else scores / scores.sum(1, keepdim=True)
            balance = (chosen.double().sum(0) * share.sum(0)).sum()
            loss = o.aux_coefficient * EXPERTS / (o.topk * len(x) ** 2) * balance
            loss = loss + o.z_coefficient * (logits.exp().sum(1).log() ** 2).mean()
        return weights * o.scaling, loss

    def layer(self, x: torch.Tensor, o: RouterOptions, bias: torch.Tensor | None) -> Any:
        weights, loss = self.weights(x, o, bias)
        y = torch.einsum("te,teh->th", weights, self.every_expert(x))
        gate, up = (x @ self.shared.w1.t()).chunk(2, dim=1)
        return y + (torch.nn.functional.silu(gate) * up) @ self.shared.w2.t(), loss

    def parameters(self) -> list[torch.Tensor]:
        return [self.router, self.w1, self.w2, *self.shared]


def backward(x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    ((y * draw(*y.shape, seed=len(y) + 40)).sum() + 1.7 * loss).backward()


def run_layer(
    rank: int, world: World, dense: Dense, o: RouterOptions, bias: torch.Tensor | None
) -> tuple[torch.Tensor, MoeOutput]:
    """The layer under test on one rank: leaves gradients in x and in this rank's parameters."""
    x = draw(tokens_of(rank, world.size), HIDDEN, seed=20 + rank, grad=True)
    local = EXPERTS // world.size
    own = slice(rank * local, (rank + 1) * local)
    experts = Experts(*(w.detach()[own].clone().requires_grad_() for w in (dense.w1, dense.w2)))
    router = dense.router.detach().clone().requires_grad_()
    shared = Experts(*(w.detach().clone().requires_grad_() for w in dense.shared))
    out = moe_layer(x, router, experts, world, o, bias=bias, shared=shared)
    backward(x, out.y, out.aux_loss)
    out = out._replace(y=out.y.detach())
    return x, out, [router.grad, *(w.grad for w in experts), *(w.grad for w in shared)]


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_dense_layer(
    name: str, size: int, biased: bool, on_cpu: Callable[..., list[Any]]
) -> None:
    o = OPTIONS[name]
    bias = draw(EXPERTS, seed=9) if biased else None
    results = on_cpu(size, run_layer, Dense(), o, bias)
    dense = Dense()
    grads = [torch.zeros_like(p) for p in dense.parameters()]
    for rank, (x, out, found) in enumerate(results):
        own_x = x.detach().clone().requires_grad_()
        y, loss = dense.layer(own_x, o, bias)
        torch.testing.assert_close(out.y, y)
        torch.testing.assert_close(out.aux_loss, loss)
        backward(own_x, y, loss)
        torch.testing.assert_close(x.grad, own_x.grad)
        # Router and shared expert are on every rank, the others on one.
        for place in (0, 3, 4):
            grads[place] += found[place]
        own = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        grads[1][own], grads[2][own] = found[1], found[2]
    for found, parameter in zip(grads, dense.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad)


def test_padding_goes_nowhere_and_counts_for_nothing() -> None:
    o = RouterOptions(3, aux_coefficient=1.0, z_coefficient=1.0)
    dense, world = Dense(), reference_world()
    x, padding = draw(9, HIDDEN, seed=0), torch.arange(9) % 3 == 1
    experts = Experts(dense.w1, dense.w2)
    out = moe_layer(x, dense.router, experts, world, o, padding=padding)
    alone = moe_layer(x[~padding], dense.router, experts, world, o)
    torch.testing.assert_close(out.y[~padding], alone.y)
    torch.testing.assert_close(out.aux_loss, alone.aux_loss)
    assert (out.y[padding] == 0).all()
    assert (out.ids[padding] == -1).all()
    assert (out.weights[padding] == 0).all()


def test_given_routing_is_followed_and_carries_gradients() -> None:
    dense, world = Dense(), reference_world()
    x = draw(5, HIDDEN, seed=0)
    ids = torch.tensor([[3, 0], [11, 4], [4, 3], [7, 8], [0, 1]])
    weights = draw(5, 2, seed=1, grad=True)
    experts = Experts(dense.w1, dense.w2)
    out = moe_layer(x, dense.router, experts, world, RouterOptions(2), routing=(ids, weights))
    every = dense.every_expert(x)
    wanted = (weights[:, :, None] * every.gather(1, ids[:, :, None].expand(-1, -1, HIDDEN))).sum(1)
    torch.testing.assert_close(out.y, wanted)
    (given,) = torch.autograd.grad(out.y.sum(), weights, retain_graph=True)
    torch.testing.assert_close(given, torch.autograd.grad(wanted.sum(), weights)[0])


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([[0, 1], [2, 2]], "distinct"),
        ([[0, 12], [1, 2]], "0 to 12"),
        ([[0, 1], [-1, 2]], "-1 to 2"),
    ],
)
def test_bad_routing_is_refused(ids: list[list[int]], told: str) -> None:
    dense = Dense()
    x = draw(2, HIDDEN, seed=0)
    routing = torch.tensor(ids), torch.ones(2, 2)
    with pytest.raises(ArgumentError, match=told):
        moe_layer(
            x, dense.router, Experts(dense.w1, dense.w2), reference_world(), RouterOptions(2),
            routing=routing,
        )  # fmt: skip


def test_ties_go_to_the_lowest_expert() -> None:
    keys = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert choose(keys, 3).tolist() == [[1, 2, 0], [0, 1, 2]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_still_chooses_distinct_experts(bad: float) -> None:
    x = torch.ones(2, HIDDEN)
    x[1] = bad
    for o in OPTIONS.values():
        routed = route(x, torch.ones(EXPERTS, HIDDEN), o)
        assert len(set(routed.ids[1].tolist())) == o.topk
        assert routed.ids.min() >= 0


def test_uniform_routing_gives_every_expert_as_much() -> None:
    o = RouterOptions(5, forced="uniform")
    ids = route(draw(EXPERTS * 4, HIDDEN, seed=0), draw(EXPERTS, HIDDEN, seed=1), o).ids
    assert torch.bincount(ids.flatten(), minlength=EXPERTS).unique().tolist() == [20]
    assert all(len(set(row)) == 5 for row in ids.tolist())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"topk": 0}, "topk: got 0"),
        ({"topk": True}, "topk: got True"),
        ({"topk": 17}, "topk: got 17"),
        ({"topk": 2, "score": "relu"}, "score: got 'relu'"),
        ({"topk": 2, "scaling": float("nan")}, "scaling: got nan"),
        ({"topk": 2, "aux_coefficient": -1.0}, "aux_coefficient: got -1.0"),
        ({"topk": 2, "groups": 2, "group_topk": 3}, "group_topk: got 3"),
        ({"topk": 2, "group_best": 0}, "group_best: got 0"),
        ({"topk": 2, "normalize": 1}, "normalize: got 1"),
        ({"topk": 2, "forced": "zipf"}, "forced: got 'zipf'"),
    ],
)
def test_bad_options_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        RouterOptions(**fields)


@pytest.mark.parametrize(
    ("options", "experts", "size", "told"),
    [
        (RouterOptions(2), 9, 2, "experts: got 9"),
        (RouterOptions(9), 8, 2, "topk: got 9, wanted at most the 8"),
        (RouterOptions(5, groups=4, group_topk=2), 8, 1, "topk: got 5, wanted at most the 4"),
        (RouterOptions(2, groups=3), 8, 2, "groups: got 3"),
        (RouterOptions(2, groups=4, group_best=3), 8, 2, "group_best: got 3"),
    ],
)
def test_options_that_do_not_fit_the_experts_are_refused(
    options: RouterOptions, experts: int, size: int, told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        options.check_experts(experts, size)


GLOO = """
    import json
    import torch.distributed as dist
    from kosmos_core.worlds import group_world
    from test_reference import Dense, RouterOptions, run_layer

    dist.init_process_group("gloo")
    world = group_world()
    x, out, grads = run_layer(world.rank, world, Dense(), RouterOptions(3), None)
    found = [out.y.tolist(), x.grad.tolist(), [g.sum().item() for g in grads]]
    with open(f"{world.rank}.json", "w") as f:
        json.dump(found, f)
    dist.destroy_process_group()
"""


def test_gloo_gives_what_virtual_ranks_give(
    tmp_path: Path, on_cpu: Callable[..., list[Any]]
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(GLOO))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    subprocess.run(
        [*command, "--standalone", "program.py"], cwd=tmp_path, check=True, timeout=200,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    for rank, (x, out, grads) in enumerate(on_cpu(3, run_layer, Dense(), RouterOptions(3), None)):
        y, dx, sums = json.loads((tmp_path / f"{rank}.json").read_text())
        wanted = torch.tensor(y, dtype=torch.float64).reshape(-1, HIDDEN)
        torch.testing.assert_close(out.y, wanted)
        wanted = torch.tensor(dx, dtype=torch.float64).reshape(-1, HIDDEN)
        torch.testing.assert_close(x.grad, wanted)
        torch.testing.assert_close([g.sum().item() for g in grads], sums)
