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
    **dict.fromkeys(("x", "weight", "bias", "out"), BF16),
    **dict.fromkeys(("num_rows", "num_outputs", "num_inputs"), "i32"),
}
SPLIT = {**PRODUCT, "parts": FLOATS, "arrivals": "*i32", "part_inputs": "i32"}
INT8 = {**PRODUCT, "x": "*i16", "weight": "*i8", "row_scales": FLOATS, "scales": FLOATS, "bias": FLOATS}
ATTENTION = {
    **dict.fromkeys(("queries", "keys", "values", "out"), BF16),
    **dict.fromkeys(("tiles", "seen_slots", "context_end", "path_start", "row_length"), INTS),
    **dict.fromkeys(("part_states", "part_sums"), FLOATS),
    "arrivals": "*i32",
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(("window", "num_rows", "num_heads", "num_kv_heads", "head_dim", "stored_dim"), "i32"),
}
TILES = [(16, 32, 128, 4, 5), (16, 64, 64, 4, 3), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (128, 128, 128, 8, 3)]
Case = tuple[str, dict[str, str], dict[str, Any], int, int]


def product(kernel: str, types: dict[str, str], tiles: tuple[int, int, int, int, int], **constants: Any) -> Case:
    """A case of a product kernel; `tiles` are rows, outputs, inputs, warps and stages."""
    rows, outputs, inputs, warps, stages = tiles
    constants |= {"HAS_BIAS": True, "TILE_ROWS": rows, "BLOCK_OUT": outputs, "BLOCK_IN": inputs}
    return kernel, types, constants, warps, stages


def attention(pairs: int) -> Case:
    constants = {"GROUP": 4, "HAS_SOFTCAP": True, "IS_SPREAD": pairs == 16, "TILE_PAIRS": pairs}
    return "attention_kernel", ATTENTION, {**constants, "BLOCK": 64, "BLOCK_DIM": 128}, 8 if pairs == 128 else 4, 3


CASES = [
    *(product("product_kernel", SPLIT, tiles, SPLIT=2, IS_EVEN=True) for tiles in TILES),
    product("gated_product_kernel", PRODUCT, (64, 64, 64, 4, 4), IS_EVEN=False),
    product("int8_product_kernel", INT8, (128, 128, 128, 8, 3)),
    *map(attention, (16, 64, 128)),
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
