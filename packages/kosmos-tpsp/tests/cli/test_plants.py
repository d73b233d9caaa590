"""Every planted defect is caught, soon, with a report that says where; without it nothing is."""

from __future__ import annotations

import re

import pytest
from kosmos_core.executor import Mutation
from kosmos_tpsp.cli.plant_list import PLANTS
from kosmos_tpsp.cli.plants import Plant

# Processor time within which a defect must show. Wall time would measure the neighbours.
MOST_SECONDS = 2.0
RULES = {
    "publish", "scope", "consume", "epochs", "start and end", "roles", "claims", "bounded waits",
    "arrival in the data",
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS.values(), ids=lambda plant: plant.name)
def test_a_planted_defect_is_caught_and_named_and_its_absence_is_not(plant: Plant) -> None:
    caught = plant.catch()
    assert caught is not None, f"{plant.name} shows under none of the seeds {plant.seeds}"
    assert caught.seconds < MOST_SECONDS
    assert re.fullmatch(r"rank\d\.wg\d", caught.wg), caught.report
    assert re.fullmatch(r"\w+\.py:\d+", caught.line), caught.report
    assert caught.region, caught.report
    assert all(name in caught.report for name in (caught.wg, caught.region, caught.line))
    assert plant.false_alarms(caught.seed) == []


def test_there_are_enough_of_them_for_every_rule() -> None:
    assert len(PLANTS) >= 20
    assert {plant.rule for plant in PLANTS.values()} == RULES
    changes = [
        (*((fn, old, new) for fn, old, new in plant.edits), str(plant.choices), plant.op)
        for plant in PLANTS.values()
    ]
    assert len(set(changes)) == len(PLANTS)


def test_a_plant_that_changes_nothing_is_not_caught() -> None:
    first = next(iter(PLANTS.values()))
    fn, old, _ = first.edits[0]
    harmless = Plant("harmless", "none", "changes nothing", ((fn, old, old),), seeds=(0, 1))
    assert harmless.catch() is None


def test_a_plant_whose_text_is_gone_says_so() -> None:
    fn, _, new = next(iter(PLANTS.values())).edits[0]
    lost = Plant("lost", "none", "text that is not there", ((fn, "nowhere", new),))
    with pytest.raises(ValueError, match="exactly once"):
        lost.catch()


def test_mutations_are_of_shipped_functions() -> None:
    for plant in PLANTS.values():
        for mutation in plant.mutations():
            assert isinstance(mutation, Mutation)
            module = mutation.fn.__module__
            assert module.startswith(("kosmos_core.device.", "kosmos_mx.device.", "kosmos_tpsp."))
