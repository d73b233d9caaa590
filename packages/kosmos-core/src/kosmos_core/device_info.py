"""What the host knows about a GPU before anything is measured."""

from __future__ import annotations

import torch

from kosmos_core.device.target import AMD, NVIDIA


def vendor_target() -> int:
    """NVIDIA or AMD constant of the device functions for this build of torch."""
    return int((AMD if torch.version.hip else NVIDIA).value)


def machine_name(device: torch.device) -> str:
    """Name of the machine model for a device: the closest model that plans exist for.

    Devices without a model of their own use that of their architecture.
    """
    name = torch.cuda.get_device_name(device).lower()
    for known in ("mi355x", "mi350x", "h200"):
        if known in name:
            return known
    return "mi350x" if torch.version.hip else "h200"


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
