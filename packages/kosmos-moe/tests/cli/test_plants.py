"""Every planted defect is caught, and its schedule passes without it."""

from __future__ import annotations

import pytest
from kosmos_moe.__main__ import main
from kosmos_moe.cli.plant_list import PLANTS


@pytest.mark.parametrize("name", PLANTS)
def test_it_is_caught(name: str) -> None:
    plant = PLANTS[name]
    caught = plant.catch()
    assert caught is not None
    assert plant.false_alarms(caught.seed) == []


def test_the_command_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plant", "start_relaxed"]) == 1
    shown = capsys.readouterr().out
    assert 'sem="relaxed"' in shown
    assert "DataRace" in shown
    assert main(["check", "--plant", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PLANTS) >= 25
    assert main(["check", "--plant", "nothing"]) == 2
