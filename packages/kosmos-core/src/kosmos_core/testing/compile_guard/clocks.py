"""Finds branches on a clock that every warp reads for itself.

A wait that ends when a bound is over must end for all warps of a workgroup at once: a reduction
over the workgroup makes one time of what its warps read.
"""

from __future__ import annotations

import re

from kosmos_core.testing.compile_guard.cases import Finding

_CLOCK = re.compile(r"%globaltimer|%clock|s_memrealtime|s_memtime|SHADER_CYCLES")
_REDUCED = re.compile(r'"tt\.reduce"|bar\.red\.')  # one answer for the whole workgroup
_VALUE = re.compile(r"%[\w$-]+")
_BRANCH = re.compile(r"\b(scf\.(if|condition|yield|while|for)|cf\.cond_br|cf\.br)\b")


def check_clocks(ttir_text: str) -> list[Finding]:
    """Clocks in Triton's own IR whose value reaches a branch, or is carried over one, unreduced."""
    own: set[str] = set()
    findings = []
    for raw in ttir_text.splitlines():
        line = raw.split(" loc(")[0].strip()
        if line.startswith("tt.func"):
            own.clear()  # names are a function's own
        made, _, rest = (
            line.partition(" = ") if re.match(r"%\S+(:\d+)? = ", line) else ("", "", line)
        )
        reads_clock = "tt.elementwise_inline_asm" in rest and bool(_CLOCK.search(rest))
        tainted = reads_clock or bool(own.intersection(_VALUE.findall(rest)))
        if tainted and _BRANCH.search(rest):
            findings.append(
                Finding("clock", "", f"a clock of each warp's own decides: {line[:120]}")
            )
        elif made:
            # Names are used again in other regions.
            name = made.split(":")[0]
            (own.add if tainted and not _REDUCED.search(rest) else own.discard)(name)
    return findings
