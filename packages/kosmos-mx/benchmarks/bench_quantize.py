"""MXFP8 casts beside the copy bandwidth of this GPU.

    python bench_quantize.py [--rows N] [--cols N] [--json FILE]

Runs `python -m kosmos_mx bench` with the same arguments.
"""

from __future__ import annotations

import sys

from kosmos_mx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
