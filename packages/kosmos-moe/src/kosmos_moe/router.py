"""What a router may be told: how it scores, how many experts it chooses, which losses it adds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kosmos_core.errors import ArgumentError

MAX_TOPK = 16
SCORES = ("softmax", "sigmoid")
FORCED = ("uniform",)


def _refuse(name: str, got: object, wanted: str) -> ArgumentError:
    return ArgumentError(f"{name}: got {got!r}, wanted {wanted}")


@dataclass(frozen=True)
class RouterOptions:
    """How tokens choose experts.

    The logits l of a token are X Wr^T in FP32. Experts are chosen by a key, the largest first, ties
    to the lowest expert: the logit where neither a bias nor groups are used, else score + bias.
    Logits and keys that are NaN count as the smallest, so that every token always chooses `topk`
    distinct experts.

    Attributes:
        topk: experts that a token chooses, 1 to 16.
        score: "softmax" or "sigmoid".
        score_first: True scores all experts and takes the weights of the chosen ones; False chooses
            by logit and scores the chosen ones among themselves.
        normalize: divide the weights of a token by their sum.
        scaling: factor of all weights, after `normalize`.
        groups: equal runs of experts of which a token may use `group_topk`.
        group_topk: how many of them.
        group_best: keys of a group's best experts that are summed to its own key; None takes
            topk / group_topk, at least 1.
        aux_coefficient: of the load-balancing loss, E / (k T^2) sum over e of n_e P_e, where n_e
            counts the choices of expert e and P_e sums its share of each token's scores, over the T
            tokens of this rank that are not padding.
        z_coefficient: of the z-loss, the mean over those tokens of logsumexp(l)^2.
        forced: "uniform" sends token t to experts t + j E // k, for benchmarks; weights stay
            those of the logits.

    Raises:
        ArgumentError: a field is out of range.
    """

    topk: int
    score: str = "softmax"
    score_first: bool = True
    normalize: bool = False
    scaling: float = 1.0
    groups: int = 1
    group_topk: int = 1
    group_best: int | None = None
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    forced: str | None = None

    def __post_init__(self) -> None:
        for name in ("topk", "groups", "group_topk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _refuse(name, value, "a positive integer")
        if self.topk > MAX_TOPK:
            raise _refuse("topk", self.topk, f"at most {MAX_TOPK}")
        if self.score not in SCORES:
            raise _refuse("score", self.score, f"one of {', '.join(SCORES)}")
        for name in ("score_first", "normalize"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "True or False")
        for name in ("scaling", "aux_coefficient", "z_coefficient"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _refuse(name, value, "a number")
            if not math.isfinite(value) or (name != "scaling" and value < 0):
                raise _refuse(name, value, "a finite number, and coefficients of at least 0")
        if self.group_topk > self.groups:
            raise _refuse("group_topk", self.group_topk, f"at most the {self.groups} groups")
        best = self.group_best
        if best is not None and (not isinstance(best, int) or isinstance(best, bool) or best < 1):
            raise _refuse("group_best", best, "a positive integer or None")
        if self.forced is not None and self.forced not in FORCED:
            raise _refuse("forced", self.forced, f"None or one of {', '.join(FORCED)}")

    def check_experts(self, experts: int, world_size: int) -> None:
        """Checks what depends on the number of experts.

        Raises:
            ArgumentError: `experts` does not go with the ranks, the groups or `topk`.
        """
        if experts < 1 or experts % world_size:
            wanted = f"a positive multiple of the {world_size} ranks"
            raise _refuse("experts", experts, f"{wanted}; pad with experts that are never chosen")
        if experts % self.groups:
            raise _refuse("groups", self.groups, f"a divisor of the {experts} experts")
        reach = experts // self.groups * self.group_topk
        if self.topk > reach:
            raise _refuse("topk", self.topk, f"at most the {reach} experts that a token may use")
        if self.best_of_group > experts // self.groups:
            wanted = f"at most the {experts // self.groups} experts of a group"
            raise _refuse("group_best", self.best_of_group, wanted)

    @property
    def best_of_group(self) -> int:
        """Keys that are summed to the key of a group."""
        return self.group_best or max(1, self.topk // self.group_topk)
