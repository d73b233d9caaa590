"""What the fused layer competes with: NCCL all-to-all and torch's grouped GEMM, in sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kosmos_core.worlds import World

from kosmos_moe.bench.models import Weights
from kosmos_moe.reference import exchange, uniform_ids
from kosmos_moe.router import RouterOptions


@dataclass
class Baseline:
    """The layer in separate kernels.

    One host synchronisation a call remains: NCCL wants the numbers of rows from the host.

    Attributes:
        weights: operands.
        router: softmax router with normalised weights.
        world: the ranks.
        group: their process group.
    """

    weights: Weights
    router: RouterOptions
    world: World
    group: dist.ProcessGroup | None = None

    def route(self) -> tuple[torch.Tensor, torch.Tensor]:
        """([tokens, k] experts, [tokens, k] weights)."""
        w, k = self.weights, self.router.topk
        scores = torch.softmax(w.x.float() @ w.router.t(), dim=1)
        if self.router.forced:
            ids = uniform_ids(len(w.x), len(w.router), k, w.x.device)
            chosen = scores.gather(1, ids)
        else:
            chosen, ids = torch.topk(scores, k, dim=1)
        return ids, chosen / chosen.sum(dim=1, keepdim=True)

    def __call__(self) -> torch.Tensor:
        """[tokens, hidden] bf16."""
        w, k = self.weights, self.router.topk
        ranks, experts = dist.get_world_size(self.group), len(w.router)
        tokens, hidden = w.x.shape
        ids, weights = self.route()
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        matrix = received.view(ranks, -1)
        both = torch.stack((counts.view(ranks, -1).sum(1), matrix.sum(1))).tolist()
        sent_rows, received_rows = both
        rows = exchange(w.x[order // k], self.world, sent_rows, received_rows)
        local = torch.arange(matrix.shape[1], device=w.x.device).repeat(ranks)
        owner = torch.repeat_interleave(local, received, output_size=sum(received_rows))
        by_expert = torch.argsort(owner, stable=True)
        results = torch.empty_like(rows).index_copy(
            0, by_expert, self.experts(rows[by_expert], matrix.sum(0))
        )
        back = exchange(results, self.world, received_rows, sent_rows)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        y = torch.bmm(weights.to(torch.bfloat16)[:, None, :], back[place].view(tokens, k, hidden))[
            :, 0
        ]
        return y if w.shared is None else y + self.shared_expert(w.shared)

    def experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of the grouped GEMMs alone."""
        w = self.weights
        ends = torch.cumsum(counts, 0).to(torch.int32)
        gate, up = torch._grouped_mm(rows, w.w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return torch._grouped_mm(F.silu(gate) * up, w.w2.transpose(1, 2), offs=ends)

    def shared_expert(self, shared: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[tokens, hidden] of the shared expert."""
        gate, up = F.linear(self.weights.x, shared[0]).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, shared[1])

    def gemms(self) -> Callable[[], torch.Tensor]:
        """The GEMMs of this rank alone, on as many rows as it receives: the bound of compute."""
        w, counts = self.weights, self._received()
        rows = w.x[torch.arange(int(counts.sum()), device=w.x.device) % len(w.x)]

        def run() -> torch.Tensor:
            y = self.experts(rows, counts)
            return y if w.shared is None else self.shared_expert(w.shared)

        return run

    def _received(self) -> torch.Tensor:
        """[local experts] rows that this rank's experts receive."""
        ids, _ = self.route()
        counts = torch.bincount(ids.flatten(), minlength=len(self.weights.router))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received.view(dist.get_world_size(self.group), -1).sum(0)

    def loads(self) -> tuple[float, float]:
        """(hottest rank, hottest expert) over the mean."""
        counts = self._received()
        everywhere = torch.empty(
            dist.get_world_size(self.group) * len(counts), dtype=counts.dtype, device=counts.device
        )
        dist.all_gather_into_tensor(everywhere, counts, group=self.group)
        of_rank = everywhere.view(-1, len(counts)).sum(1).double()
        of_expert = everywhere.double()
        return float(of_rank.max() / of_rank.mean()), float(of_expert.max() / of_expert.mean())
