"""Word layout of the control memory that host and kernels share.

Three blocks, all created zeroed or filled by the host and owned by one workspace:

* control (int32, this rank only): a header, then two sets of counters chosen by the parity of the
  epoch;
* signal (int64, symmetric): start words of all peers in two slots, the abort word, one abort record
  a raiser;
* arrival (int32, symmetric): two sets of counters in which peers count the units they pushed to
  this rank.

Source: the synchronisation rules in docs/memory-model.md.
"""

from typing import NamedTuple

import triton.language as tl

MAX_RANKS = tl.constexpr(8)

# Regions of the peer table (int64 [NUM_REGIONS, MAX_RANKS]): the address of each region on each
# rank. A region that its owner refills before it holds its peers' starts is two-deep: two rows of
# the table.
SIGNAL = tl.constexpr(0)
ARRIVAL = tl.constexpr(1)
SHARD = tl.constexpr(2)  # and 3: AG pull, the owner's chunk, by parity of the epoch
GATHER = tl.constexpr(4)  # push, written by peers: gathered rows (AG), partial sums (RS)
STAGING = tl.constexpr(5)  # and 6: RS pull, own partial sums for all owners, by turns
HANDOVER = tl.constexpr(7)  # written by its owner with every peer's start held, read by peers later
NUM_REGIONS = tl.constexpr(8)

# Control header (int32 words).
EPOCH = tl.constexpr(0)
RANK = tl.constexpr(1)
RAISED = tl.constexpr(2)
BOUND_MS = tl.constexpr(3)
STAGE_TURN = tl.constexpr(4)  # calls that have used the staging region
STAGE_EXTENT = tl.constexpr(5)  # and 6: what is written in each half, in runs of EXTENT_ELEMENTS
EXTENT_ELEMENTS = tl.constexpr(8)
HEADER_WORDS = tl.constexpr(32)

# One set of counters. Queue heads and counters that many hit stand on lines of their own.
LINE = tl.constexpr(32)
TICKET = tl.constexpr(0)
LEAVE = tl.constexpr(32)
COPY_QUEUE = tl.constexpr(64)
COPY_DONE = tl.constexpr(96)
UNIT_QUEUE = tl.constexpr(128)
TILE_QUEUE = tl.constexpr(160)
KEEP_QUEUE = tl.constexpr(192)
SPLIT_QUEUE = tl.constexpr(224)
JOIN_QUEUE = tl.constexpr(256)
POISON_QUEUE = tl.constexpr(288)
REDUCE_QUEUE = tl.constexpr(320)
UNPACK_QUEUE = tl.constexpr(352)
ALL_READY = tl.constexpr(384)
SECOND_QUEUE = tl.constexpr(416)
COUNTERS = tl.constexpr(448)  # arrival words of (source, tile row), then split-K tickets
SET_GRANULE = tl.constexpr(1024)  # a set is a multiple of this, to be zeroed by whole blocks

# Signal words (int64).
START = tl.constexpr(0)  # [2 parities][MAX_RANKS]
ABORT = tl.constexpr(16)
RECORD = tl.constexpr(32)  # [raiser][RECORD_WORDS]
RECORD_WORDS = tl.constexpr(8)
SIGNAL_WORDS = tl.constexpr(128)

# Words of an abort record.
RECORD_CODE = tl.constexpr(0)
RECORD_PEER = tl.constexpr(1)
RECORD_PHASE = tl.constexpr(2)
RECORD_FLAG = tl.constexpr(3)
RECORD_INDEX = tl.constexpr(4)
RECORD_SEEN = tl.constexpr(5)
RECORD_WANTED = tl.constexpr(6)
RECORD_EPOCH = tl.constexpr(7)

# Why a call was aborted.
TIMEOUT = tl.constexpr(1)
MISMATCH = tl.constexpr(2)
FAULT = tl.constexpr(3)

# Where a workgroup waited, and on what kind of word.
PHASE_START = tl.constexpr(1)
PHASE_GATHER = tl.constexpr(2)
PHASE_BUILD = tl.constexpr(3)
PHASE_REDUCE = tl.constexpr(4)
PHASE_LEAVE = tl.constexpr(5)
PHASE_PLAN = tl.constexpr(6)
PHASE_COMBINE = tl.constexpr(7)
PHASE_FOLD = tl.constexpr(8)
FLAG_START = tl.constexpr(1)
FLAG_ARRIVAL = tl.constexpr(2)
FLAG_DATA = tl.constexpr(3)

PHASE_NAMES = {
    1: "start",
    2: "gather",
    3: "build",
    4: "reduce",
    5: "leave",
    6: "plan",
    7: "combine",
    8: "fold",
}
FLAG_NAMES = {1: "start word", 2: "arrival counter", 3: "data"}


class Context(NamedTuple):
    """What every launch carries: where the shared words are, and the constants of the world.

    Attributes:
        table_ptr: int64 [NUM_REGIONS, MAX_RANKS], address of each region on each rank.
        control_ptr: int32, header and two sets of counters of this rank.
        status_ptr: int64 [1], host-visible copy of the abort word.
        trace_ptr: int64 event buffer (`device/trace.py`), or any int64 pointer when TRACE is 0.
        WORLD: number of ranks.
        SET_WORDS: int32 words in one set of counters.
        ARRIVAL_WORDS: int32 words in one set of the symmetric arrival region.
        MAX_ROWS: tile rows a source may have (stride of the arrival words).
        TARGET: NVIDIA or AMD (`device/target.py`).
        TRACE: 0, or the number of events a workgroup may record.
    """

    table_ptr: tl.tensor
    control_ptr: tl.tensor
    status_ptr: tl.tensor
    trace_ptr: tl.tensor
    WORLD: tl.constexpr
    SET_WORDS: tl.constexpr
    ARRIVAL_WORDS: tl.constexpr
    MAX_ROWS: tl.constexpr
    TARGET: tl.constexpr
    TRACE: tl.constexpr


class Call(NamedTuple):
    """One call as a workgroup sees it after `call_enter`.

    Attributes:
        rank: this rank.
        epoch: number of this call on the workspace.
        parity: epoch & 1, chooses slots and sets.
        start_word: what every peer must publish for this call (hash << 32 | epoch).
        ticket: arrival ticket of this workgroup.
        set_ptr: this call's set of rank-local counters.
        signal_ptr: this rank's signal words.
        bound_ns: how long a wait may last.
    """

    rank: tl.tensor
    epoch: tl.tensor
    parity: tl.tensor
    start_word: tl.tensor
    ticket: tl.tensor
    set_ptr: tl.tensor
    signal_ptr: tl.tensor
    bound_ns: tl.tensor


class Standing(NamedTuple):
    """What a workgroup has established so far in a call; carried through its loops.

    Attributes:
        held: bit p is set once peer p's start word has been acquired.
        ok: 1, or 0 once the call is aborted.
    """

    held: tl.tensor
    ok: tl.tensor
