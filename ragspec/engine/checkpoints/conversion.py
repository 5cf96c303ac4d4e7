"""Writes a GGUF file, or a model and its LoRA adapter, as one Hugging Face folder.

Owns the reading of GGUF files (by transformers) and of PEFT directories. The adapter is added in float32: W + scale * B A, then
rounded to the target's dtype, as PEFT's `merge_and_unload` does. Every rank of a tensor-parallel group reads the merged folder,
so all rank counts serve the same bits.

>>> convert_target("model.gguf", Path("adapter"), "float32", Path("converted"))

Source: LoRA 2106.09685; rsLoRA 2312.03732.
"""

import contextlib
import json
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from ragspec.core import Say, log_progress
from ragspec.engine.checkpoints.gguf_metadata import GgufMetadata
from ragspec.engine.checkpoints.model_config import check_servable, read_tokenizer
from ragspec.engine.checkpoints.weights import check_complete, load_whole, model_errors
from ragspec.errors import ModelError
from ragspec.numerics.threads import num_processors
from ragspec.retrieval.row_invariant import without_progress_bars

_READING = threading.Lock()
"""Held while names of the library gguf stand for a file's own, which one thread at a time can do."""

_MAX_FILE = "4GB"
_SAY_EVERY_BYTES = 100_000
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")


def convert_target(model: str, adapter: Path | None, dtype: str, folder: Path, say: Say = log_progress) -> None:
    """Write the target's folder: weights in `dtype`, tokenizer, chat template and generation settings.

    `say` gets a line for each part of the work. Raises: ModelError.
    """
    is_gguf = model.endswith(".gguf")
    quick = _quick_reading(model, say) if is_gguf else contextlib.nullcontext()
    with model_errors(model), without_progress_bars(), quick:
        kind = getattr(torch, dtype)
        loaded = _read_gguf(Path(model), kind) if is_gguf else load_whole(model, kind)
        if adapter is not None:
            merge_adapter(loaded, adapter)
        say("writing the converted weights")
        loaded.save_pretrained(folder, max_shard_size=_MAX_FILE)
        say("writing the tokenizer")
        _source_tokenizer(model).save_pretrained(folder)


def merge_adapter(model: Any, folder: Path) -> None:
    """Add a PEFT LoRA adapter to the model's weights, in place.

    Raises: ModelError for an adapter of another kind or another model.
    """
    with model_errors(str(folder)):
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        _check_adapter(folder, config)
        factors = _factors(folder)
        weights = dict(model.named_parameters())
        for module, (a, b) in factors.items():
            weight = weights.get(f"{module}.weight")
            delta_shape = (b.shape[0], a.shape[1])
            if weight is None or tuple(weight.shape) != delta_shape or a.shape[0] != b.shape[1]:
                raise ModelError(f"{folder} is an adapter of another model: {module} does not fit")
            rank = a.shape[0]
            alpha = _alpha(config, module)
            scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
            delta = (b.float() @ a.float()) * scale
            with torch.no_grad():
                weight.copy_((weight.float() + delta).to(weight.dtype))


class _Reader(gguf.GGUFReader):
    """Reads a file's metadata in a third of the time: slices of a mapped file cost several times as much as an array's."""

    def __init__(self, path: str, say: Say) -> None:
        self._say, self._said_bytes = say, 0
        super().__init__(path)

    def _get(self, offset: int, *kind: Any, **order: Any) -> Any:
        self.data: Any = np.asarray(self.data)
        if offset >= self._said_bytes + _SAY_EVERY_BYTES:
            self._said_bytes = int(offset)
            self._say("reading the metadata of the GGUF file, kilobytes", self._said_bytes // 1000)
        return super()._get(offset, *kind, **order)


@contextlib.contextmanager
def _quick_reading(path: str, say: Say) -> Iterator[None]:
    """Inside, transformers gets the file's metadata from one reading, and tensors that all threads dequantise ahead of it.

    Why: transformers reads the metadata four times, ten seconds each for 150,000 tokens, and dequantises in one thread.
    """
    say("reading the GGUF file")
    library: Any = gguf
    caller: Any = modeling_gguf_pytorch_utils
    reader = _Reader(path, say)
    with _READING, ThreadPoolExecutor(num_processors()) as pool:
        kept = library.GGUFReader, library.dequantize, caller.tqdm
        library.GGUFReader, caller.tqdm = lambda _: reader, lambda tensors, **_: tensors
        library.dequantize = _Dequantiser(reader.tensors, pool, num_processors() + 1, say)
        try:
            yield
        finally:
            library.GGUFReader, library.dequantize, caller.tqdm = kept


class _Dequantiser:
    """Stands for `gguf.dequantize`: the tensors in their order, `num_ahead` of them computed before they are asked for."""

    def __init__(self, tensors: Sequence[Any], pool: ThreadPoolExecutor, num_ahead: int, say: Say) -> None:
        self._tensors, self._num_ahead, self._say = tensors, num_ahead, say
        self._pool, self._dequantize = pool, gguf.dequantize
        self._ahead: deque[Future[Any]] = deque()
        self._num_started = 0

    def __call__(self, data: Any, kind: Any) -> Any:
        number = self._num_started - len(self._ahead)
        if data is not self._tensors[number].data:
            raise ModelError("this version of transformers reads a GGUF file's tensors in another order")
        for tensor in self._tensors[self._num_started : number + self._num_ahead]:
            self._ahead.append(self._pool.submit(self._dequantize, tensor.data, tensor.tensor_type))
            self._num_started += 1
        self._say("dequantising the weights", number, len(self._tensors))
        return self._ahead.popleft().result()


def _read_gguf(path: Path, dtype: torch.dtype) -> Any:
    """The model with dequantised weights. Why a second model: transformers marks the first as quantised and does not save it."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    metadata = GgufMetadata(gguf.GGUFReader(path))
    metadata.check_keys(config)
    metadata.scale_rotation(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_servable(model, config.get_text_config())
    metadata.check_tensors(model)
    read: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, config=config, gguf_file=path.name, dtype=dtype, output_loading_info=True
    )
    dequantised, report = read
    check_complete(str(path), sorted(report["missing_keys"]))
    model.load_state_dict(dequantised.state_dict(), assign=True, strict=False)
    model.tie_weights()
    if dequantised.generation_config is not None:
        model.generation_config = dequantised.generation_config
    return model


def _source_tokenizer(model: str) -> Any:
    path = Path(model)
    if path.suffix == ".gguf":
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        GgufMetadata(gguf.GGUFReader(path)).set_split(tokenizer)
        return tokenizer
    return read_tokenizer(model)


_ADAPTER_KEYS = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"})
"""Keys of adapter_config.json that `merge_adapter` applies; ranks are those of the tensors."""

_HARMLESS_ADAPTER_KEYS = frozenset({
    "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
})  # fmt: skip
"""Keys of training, or of which layers have factors: the tensors say that."""

_NEUTRAL_ADAPTER_VALUES = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
"""Other values change the base model: trained biases, PiSSA, OLoRA, CorDA, LoftQ."""


def _check_adapter(folder: Path, config: dict[str, Any]) -> None:
    """Raises: ModelError naming every key that may change numbers and is not applied."""
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is an adapter of the kind {config.get('peft_type')}; only LORA is merged")
    known = _ADAPTER_KEYS | _HARMLESS_ADAPTER_KEYS
    others = [(key, value) for key, value in config.items() if value and key not in known]
    telling = [(key, value) for key, value in others if value not in _NEUTRAL_ADAPTER_VALUES.get(key, ())]
    unknown = [f"{key}: {json.dumps(value)[:40]}" for key, value in telling]
    if unknown:
        raise ModelError(f"{folder} has {', '.join(unknown)}, which is not merged")


def _factors(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Module name -> (A, B). Shapes: A [rank, in], B [out, rank]. Raises: ModelError for tensors of another kind."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(folder).items():
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() != 2:
            raise ModelError(f"{folder} holds {name}, which is no factor of a linear layer")
        found.setdefault(match["module"], {})[match["factor"]] = tensor
    if lonely := [module for module, pair in found.items() if len(pair) < 2]:
        raise ModelError(f"{folder} lacks a factor of {lonely[0]}")
    if not found:
        raise ModelError(f"{folder} holds no factors")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / "adapter_model.safetensors").is_file():
        return load_file(folder / "adapter_model.safetensors")
    if (folder / "adapter_model.bin").is_file():
        loaded: dict[str, Tensor] = torch.load(folder / "adapter_model.bin", map_location="cpu", weights_only=True)
        return loaded
    raise ModelError(f"{folder} has no adapter_model.safetensors and no adapter_model.bin")


def _alpha(config: dict[str, Any], module: str) -> float:
    """`alpha_pattern` maps regular expressions for ends of module names to their own alpha; the first match counts."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return float(alpha)
    return float(config["lora_alpha"])
