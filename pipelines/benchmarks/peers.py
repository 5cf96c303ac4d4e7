"""Other programs on the same weights: greedy decoding and prompt lookup, timed from token to token.

transformers runs stock linear layers and scaled-dot-product attention. llama.cpp runs GGUF files that its own quantiser makes of
these weights. Nothing of ragspec's numerics takes part.

    >>> peer_decoders(config, engine, cache_dir, num_context=2048)["generate"](case).token_ids
"""

import ctypes
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from pipelines.benchmarks.cases.timing import GENERATE, PROMPT_LOOKUP, Case, Decoder, TimedGeneration
from ragspec.config import TargetConfig
from ragspec.disk import saving
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.engine import Engine
from ragspec.errors import ModelError
from ragspec.numerics.threads import num_processors, run_in_thread, set_num_threads

LOOKUP_TOKENS = 10
_GGUF_TYPES = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
LLAMA_TYPES = {"Q8_0": 7, "BF16": 32}
"""llama.cpp's numbers of the types of weights (`llama_ftype`)."""


def load_peer(config: TargetConfig) -> Any:
    """The target's weights as transformers runs them."""
    dtype = getattr(torch, config.dtype)
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    return run_in_thread(
        lambda: AutoModelForCausalLM.from_pretrained(target_folder(config), **options).eval(), num_processors()
    )


def peer_decoders(config: TargetConfig, engine: Engine, cache_dir: Path, num_context: int) -> dict[str, Decoder]:
    """Every program that is installed, by name: `generate`, prompt lookup, llama.cpp plain and with its prompt lookup.

    `num_context`: tokens of the longest prompt and its output. Raises: ModelError, SaveError.
    """
    model = load_peer(config)
    decoders: dict[str, Decoder] = {
        GENERATE: TransformersDecoder(model, engine),
        PROMPT_LOOKUP: TransformersDecoder(model, engine, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }
    if importlib.util.find_spec("llama_cpp") is None:
        return decoders
    for type_, path in llama_files(model, cache_dir / "llama_cpp").items():
        decoders[f"llama.cpp {type_}"] = LlamaDecoder(path, engine, num_context)
        decoders[f"llama.cpp {type_}, prompt lookup"] = LlamaDecoder(path, engine, num_context, LOOKUP_TOKENS)
    return decoders


class TransformersDecoder:
    """Greedy `generate` with `options` such as `prompt_lookup_num_tokens=10`.

    Decoding runs in the engine's thread, with the same OpenMP workers as the engine.
    """

    def __init__(self, model: Any, engine: Engine, **options: Any) -> None:
        self._model, self._engine, self._options = model, engine, options

    def __call__(self, case: Case) -> TimedGeneration:
        runs: list[TimedGeneration] = []
        self._engine.between_steps(lambda: runs.append(self._decode(case)))
        return runs[0]

    def _decode(self, case: Case) -> TimedGeneration:
        clock = _Clock()
        prompt = torch.tensor([case.prompt_ids])
        set_num_threads(num_processors())
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=case.max_tokens,
                do_sample=False,
                streamer=clock,
                eos_token_id=list(self._engine.target.eos_ids) or None,
                pad_token_id=0,
                **self._options,
            )
        token_ids = tuple(output[0, prompt.shape[1] :].tolist())
        return _timed(self._engine, token_ids, begin, clock.times_s[1:])  # [0] is the prompt


def _timed(engine: Engine, token_ids: tuple[int, ...], begin_s: float, times_s: list[float]) -> TimedGeneration:
    text = str(engine.target.tokenizer.decode(list(token_ids), skip_special_tokens=True))
    return TimedGeneration(token_ids, times_s[0] - begin_s, times_s[-1] - times_s[0], len(times_s), text)


class _Clock(BaseStreamer):
    """Notes the time of each put: the prompt first, then each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


class LlamaDecoder:
    """Greedy decoding by llama.cpp of a GGUF file; with `lookup_tokens` its prompt lookup drafts so many.

    Decoding runs in the engine's thread. Every call computes the whole prompt. A context has room for `num_context` tokens.
    """

    def __init__(self, path: Path, engine: Engine, num_context: int, lookup_tokens: int = 0) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup_tokens) if lookup_tokens else None
        self._engine = engine
        self._model = Llama(
            str(path),
            n_ctx=num_context,
            n_threads=num_processors(),
            n_threads_batch=num_processors(),
            draft_model=draft,
            logits_all=draft is not None,
            verbose=False,
        )

    def __call__(self, case: Case) -> TimedGeneration:
        runs: list[TimedGeneration] = []
        self._engine.between_steps(lambda: runs.append(self._decode(case)))
        return runs[0]

    def _decode(self, case: Case) -> TimedGeneration:
        token_ids: list[int] = []
        times_s: list[float] = []
        self._model.reset()
        begin = time.perf_counter()
        for token in self._model.generate(list(case.prompt_ids), temp=0.0, repeat_penalty=1.0):
            times_s.append(time.perf_counter())
            token_ids.append(token)
            if token in self._engine.target.eos_ids or len(token_ids) == case.max_tokens:
                break
        return _timed(self._engine, tuple(token_ids), begin, times_s)


def llama_files(model: Any, folder: Path, tokenizer: Any = None) -> dict[str, Path]:
    """GGUF files of a transformers model's weights, by type, made once and kept in `folder`; with a vocabulary if it is given.

    Raises: ModelError for a model that is no plain Llama or that llama.cpp refuses, SaveError.
    """
    tensors = dict(_llama_tensors(model))
    vocabulary = _vocabulary(tokenizer, model.config.vocab_size) if tokenizer is not None else None
    digest = hashlib.sha256(repr((sorted(_llama_metadata(model.config).items()), vocabulary)).encode())
    for name, tensor in tensors.items():
        digest.update(name.encode() + np.ascontiguousarray(tensor).data)
    paths = {name: folder / f"{digest.hexdigest()[:24]}-{name}.gguf" for name in LLAMA_TYPES}
    if not all(path.exists() for path in paths.values()):
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _write_files(model.config, tensors, vocabulary, paths)
    return paths


class _Vocabulary(NamedTuple):
    tokens: list[str]
    types: list[gguf.TokenType]
    merges: list[str]
    end: int


def _vocabulary(tokenizer: Any, size: int) -> _Vocabulary:
    """A byte-level tokenizer as GGUF has it. llama-server needs one to write text, even where prompts come as token ids."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    merges = [each if isinstance(each, str) else " ".join(each) for each in state["model"]["merges"]]
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(size)]
    return _Vocabulary([names.get(i, f"[unused {i}]") for i in range(size)], kinds, merges, tokenizer.eos_token_id)


def _write_files(
    config: Any, tensors: Mapping[str, np.ndarray], vocabulary: _Vocabulary | None, paths: Mapping[str, Path]
) -> None:
    """A float32 file first, which llama.cpp's quantiser turns into each type."""
    import llama_cpp
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    whole, building = (next(iter(paths.values())).with_suffix(f".{os.getpid()}.{part}") for part in ("f32", "part"))
    try:
        writer = gguf.GGUFWriter(whole, "llama")
        for key, value in _llama_metadata(config).items():
            writer.add_key_value(key, value, _GGUF_TYPES[type(value)])
        if vocabulary is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_list(vocabulary.tokens)
            writer.add_token_types(vocabulary.types)
            writer.add_token_merges(vocabulary.merges)
            writer.add_eos_token_id(vocabulary.end)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        for name, path in paths.items():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = LLAMA_TYPES[name], num_processors()
            if llama_cpp.llama_model_quantize(str(whole).encode(), str(building).encode(), ctypes.byref(params)):
                raise ModelError(f"llama.cpp did not convert the weights to {name}")
            os.replace(building, path)
    finally:
        for path in (whole, building):
            path.unlink(missing_ok=True)


def _llama_metadata(config: Any) -> dict[str, int | float | str]:
    """GGUF's description of a Llama without its vocabulary. Raises: ModelError."""
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default":
        raise ModelError(f"llama.cpp runs beside plain Llamas alone, not beside {config.model_type}")
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    keys: dict[str, int | float | str] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return {f"llama.{key}": value for key, value in keys.items()}


def _llama_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight in float32 under GGUF's name. llama.cpp rotates neighbouring pairs, so rows of queries and keys move."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor: np.ndarray = weight.float().numpy()
        if (count := heads.get(name.split(".")[-2])) is not None:
            halves = tensor.reshape(count, 2, len(tensor) // count // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"llama.cpp has no name for the weight {name}")
        yield found, tensor
