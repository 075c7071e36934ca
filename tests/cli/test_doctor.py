from __future__ import annotations

import io
import json
import re
import subprocess
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ecornn.backends.registry import BACKENDS
from ecornn.cli import doctor
from ecornn.cli.app import app

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"


@dataclass(frozen=True)
class FakeProperties:
    """What torch reports of a GPU, with round figures."""

    name: str = "NVIDIA Imaginary"
    major: int = 9
    minor: int = 0
    total_memory: int = 2**37
    multi_processor_count: int = 100
    regs_per_multiprocessor: int = 65_536
    shared_memory_per_multiprocessor: int = 2**18
    L2_cache_size: int = 2**25


@dataclass(frozen=True)
class FakeBackend:
    name: str
    summary: str = "imaginary"
    reason: str | None = None

    def unavailable(self) -> str | None:
        return self.reason


def rendered(report: doctor.Report) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(doctor.render(report))
    return capture.get()


def with_gpu(report: doctor.Report) -> doctor.Report:
    gpu = doctor.describe_gpu(0, FakeProperties())
    return replace(report, gpus=(gpu,), no_gpu_because=None)


def keys(value: object) -> set[str]:
    """Every key of a JSON value, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*(keys(v) for v in value.values()))
    if isinstance(value, list):
        return set().union(*(keys(v) for v in value))
    return set()


def test_on_chip_capacity_counts_registers_and_shared_memory() -> None:
    gpu = doctor.describe_gpu(3, FakeProperties())
    assert gpu.index == 3
    assert gpu.capability == "9.0"
    assert gpu.register_bytes_per_multiprocessor == 2**18
    assert gpu.on_chip_bytes == 100 * (2**18 + 2**18)
    assert gpu.l2_bytes == 2**25


def test_this_machine() -> None:
    report = doctor.collect()
    assert report.versions.torch == torch.__version__
    assert report.cpu.threads == torch.get_num_threads()
    assert [b.name for b in report.backends] == [b.name for b in BACKENDS]
    assert bool(report.gpus) == torch.cuda.is_available()
    assert (report.no_gpu_because is None) == bool(report.gpus)
    text = rendered(report)
    assert torch.__version__ in text
    for backend in BACKENDS:
        assert backend.name in text


def test_every_backend_says_whether_it_runs_and_why_not() -> None:
    statuses = doctor.collect_backends((FakeBackend("a"), FakeBackend("b", reason="no GPU [0]")))
    assert [(s.available, s.reason) for s in statuses] == [(True, None), (False, "no GPU [0]")]
    text = rendered(replace(doctor.collect(), backends=statuses))
    assert "no: no GPU [0]" in text  # brackets are not taken for markup


def test_a_gpu_is_shown_in_units_that_people_read() -> None:
    text = rendered(with_gpu(doctor.collect()))
    assert "gpu 0: NVIDIA Imaginary" in text
    assert "128.0 GiB" in text
    assert "50.0 MiB" in text
    assert "32.0 MiB" in text


def test_the_command_prints_tables() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "this machine" in result.output


def test_the_command_prints_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output) == json.loads(doctor.to_json(doctor.collect()))


def test_the_command_fails_where_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = doctor.collect_backends((FakeBackend("a", reason="none"),))
    report = replace(doctor.collect(), backends=statuses)
    monkeypatch.setattr(doctor, "collect", lambda: report)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_the_json_s_keys_are_the_documented_ones() -> None:
    described = set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", DOCUMENTATION.read_text(), re.M))
    described_keys = {part.removesuffix("[]") for path in described for part in path.split(".")}
    report = json.loads(doctor.to_json(with_gpu(doctor.collect())))
    assert keys(report) == described_keys
    assert asdict(with_gpu(doctor.collect()))["schema"] == doctor.SCHEMA


@pytest.mark.parametrize(
    ("number", "text"), [(91_900, "9.19.0"), (90_101, "9.1.1"), (8_902, "8.9.2")]
)
def test_cudnn_s_number_is_read_as_its_releases_are_named(number: int, text: str) -> None:
    assert doctor.format_cudnn(number) == text


class TestNoGpu:
    def test_without_cuda_in_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
        assert doctor.collect_gpus() == ((), "this torch is built without CUDA")

    def test_with_cuda_but_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert doctor.collect_gpus() == ((), "torch finds no CUDA GPU")

    def test_torch_s_own_reason_is_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def too_old() -> bool:
            warnings.warn("the driver is too old\nsecond line", stacklevel=1)
            return False

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", too_old)
        assert doctor.collect_gpus() == ((), "the driver is too old")


def test_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: FakeProperties(name=f"g{i}"))
    gpus, no_gpu_because = doctor.collect_gpus()
    assert [(gpu.index, gpu.name) for gpu in gpus] == [(0, "g0"), (1, "g1")]
    assert no_gpu_because is None


class TestDriver:
    @pytest.fixture(autouse=True)
    def _no_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")

    @pytest.mark.parametrize(
        "line",
        [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
        ],
    )
    def test_from_the_kernel(self, line: str) -> None:
        doctor.DRIVER_FILE.write_text(f"{line}\nGCC version:  gcc version 12.2.0\n")
        assert doctor.collect_driver() == "580.65.06"

    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
        assert doctor.collect_driver() is None

    def test_from_nvidia_smi(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(doctor.shutil, "which", lambda _: "nvidia-smi")
        answer = subprocess.CompletedProcess([], 0, stdout="580.65.06\n580.65.06\n")
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: answer)
        assert doctor.collect_driver() == "580.65.06"

    def test_nvidia_smi_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor.shutil, "which", lambda _: "/nowhere/nvidia-smi")
        assert doctor.collect_driver() is None
