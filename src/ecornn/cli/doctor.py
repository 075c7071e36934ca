"""`ecornn doctor`: what this machine has, and which backends can run on it.

`collect` returns data, `render` turns data into a table; docs/doctor.md describes the JSON.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from ecornn._version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
REGISTER_BYTES = 4
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_TIMEOUT_S = 10


@dataclass(frozen=True)
class Versions:
    """None: not installed, or not part of this torch."""

    ecornn: str
    python: str
    torch: str
    cuda: str | None
    cudnn: str | None
    triton: str | None
    cuda_core: str | None
    driver: str | None


@dataclass(frozen=True)
class Cpu:
    architecture: str
    capability: str
    threads: int
    interop_threads: int
    onednn: bool
    mkl: bool


@dataclass(frozen=True)
class Gpu:
    """`on_chip_bytes` is what all multiprocessors together hold in registers and shared memory:
    the room that weights have if they are to stay on the chip from step to step."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    multiprocessors: int
    register_bytes_per_multiprocessor: int
    shared_memory_bytes_per_multiprocessor: int
    on_chip_bytes: int
    l2_bytes: int


@dataclass(frozen=True)
class BackendStatus:
    name: str
    summary: str
    available: bool
    reason: str | None


@dataclass(frozen=True)
class Report:
    schema: int
    os: str
    versions: Versions
    cpu: Cpu
    gpus: tuple[Gpu, ...]
    no_gpu_because: str | None
    backends: tuple[BackendStatus, ...]


class DeviceProperties(Protocol):
    """The part of what torch.cuda.get_device_properties returns that is read here."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    regs_per_multiprocessor: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int


class BackendLike(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def unavailable(self) -> str | None: ...


def collect() -> Report:
    """Look at this machine. Starts CUDA where there is a GPU."""
    from ecornn.backends.registry import BACKENDS

    gpus, no_gpu_because = collect_gpus()
    return Report(
        schema=SCHEMA,
        os=platform.platform(),
        versions=collect_versions(),
        cpu=collect_cpu(),
        gpus=gpus,
        no_gpu_because=no_gpu_because,
        backends=collect_backends(BACKENDS),
    )


def collect_versions() -> Versions:
    import torch

    cudnn = torch.backends.cudnn.version()
    return Versions(
        ecornn=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else format_cudnn(cudnn),
        triton=installed("triton"),
        cuda_core=installed("cuda-core"),
        driver=collect_driver(),
    )


def collect_cpu() -> Cpu:
    import torch

    return Cpu(
        architecture=platform.machine(),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        onednn=torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        mkl=torch.backends.mkl.is_available(),
    )


def collect_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs torch sees; where it sees none, why."""
    import torch

    if not torch.backends.cuda.is_built():
        return (), "this torch is built without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        # torch warns, and says why, where there is a GPU that it cannot use.
        reasons = [str(warning.message).partition("\n")[0] for warning in caught]
        return (), "; ".join(reasons) or "torch finds no CUDA GPU"
    properties = torch.cuda.get_device_properties
    return tuple(describe_gpu(i, properties(i)) for i in range(torch.cuda.device_count())), None


def describe_gpu(index: int, properties: Any) -> Gpu:
    """`properties` is a `DeviceProperties`; torch's own type stub leaves some of it out."""
    gpu: DeviceProperties = properties
    register_bytes = gpu.regs_per_multiprocessor * REGISTER_BYTES
    shared_bytes = gpu.shared_memory_per_multiprocessor
    return Gpu(
        index=index,
        name=gpu.name,
        capability=f"{gpu.major}.{gpu.minor}",
        memory_bytes=gpu.total_memory,
        multiprocessors=gpu.multi_processor_count,
        register_bytes_per_multiprocessor=register_bytes,
        shared_memory_bytes_per_multiprocessor=shared_bytes,
        on_chip_bytes=gpu.multi_processor_count * (register_bytes + shared_bytes),
        l2_bytes=gpu.L2_cache_size,
    )


def collect_backends(backends: Iterable[BackendLike]) -> tuple[BackendStatus, ...]:
    statuses = []
    for backend in backends:
        reason = backend.unavailable()
        statuses.append(BackendStatus(backend.name, backend.summary, reason is None, reason))
    return tuple(statuses)


def collect_driver() -> str | None:
    """The driver's version from the kernel's own file or, where that is missing, nvidia-smi."""
    if DRIVER_FILE.is_file():
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", DRIVER_FILE.read_text())
        if found:
            return found[1]
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.partition("\n")[0].strip() or None


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def format_cudnn(version: int) -> str:
    """cuDNN's number in the notation of its releases: 91900 is 9.19.0, and 8902 was 8.9.2."""
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def to_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=2)


def render(report: Report) -> RenderableType:
    """The report as tables for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    machine = table("this machine", "what", "found")
    for what, found in asdict(report.versions).items():
        machine.add_row(what.replace("_", "-"), Text(found or "–"))
    machine.add_row("os", Text(report.os))
    machine.add_row("cpu", Text(_cpu_line(report.cpu)))
    if report.no_gpu_because is not None:
        machine.add_row("gpu", Text(f"none: {report.no_gpu_because}"))

    parts: list[RenderableType] = [machine]
    for gpu in report.gpus:
        described = table(f"gpu {gpu.index}: {gpu.name}", "what", "found")
        for what, found in _gpu_rows(gpu):
            described.add_row(what, found)
        parts.append(described)

    backends = table("backends, in the order they are asked", "name", "runs here", "what it is")
    for backend in report.backends:
        answer = Text("yes", "green") if backend.available else Text(f"no: {backend.reason}", "red")
        backends.add_row(backend.name, answer, Text(backend.summary))
    parts.append(backends)
    return Group(*parts)


def _cpu_line(cpu: Cpu) -> str:
    return (
        f"{cpu.architecture}, {cpu.capability}, {cpu.threads} threads "
        f"({cpu.interop_threads} between operations), "
        f"oneDNN {'on' if cpu.onednn else 'off'}, MKL {'on' if cpu.mkl else 'off'}"
    )


def _gpu_rows(gpu: Gpu) -> list[tuple[str, str]]:
    registers = gpu.register_bytes_per_multiprocessor
    shared = gpu.shared_memory_bytes_per_multiprocessor
    return [
        ("compute capability", gpu.capability),
        ("memory", f"{gpu.memory_bytes / 2**30:,.1f} GiB"),
        ("L2 cache", f"{gpu.l2_bytes / 2**20:,.1f} MiB"),
        ("multiprocessors", str(gpu.multiprocessors)),
        ("registers each", f"{registers / 2**10:,.0f} KiB"),
        ("shared memory each", f"{shared / 2**10:,.0f} KiB"),
        ("on chip in all", f"{gpu.on_chip_bytes / 2**20:,.1f} MiB"),
    ]


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables; see docs/doctor.md.")
    ] = False,
) -> None:
    """Tell what this machine has and which backends can run on it."""
    from rich.console import Console

    report = collect()
    if as_json:
        typer.echo(to_json(report))
    else:
        Console().print(render(report))
    if not any(backend.available for backend in report.backends):
        raise typer.Exit(1)
