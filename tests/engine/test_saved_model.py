"""A target built from its saved int8 weights is the target that transformers builds, bit for bit; types of weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import fresh_forward
from tiny_target import save_model, target_config

from ragspec.config import EncoderConfig, TargetConfig
from ragspec.core import Document
from ragspec.engine.checkpoints.model_config import read_tokenizer
from ragspec.engine.checkpoints.saved_model import SavedModel
from ragspec.engine.target import FINAL, Target
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import build_index


def settings_of(folder: Path) -> TargetConfig:
    settings = target_config(str(folder), "int8")
    return settings.model_copy(update={"cache_dir": str(folder / "cache")})


def loaded_unsaved(settings: TargetConfig) -> Target:
    """The target as transformers builds it: its weights cannot be saved, for the cache is a file."""
    return Target.load(settings.model_copy(update={"cache_dir": str(Path(settings.model) / "config.json")}), 256)


def outputs(target: Target) -> list[np.ndarray[Any, Any]]:
    text = np.random.default_rng(5).integers(0, target.vocab_size, 70).astype(np.int32)
    logits, tapped = fresh_forward(target, text, (0, 1, 2, FINAL))
    return [logits, *(tapped[tap].numpy() for tap in sorted(tapped))]


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"rms_norm_eps": 1e-3}),
        pytest.param("llama", {"head_dim": 32}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": None}, marks=pytest.mark.slow),
    ],
)
def test_saved_weights_have_the_bits_of_the_model(kind: str, own: dict[str, Any], tmp_path: Path) -> None:
    """A bias, an epsilon, a rotation or a head size that only the model knew: its saved weights answered otherwise. Or the first
    start kept the whole model in memory, beside its quantised weights."""
    settings = settings_of(save_model(kind, tmp_path, **own))
    first, second = loaded_unsaved(settings), Target.load(settings, 256)
    assert not isinstance(first._model, SavedModel) and isinstance(second._model, SavedModel)
    assert all(np.array_equal(*both) for both in zip(outputs(first), outputs(second), strict=True))
    for name in ("vocab_size", "num_positions", "eos_ids", "shapes", "num_parameters", "max_context_tokens"):
        assert getattr(first, name) == getattr(second, name)
    assert torch.equal(first.embedding, second.embedding)
    for name in first.text_config.to_dict().keys() - {"model_type", "use_cache", "architectures"}:
        assert getattr(first.text_config, name) == getattr(second.text_config, name), name


def test_windows_are_left_to_transformers(tmp_path: Path) -> None:
    """Each family has its own rule for which layers have a window."""
    settings = settings_of(save_model("mistral", tmp_path))
    first, second = loaded_unsaved(settings), Target.load(settings, 256)
    assert not isinstance(second._model, SavedModel)
    assert all(np.array_equal(*both) for both in zip(outputs(first), outputs(second), strict=True))


def test_weights_saved_by_earlier_versions_get_what_they_lack(tmp_path: Path) -> None:
    """Weights saved by an earlier version: every start took the long way, for ever."""
    from safetensors.torch import load_file, save_file

    settings = settings_of(save_model("llama", tmp_path))
    expected = outputs(Target.load(settings, 256))
    [saved] = (tmp_path / "cache" / "int8").glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(saved).items() if name != "rotations"}, saved)
    old, new = (Target.load(settings, 256) for _ in range(2))
    assert not isinstance(old._model, SavedModel) and isinstance(new._model, SavedModel)
    for target in (old, new):
        assert all(np.array_equal(*both) for both in zip(outputs(target), expected, strict=True))


HEAVY = (
    "transformers.modeling_utils transformers.models torch.distributed.tensor sympy torch._dynamo scipy.linalg triton pandas "
    "ray sentence_transformers numba.np.arraymath"
)
SCRIPT = """
import sys
from ragspec.config import DraftingConfig, EncoderConfig, EngineConfig, RetrieverConfig, TargetConfig
from ragspec.engine.loading import load_engine
from ragspec.retrieval.retriever import Retriever
import services.app, services.backend, services.embedded
retriever = Retriever.from_config(RetrieverConfig(index_dir=sys.argv[3], mode="dense"), EncoderConfig())
retriever.retrieve(["When did it rain?"], 1)
load_engine(TargetConfig.model_validate_json(sys.argv[1]), EngineConfig(max_kv_tokens=256), DraftingConfig()).close()
print(*[name for name in sys.argv[2].split() if name in sys.modules])
"""


@pytest.mark.slow
def test_a_later_start_imports_neither_model_classes_nor_a_compiler(tmp_path: Path) -> None:
    """One careless import at the top of a module: three seconds more before `serve` is ready."""
    settings, index = settings_of(save_model("llama", tmp_path)), tmp_path / "index"
    build_index([Document("rain", "It rained on Monday.")], index, Encoder.load(EncoderConfig()))
    command = [sys.executable, "-c", SCRIPT, settings.model_dump_json(), HEAVY, str(index)]
    _, later = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert later.stdout.split() == []


def test_a_tokenizer_is_the_one_that_transformers_chooses(tmp_path: Path) -> None:
    """A tokenizer that is read without transformers' tables wrote other tokens, or another chat."""
    from transformers import AutoTokenizer

    text, messages = "It rained.  <s> 1,024 naïve 雨\n", [{"role": "user", "content": "When?"}]
    for kind in ("llama", "qwen2", "mistral"):
        folder = str(save_model(kind, tmp_path / kind))
        own, chosen = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert type(own) is type(chosen) and own.get_vocab() == chosen.get_vocab()
        assert own.special_tokens_map == chosen.special_tokens_map and own.model_max_length == chosen.model_max_length
        assert own(text)["input_ids"] == chosen(text)["input_ids"]
        assert own.chat_template == chosen.chat_template
        if own.chat_template:
            assert own.apply_chat_template(messages) == chosen.apply_chat_template(messages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("types") / "model")


def config(folder: Path, **options: object) -> TargetConfig:
    return TargetConfig.model_validate({"model": str(folder), "cache_dir": str(folder.parent / "cache"), **options})


def test_every_model_is_int8_on_the_cpu_backend(folder: Path) -> None:
    """A model other than the default ran in float32, five times slower."""
    target = Target.load(config(folder), 64)
    assert (target.config.weight_dtype, target.config.kv_dtype) == ("int8", "bfloat16")
    assert target.backend.kv_itemsize == 2
    assert target.config.numerics_dtype == "float32-int8-v2-kv-bfloat16"
    assert config(folder, backend="torch").weight_dtype == config(folder, quantization="none").weight_dtype == "float32"
