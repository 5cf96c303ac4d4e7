"""One directory for each published dialect of EAGLE-3.

Each head is read as its trainer means it, or refused by the name of a key or a tensor. `dialects.json` has the configs, which
have the keys of the public files, scaled down, and the readings, which are written from the code of trainers and servers:
EAGLE, SpecForge, speculators, ModelOpt, DeepSpec, AngelSlim, TorchSpec, NeMo, SGLang, vLLM and TensorRT-LLM.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafting.eagle_heads import LLAMA3, layer_shapes, save_files
from drafting.eagle_reference import rates
from torch import Tensor

from ragspec.drafting.eagle.checkpoint import read_head, write_head
from ragspec.drafting.eagle.network import rotations_of, taps_of
from ragspec.errors import ModelError

H, I, V, VD, NUM_LAYERS = 64, 112, 256, 160, 12  # noqa: E741
DIALECTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("dialects.json").read_text())
"""By name: `config`; `tensors`, the options of the function below; `ones`, the shapes of further tensors; `norm_output` of the
configuration; and `reading`, the fields that differ from the class's own, or `refused`, the pattern of the refusal."""
PLAIN: dict[str, Any] = DIALECTS["SpecForge, Qwen3"]["config"]
SPECULATORS = DIALECTS["speculators, ids null"]["config"]


def tensors(
    taps: int = 3, layers: int = 1, vd: int = VD, hd: int = 16, norm: str = "", *, qk: bool = False, embed: bool = False,
    bias: bool = False, t2d: bool = True, lm: bool = True, fc: bool = True, prefix: str = "layers.0.",
) -> dict[str, Tensor]:  # fmt: skip
    made = {"norm.weight": (H,), "layers.0.hidden_norm.weight": (H,)}
    made |= {"fc.weight": (H, taps * H)} if fc else {}
    made |= {"lm_head.weight": (vd, H)} if lm else {}
    made |= {"embed_tokens.weight": (V, H)} if embed else {}
    made |= {"input_norm.weight": (taps * H,)} if norm == "all" else {}
    made |= {f"fc_norm.{i}.weight": (H,) for i in range(taps)} if norm == "each" else {}
    for i in range(layers):
        at = f"layers.{i}."
        made |= layer_shapes(at, H if i else 2 * H, H, I, 4 * hd, 2 * hd) | {f"{at}input_layernorm.weight": (H,)}
        made |= {f"{at}self_attn.{n}_norm.weight": (hd,) for n in "qk"} if qk else {}
        sizes = (("q", 4 * hd), ("k", 2 * hd), ("v", 2 * hd), ("o", H))
        made |= {f"{at}self_attn.{n}_proj.bias": (size,) for n, size in sizes} if bias else {}
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in made.items()}
    if vd < V:
        stored["d2t"] = torch.arange(vd) // 2
        stored["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.arange(vd) + stored["d2t"], True)
    if not t2d:
        del stored["t2d"]
    return {prefix + n.removeprefix("layers.0.") if n.startswith("layers.0.") else n: t for n, t in stored.items()}


ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64},
}


def turns(kind: str, theta: float, head_dim: int = 16, truncate: bool = True) -> list[float]:
    """A position's turns of each plane, by the published formulas."""
    return rates(theta, head_dim, ROPES[kind] | {"truncate": truncate}, 0)


class Reading(NamedTuple):
    """`taps`: boundaries behind a layer. `feed`: the normed state is fed back. `frequencies`: arguments of `turns`."""

    taps: tuple[int, ...] = (2, 6, 9)
    norm: str = ""
    feed: bool = False
    norm_before_residual: bool = False
    layers: int = 1
    qk: bool = False
    bias: bool = False
    window: int = 0
    vocabulary: int = VD
    frequencies: Sequence[Any] = ("plain", 1e6)
    scale: float = 1.0
    own_output: bool = True


def quantised(dtype: torch.dtype, **scales: Tensor) -> dict[str, Tensor]:
    made = tensors()
    for name, scale in scales.items():
        at = f"layers.0.mlp.{name}_proj.weight"
        made |= {at: made[at].clamp(-1, 1).to(dtype), at + "_scale": scale}
    return made


def deep() -> dict[str, Tensor]:
    return {name.replace("layers.", "midlayer.", 1): tensor for name, tensor in tensors(layers=2).items()}


def reversed_maps() -> dict[str, Tensor]:
    made, rows = tensors(prefix="midlayer."), torch.arange(VD)
    return made | {"d2t": (rows + made["d2t"]).flip(0) - rows, "lm_head.weight": made["lm_head.weight"].flip(0)}


def other_integers() -> dict[str, Tensor]:
    made = tensors(prefix="midlayer.")
    return made | {"d2t": made["d2t"].to(torch.int32), "t2d": made["t2d"].to(torch.int64)}


def scaled_once() -> dict[str, Tensor]:
    made = quantised(torch.float8_e4m3fn, up=torch.tensor(0.5))
    return made | {"layers.0.mlp.up_proj.input_scale": torch.tensor(1.0)}


def of_a_model() -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors(norm="each").items()}


def scaled_by_row() -> dict[str, Tensor]:
    return quantised(torch.float8_e4m3fn, up=torch.full((I, 1), 0.5).bfloat16(), down=torch.ones(H, 1).bfloat16())


def scaled_by_block() -> dict[str, Tensor]:
    return quantised(torch.float8_e4m3fn, up=torch.ones(2, 1))


DEEP = {"architectures": ["LlamaForCausalLMEagle3Deep"], "num_hidden_layers": 2}
MADE: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, Any], Reading | str]] = {
    "NeMo Automodel": (of_a_model, {"fc_norm": True, "norm_output": True}, Reading(norm="each", feed=True)),
    "ModelOpt, Deep": (deep, DEEP, Reading(layers=2)),
    "maps of other integers": (other_integers, {}, Reading()),
    "d2t out of order": (reversed_maps, {}, Reading()),
    "compressed-tensors, a scale a row": (
        scaled_by_row,
        SPECULATORS | {"quantization_config": {"quant_method": "compressed-tensors"}},
        Reading(norm_before_residual=True),
    ),
    "ModelOpt, FP8": (scaled_once, {"quantization_config": {"quant_method": "modelopt"}}, Reading()),
    "quantised in blocks": (scaled_by_block, {}, r"mlp\.up_proj\.weight_scale is \[2, 1\]"),
}
"""Dialects of tensors that need a function: with changes of the plain config, or another one."""


def dialect(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Reading | str]:
    """Config, tensors, and the right reading or the pattern of the refusal."""
    if name in MADE:
        made, changes, right = MADE[name]
        return (changes if "transformer_layer_config" in changes else PLAIN | changes), made(), right
    given = DIALECTS[name]
    stored = tensors(**given["tensors"]) | {each: torch.ones(shape) for each, shape in given.get("ones", {}).items()}
    reading = given.get("reading", {})
    right = given.get("refused") or Reading(**reading | {"taps": tuple(reading.get("taps", (2, 6, 9)))})
    return given["config"], stored, right


@pytest.mark.parametrize("name", [*DIALECTS, *MADE])
def test_a_dialect_is_read_as_its_trainer_means_it(name: str, tmp_path: Path) -> None:
    """A key that is read in another sense, or not at all: the head loads, and only its drafts are worse."""
    given, stored, right = dialect(name)
    option = DIALECTS.get(name, {}).get("norm_output")
    save_files(tmp_path, given, stored)
    if isinstance(right, str):
        with pytest.raises(ModelError, match=right):
            read_head(tmp_path, norm_output=option)
        return
    config, read = checkpoint = read_head(tmp_path, norm_output=option)
    norms = len(read["fc_norm.weight"]) if "fc_norm.weight" in read else 0
    cosines, sines = rotations_of(config, 2)
    half = config.head_dim // 2
    frequencies = torch.atan2(sines[1, :half].double(), cosines[1, :half].double())
    assert frequencies.tolist() == pytest.approx(turns(*right.frequencies), rel=1e-5, abs=1e-9)
    got = Reading(
        taps=taps_of(config, NUM_LAYERS),
        norm=("all" if norms == 1 else "each") if norms else "",
        feed=config.norm_output,
        norm_before_residual=config.norm_before_residual,
        layers=config.num_layers,
        qk=config.qk_norm,
        bias=config.qkv_bias and config.output_bias,
        window=config.window,
        vocabulary=config.draft_vocab_size,
        frequencies=right.frequencies,
        scale=pytest.approx(float(cosines[0, 0])),
        own_output=not config.shares_lm_head,
    )
    assert got == right
    assert config.vocab_size == V
    write_head(tmp_path / "again", checkpoint)
    assert read_head(tmp_path / "again").config == config


def test_derived_maps_and_dequantised_weights_are_the_stored_ones(tmp_path: Path) -> None:
    """Draft tokens sent to other tokens than their rows of the output layer; a weight read without its scale."""

    def read(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        save_files(tmp_path, PLAIN, stored)
        return read_head(tmp_path).tensors

    whole = tensors(prefix="midlayer.")
    for stored in (
        tensors(prefix="midlayer.", t2d=False),
        reversed_maps(),
        {n: t for n, t in reversed_maps().items() if n != "t2d"},
    ):
        got = read(stored)
        assert all(torch.equal(got[name], whole[name]) for name in ("d2t", "t2d", "lm_head.weight"))
    scale = torch.linspace(0.5, 2.0, I)[:, None]
    stored = quantised(torch.float8_e4m3fn, up=scale)
    expected = stored["layers.0.mlp.up_proj.weight"].float() * scale
    assert torch.equal(read(stored)["midlayer.mlp.up_proj.weight"], expected)
