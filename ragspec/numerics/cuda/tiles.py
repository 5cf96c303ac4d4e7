"""Which tile of a product runs for how many rows: free choices, because no bit of a product depends on a tile.

A product adds its inputs in blocks of `SumOrder.block_in`, in `SumOrder.split` parts that are added in order. The order depends
on the weight's type and shape alone, and with it the bits. Height, width, warps and stages of a tile change none (measured on an
H200 for 16, 32, 64 and 128 rows, widths of 16 to 128; `infra/gpu/check.sh bits` measures it again on any device).

`tiles.json` has the tiles that `infra/gpu/tune.py` measured, by device and weight; elsewhere a rule chooses.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("tiles.json")
ROW_TIERS = (16, 128)
"""A table's tiles are for at most 16 rows, at most 128 rows, and more."""
_WIDE, _LONG = 16_384, 8_192
"""Outputs from which one part of the inputs fills a device, and inputs from which two parts do."""
_SHARED_BYTES = 99 * 1024
"""Shared memory of a block on every device since compute capability 8.0."""


class SumOrder(NamedTuple):
    """In which order a weight's products are added up: the bits depend on it."""

    block_in: int
    split: int


class Tile(NamedTuple):
    """Rows and outputs of one program, its warps, and the blocks of inputs that are loaded ahead."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


FLOAT32_TILE = Tile(16, 64, 4, 3)
"""Products in float32 have one tile: no other was measured to give the same bits."""


def sum_order(weight: Tensor) -> SumOrder:
    """Shape: weight [out, in]."""
    num_outputs, num_inputs = weight.shape
    if weight.dtype == torch.float32 or num_outputs >= _WIDE:
        return SumOrder(64, 1)
    return SumOrder(128, 2 if num_inputs >= _LONG else 1)


def tile_for(num_rows: int, weight: Tensor) -> Tile:
    """The tile of a product of so many rows. Shape: weight [out, in]."""
    if weight.dtype == torch.float32:
        return FLOAT32_TILE
    tier = next((number for number, most in enumerate(ROW_TIERS) if num_rows <= most), len(ROW_TIERS))
    return _tile(tier, weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch."), weight.device)


@functools.cache
def _tile(tier: int, num_outputs: int, num_inputs: int, dtype: str, device: torch.device) -> Tile:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    measured = tile_table().get(name, {}).get(f"{dtype} {num_outputs}x{num_inputs}")
    if measured:
        return Tile(*measured[tier])
    wide = num_outputs >= _WIDE
    tile = (
        Tile(16, 64, 4, 3) if wide else Tile(16, 32, 4, 5),
        Tile(64, 128, 4, 4) if wide else Tile(64, 64, 4, 4),
        Tile(128, 128, 8, 3),
    )[tier]
    # a block of inputs holds 128 numbers at most, of two bytes at most
    return tile._replace(
        num_stages=max(1, min(tile.num_stages, shared_bytes(device) // (256 * (tile.rows + tile.outputs))))
    )


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take."""
    if device.type != "cuda":
        return _SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs lack the field
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def tile_table() -> dict[str, dict[str, list[list[int]]]]:
    """By the device's name, then by type and shape of the weight: a tile for each tier of rows."""
    table: dict[str, dict[str, list[list[int]]]] = json.loads(TABLE.read_text())
    return table
