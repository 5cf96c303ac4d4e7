"""The suite cpu runs from end to end on a random target, with llama.cpp where it is installed and without."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from stand_ins import no_tick
from tiny_target import chat_tokenizer

from ragspec.config import DraftingConfig
from ragspec.core import GenerationStats
from ragspec.engine.loading import load_engine
from ragspec.errors import ModelError
from ragspec.evaluation import peers
from ragspec.evaluation.cases import Case
from ragspec.evaluation.peers import LlamaDecoder, llama_files, load_peer
from ragspec.evaluation.report import complete, summary
from ragspec.evaluation.suite import Settings, engine_config, find_suite, run_suite
from ragspec.evaluation.suites import cpu
from ragspec.evaluation.timing import TimedGeneration, Timings

LLAMA = importlib.util.find_spec("llama_cpp") is not None
OWN = ("identical", "step16_over_step1", "batch8_on_off", "step_over_roofline", "perplexity_ratio", "busy_over_quiet")
AGAINST_LLAMA = (
    "plain_vs_llama_q8",
    "plain_vs_llama_bf16",
    "rag_vs_llama_best",
    "grammar_vs_llama_best",
    "prefill_vs_llama_best",
)


@pytest.mark.parametrize(
    "installed", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.skipif(not LLAMA, reason="no peer")])]
)
def test_every_key_is_measured(
    installed: bool, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a key that is missing or null where it was to be measured; a suite that needs llama.cpp to run at all."""
    monkeypatch.setattr(cpu, "llama_installed", lambda: installed)
    monkeypatch.setattr(cpu, "CHAT_TOKENS", 24)
    assert settings.data_dir is not None
    data_dir = tmp_path / "data"  # Why a copy: the folder is every test's
    shutil.copytree(settings.data_dir, data_dir)
    requests = data_dir / "mt_bench/vicuna_bench_question.jsonl"
    requests.parent.mkdir()
    requests.write_text("".join(json.dumps({"turns": [f"Write about the mill of Town{i}."]}) + "\n" for i in range(3)))
    target = settings.target.model_copy(
        update={"quantization": "int8", "cache_dir": str(settings.cache_dir / "targets")}
    )
    settings = dataclasses.replace(settings, target=target, data_dir=data_dir)
    result = complete(run_suite("cpu", settings, no_tick).result)
    assert [key for key in OWN if result[key] is None] == []
    assert [key for key in AGAINST_LLAMA if result[key] is None] == ([] if installed else [*AGAINST_LLAMA])
    assert result["identical"] is True
    assert len(result["peers"]) == (8 if installed else 4)
    notes = [text for name, _, text in summary(result, find_suite("cpu").metrics, ("missing",)) if name == "missing"]
    assert installed or notes == ["llama.cpp did not run: make peers installs llama-cpp-python"]


@pytest.mark.skipif(not LLAMA, reason="llama-cpp-python is not installed")
def test_llama_cpp_runs_the_same_weights(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: rows of queries and keys in transformers' order, which llama.cpp rotates wrongly: another model."""
    monkeypatch.setattr(peers, "LLAMA_TYPES", {"F32": 0})  # Why: rounded weights may write other tokens
    model = load_peer(settings.target)
    prompt = list(range(30, 60))
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with load_engine(settings.target, engine_config(), DraftingConfig()) as engine:
        for lookup in (0, 4):
            decode = LlamaDecoder(llama_files(model, tmp_path)["F32"], engine, 256, lookup)
            first = [decode(Case("a", "a", tuple(prompt), (), 12)) for _ in range(2)][1]
            assert list(first.token_ids) == expected[0, len(prompt) :].tolist()[: len(first.token_ids)]
            assert decode.step_s(4, 20) > 0.0


def test_a_model_that_llama_cpp_would_misread_is_refused(settings: Settings) -> None:
    """Bug guarded: other architectures written as Llamas, compared in speed with garbage."""
    model = load_peer(settings.target)
    model.config.model_type = "gemma2"
    with pytest.raises(ModelError, match="gemma2"):
        peers.llama_files(model, Path("nowhere"))


def test_ratios_are_against_the_best_of_the_same_run() -> None:
    """Bug guarded: the slowest peer as the measure, a peer that did not run as one of speed zero, or tokens counted wrongly."""

    def run(num_tokens: int, seconds: float, first_s: float = 1.0) -> TimedGeneration:
        return TimedGeneration(tuple(range(num_tokens)), first_s, seconds)

    runs = {"own": [[run(11, 1.0)], [run(11, 2.0)]], "a": [[run(6, 1.0)], [run(6, 1.0, 0.5)]], "b": [[run(3, 1.0)]] * 2}
    timings = Timings(runs, [0.0])
    assert timings.rate_ratio("own", ["a", "b", "absent"]) == (10 / 5 + 5 / 5) / 2
    assert timings.rate_ratio("own", ["absent"]) is None
    early = run(11, 1.0)._replace(stats=GenerationStats(num_first_tokens=6))
    assert Timings({"own": [[early]]}, [0.0]).rate("own") == 5.0, "tokens that came with the first took no time here"
    assert timings.prompt_ratio("own", ["a", "b"]) == (1.0 + 0.5) / 2
    assert timings.shared_tokens("own", "b") == 3 / 11


def test_a_vocabulary_for_llama_server_has_every_token_at_its_id() -> None:
    """Bug guarded: added tokens left out or moved, so that the server writes other words, or refuses the file."""
    tokenizer, size = chat_tokenizer(), 330
    found = peers._vocabulary(tokenizer, size)
    assert len(found.tokens) == len(set(found.tokens)) == len(found.types) == size > len(tokenizer)
    assert all(found.tokens[index] == token for token, index in tokenizer.get_vocab().items())
    control = [found.tokens[i] for i, kind in enumerate(found.types) if kind == gguf.TokenType.CONTROL]
    assert control == ["<s>", "</s>", "<|im_start|>", "<|im_end|>"] and found.tokens[found.end] == "<|im_end|>"
    assert found.merges and all(merge.count(" ") == 1 for merge in found.merges)
