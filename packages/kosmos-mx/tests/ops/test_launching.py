"""Keys of compiled code, where kernels run, and which targets take scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton.language as tl
from kosmos_mx.ops import launching


class Struct(NamedTuple):
    ptr: object
    count: object


def key(count=5, offset=0, dtype=torch.bfloat16, constant=3):
    memory = torch.zeros(64, dtype=dtype)[offset:]
    return launching.specialised((Struct(memory, count), tl.constexpr(constant)))


def test_equal_code_has_one_key():
    assert key(5) == key(7) == key(5, offset=32)
    assert key(16) == key(64)


@pytest.mark.parametrize(
    "changes",
    [{"count": 1}, {"count": 16}, {"count": 1 << 33}, {"offset": 1}, {"dtype": torch.float32},
     {"constant": 4}],
)  # fmt: skip
def test_other_code_has_another_key(changes):
    assert key(**changes) != key()


@pytest.mark.parametrize(
    ("amd", "name", "takes"),
    [
        (True, "gfx950:sramecc+:xnack-", True),
        (True, "gfx942:sramecc+:xnack-", False),
        (False, (9, 0), False),
        (False, (10, 0), True),
        (False, (12, 0), False),
    ],
)
def test_targets_with_block_scaled_mma(monkeypatch, amd, name, takes):
    monkeypatch.setattr(launching, "vendor_target", lambda: int(amd))
    properties = SimpleNamespace(gcnArchName=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: name)
    assert launching.has_block_scaled_mma(torch.device("cuda")) is takes


def test_on_the_cpu_kernels_run_in_an_executor_alone(on_executor):
    cpu = torch.device("cpu")
    assert not launching.runs_kernels(cpu)
    assert on_executor(lambda: launching.runs_kernels(cpu))
    assert not launching.has_block_scaled_mma(cpu)


def test_a_gpus_launch_goes_by_key_and_device(monkeypatch):
    made = []
    monkeypatch.setattr(launching.LAUNCHER, "launch", lambda *a: made.append(a))
    monkeypatch.setattr(torch.cuda, "device", lambda index: __import__("contextlib").nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    arguments = (torch.zeros(4), 3)
    launching.launch("kernel", 0, arguments, torch.device("cuda", 1))
    assert made == []
    launching.launch("kernel", 9, arguments, torch.device("cuda", 1), num_warps=8)
    ((kernel, wgs, args, key, device, stream, warps, stages),) = made
    assert (kernel, wgs, device, stream, warps, stages) == ("kernel", 9, 1, 77, 8, 1)
    assert args is arguments
    assert key == (*map(launching.specialised, arguments), 8, 1)
