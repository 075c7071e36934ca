"""How long a step of a persistent kernel takes, by a small linear model that can be printed.

The terms are counts that follow from the tile; the weights were fitted to a thousand LSTM tiles
measured on an H200 (bfloat16 and TF32, H from 64 to 2048, 1 to 64 sequences). 94 of a hundred are
predicted within a quarter of what they take: enough to leave out what is hopeless, not to tell the
two best apart, which is what the measured table in `tuned.json` is for. IEEE float32 is multiplied
by other units: its products are not fitted but counted, by the rates that the units have.
"""

from __future__ import annotations

from ecornn.kernels.persistent.tile import CHUNK_BYTES, TILE_SEQUENCES, Geometry, Tile

#: Microseconds a unit of each term, by (kernel, whether all blocks exchange through L2).
WEIGHTS: dict[tuple[str, bool], dict[str, float]] = {
    ("forward", True): {
        "start": 0.5,
        "chain": 0.075,
        "products": 0.14,
        "kilobytes": 0.023,
        "pieces": 0.069,
        "polled megabytes": 0.2,
        "reduction": 0.47,
        "reduced kilobytes": 0.093,
        "items": 0.45,
        "warps": 0.067,
    },
    ("forward", False): {
        "start": 0.41,
        "large cluster": 0.036,
        "chain": 0.0085,
        "products": 0.25,
        "kilobytes": 0.073,
        "kilobytes read by all row warps": 0.0029,
        "partial sums": 0.0094,
        "weights in shared memory": 0.097,
        "items": 0.15,
        "warps": 0.0006,
        "wide numbers": 0.14,
    },
    ("backward", True): {
        "start": 0.53,
        "chain": 0.032,
        "products": 0.17,
        "kilobytes": 0.021,
        "pieces": 0.082,
        "polled megabytes": 0.15,
        "reduction": 0.44,
        "reduced kilobytes": 0.21,
        "weights in shared memory": 0.075,
        "items": 0.35,
        "warps": 0.034,
        "wide numbers": 0.022,
    },
    ("backward", False): {
        "start": 0.58,
        "large cluster": 0.027,
        "chain": 0.014,
        "products": 0.34,
        "kilobytes": 0.052,
        "partial sums": 0.0077,
        "weights in shared memory": 0.11,
        "wide numbers": 0.32,
    },
}

#: Microseconds of a thousand cycles, at the 1.755 GHz that an H200 runs at.
CYCLES = {"thousand cycles of ordinary units": 0.57}
#: Cycles that a quarter of a multiprocessor is busy with a warp's shuffle; with an addition, one.
SHUFFLE = 4


#: Of the estimate of one block whose columns are repeated, which was not among those tiles: such a
#: step waits for less. Measured were 0.5 to 0.6 of the estimate at 64 units, 0.8 at 128 in half
#: precision; with this part the model orders them as they were measured.
WITHOUT_WAITS = 0.75


def terms(geometry: Geometry, hidden: int) -> dict[str, float]:
    """What a step of this geometry consists of."""
    tile = geometry.tile
    batch, warps = geometry.group_batch, tile.threads // 32
    batch_tiles = -(-batch // 8)
    items = -(-tile.units * batch // tile.threads)
    if tile.direct:
        items = tile.row_tiles * batch_tiles * (2 * min(2, batch) if tile.outer == 1 else 1)
        items = min(items, tile.items)
    in_shared = (tile.row_tiles * tile.chunks - tile.in_registers) * 2 * tile.threads * 16
    kilobytes = batch * tile.inner * hidden * tile.exchanged_bytes / tile.owners / 1024
    ieee, at_once = tile.numbers == "ieee", max(1.0, warps / 4)
    products = tile.row_tiles * tile.chunks * 2 * batch_tiles
    found = {
        "start": 1.0,
        "chain": tile.chunks * batch_tiles,
        "products": 0.0 if ieee else products * at_once / 64,
        "thousand cycles of ordinary units": ieee * batch_tiles * _cycles(tile) * at_once / 1000,
        "weights in shared memory": in_shared * -(-batch_tiles // tile.abreast) / 32768,
        "items": items - 1,
        "warps": warps,
        "wide numbers": float(tile.exchanged_bytes == 4),
    }
    if tile.grid:
        return found | _through_l2(geometry, batch_tiles, kilobytes)
    several = tile.cluster > 1
    return found | {
        "cluster": float(several),
        "large cluster": float(tile.cluster == 16),
        "kilobytes": kilobytes * several,
        "kilobytes read by all row warps": kilobytes * tile.row_warps,
        "partial sums": tile.k_warps * tile.outer * items,
    }


def _cycles(tile: Tile) -> int:
    """Of the ordinary units, for a batch tile's products in IEEE float32; see `columns.cuh`."""
    multiplied = tile.row_tiles * tile.chunks * 8 * tile.width
    gathered = tile.chunks * 4 * tile.width if tile.width > 1 else 0
    added = tile.row_tiles * {1: 4, 2: 8}.get(tile.width, 12)
    return multiplied + SHUFFLE * (gathered + added)


def _through_l2(geometry: Geometry, batch_tiles: int, kilobytes: float) -> dict[str, float]:
    tile = geometry.tile
    pieces = -(-tile.chunks * batch_tiles // tile.at_once)
    reduced = tile.owners * tile.outer * tile.units * geometry.group_batch * 4 / 1024
    return {
        "kilobytes": kilobytes,
        "pieces": pieces - 1,
        "polled megabytes": kilobytes * geometry.all_blocks / 1024 if pieces == 1 else 0.0,
        "reduction": float(tile.owners > 1),
        "reduced kilobytes": reduced if tile.owners > 1 else 0.0,
    }


def estimate(geometry: Geometry, hidden: int) -> float:
    """Microseconds a step."""
    weights = WEIGHTS[geometry.tile.kernel, geometry.tile.grid] | CYCLES
    total = sum(weights.get(name, 0.0) * count for name, count in terms(geometry, hidden).items())
    return total * (WITHOUT_WAITS if _waits_for_little(geometry.tile) else 1.0)


def _waits_for_little(tile: Tile) -> bool:
    return tile.width < TILE_SEQUENCES and tile.direct and tile.cluster == 1


#: What a launch takes beyond its steps, in microseconds: to begin and to end, and for each kilobyte
#: of weights that a block reads first. On an H200 launches of small layers took 10 to 15, those of
#: 128 KiB a block 32 forwards and 70 backwards, where weights are read across.
LAUNCH, WEIGHT_KILOBYTE = 12.0, {"forward": 0.16, "backward": 0.45}


def launch_estimate(geometry: Geometry) -> float:
    """Microseconds of a launch beyond its steps."""
    tile = geometry.tile
    return LAUNCH + WEIGHT_KILOBYTE[tile.kernel] * _weight_bytes(tile) / 1024


def _weight_bytes(tile: Tile) -> int:
    """Of a block."""
    return tile.row_tiles * tile.chunks * CHUNK_BYTES * 16 * tile.threads // 32


def explain(geometry: Geometry, hidden: int) -> str:
    """The estimate, term by term, the largest first."""
    tile = geometry.tile
    weights = WEIGHTS[tile.kernel, tile.grid] | CYCLES
    counts = terms(geometry, hidden)
    costs = {name: weights.get(name, 0.0) * count for name, count in counts.items()}
    told = [
        f"{cost:.2f} {name}" + (f" ({counts[name]:g})" if counts[name] != 1 else "")
        for name, cost in sorted(costs.items(), key=lambda item: -item[1])
        if cost >= 0.005
    ]
    summed = " + ".join(told)
    if _waits_for_little(tile):
        summed = f"({summed}) × {WITHOUT_WAITS:g}, one block waits for little"
    return (
        f"{describe(geometry)}\n  {estimate(geometry, hidden):.2f} us a step by the model: {summed}"
    )


def describe(geometry: Geometry) -> str:
    tile = geometry.tile
    where = "all blocks exchange through L2" if tile.grid else "one block, nothing to exchange"
    if tile.cluster > 1:
        where = f"clusters of {tile.cluster} exchange through shared memory"
        if tile.grid:
            where = f"exchange through L2, clusters of {tile.cluster} share the inner dimension"
    weights = _weight_bytes(tile) // 1024
    return (
        f"{tile.kernel} {tile.cell} {tile.numbers}: {geometry.blocks} blocks of {tile.units} units "
        f"× {geometry.groups} groups of {geometry.group_batch} sequences"
        f"{' × 2 directions' if geometry.directions == 2 else ''}; {where}; "
        f"{weights} KiB of weights a block, {_in_registers(tile)} in registers"
        f"{', loaded through shared memory' if tile.staged_bytes else ''}; "
        f"{tile.threads} threads, {tile.shared_bytes // 1024} KiB shared memory"
    )


def _in_registers(tile: Tile) -> str:
    whole = tile.row_tiles * tile.chunks
    return "all" if tile.in_registers == whole else f"{tile.in_registers} of {whole}"
