"""How the persistent GEMMs of several ranks are cut: tile sizes per architecture, and programs per launch.

Pure functions of shapes and of the device's kind, so that all ranks of a job agree. A grid is co-resident and leaves
one processor to others, see [Note: who may spin] in signals/peers.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

INTERPRETED_PROCESSORS = 8
"""Off the GPU: few, so that each program takes several tiles."""
HEADROOM = 1
"""Processors that no program of a waiting grid is on."""
PULLING = {"cuda": 16, "cpu": 2}
"""Programs that pull and reduce while the others multiply."""


@dataclass(frozen=True)
class Tile:
    """One program's piece of the product, and how many such programs a processor holds at once."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    per_processor: int = 1
    group: int = 8

    @property
    def constexprs(self) -> dict[str, int]:
        """As the kernels name them."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.inner, "GROUP": self.group}

    @property
    def move(self) -> int:
        """Elements that a program moves at a time: four 16-byte words of 16-bit numbers per thread."""
        return 32 * 32 * self.num_warps if self.rows > INTERPRETED.rows else 64


INTERPRETED = Tile(16, 32, 16, num_warps=1, num_stages=1, group=2)
WIDE = Tile(64, 64, 32, num_warps=4, num_stages=3, per_processor=2)
"""For fp32, which has no tensor cores at full precision."""
GATHER = {
    "sm_80": Tile(128, 128, 32, num_warps=4, num_stages=4, per_processor=2),
    "sm_90": Tile(128, 256, 64, num_warps=8, num_stages=3),
}
"""Architecture -> the tile of 16-bit numbers, for products of gathered rows."""
REDUCE = {
    "sm_80": Tile(128, 128, 64, num_warps=8, num_stages=3),
    "sm_90": Tile(128, 256, 64, num_warps=8, num_stages=3),
}
"""The same for products that are summed over ranks, whose kernels hold more."""


@dataclass(frozen=True)
class Grid:
    """Programs of one launch: the first `multiplying` ones multiply, the rest pull."""

    multiplying: int
    pulling: int = 0

    @property
    def programs(self) -> int:
        """Of both kinds."""
        return self.multiplying + self.pulling


def tile_for(narrow: dict[str, Tile], dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile for factors of `dtype`; `narrow` is GATHER or REDUCE."""
    if device.type != "cuda":
        return INTERPRETED
    if dtype.itemsize > 2:
        return WIDE
    return narrow["sm_90" if torch.cuda.get_device_capability(device) >= (9, 0) else "sm_80"]


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_grid(tiles: int, *, processors: int, tile: Tile, pulling: int = 0, share: int = 1) -> Grid:
    """Programs for `tiles` tiles.

    Args:
        pulling: programs that wait for others of the launch; each is planned with a processor of its own.
        share:   ranks that run on the same device at the same time.

    Raises:
        ValueError: too few processors for one multiplying program beside those that wait.
    """
    left = processors // share - HEADROOM - pulling
    if left < 1:
        raise ValueError(
            f"{processors} processors for {share} ranks leave none to multiply beside {pulling} that pull and "
            f"{HEADROOM} free; use overlap.backend=none"
        )
    return Grid(max(1, min(tiles, left * tile.per_processor)), pulling)


TENSOR_CORES = {"sm_80": (r"HMMA", r"LDGSTS"), "sm_90": (r"HGMMA", r"LDGSTS")}
"""SASS of a pipelined product of 16-bit numbers."""


def launches(tiles: dict[str, Tile], chosen: dict[str, Any], *, move: bool = False) -> dict[str, Any]:
    """What a CompileCase says of its launches with these tiles, by architecture; `move` adds MOVE."""

    def launch(tile: Tile) -> dict[str, Any]:
        constexprs = chosen | tile.constexprs | ({"MOVE": tile.move} if move else {})
        return {"constexprs": constexprs, "num_warps": tile.num_warps, "num_stages": tile.num_stages}

    tuned = {arch: launch(tile) for arch, tile in tiles.items()}
    return tuned[min(tuned)] | {"tuned": tuned}
