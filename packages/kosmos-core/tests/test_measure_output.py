"""What a measurement becomes: a machine for plans, tables, a picture, a file."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import matplotlib.image
import pytest
from kosmos_core.measure import to_json
from kosmos_core.measure.beside import sums
from kosmos_core.measure.budget import FULL
from kosmos_core.measure.copies import Way, best_curve, ways
from kosmos_core.measure.figure import draw
from kosmos_core.measure.report import print_report
from rich.console import Console

COUNTS = FULL.counts(FULL.movers, 132)


def copy_curves(world_size: int) -> list[dict]:
    """Curves like those of an H200: linear in movers up to what the link gives."""

    def gbps(way: Way, step: int, depth: int, warps: int) -> dict[str, float]:
        slope = {"pull": 24, "push": 42, "local": 60}[way.direction]
        slope *= (0.55 + 0.15 * depth) * step / 32768 * warps / 6
        top = {"pull": 330, "push": 351, "local": 2100}[way.direction]
        return {str(w): round(min(top, slope * w) * (1 - w / 4000), 1) for w in COUNTS}

    return [
        {
            "direction": way.direction,
            "peers": way.peers,
            "copy_bytes": 2 * v.step_elements,
            "depth": v.depth,
            "num_warps": v.num_warps,
            "gbps": gbps(way, v.step_elements, v.depth, v.num_warps),
        }
        for way in ways(world_size)
        for v in FULL.variants
    ]


def start_order(wgs: int) -> dict:
    """Workgroups that start in stripes, as the SMs of a GPU are filled."""
    shuffled = random.Random(1)
    keys = [i % 18 * (wgs / 18) + i / 18 + shuffled.random() * wgs / 12 for i in range(wgs)]
    tickets = [0] * wgs
    for place, i in enumerate(sorted(range(wgs), key=keys.__getitem__)):
        tickets[i] = place
    return {"wgs": wgs, "tickets": tickets, "start_ns": [11 * t for t in tickets]}


def synthetic(world_size: int) -> dict:
    """A measurement with H200-like figures."""
    curves = copy_curves(world_size)
    caps = FULL.cap_counts(132)
    tflops = {str(w): round(690 * (w / 132) ** 0.55, 1) for w in caps}
    loads = (0, *FULL.counts(FULL.power_wgs, 132))
    data = {
        "schema": 1,
        "machine": "NVIDIA H200",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "world_size": world_size,
        "num_wgs": 132,
        "flag_latency_us": 1.9 if world_size > 1 else None,
        "launch_us": 11.3,
        "latency": {"local_flag_us": 0.71, "empty_kernel_us": 4.6, "host_launch_us": 8.8},
        "start_order": {"persistent": start_order(132), "oversubscribed": start_order(1024)},
        "pull_gbps": None,
        "push_gbps": None,
        "copies": {"curves": curves, "engine_gbps": 368.0 if world_size > 1 else 2000.0},
        "tflops": tflops,
        "gemm": {
            "shape": list(FULL.gemm),
            "fixed_shape_tflops": tflops,
            "vendor_tflops": 721.0,
            "vendor_whole_rounds_tflops": 728.0,
            **{
                f"{vendor}{key}_tflops": {str(size): 600.0 + size % 97 for size in sizes}
                for vendor in ("", "vendor_")
                for key, sizes in (
                    ("contraction", FULL.contractions),
                    ("call", FULL.call_tiles),
                )
            },
        },
        "sums": [
            {
                "direction": kind.direction,
                "sources": kind.sources,
                "copy_bytes": variant.step_elements * 2 // kind.sources,
                "num_warps": variant.num_warps,
                "gbps": {str(w): 20.0 * w for w in COUNTS},
            }
            for kind in sums(world_size)
            for variant in FULL.sum_variants
        ],
        "beside": {
            "curves": [
                {
                    "direction": direction,
                    "gbps": {str(w): min(330.0, 30.0 * w) for w in FULL.beside_movers},
                    "tflops": {str(w): 690.0 - 3 * w for w in FULL.beside_movers},
                }
                for direction in ("pull", "push", "reduce")
            ],
            "alone_tflops": {str(w): 690.0 - w for w in FULL.beside_movers},
        },
        "power": {
            "source": "nvml",
            "watts": {str(w): 120 + 580 * (w / 132) ** 0.7 for w in loads},
            "mhz": {str(w): 1980 - max(0, w - 84) * 7 for w in loads},
        },
    }
    for direction in ("pull", "push"):
        best = best_curve(curves, direction, 1)
        if best is not None:
            data[f"{direction}_gbps"] = best["gbps"]
            data[f"{direction}_copy"] = {k: best[k] for k in ("copy_bytes", "depth", "num_warps")}
            data["copies"] |= {"collective_gbps": 231.0, "collective_us": 21.0}
    return data


def test_plans_can_be_made_from_a_measurement() -> None:
    heuristics = pytest.importorskip("kosmos_heuristics")
    machine = heuristics.machine_from_measurement(synthetic(2))
    plan = heuristics.plan_ag_gemm(heuristics.AgGemmProblem(8192, 3584, 4096, 2), machine)
    assert 1 <= plan.num_movers <= 66
    assert plan.cap == 132


@pytest.mark.parametrize("world_size", [1, 8])
def test_a_picture_is_drawn_of_one_gpu_and_of_many(tmp_path: Path, world_size: int) -> None:
    draw(synthetic(world_size), tmp_path / "a.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "a.png").shape
    assert width >= 1600
    assert height >= 1100


def halve_copies(data: dict) -> None:
    for curve in data["copies"]["curves"]:
        curve["gbps"] = {wgs: 0.5 * v for wgs, v in curve["gbps"].items()}


def make_proportional(data: dict) -> None:
    data["tflops"] = {wgs: v * int(wgs) / 132 for wgs, v in data["tflops"].items()}


def turn_around(data: dict) -> None:
    for order in data["start_order"].values():
        order["tickets"].reverse()


def halve_movers(data: dict) -> None:
    for curve in data["beside"]["curves"]:
        curve["gbps"] = {wgs: 0.5 * v for wgs, v in curve["gbps"].items()}


def forget_power(data: dict) -> None:
    data["power"] = {"note": "not measured: no meter"}


def test_each_part_of_the_data_shows_in_its_part_of_the_picture(tmp_path: Path) -> None:
    data = synthetic(2)

    def quadrants(data: dict) -> list:
        draw(data, tmp_path / "b.png")
        image = matplotlib.image.imread(tmp_path / "b.png")
        y, x = image.shape[0], image.shape[1] // 2
        return [
            image[rows, columns]
            # Top and bottom; the middle row has its own.
            for rows in (slice(150, y * 35 // 100), slice(y * 67 // 100, None))
            for columns in (slice(0, x), slice(x, None))
        ] + [image[y * 38 // 100 : y * 66 // 100]]

    before = quadrants(data)
    # Opposite corners change at once: what is redrawn may move its neighbours a little.
    for first, second in (
        ((0, halve_copies), (3, forget_power)),
        ((1, make_proportional), (2, turn_around)),
        ((4, halve_movers), (4, halve_movers)),
    ):
        changed = json.loads(json.dumps(data))
        for _, change in (first, second):
            change(changed)
        after = quadrants(changed)
        for quadrant, change in (first, second):
            touched = (abs(after[quadrant] - before[quadrant]).max(axis=2) > 0.2).mean()
            assert touched > 0.002, change.__name__


def test_the_report_names_every_curve() -> None:
    data = synthetic(8)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=200, file=nowhere)
        print_report(data, console)
    text = console.export_text()
    for wanted in (
        "pull 64 KiB x 3, 8 warps", "push to 7 32 KiB x 2, 4 warps", "pull from 7", "whole rounds",
        "8192x4096x4096", "reduce 4 KiB of 8", "push, TFLOPS beside", "tiles a WG in one call",
        "flag between ranks", "vendor's all-gather", "MHz by active workgroups",
    ):  # fmt: skip
        assert wanted in text


def test_json_is_read_back_as_it_was() -> None:
    data = synthetic(8)
    text = to_json(data)
    assert json.loads(text) == data
    # One curve or array a line, so that two measurements can be compared with diff.
    assert max(line.count(": {") + line.count(": [") for line in text.splitlines()) == 1
