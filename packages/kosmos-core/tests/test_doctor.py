"""The doctor: what it says of this machine is true, and no machine makes it raise."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from kosmos_core.__main__ import cli, main
from kosmos_core.doctor import Report, WorldReport, examine, print_report, probes, worlds
from rich.console import Console

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


def world(report: Report, name: str) -> WorldReport:
    return next(w for w in report.worlds if w.name == name)


def shown(report: Report) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=160, file=nowhere)
        print_report(report, console)
    return console.export_text()


def gpus(count: int, resident: int | None = 132) -> list[dict]:
    return [
        {
            "index": i,
            "name": "NVIDIA H200",
            "sms": 132,
            "capability": "9.0",
            "memory_gib": 139.8,
            "shared_memory_optin_kib": 227.0,
            "driver": "580.1",
            "resident_wgs": resident,
        }
        for i in range(count)
    ]


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch):
    """Makes the probes say that there are GPUs, and returns the report of such a machine."""

    def pretend(count: int, access: bool = True, resident: int | None = 132) -> Report:
        monkeypatch.setattr(probes, "probe_gpus", lambda faults: gpus(count, resident))
        table = [[i == j or access for j in range(count)] for i in range(count)]
        monkeypatch.setattr(probes, "probe_peer_access", lambda n: table)
        rates = [[None if i == j else 368.4 for j in range(count)] for i in range(count)]
        monkeypatch.setattr(probes, "probe_links", lambda n: rates)
        there = {"available": True, "why_not": ""}
        monkeypatch.setattr(probes, "probe_symmetric_memory", lambda: there)
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
        return examine()

    return pretend


@no_gpu
def test_without_a_gpu_the_cpu_and_the_reference_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "yes cpu:N" in out
    assert "yes reference" in out
    assert "no  group" in out
    assert "no  gpu:N" in out
    assert "--world cpu:4" in out or "cpu_world(4)" in out


@no_gpu
def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == ""
    assert data["can_run"] is True
    assert {w["name"]: w["possible"] for w in data["worlds"]} == {
        "group": False,
        "gpu:N": False,
        "cpu:N": True,
        "reference": True,
    }
    assert data["versions"]["torch"] == torch.__version__
    assert data["faults"] == {}


@no_gpu
def test_without_a_driver_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    report = examine()
    assert report.faults == {}
    assert world(report, "group").detail == "no GPU is visible"
    assert world(report, "gpu:N").detail == "no GPU is visible"
    assert "driver" not in shown(report)


@pytest.mark.parametrize("name", ["cpu:N", "reference"])
def test_the_command_to_try_works(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With kosmos-tpsp the command is its check, which has tests of its own.
    monkeypatch.setattr(worlds, "_has_check", lambda: False)
    program, *rest = shlex.split(world(examine(), name).command)
    assert program.startswith("python")
    done = subprocess.run([sys.executable, *rest], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == {"cpu:N": "[0, 1, 2, 3]\n", "reference": "reference\n"}[name]


def test_with_tpsp_the_command_is_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "_has_check", lambda: True)
    command = world(examine(), "cpu:N").command
    assert command.endswith("-m kosmos_tpsp check ag_gemm --m 384 --n 200 --k 128 --world cpu:4")


def test_without_symmetric_memory_a_group_shares_its_memory_by_ipc(
    with_gpus: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = with_gpus(2)
    assert "IPC" not in world(report, "group").detail
    lacks = {"available": False, "why_not": "it lacks rendezvous"}
    monkeypatch.setattr(probes, "probe_symmetric_memory", lambda: lacks)
    group = world(examine(), "group")
    assert group.possible
    assert "shared by IPC, not as torch's symmetric memory: it lacks rendezvous" in group.detail


def doctor_without(module: str) -> tuple[int, dict, str]:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from kosmos_core.__main__ import main\n"
        "sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_without_triton_only_the_reference_is_left() -> None:
    status, data, err = doctor_without("triton")
    assert (status, err) == (0, "")
    possible = {w["name"]: w["possible"] for w in data["worlds"]}
    assert possible["reference"]
    assert not possible["cpu:N"]
    assert any(w["name"] == "cpu:N" and "triton" in w["detail"] for w in data["worlds"])


def test_without_torch_nothing_runs_and_the_status_says_so() -> None:
    status, data, err = doctor_without("torch")
    assert (status, err) == (1, "")
    assert data["can_run"] is False
    assert all("torch" in w["detail"] for w in data["worlds"])


def test_a_broken_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", broken)
    report = examine()
    assert report.can_run
    assert "too old" in report.faults["gpus"]
    assert "too old" in world(report, "group").detail
    assert "too old" in shown(report)


def test_a_kernel_that_does_not_launch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int, sms: int) -> int:
        raise RuntimeError("ptxas not found")

    class Properties:
        name, multi_processor_count, major, minor, total_memory = "NVIDIA H200", 132, 9, 0, 2**37

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    monkeypatch.setattr(probes, "probe_residency", fails)
    report = examine()
    assert report.gpus[0]["resident_wgs"] is None
    assert "ptxas not found" in world(report, "gpu:N").detail
    assert "ptxas not found" in report.faults["residency of GPU 0"]


def test_any_probe_may_fail_and_the_rest_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [n for n in dir(probes) if n.startswith("probe_") and n != "probe_residency"]
    for name in names:

        def fails(*arguments: object, name: str = name) -> None:
            raise OSError(f"{name} broke")

        monkeypatch.setattr(probes, name, fails)
    report = examine()
    assert len(report.faults) == len(names)
    assert world(report, "cpu:N").possible
    text = shown(report)
    for name in names:
        assert f"OSError: {name} broke" in text


def test_two_linked_gpus_make_a_group(with_gpus) -> None:
    report = with_gpus(2)
    assert world(report, "group").possible
    assert re.match(
        r"torchrun --nproc-per-node 2 -m kosmos_\w+ -- \w+ ", world(report, "group").command
    )
    assert world(report, "gpu:N").possible
    text = shown(report)
    assert "NVIDIA H200" in text
    assert "368" in text
    assert "NVLink multicast: not used" in text


def test_gpus_without_peer_access_make_none(with_gpus) -> None:
    report = with_gpus(2, access=False)
    assert not world(report, "group").possible
    assert world(report, "group").detail == "no peer access from GPU 0 to 1, 1 to 0"
    assert "368 x" in shown(report)


def test_more_gpus_than_ranks_are_not_asked_for(with_gpus) -> None:
    assert "--nproc-per-node 8 " in world(with_gpus(16), "group").command


def test_a_grid_that_is_not_resident_as_a_whole_is_told(with_gpus) -> None:
    report = with_gpus(1, resident=57)
    assert not world(report, "gpu:N").possible
    assert "only 57 of 132 workgroups" in world(report, "gpu:N").detail


def test_the_multicast_variables_are_shown_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, with_gpus
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    text = shown(with_gpus(2))
    assert "NCCL_NVLS_ENABLE=0" in text
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=not set" in text


@pytest.mark.parametrize("arguments", [[], ["doctor", "--nonsense"], ["operate"]])
def test_bad_arguments_are_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert ("see --help" in err) == (not arguments)


def test_the_commands_are_these() -> None:
    assert sorted(cli.commands) == ["doctor", "measure"]


@pytest.mark.gpu
def test_every_workgroup_of_a_gpu_is_resident() -> None:
    report = examine()
    assert report.faults == {}
    for gpu in report.gpus:
        assert gpu["resident_wgs"] == gpu["sms"]
    assert world(report, "gpu:N").possible
    assert main(["doctor"]) == 0


@pytest.mark.multi_gpu(2)
def test_links_between_gpus_have_a_rate() -> None:
    report = examine()
    for i, row in enumerate(report.link_gbps):
        for j, rate in enumerate(row):
            assert (rate is None) if i == j else rate > 1
