"""``python -m kosmos_heuristics fit``: the H200's constants from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.fit import CREW_TIMES, CURVES, GEMMS, Fitted, fit, packaged
from kosmos_heuristics.movers import CREWS
from kosmos_heuristics.parts import FIX


@click.command("fit")
@click.option("--curves", type=Path, help="Measurement of two GPUs.  [default: the packaged]")
@click.option("--gemms", type=Path, help="Times of GEMMs alone.  [default: the packaged]")
@click.option("--crews", type=Path, help="Times of ag_gemm by crew.  [default: the packaged]")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for simulate/h200.json, like the package's data.",
)
def fit_command(
    curves: Path | None, gemms: Path | None, crews: Path | None, output: Path | None
) -> None:
    """Fit the H200's crew rule and simulated machine to what was measured.

    The packaged measurements give the packaged constants.
    """
    given = ((curves, CURVES), (gemms, GEMMS), (crews, CREW_TIMES))
    found = fit(*(packaged(name) if path is None else _read(path) for path, name in given))
    for name, value, used in zip(found.crews._fields, found.crews, CREWS, strict=True):
        click.echo(f"{name} {value:g} (movers.py has {used:g})")
    for section, values in found.simulated.items():
        if section != "sources":
            click.echo(f"simulated, {section}: " + json.dumps(values))
    if output is not None:
        for path, text in texts(found).items():
            target = output / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            click.echo(f"written: {target}")


def texts(found: Fitted) -> dict[str, str]:
    """The package's data files, by path within its data folder."""
    return {"simulate/h200.json": json.dumps(found.simulated, indent=2) + "\n"}


def _read(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        wanted = "a readable JSON file"
        raise MachineError("measured", str(path), wanted, f"{FIX} ({error})") from None
    if not isinstance(data, dict):
        raise MachineError("measured", str(path), "an object", FIX)
    return data
