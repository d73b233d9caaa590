"""Machines: the packaged ones, JSON round trips, garbage refused, curves interpolated."""

import dataclasses
import json

import pytest
from kosmos_heuristics import MACHINE_NAMES, Curve, Machine, MachineError, load_machine


@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_packaged_machine_round_trips_through_json(name):
    machine = load_machine(name)
    assert machine.name == name
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    assert load_machine(machine) is machine


@pytest.mark.parametrize("name", ["h200", "mi350x", "mi355x"])
def test_every_number_of_a_gpu_names_its_source(name):
    machine = load_machine(name)
    numbers = {item.name for item in dataclasses.fields(machine)} - {"name", "rule_set", "sources"}
    assert set(dict(machine.sources)) == numbers
    assert all(text.strip() for text in dict(machine.sources).values())


def test_wg_counts():
    wgs = {name: load_machine(name).num_wgs for name in MACHINE_NAMES}
    assert wgs == {"executor": 4, "h200": 132, "mi350x": 256, "mi355x": 256}


def test_transport_of_the_paper():
    machine = load_machine("mi350x")
    # Table A.4: 1 GiB gathered at TP 8 takes 2.217 ms with 56 WGs, 7/8 of it over the fabric.
    assert machine.gbps("pull", 56, 7) == pytest.approx(2**30 * 7 / 8 / 2.217e-3 / 1e9, rel=1e-3)


def test_mesh_scales_with_links_and_switch_does_not():
    mesh, switch = load_machine("mi350x"), load_machine("h200")
    for movers in (3, 8, 20):
        assert mesh.gbps("pull", movers, 1) == pytest.approx(mesh.gbps("pull", 7 * movers, 7) / 7)
        assert switch.gbps("pull", movers, 1) == switch.gbps("pull", movers, 7)
    assert mesh.peak_gbps("pull", 1) == pytest.approx(mesh.peak_gbps("pull", 7) / 7)
    assert switch.peak_gbps("push", 1) == switch.peak_gbps("push", 7)


def test_curve_is_linear_between_points_and_flat_beyond():
    curve = Curve.from_mapping("c", {"16": 300, "4": 100.0})
    assert curve.points == ((4, 100.0), (16, 300.0))
    assert curve.at(0) == 0
    assert curve.at(2) == 50
    assert curve.at(10) == 200
    assert curve.at(400) == 300
    assert curve.peak == 300


@pytest.mark.parametrize(
    "points",
    [
        *(None, [], {}, {"a": 1}, {"0": 1}, {"-4": 1}, {"4": -1}, {"4": 0}, {"4": "x"}),
        *({"4": None}, {"4": float("nan")}, {"4": float("inf")}, {"4": True}, {"4": 7e14}),
        {"4": 1, "04": 2},
    ],
)
def test_bad_curves_are_refused(points):
    with pytest.raises(MachineError, match=r"tflops"):
        Curve.from_mapping("tflops", points)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", ""),
        ("rule_set", "gfx"),
        ("num_wgs", 1),
        ("num_wgs", "132"),
        ("num_wgs", 10**9),
        ("tiles", []),
        ("tiles", 3),
        ("tiles.0.block_m", 96),
        ("tiles.0.block_n", 0),
        ("tiles.0.num_warps", 3),
        ("tiles.0.num_stages", 0),
        ("tiles.0.efficiency", 0),
        ("tile_row_rows", 64),
        ("tile_row_rows", 100),
        ("topology", "ring"),
        ("curve_peers", 0),
        ("transport", "shove"),
        ("pull", 5),
        ("push.copy_bytes", 8),
        ("push.copy_bytes", 24000),
        ("pull.gbps", {"8": -3}),
        ("tflops", {}),
        ("tile_us", -1),
        ("flag_latency_us", None),
        ("launch_us", "2"),
        ("hbm_gbps", 0),
        ("baseline.tflops", 0),
        ("baseline.gemm_us", -2),
        ("max_split_k_bytes", -1),
        ("l2_bytes", 0),
        ("num_xcds", 0),
        ("sources", ["a"]),
        ("sources", {"pull": 3}),
        ("schema", 2),
    ],
)
def test_bad_fields_are_named(path, value):
    data = json.loads(json.dumps(load_machine("h200").to_dict()))
    *parents, leaf = path.split(".")
    at = data
    for key in parents:
        at = at[int(key)] if key.isdigit() else at[key]
    at[leaf] = value
    with pytest.raises(MachineError) as caught:
        Machine.from_dict(data)
    assert leaf in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unknown_fields_are_named():
    data = load_machine("h200").to_dict()
    optional = {"mxfp8_ratio", "reduce"}
    for field in set(data) - optional:
        with pytest.raises(MachineError, match=rf"machine\.{field}: "):
            Machine.from_dict({key: value for key, value in data.items() if key != field})
    older = Machine.from_dict({key: data[key] for key in set(data) - optional})
    assert (older.mxfp8_ratio, older.reduce) == (1.0, None)
    with pytest.raises(MachineError, match=r"machine\.colour: "):
        Machine.from_dict({**data, "colour": 1})
    with pytest.raises(MachineError, match=r"machine: "):
        Machine.from_dict([1])


def test_machine_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load_machine("mi350x").to_dict()))
    assert load_machine(path) == load_machine(str(path)) == load_machine("mi350x")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "NaN", "[" * 100_000, '{"schema": 1}'])
def test_bad_files_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(MachineError) as caught:
        load_machine(path)
    assert "\n" not in str(caught.value)


def test_unreadable_sources_are_refused(tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for source in ("mi999", tmp_path, tmp_path / "none.json", binary):
        with pytest.raises(MachineError, match="machine: got"):
            load_machine(source)
