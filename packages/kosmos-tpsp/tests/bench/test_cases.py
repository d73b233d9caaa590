"""Shapes of the benchmark by name and by size."""

from __future__ import annotations

import pytest
from kosmos_tpsp.bench.cases import Case, order_cases, parse_cases


def test_shapes_are_named_or_given() -> None:
    assert len(parse_cases("llama3", "tn", 8)) == len(parse_cases("llama3", "nn", 8)) == 24
    named = parse_cases(" 8b-fc1-mbs1 ; 512,256,128;", "tn", 2)
    assert named == [Case("8B-FC1-MBS1", 8192, 3584, 4096), Case("512x256x128", 512, 256, 128)]
    assert named[1].flops == 2 * 512 * 256 * 128
    assert named[1].remote_bytes(4) == 3 * 128 * 128 * 2
    assert {(c.name, c.layout) for c in order_cases()} == {
        ("70B-FC1-MBS8", "tn"),
        ("405B-QKV-MBS8", "tn"),
        ("70B-Down-MBS8", "nn"),
        ("405B-OProj-MBS8", "nn"),
    }


@pytest.mark.parametrize(
    ("spec", "layout", "says"),
    [
        ("8,8", "tn", "wanted llama3"),
        ("8,8,0", "tn", "positive"),
        ("8,8,-8", "tn", "positive"),
        ("13B-FC1-MBS1", "tn", "13B-FC1-MBS1"),
        (";", "tn", "at least one"),
        ("9,8,8", "tn", "does not divide over 2 ranks"),
        ("8,8,8", "nt", "layout"),
    ],
)
def test_shapes_that_are_none_are_refused(spec: str, layout: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_cases(spec, layout, 2)
