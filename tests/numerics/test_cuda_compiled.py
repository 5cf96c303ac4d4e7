"""The Triton kernels compile for compute capability 9.0 on a machine without a GPU, within the shared memory that is planned."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra `kernels` is not installed")
pytestmark = pytest.mark.slow

BF16, FLOATS, INTS = "*bf16", "*fp32", "*i64"
SIZES = ("num_outputs", "num_inputs", "part_inputs", "head_dim", "stored_dim")
"""Arguments that are multiples of 16, as the launcher finds out."""
PRODUCT = {
    "x": BF16,
    "weight": BF16,
    "bias": BF16,
    "out": BF16,
    "num_rows": "i32",
    "num_outputs": "i32",
    "num_inputs": "i32",
}
SPLIT = {**PRODUCT, "parts": FLOATS, "arrivals": "*i32", "part_inputs": "i32"}
INT8 = {**PRODUCT, "x": "*i16", "weight": "*i8", "row_scales": FLOATS, "scales": FLOATS, "bias": FLOATS}
ATTENTION = {
    **dict.fromkeys(("queries", "keys", "values", "out"), BF16),
    **dict.fromkeys(("tiles", "seen_slots", "context_end", "path_start", "row_length"), INTS),
    "part_states": FLOATS,
    "part_sums": FLOATS,
    "arrivals": "*i32",
    "scale": "fp32",
    "softcap": "fp32",
    **dict.fromkeys(("window", "num_rows", "num_heads", "num_kv_heads", "head_dim", "stored_dim"), "i32"),
}
TILES = [(16, 32, 128, 4, 5), (16, 64, 64, 4, 3), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (128, 128, 128, 8, 3)]
CASES: list[tuple[str, dict[str, str], dict[str, Any], int, int]] = [
    *(
        (
            "product_kernel",
            SPLIT,
            {"HAS_BIAS": True, "SPLIT": 2, "IS_EVEN": True, "TILE_ROWS": r, "BLOCK_OUT": o, "BLOCK_IN": i},
            w,
            n,
        )
        for r, o, i, w, n in TILES
    ),
    (
        "gated_product_kernel",
        PRODUCT,
        {"HAS_BIAS": True, "IS_EVEN": False, "TILE_ROWS": 64, "BLOCK_OUT": 64, "BLOCK_IN": 64},
        4,
        4,
    ),
    ("int8_product_kernel", INT8, {"HAS_BIAS": True, "TILE_ROWS": 128, "BLOCK_OUT": 128, "BLOCK_IN": 128}, 8, 3),
    *(
        (
            "attention_kernel",
            ATTENTION,
            {"GROUP": 4, "HAS_SOFTCAP": True, "IS_SPREAD": h == 16, "TILE_PAIRS": h, "BLOCK": 64, "BLOCK_DIM": 128},
            8 if h == 128 else 4,
            3,
        )
        for h in (16, 64, 128)
    ),
]
PROGRAM = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ragspec.numerics.cuda import kernels
name, types, constants, warps, stages, sizes = json.loads(sys.argv[1])
kernel = getattr(kernels, name)
places = {argument: (number,) for number, argument in enumerate(kernel.arg_names)}
signature = {argument: types.get(argument, "constexpr") for argument in places}
even = {places[a]: [["tt.divisibility", 16]] for a, kind in signature.items() if kind[0] == "*" or a in sizes}
source = ASTSource(kernel, signature, {places[name]: value for name, value in constants.items()}, even)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
print(json.dumps([made.metadata.shared, "mma" in made.asm["ptx"]]))
"""


@pytest.mark.parametrize(("name", "types", "constants", "warps", "stages"), CASES)
def test_a_kernel_compiles(
    name: str, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> None:
    """Bug guarded: Triton's interpreter runs code that its compiler refuses; a tile that takes more memory than is planned."""
    given = json.dumps([name, types, constants, warps, stages, SIZES])
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shared, multiplies = json.loads(done.stdout.splitlines()[-1])
    most = 227 * 1024
    if name == "attention_kernel":
        most = (256 + 6.5 * constants["TILE_PAIRS"]) * constants["BLOCK_DIM"]
    assert multiplies and shared <= most
