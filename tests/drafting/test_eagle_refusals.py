"""EAGLE heads that cannot be served: each is refused with a reason, by ModelError and nothing else."""

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting.eagle_heads import change_config, change_tensors, random_head, save_head
from safetensors.torch import load_file
from torch import Tensor

from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint
from ragspec.errors import ModelError

Tensors = dict[str, Tensor]

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
SECTIONS = ("eagle_config", "transformer_layer_config", "rope_scaling")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_head(folder)
    return str(caught.value)


@pytest.mark.parametrize("family", EagleFamily)
def test_each_missing_misshapen_or_broken_tensor_is_named(family: EagleFamily, tmp_path: Path) -> None:
    """A loader that is not strict: a wrong name loads silently and the head drafts noise."""
    made = random_head(family, own_embedding=True, fc_bias=True)
    for name, tensor in made.tensors.items():
        needed = name not in ("embed_tokens.weight", "t2d")
        wrong = [made.tensors | {name: tensor[:-1]}]
        if needed:
            wrong.append({other: held for other, held in made.tensors.items() if other != name})
        if tensor.is_floating_point():
            holed = tensor.clone().index_put_(tuple(torch.zeros(tensor.ndim, 1).long()), torch.tensor(torch.nan))
            wrong += [made.tensors | {name: holed}, made.tensors | {name: tensor.to(torch.int32)}]
            wrong += [made.tensors | {name: torch.full_like(tensor, -torch.inf)}, made.tensors | {name: tensor[None]}]
            wrong.append(made.tensors | {name: tensor.to(torch.float8_e4m3fn)})
        for tensors in wrong:
            save_head(tmp_path, HeadCheckpoint(made.config, tensors))
            assert name in refusal(tmp_path)


def test_a_vocabulary_map_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Draft tokens sent to wrong target tokens: lossless, and never accepted."""

    def broken(change: Callable[[Tensors], object]) -> str:
        random_head("eagle3", tmp_path)
        change_tensors(tmp_path, change)
        return refusal(tmp_path)

    assert "offsets" in broken(lambda t: t["d2t"].add_(torch.arange(40)))  # ids
    assert "d2t and t2d" in broken(lambda t: t["d2t"].add_(1000))
    assert "d2t and t2d" in broken(lambda t: t["d2t"].sub_(1000))
    assert "d2t and t2d" in broken(lambda t: t["d2t"].fill_(2**63 - 1))
    assert "d2t and t2d" in broken(lambda t: t.update(d2t=t["d2t"].flip(0)))
    assert "d2t and t2d" in broken(lambda t: t.update(t2d=~t["t2d"]))
    assert "d2t and t2d" in broken(lambda t: t["t2d"].fill_(True))
    assert "d2t and t2d" in broken(lambda t: t.update(t2d=t["t2d"].roll(1)))
    assert "t2d" in broken(lambda t: t.update(t2d=2 * t["t2d"].to(torch.uint8)))
    random_head("eagle3", tmp_path, draft_vocab=64)
    change_tensors(tmp_path, lambda t: t.update(t2d=torch.ones(64, dtype=torch.bool)))
    assert "only one of d2t and t2d" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, ...) for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")),
        *((key, value) for key in ("hidden_size", "vocab_size") for value in ("32", 32.0, True, [], {}, -1, 0, 10**40)),
        *(("num_attention_heads", value) for value in (0, -4, 3, 10**40)),
        *(("head_dim", value) for value in (0, -2, 7)),
        *(("rope_theta", value) for value in ("1e4", 0, -1.0, float("nan"), float("inf"), 10**400, True)),
        *(("rms_norm_eps", value) for value in ("x", 0, float("nan"))),
        *(("num_key_value_heads", value) for value in (3, 0, 1.5)),
        *(("draft_vocab_size", value) for value in (65, 0, "all", ...)),
        *((AUX_KEY, value) for value in (3, "012", [1, 1, 2], [-1, 0, 1], [True, 2, 3], [1])),
        *((key, value) for key in SECTIONS for value in (7, "x", [1])),
        *((key, "yes") for key in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "bias")),
        ("num_hidden_layers", 2),
        ("num_hidden_layers", 10**9),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 8.0, "short_factor": [1.0], "long_factor": [2.0]}),
        ("rope_scaling", {"rope_type": "linear", "factor": "8"}),
        ("rope_scaling", {"type": ["yarn"], "factor": 8.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", ["chunked_attention"]),
        ("layer_types", ["full_attention", "full_attention"]),
        ("layer_types", "full_attention"),
        ("target_hidden_size", 48),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_followed_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    """A traceback of another class, or a head computed in another way than it was trained."""
    random_head("eagle3", tmp_path)
    if key == "num_attention_heads":
        change_config(tmp_path, head_dim=...)
    change_config(tmp_path, **{key: value})
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    words = ("heads", "aux_layers", "vocabulary", ".weight", "d2t", "t2d", "has factor", "sliding_window")
    assert any(word in message for word in (key, *words))


def test_files_that_are_not_there_or_no_json_are_named(tmp_path: Path) -> None:
    """FileNotFoundError, JSONDecodeError, UnicodeDecodeError, RecursionError or ValueError reach the user as a traceback."""
    assert "config.json" in refusal(tmp_path / "nowhere")
    random_head("eagle3", tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole = config.read_bytes()
    for text in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}"):
        config.write_bytes(text)
        assert "config.json" in refusal(tmp_path)
    config.write_bytes(whole)
    weights.rename(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"")
    assert "x.safetensors, y.safetensors" in refusal(tmp_path)
    (tmp_path / "x.safetensors").unlink()
    assert "y.safetensors" in refusal(tmp_path)
    (tmp_path / "y.safetensors").unlink()
    assert "no model.safetensors" in refusal(tmp_path)
    weights.mkdir()
    assert refusal(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"fc.weight": 3}, {"fc.weight": "../x"}, {"fc.weight": "/x"}])
def test_an_index_names_files_of_its_own_directory(weight_map: Any, tmp_path: Path) -> None:
    """An index that reads a file elsewhere, or crashes the loader."""
    random_head("eagle3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map" in refusal(tmp_path)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """A pickled call in pytorch_model.bin runs on the machine that loads it; a tensor without plain memory fails in a product."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    random_head("eagle", tmp_path, fc_bias=True)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "pytorch_model.bin" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.save({"fc.weight": [1.0]}, tmp_path / "pytorch_model.bin")
    assert "named tensors" in refusal(tmp_path)
    made = random_head("eagle", fc_bias=True)
    for bad in (made.tensors["fc.weight"].to_sparse(), made.tensors["fc.weight"].to("meta")):
        torch.save(made.tensors | {"fc.weight": bad}, tmp_path / "pytorch_model.bin")
        assert "fc.weight" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_damage_of_any_byte_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """A truncated download or a flipped bit raises a class that nobody expects."""
    random_head("eagle3", tmp_path, hidden=8, vocab=16)
    if name == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
        (tmp_path / "model.safetensors").unlink()
    whole = (tmp_path / name).read_bytes()
    draw, num_refused = random.Random(7), 0
    for trial in range(80):
        damaged = bytearray(whole[: draw.randrange(len(whole))] if trial % 2 else whole)
        for _ in range(draw.choice([1, 1, 8]) if damaged else 0):
            damaged[draw.randrange(min(len(damaged), 3000))] ^= 1 << draw.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            read_head(tmp_path)
        except ModelError:
            num_refused += 1
    assert num_refused >= 40
