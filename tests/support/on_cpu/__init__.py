"""The persistent kernels' own sources, compiled for a CPU and run thread by thread.

What a GPU's instructions do is written down in `cuda_on_cpu.h`; here they are put in the place of
the sources' assembly. Each replacement must be found, so that a source that changes is noticed.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ecornn.kernels.jit.key import SOURCES
from ecornn.kernels.persistent.gradients import GradientTile
from ecornn.kernels.persistent.shares import ShareTile
from ecornn.kernels.persistent.tile import Geometry, Tile, round_up
from ecornn.kernels.persistent.transposed import TransposeTile

HERE = Path(__file__).parent
ARGUMENTS = {
    "forward": "ForwardArguments",
    "backward": "BackwardArguments",
    "exchange_floor": "FloorArguments",
    "shares": "ShareArguments",
    "gradients": "GradientArguments",
    "transposed": "TransposeArguments",
}
#: Kernels beside the recurrence, which wait for nobody.
OnItsOwn = ShareTile | GradientTile | TransposeTile
#: Sources whose other assembly is of numbers or clusters that are not run here.
PARTLY = ("numbers.cuh", "tiles.cuh", "gradients.cu")

#: By file: from where to where its text is replaced, and by what.
REPLACED: dict[str, list[tuple[str, str, str]]] = {
    "exchange.cuh": [
        ('asm volatile("ld.relaxed', '"memory");', "v = load_exchanged<Exchanged>(address);"),
        *(
            (f'asm volatile("st.relaxed.gpu.global.{width}', '"memory");', store)
            for width, store in (
                ("u16", "__atomic_store_n(address, value, __ATOMIC_RELAXED);"),
                ("u32", "__atomic_store_n(address, value, __ATOMIC_RELAXED);"),
            )
        ),
        ('asm volatile("prefetch', '"memory");', "prefetch_exchanged<Exchanged>(address);"),
        ("#if CLUSTER > 1", "#endif", '#include "clusters.h"'),
    ],
    "numbers.cuh": [
        ('asm("cvt.rn.bf16x2', ";\n", "pair = to_bf16(x);\n"),
        ('asm("ex2.approx', ";\n", "y = exp2f(x * (SCALE * 1.44269504f));\n"),
        ('asm("tanh.approx', ";\n", "y = tanhf(x);\n"),
        ('ROUNDING("cvt.rna', ";\n", "rounded = to_tf32_on_cpu(bits);\n"),
        (
            'asm volatile("mma.sync',
            '"r"(b1));',
            "multiply_on_cpu<HALVES ? 16 : 8, DTYPE == 5>(c, a, b0, b1);",
        ),
    ],
    "memory.cuh": [
        ("extern __shared__", ";", ""),
        ('asm volatile("cp.async.commit', '"memory");', "commit_on_cpu();"),
        ('asm volatile("cp.async.wait', '"memory");', "await_on_cpu(COUNT);"),
        # no more than was asked for, so that weights which are staged do not pass all at once
        ("constexpr int ROOM =", ";", "constexpr int ROOM = LEAST_SLOTS;"),
    ],
    # one launch runs after the other here, but what the one ahead makes is not there before
    "launches.cuh": [
        *[("#if __CUDA_ARCH__ >= 900", "\n", "#if true\n")] * 2,
        ('asm volatile("griddepcontrol.launch', '"memory");', ""),
        ('asm volatile("griddepcontrol.wait', '"memory");', "await_launch_ahead_on_cpu();"),
    ],
    "staging.cuh": [
        ('asm volatile("cp.async.cg', '"memory");', "copy_on_cpu(to, from, 16, bytes);"),
        ('asm volatile("ldmatrix', '"memory");', "found = ldmatrix_on_cpu(at);"),
        ('asm("" : "+r"', ";", ""),
    ],
    "multiply.cuh": [('asm("" : "+l"', ";", "")],
    "scaled.cuh": [
        ('asm("cvt.rn.f16x2', ";\n", "pair = to_f16(low) | unsigned(to_f16(high)) << 16;\n")
    ],
    "sequence.cuh": [('asm("" : "+r"', ";", "")],
    "stream.cuh": [
        (
            'asm volatile("cp.async.ca',
            '"memory");',
            "copy_on_cpu(to, source, COPIED * sizeof(Element), COPIED * sizeof(Element));",
        )
    ],
    "product.cuh": [('asm volatile("fence.mbarrier_init', '"memory");', "")],
    "transposed.cu": [
        (
            "__shared__ float tiles",
            "all banks\n",
            "#define tiles (*reinterpret_cast<float(*)[SIDE][SIDE + 1]>(shared))\n",
        )
    ],
    "tiles.cuh": [
        (
            "__shared__ __align__(16) Element tiles",
            "of each factor\n",
            "#define tiles (*reinterpret_cast<Element(*)[4 * SIDE]>(shared))\n",
        )
    ],
}


def unavailable() -> str | None:
    """Why kernels cannot be compiled for this machine's CPU, if they cannot."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no g++ to compile kernels for the CPU"
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True)
    old = int(version.stdout.split(".")[0]) < 11
    return "g++ 11 or newer is needed: <barrier>" if old else None


def for_cpu(name: str, text: str) -> str:
    for begins, ends, other in REPLACED.get(name, ()):
        start = text.index(begins)
        text = text[:start] + other + text[text.index(ends, start) + len(ends) :]
    assert name in PARTLY or not re.search(r"\basm\b", text), f"assembly is left in {name}"
    return text


COMPILER = ("g++", "-std=c++20", "-Og", "-w", "-fPIC", "-pthread")


def compiled(*arguments: str) -> None:
    made = subprocess.run([*COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[:3000]


@cache
def headers(folder: Path) -> Path:
    """Where `cuda_on_cpu.h` lies with what the compiler made of it, and so of the standard library:
    read anew it takes half of a kernel's compilation."""
    header = folder / "cuda_on_cpu.h"
    shutil.copy(HERE / header.name, header)
    compiled("-x", "c++-header", str(header), "-o", f"{header}.gch")
    return folder


class Place(ctypes.Structure):
    """Memory, and whether the launch ahead makes what is there, or still reads it."""

    _fields_ = (("bytes", ctypes.c_void_p), ("size", ctypes.c_size_t), ("made", ctypes.c_int))


@cache
def built(tile: OnItsOwn | Tile, folder: Path) -> Any:
    """The launch function of a tile's kernel."""
    constants = dict(tile.variant("sm_90a").constants)
    key = hashlib.sha256(repr((tile.kernel, constants)).encode()).hexdigest()[:16]
    here = folder / key
    here.mkdir(exist_ok=True)
    for source in (SOURCES / f"{tile.kernel}.cu", *SOURCES.glob("*.cuh")):
        (here / source.name).write_text(for_cpu(source.name, source.read_text()))
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    shared_bytes = "SHARED_BYTES" if isinstance(tile, Tile) else "sizeof(tiles)"
    (here / "main.cpp").write_text(
        f'''#include "cuda_on_cpu.h"
#define COPIES_ARRIVE_LATE {int(key, 16) % 2}
#include "copies.h"
{defined}#include "{tile.kernel}.cu"
extern "C" int run(const {ARGUMENTS[tile.kernel]}* arguments, unsigned blocks, unsigned groups,
                   unsigned directions, const uintptr_t* exchanged, int missing, double seconds,
                   const Place* places, int count) {{
  return launch({tile.kernel}, arguments, Dim{{blocks, groups, directions}}, THREADS, CLUSTER,
                {shared_bytes}, exchanged, missing, seconds, places, count);
}}
'''
    )
    library = here / "kernel.so"
    includes = (f"-I{headers(folder)}", f"-I{HERE}", f"-I{here}")
    compiled("-shared", *includes, "-o", str(library), str(here / "main.cpp"))
    run = ctypes.CDLL(str(library)).run
    # without these an argument left out is whatever lies in its place, and no error
    run.argtypes = (ctypes.c_void_p, *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_size_t))
    run.argtypes += (ctypes.c_int, ctypes.c_double, ctypes.POINTER(Place), ctypes.c_int)
    return run


def run_kernel(
    tile: OnItsOwn | Tile,
    folder: Path,
    arguments: Any,
    grid: tuple[int, int, int],
    *,
    exchanged: Sequence[int] = (0, 0, 0, 0),
    missing: int = 0,
    beside: Sequence[Place] = (),
) -> int:
    """One launch: what went astray in it. `exchanged` is where that begins and ends, for each
    direction; `missing` blocks never run; `beside` is memory of the launch ahead."""
    # a busy machine may leave a thread alone for long
    seconds = 0.5 if missing else 100.0
    inside, places = (ctypes.c_size_t * 4)(*exchanged), (Place * len(beside))(*beside)
    launch = built(tile, folder)
    found = launch(ctypes.byref(arguments), *grid, inside, missing, seconds, places, len(places))
    return int(found)


def run_small(tile: OnItsOwn, arguments: Any, blocks: int, folder: Path) -> None:
    assert run_kernel(tile, folder, arguments, (blocks, 1, 1)) == 0


def beside_launch_ahead(tile: Tile, arguments: Any) -> list[Place]:
    """Of a forward kernel, which may begin before the launch has ended that makes the input's share
    of the gates."""
    if tile.kernel != "forward":
        return []
    found = []
    rows = arguments.batch * arguments.total
    result = ((rows - 1) * arguments.output_row + arguments.hidden) * tile.element_bytes
    share = arguments.steps * arguments.batch * tile.outer * arguments.hidden * tile.element_bytes
    for d in range(2):
        results = (arguments.output[d], arguments.cells[d])
        found += [Place(place, result, made=0) for place in results if place]
        found += [Place(place, share, made=1) for place in (arguments.gates[d],) if place]
    return found


class OnCpu:
    """A launcher. `failed` counts the launches that gave up."""

    def __init__(self, geometry: Geometry, folder: Path, missing: int = 0) -> None:
        self.geometry, self.missing, self.failed = geometry, missing, 0
        self.folder = folder

    def __call__(self, arguments: Any, stream: Any = None, *, early: bool = False) -> None:
        """On a stream that is not the current one it runs when somebody waits for that."""
        if stream is not None:
            stream.append(lambda: self(arguments))
            return
        geometry, tile = self.geometry, self.geometry.tile
        steps = arguments.total if tile.kernel == "forward" else arguments.steps
        row = tile.inner * round_up(arguments.hidden, tile.vector)
        elements = (steps * arguments.batch - 1) * arguments.exchange_row + row
        exchanged = [0] * 4
        for d in range(2):
            start = arguments.exchange[d] or 0
            exchanged[2 * d] = start
            exchanged[2 * d + 1] = start + (elements * tile.exchanged_bytes if start else 0)
        gave_up = ctypes.c_int(0)
        arguments.failed = ctypes.addressof(gave_up)
        grid = (geometry.blocks, geometry.groups, geometry.directions)
        outside = run_kernel(
            *(tile, self.folder, arguments, grid),
            exchanged=exchanged,
            missing=self.missing,
            beside=beside_launch_ahead(tile, arguments),
        )
        assert outside == 0, (
            f"{outside} loads astray or not aligned, results too early, or no memory: {geometry}"
        )
        self.failed += gave_up.value
