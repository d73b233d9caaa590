"""Schedules of the CPU executor, as this package's checks use them."""

from kosmos_core.testing.schedules import DELAYS, POLICIES, STARTS, Schedule

__all__ = ["DELAYS", "POLICIES", "STARTS", "Schedule"]
