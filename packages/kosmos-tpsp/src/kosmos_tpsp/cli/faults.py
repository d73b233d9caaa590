"""What counts as reported, as this package's checks use it."""

from kosmos_core.testing.faults import is_reported

__all__ = ["is_reported"]
