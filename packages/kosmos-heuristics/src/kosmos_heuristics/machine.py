"""Machines: the few numbers that plans and estimates are made from.

A machine is data: ``data/NAME.json`` or a file of the user's. Rank 0's machine is broadcast, so it
round-trips through plain JSON (``to_dict`` / ``from_dict``). ``sources`` says for each field where
its number came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kosmos_heuristics.checks import check_choice, check_int, check_number, check_power_of_two
from kosmos_heuristics.errors import MachineError
from kosmos_heuristics.parts import FIX, Baseline, Curve, TileShape, Transport

SCHEMA = 1
RULE_SETS = ("mi350", "h200", "executor")
TOPOLOGIES = ("mesh", "switch")
TRANSPORTS = ("pull", "push")
# Above any GPU; a larger count is garbage.
MAX_WGS = 4096
# What files may leave out.
_OPTIONAL = frozenset({"mxfp8_ratio", "reduce"})


@dataclass(frozen=True)
class Machine:
    """What plans and estimates know of a GPU and its node.

    Args:
        name: Name for messages.
        rule_set: Which rules plan for it: ``mi350`` (the paper's Table B.3), ``h200`` (the same
            closed form, from this machine's curves) or ``executor`` (tiny sizes for the CPU).
        num_wgs: WGs resident at once, one a CU or SM.
        tiles: Tile shapes; the first is the default, the others serve shapes with few tiles.
        tile_row_rows: Rows of a tile row, the unit at which gathered data is declared ready.
        topology: ``mesh`` (a link per peer) or ``switch`` (all of a rank's links serve any peer).
        curve_peers: Peers among which the transport curves were measured.
        transport: Transport to use when nothing else decides.
        pull: The pull transport.
        push: The push transport.
        tflops: BF16 TFLOPS of our own GEMM by number of builder WGs.
        tile_us: Fixed cost of a tile (claim, prologue, epilogue), microseconds.
        flag_latency_us: One flag from a rank to another, microseconds.
        launch_us: Fixed cost of one fused call (launch, start, last leaver), microseconds.
        hbm_gbps: Local memory bandwidth, GB/s, reads and writes counted.
        baseline: The unfused path.
        max_split_k_bytes: Most bytes of FP32 partials that split-K may use.
        l2_bytes: Last-level cache.
        num_xcds: Dies with a cache of their own among which WGs are dealt; 1 if there is one.
        mxfp8_ratio: Throughput of a GEMM of MXFP8 operands relative to BF16. 1 where the movers
            dequantise on arrival because the GPU has no block-scaled MMA.
        reduce: GB/s into one rank by number of WGs that pull from all peers and sum; None where it
            was not measured and the pull curve stands for it.
        sources: Field name to where its number came from.
    """

    name: str
    rule_set: str
    num_wgs: int
    tiles: tuple[TileShape, ...]
    tile_row_rows: int
    topology: str
    curve_peers: int
    transport: str
    pull: Transport
    push: Transport
    tflops: Curve
    tile_us: float
    flag_latency_us: float
    launch_us: float
    hbm_gbps: float
    baseline: Baseline
    max_split_k_bytes: int
    l2_bytes: int
    num_xcds: int
    mxfp8_ratio: float = 1.0
    reduce: Curve | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MachineError("name", self.name, "a name", FIX)
        check_choice(MachineError, "rule_set", self.rule_set, RULE_SETS, FIX)
        check_choice(MachineError, "topology", self.topology, TOPOLOGIES, FIX)
        check_choice(MachineError, "transport", self.transport, TRANSPORTS, FIX)
        check_int(MachineError, "num_wgs", self.num_wgs, 2, FIX)
        if self.num_wgs > MAX_WGS:
            raise MachineError("num_wgs", self.num_wgs, f"at most {MAX_WGS}", FIX)
        check_power_of_two(MachineError, "tile_row_rows", self.tile_row_rows, 16, FIX)
        for name in ("curve_peers", "l2_bytes", "num_xcds"):
            check_int(MachineError, name, getattr(self, name), 1, FIX)
        check_int(MachineError, "max_split_k_bytes", self.max_split_k_bytes, 0, FIX)
        for name in ("hbm_gbps", "mxfp8_ratio"):
            check_number(MachineError, name, getattr(self, name), FIX)
        for name in ("tile_us", "flag_latency_us", "launch_us"):
            check_number(MachineError, name, getattr(self, name), FIX, positive=False)
        if not self.tiles:
            raise MachineError("tiles", self.tiles, "at least one tile shape", FIX)
        for tile in self.tiles:
            if self.tile_row_rows % tile.block_m:
                raise MachineError(
                    "tile_row_rows",
                    self.tile_row_rows,
                    f"a multiple of block_m {tile.block_m}",
                    FIX,
                )

    @property
    def tile(self) -> TileShape:
        """The default tile shape."""
        return self.tiles[0]

    def source(self, field: str) -> str:
        """Where a field's number came from."""
        return dict(self.sources).get(field, f"machine {self.name}")

    def transport_named(self, name: str) -> Transport:
        """The ``pull`` or ``push`` transport."""
        return self.push if name == "push" else self.pull

    def dtype_ratio(self, dtype: str) -> float:
        """Throughput of a GEMM of ``dtype`` operands relative to BF16."""
        return self.mxfp8_ratio if dtype == "mxfp8" else 1.0

    def way_curve(self, way: str) -> Curve:
        """GB/s by WGs of ``pull``, ``push`` or ``reduce``."""
        if way == "reduce":
            return self.pull.gbps if self.reduce is None else self.reduce
        return self.transport_named(way).gbps

    def gbps(self, way: str, wgs: float, num_peers: int) -> float:
        """GB/s into one rank when ``wgs`` movers serve ``num_peers`` peers.

        On a mesh each peer has its own link: the measured curve is taken per link and scaled. On a
        switch all links serve whatever peers there are.
        """
        curve = self.way_curve(way)
        if self.topology == "switch" or num_peers < 1:
            return curve.at(wgs)
        share = num_peers / self.curve_peers
        return share * curve.at(wgs / share)

    def peak_gbps(self, way: str, num_peers: int) -> float:
        """Largest GB/s into one rank over any number of movers."""
        peak = self.way_curve(way).peak
        return peak if self.topology == "switch" else peak * max(1, num_peers) / self.curve_peers

    def to_dict(self) -> dict[str, object]:
        """Plain JSON data, the inverse of ``from_dict``."""
        data: dict[str, object] = {"schema": SCHEMA}
        for item in fields(self):
            data[item.name] = getattr(self, item.name)
        data["tiles"] = [dict(vars(tile)) for tile in self.tiles]
        for name in TRANSPORTS:
            way = self.transport_named(name)
            data[name] = {"copy_bytes": way.copy_bytes, "gbps": way.gbps.to_mapping()}
        data["tflops"] = self.tflops.to_mapping()
        if self.reduce is None:
            del data["reduce"]
        else:
            data["reduce"] = self.reduce.to_mapping()
        data["baseline"] = dict(vars(self.baseline))
        data["sources"] = dict(self.sources)
        return data

    @classmethod
    def from_dict(cls, data: object) -> Machine:
        """Read what ``to_dict`` wrote.

        Raises:
            MachineError: A field is missing, unknown, of the wrong kind or out of range.
        """
        names = {item.name for item in fields(cls)} | {"schema"}
        top = _record("machine", data, names - _OPTIONAL, _OPTIONAL)
        schema = top.pop("schema")
        if schema != SCHEMA:
            raise MachineError("schema", schema, str(SCHEMA), "use a file of this version")
        tiles = top["tiles"]
        if not isinstance(tiles, (list, tuple)):
            raise MachineError("tiles", tiles, "a list of tile shapes", FIX)
        tile_fields = {item.name for item in fields(TileShape)}
        top["tiles"] = tuple(TileShape(**_record("tiles", tile, tile_fields)) for tile in tiles)
        for name in TRANSPORTS:
            way = _record(name, top[name], {"gbps", "copy_bytes"})
            curve = Curve.from_mapping(f"{name}.gbps", way["gbps"])
            top[name] = Transport(curve, way["copy_bytes"])
        for name in ("tflops", "reduce"):
            if name in top:
                top[name] = Curve.from_mapping(name, top[name])
        baseline_fields = {item.name for item in fields(Baseline)}
        top["baseline"] = Baseline(**_record("baseline", top["baseline"], baseline_fields))
        sources = top["sources"]
        if not isinstance(sources, Mapping) or not all(
            isinstance(text, str) for pair in sources.items() for text in pair
        ):
            raise MachineError("sources", sources, "an object of field name to text", FIX)
        top["sources"] = tuple(sources.items())
        return cls(**top)


def _record(
    name: str, data: object, wanted: set[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """``data`` as a dict that has all keys ``wanted``, maybe some ``optional``, and no others."""
    if not isinstance(data, Mapping):
        raise MachineError(name, data, "an object", FIX)
    missing = sorted(wanted - set(data))
    if missing:
        raise MachineError(f"{name}.{missing[0]}", None, "a value", f"add it: {FIX}")
    unknown = sorted(str(key) for key in set(data) - wanted - optional)
    if unknown:
        raise MachineError(f"{name}.{unknown[0]}", data[unknown[0]], "no such field", FIX)
    return dict(data)
