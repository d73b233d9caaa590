"""`bench`: its figures with a clock of its own, and that wrong outputs have no time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from kosmos_core.worlds import cpu_world
from kosmos_mx.__main__ import main
from kosmos_mx.cli import bench

NAMES = [
    "copy",
    "quantize both",
    "quantize both, transposed",
    "quantize row",
    "quantize col",
    "swiglu and quantize both",
    "values of both",
    "dequantize row",
    "dequantize col",
]


class Clock:
    """Every call takes a millisecond, a copy half of one."""

    def time(self, name, fn, warmup, calls):
        fn()
        return [0.5 if name == bench.COPY else 1.0] * calls


def measure(sweep=False):
    with cpu_world(1) as world:
        (report,) = world.spmd(lambda rank: bench.run(world, Clock(), 70, 96, "rceil", 2, sweep))
    return report


def test_a_sweep_times_other_tiles():
    names = [row["name"] for row in measure(sweep=True)["rows_of_table"]]
    assert names[: len(NAMES)] == NAMES
    assert names[len(NAMES) :] == [
        f"quantize {axis}, {'/'.join(map(str, tile))}"
        for tile in bench.TILES
        for axis in ("both", "row", "col")
    ]


def test_figures_are_bytes_over_time():
    report = measure()
    rows = {row["name"]: row for row in report["rows_of_table"]}
    assert list(rows) == NAMES
    source = 70 * 96 * 2
    copies = 70 * 96 + 70 * 3 + 96 * 96 + 3 * 96
    assert rows["copy"]["bytes"] == 2 * source
    assert rows["quantize both"]["bytes"] == source + copies
    assert rows["swiglu and quantize both"]["bytes"] == 2 * source + copies
    assert rows["values of both"]["bytes"] == 3 * source
    assert rows["quantize both"]["gb_per_s"] == pytest.approx((source + copies) / 1e6)
    share = (source + copies) / (4 * source)
    assert rows["quantize both"]["share_of_copy"] == pytest.approx(share)
    assert report["wanted_share_of_copy"] == {"quantize both": 0.7}
    assert json.loads(json.dumps(report))["rows_of_table"][0]["round_ms"] == [0.5, 0.5]
    assert f"{share:.1%}" in bench.table(report)


@pytest.mark.parametrize("which", [0, 1])
def test_wrong_values_have_no_time(monkeypatch, which):
    right = bench.quantize

    def wrong(*arguments, **options):
        made = list(right(*arguments, **options))
        if options.get("values"):
            made[which] = made[which].clone()
            made[which][-1, 5] *= 1.5
        return made

    monkeypatch.setattr(bench, "quantize", wrong)
    with pytest.raises(bench.WrongOutput, match=f"values of the {('row', 'column')[which]}-wise"):
        measure()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("part", ["data", "scales"])
def test_a_wrong_output_has_no_time(monkeypatch, which, part):
    right = bench.quantize

    def wrong(*arguments, **options):
        copies = list(right(*arguments, **options))
        bits = getattr(copies[which], part).view(torch.uint8).clone()
        bits[-1, 5 if part == "data" else 0] ^= 1
        kind = getattr(copies[which], part).dtype
        copies[which] = replace(copies[which], **{part: bits.view(kind)})
        return tuple(copies)

    monkeypatch.setattr(bench, "quantize", wrong)
    with pytest.raises(bench.WrongOutput, match="differ from the reference"):
        measure()


@pytest.mark.gpu
def test_it_measures_this_gpu(tmp_path, capsys):
    path = tmp_path / "mx.json"
    command = ["bench", "--rows", "4096", "--cols", "4096", "--rounds", "1", "--json", str(path)]
    assert main(command) == 0
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["rows_of_table"]] == NAMES
    assert "quantize both" in capsys.readouterr().out
