"""What counts as reported, without the executor: a machine for groups may lack greenlet."""

from __future__ import annotations

import sys

from kosmos_core.errors import KosmosError


def is_reported(error: Exception) -> bool:
    """Whether an exception is a finding, of KOSMOS or of the executor, and not a defect here."""
    executor = sys.modules.get("kosmos_core.executor")
    kinds = (KosmosError,) if executor is None else (KosmosError, executor.ExecutorError)
    return isinstance(error, kinds)
