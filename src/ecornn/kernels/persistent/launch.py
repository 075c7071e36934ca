"""Load a persistent kernel, check that all its blocks can run at once, launch it on torch's stream.

Everything here goes through the CUDA driver's own functions, which come with `cuda-core`.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

from ecornn.errors import EcornnError
from ecornn.kernels.jit import compiled
from ecornn.kernels.persistent.tile import Geometry, Tile

#: Largest cluster that needs no permission.
PORTABLE_CLUSTER = 8
#: The driver's answer to a thread that has no context.
INVALID_CONTEXT = 201
#: From which a launch may begin before the one ahead of it has ended: compute capability, and the
#: driver's CUDA, which before that cannot capture such launches.
EARLY_CAPABILITY, EARLY_DRIVER = (9, 0), 12_030


class LaunchError(EcornnError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""


def driver() -> Any:
    from cuda.bindings import driver as functions

    return functions


def _call(found: tuple[Any, ...], doing: str) -> Any:
    error, *values = found
    if int(error) != 0:
        raise LaunchError(f"{doing}: {error}")
    return values[0] if values else None


def architecture(device: int) -> str:
    """The target that kernels for a device are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"


@cache
def has_early_launches(device: int) -> bool:
    found = int(_call(driver().cuDriverGetVersion(), "asking for the driver's version"))
    return torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY and found >= EARLY_DRIVER


def bytes_apart(geometry: Geometry, device: int) -> int:
    """Shared memory of which a multiprocessor has no room for two blocks: what those of a launch
    that begins early ask for, if there are no more of them than multiprocessors. Otherwise two lie
    on one where blocks of the product ahead have left: by a script on an H200 the steps of 64 units
    in float32 then took 115 µs, and 95 of the same launch by itself. Its price: two such launches
    on two streams wait for each other where together they have more blocks."""
    tile, chip = geometry.tile, torch.cuda.get_device_properties(device)
    alone = tile.kernel == "forward" and not tile.grid and tile.cluster == 1
    if not alone or geometry.all_blocks > chip.multi_processor_count:
        return tile.shared_bytes
    return max(tile.shared_bytes, int(chip.shared_memory_per_multiprocessor) // 2)


def make_context_current(device: int) -> None:
    """torch's context of a device, where a thread has none yet. The driver is asked and not a
    stream: a stream that is being captured must not be asked anything."""
    cuda = driver()
    if int(_call(cuda.cuCtxGetCurrent(), "asking for the context")) == 0:
        context = _call(cuda.cuDevicePrimaryCtxRetain(device), f"opening GPU {device}")
        _call(cuda.cuCtxSetCurrent(context), f"opening GPU {device}")


class Kernel:
    """One compiled tile, loaded; it serves every device of its architecture."""

    def __init__(self, tile: Tile, arch: str) -> None:
        cuda = driver()
        code = compiled(tile.variant(arch))
        doing = f"loading {tile}"
        self.tile = tile
        self.library = _call(cuda.cuLibraryLoadData(code, [], [], 0, [], [], 0), doing)
        self.handle = _call(cuda.cuLibraryGetKernel(self.library, tile.kernel.encode()), doing)
        self._allowed: dict[int, int] = {}  # shared memory by device

    def allow_on(self, device: int, shared_bytes: int = 0) -> None:
        """Let it have its shared memory, or more, and cluster there; only devices that are used are
        asked, since the others may have no context."""
        cuda, tile = driver(), self.tile
        shared_bytes = max(tile.shared_bytes, shared_bytes)
        if self._allowed.get(device, -1) >= shared_bytes:
            return
        attribute = cuda.CUfunction_attribute
        wanted = [(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)]
        if tile.cluster > PORTABLE_CLUSTER:
            wanted.append((attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for name, value in wanted:
            allowed = cuda.cuKernelSetAttribute(name, value, self.handle, device)
            _call(allowed, f"preparing {tile} for GPU {device}")
        self._allowed[device] = shared_bytes

    def blocks_at_once(self) -> int:
        """How many blocks the current device runs at the same time."""
        cuda, tile = driver(), self.tile
        self.allow_on(torch.cuda.current_device())
        function = _call(cuda.cuKernelGetFunction(self.handle), "finding the kernel")
        if tile.cluster > 1:
            config = self.config(Geometry(tile, tile.cluster, 1, 1, 1), cooperative=False)
            clusters = cuda.cuOccupancyMaxActiveClusters(function, config)
            return int(_call(clusters, "counting clusters")) * tile.cluster
        per_multiprocessor = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, tile.threads, tile.shared_bytes
        )
        count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        return int(_call(per_multiprocessor, "counting blocks")) * count

    def config(
        self,
        geometry: Geometry,
        *,
        cooperative: bool,
        early: bool = False,
        shared_bytes: int | None = None,
    ) -> Any:
        cuda, tile = driver(), self.tile
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY = geometry.blocks, geometry.groups
        config.gridDimZ = geometry.directions
        config.blockDimX, config.blockDimY, config.blockDimZ = tile.threads, 1, 1
        config.sharedMemBytes = tile.shared_bytes if shared_bytes is None else shared_bytes
        attributes = []
        if tile.cluster > 1:
            shape = cuda.CUlaunchAttribute()
            shape.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape.value.clusterDim.x = tile.cluster
            shape.value.clusterDim.y = shape.value.clusterDim.z = 1
            attributes.append(shape)
        if cooperative:
            together = cuda.CUlaunchAttribute()
            together.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            together.value.cooperative = 1
            attributes.append(together)
        if early:
            before_the_end = cuda.CUlaunchAttribute()
            before_the_end.id = (
                cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            before_the_end.value.programmaticStreamSerializationAllowed = 1
            attributes.append(before_the_end)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


@cache
def kernel(tile: Tile, arch: str) -> Kernel:
    return Kernel(tile, arch)


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


@cache
def _launch_function() -> Any:
    # by ctypes: in a profile of a call the bindings' own wrapper took longer than torch.mm
    function = _library().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


@cache
def _fill_function() -> Any:
    function = _library().cuMemsetD32Async
    function.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function


def set_all_bits(address: int, size: int, device: int) -> None:
    """Of `size` bytes, a multiple of four, on torch's current stream. By the driver: in a profile
    of a call a fill by torch and the view that it needs took the host 20 to 30 µs."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    fill = (address, 0xFFFFFFFF, size // 4, stream)
    code = _fill_function()(*fill)
    if code == INVALID_CONTEXT:
        make_context_current(device)
        code = _fill_function()(*fill)
    if code != 0:
        raise LaunchError(f"filling {size} bytes: {driver().CUresult(code)!r}")


class Launcher:
    """A kernel with one geometry on one device, ready to be launched."""

    def __init__(self, geometry: Geometry, device: int) -> None:
        self.geometry, self.device = geometry, device
        self._kernel = kernel(geometry.tile, architecture(device))
        # blocks that exchange across the whole grid must all run at once; clusters always do
        grid = geometry.tile.grid
        can_be_early = not grid and has_early_launches(device)
        apart = bytes_apart(geometry, device) if can_be_early else geometry.tile.shared_bytes
        self._kernel.allow_on(device, apart)
        self._built = [
            self._kernel.config(geometry, cooperative=grid),
            self._kernel.config(geometry, cooperative=grid, early=can_be_early, shared_bytes=apart),
        ]
        self._configs = [_Config.from_address(int(built.getPtr())) for built in self._built]
        self._handle = int(self._kernel.handle)
        self._launch = _launch_function()

    def __call__(
        self,
        arguments: ctypes.Structure,
        blocks: int | None = None,
        stream: int | None = None,
        *,
        early: bool = False,
    ) -> None:
        """`blocks`: in place of those of the geometry; `stream`: in place of torch's current.
        `early`: it may begin before the launch ahead of it has ended, whose kernel and its own are
        made for that (`launches.cuh`); where the GPU cannot, it does not. Not where blocks exchange
        across the grid: they must all run at once, and the other's may have their places."""
        config = _Config.from_buffer_copy(self._configs[early])  # each thread its own
        if blocks is not None:
            config.grid_x = blocks
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self.device)
        config.stream = stream
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        launch = (ctypes.addressof(config), self._handle, ctypes.addressof(pointers), 0)
        code = self._launch(*launch)
        if code == INVALID_CONTEXT:  # the first thing that autograd's thread does on the GPU
            make_context_current(self.device)
            code = self._launch(*launch)
        if code != 0:
            raise LaunchError(f"launching {self.geometry}: {driver().CUresult(code)!r}")


@cache
def launcher(geometry: Geometry, device: int) -> Launcher:
    return Launcher(geometry, device)
