#!/usr/bin/env python3
"""Measures the tiles of products on this GPU and writes the fastest into `ragspec/numerics/cuda/tiles.json`.

    python infra/gpu/tune.py                        # the weights of the suite gpu's models of 0.1 to 8 billion parameters
    python infra/gpu/tune.py 4096x14336 1024x4096   # of these weights, OUTPUTSxINPUTS

A tile is written only if its products, plain and gated, have the bits of the smallest tile for 1 to 2,048 rows. The table is
written after each weight, so that a run which is stopped keeps what was measured; weights in the table are left out unless they
are named.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from pipelines.benchmarks.gpu import SHAPES
from ragspec.numerics.cuda import backend
from ragspec.numerics.cuda.kernels import NUM_ARRIVALS
from ragspec.numerics.cuda.tiles import ROW_TIERS, TABLE, Tile, shared_bytes, sum_order, tile_for, tile_table

ROWS = (1, 64, 2048)
"""The number of rows that is measured for each tier of the table."""
CHECKED_ROWS = (1, 7, 16, 17, 64, 65, 128, 129, 2048)
NUM_ROUNDS = 20


def main() -> None:
    """Raises: SystemExit without a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("tune.py needs a CUDA device")
    table = {name: dict(weights) for name, weights in tile_table().items()}
    own = table.setdefault(torch.cuda.get_device_name(), {})
    named = [tuple(map(int, size.split("x"))) for size in sys.argv[1:]]
    for num_outputs, num_inputs in named or [
        size for size in known_weights() if f"bfloat16 {size[0]}x{size[1]}" not in own
    ]:
        weight = torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device="cuda")
        own[f"bfloat16 {num_outputs}x{num_inputs}"] = [list(fastest_tile(weight, tier)) for tier in range(len(ROWS))]
        TABLE.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def known_weights() -> list[tuple[int, int]]:
    """Outputs and inputs of the products of the suite's models of at most 8 billion parameters."""
    sizes = []
    for shape in SHAPES[:3]:
        head_dim = shape.hidden // shape.heads
        sizes += [
            ((shape.heads + 2 * shape.kv_heads) * head_dim, shape.hidden),
            (shape.hidden, shape.heads * head_dim),
            (2 * shape.inner, shape.hidden),
            (shape.hidden, shape.inner),
            (shape.vocab, shape.hidden),
        ]
    return list(dict.fromkeys(sizes))


def candidates(weight: torch.Tensor, tier: int) -> Iterator[Tile]:
    """Tiles whose blocks fit the device's shared memory. Shape: weight [out, in]."""
    heights = ((16,), (16, 32, 64), (64, 128))[tier]
    for rows, outputs, num_warps, num_stages in itertools.product(heights, (16, 32, 64, 128), (4, 8), (3, 4, 5)):
        loaded = num_stages * sum_order(weight).block_in * (rows + outputs) * weight.itemsize
        if loaded <= shared_bytes(weight.device) and (rows * outputs >= 4096 or num_warps == 4):
            yield Tile(rows, outputs, num_warps, num_stages)


def fastest_tile(weight: torch.Tensor, tier: int) -> Tile:
    """The tile of the least median time among those that have the right bits. Shape: weight [out, in]."""
    linear = backend.TritonLinear(weight, None, torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=weight.device))
    x = torch.randn(max(CHECKED_ROWS), weight.shape[1], dtype=weight.dtype, device=weight.device)
    products, timed = (linear, linear.gated), []
    expected = [with_tile(product, x, Tile(16, 16, 4, 3)) for product in products]
    for tile in candidates(weight, tier):
        try:
            rows = [n for n in CHECKED_ROWS if tier == 2 or n <= ROW_TIERS[tier]]
            pairs = itertools.product(rows, zip(products, expected, strict=True))
            if all(torch.equal(with_tile(product, x[:n], tile), whole[:n]) for n, (product, whole) in pairs):
                timed.append((milliseconds(linear, x[: ROWS[tier]], tile), tile))
            else:
                print(f"{tuple(weight.shape)}: {tile} has other bits", flush=True)
        except Exception as error:  # a tile that the compiler or the device refuses
            print(f"{tuple(weight.shape)}: {tile} does not run: {error}", flush=True)
    ms, best = min(timed)
    rule = milliseconds(linear, x[: ROWS[tier]], tile_for(ROWS[tier], weight))
    print(f"{tuple(weight.shape)}, {ROWS[tier]} rows: {best}, {ms:.4f} ms, until now {rule:.4f}", flush=True)
    return best


def with_tile(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A linear's product by this tile. Shapes: x [N, in] -> [N, out], gated [N, out / 2]."""
    chosen, backend.tile_for = backend.tile_for, lambda num_rows, weight: tile
    try:
        return product(x)
    finally:
        backend.tile_for = chosen


def milliseconds(linear: backend.TritonLinear, x: torch.Tensor, tile: Tile) -> float:
    """Median time of a product whose weight comes from memory: the cache is overwritten before each."""
    cache, times = torch.empty(2**26, dtype=torch.int32, device=x.device), []
    for _ in range(NUM_ROUNDS):
        cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with_tile(linear, x, tile)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
