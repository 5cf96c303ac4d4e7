"""Every suite runs from end to end on a random target, and its checks can fail."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stand_ins import no_tick
from tiny_target import CHATML, Free
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragspec.config import DraftingConfig, TargetConfig
from ragspec.core import Document, Request
from ragspec.engine import loading
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import ConfigError, InputError
from ragspec.evaluation.cases import Case, nothing_to_copy_cases
from ragspec.evaluation.datasets import RagList
from ragspec.evaluation.overrides import ForcedAnswers, ForcedSampler
from ragspec.evaluation.peers import TransformersDecoder, load_peer
from ragspec.evaluation.report import KEYS, complete, summary
from ragspec.evaluation.suite import Settings, engine_config, find_suite, run_suite
from ragspec.evaluation.suites import target as target_suite
from ragspec.evaluation.suites.generation import GREEDY, GenerationSuite
from ragspec.evaluation.suites.target import Generate, Retrieve
from ragspec.evaluation.timing import SPECULATIVE
from ragspec.rag.wording import question_messages
from ragspec.verification.sampling import Sampler

GENERATION_KEYS = (
    "identical", "tokens_per_s", "speedup_vs_plain", "speedup_vs_generate", "speedup_vs_prompt_lookup",
    "plain_vs_generate", "speedup_end_to_end", "acceptance_length", "bitwise", "peak_pss_mb", "nothing_to_copy",
)  # fmt: skip


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    with load_engine(settings.target, engine_config(), DraftingConfig()) as engine:
        yield engine


@pytest.mark.parametrize("name", ["rag", pytest.param("grammar", marks=pytest.mark.slow)])
def test_generation_suites_measure_everything(name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a key that is missing, or null where it was to be measured; any token that differs."""
    monkeypatch.setitem(GREEDY, "verbatim_quotes", False)  # a random target that quotes writes what no peer writes
    outcome = run_suite(name, settings, no_tick)
    result = complete(outcome.result | {"commit": "abc", "threads": 2})
    assert set(KEYS) <= result.keys()
    assert [key for key in (*GENERATION_KEYS, "t1_over_t0", "t1_bound") if result[key] is None] == []
    assert result["identical"] is True and result["bitwise"] is True
    assert result["num_prompts"] == (2 if name == "rag" else 6)
    assert len(result["identical_counts"]) == 11  # the first plain run, alone, is what all are compared with
    if name == "grammar":
        wanted = (
            "passes_saved",
            "gleu",
            "gleu_source",
            "clean_edit_rate",
            "identical_corrections",
            "edit_rates",
            "document",
        )
        assert [key for key in wanted if result.get(key) is None] == []
    assert len(summary(result, find_suite(name).metrics)) > 20


def test_forced_gold_answers_are_what_is_decoded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: forcing that is ignored, so the label lies; a random target never writes a quote by itself."""
    monkeypatch.setattr(loading, "measure_costs", lambda *given: Free())
    outcome = run_suite("rag", dataclasses.replace(settings, forced="gold", peers=True), no_tick)
    assert outcome.measured is not None
    texts = [run.text for run in outcome.measured.greedy.runs[SPECULATIVE][0]]
    assert all(text.startswith('"The old mill of Town') for text in texts)
    assert outcome.result["agrees_with_generate"] == 1.0
    assert "forced" in outcome.result["label"]
    assert outcome.result["acceptance_length"] > 1.5
    assert "t1_over_t0" not in outcome.result and "quality" not in outcome.result
    assert outcome.result["identical"] is None, "forced tokens are the same whatever the forward computes"


def test_forced_file_must_hold_every_prompt(settings: Settings, tmp_path: Path) -> None:
    """Bug guarded: prompts without an answer decoded freely under the label "forced"."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "q4", "answer": "yes"}\n')
    with pytest.raises(InputError, match="no forced answer"):
        run_suite("rag", dataclasses.replace(settings, forced=str(path)), no_tick)


def test_identical_is_false_when_outputs_differ(settings: Settings) -> None:
    """The check can fail: an engine whose output depends on speculation is found out."""

    def by_speculation(request: Request, seed: int, choice: int) -> Sampler:
        return ForcedSampler((40, 41, 42) if request.speculation else (40, 41, 43))

    with load_engine(settings.target, engine_config(), DraftingConfig(), by_speculation) as engine:
        cases = [Case("a", "a", tuple(range(20, 40)), (), 3)]
        result = GenerationSuite(engine, cases, settings.plan).measure().result
    assert result["identical"] is False
    assert result["identical_counts"]["T=0 speculative alone"] == "0/1"
    assert result["identical_counts"]["T=0 plain in batches of 8"] == "3/3"


def test_peer_decodes_forced_answers_too(engine: Engine, settings: Settings) -> None:
    """Bug guarded: a comparison of forced answers with whatever the peer says."""
    forced = ForcedAnswers()
    (case,) = nothing_to_copy_cases(engine.target.vocab_size, 64, 1, seed=3)
    forced.force(case.id, (30, 31, 32, 30, 31, 32, *engine.target.eos_ids))
    peer = load_peer(settings.target)
    for options in ({}, {"prompt_lookup_num_tokens": 10}):
        run = TransformersDecoder(peer, engine, forced, **options)(case)
        assert run.token_ids == (30, 31, 32, 30, 31, 32, *engine.target.eos_ids)


def test_target_suite_lets_the_engine_answer(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: scores of texts that the engine did not write, or cut at another length than transformers' own."""
    conversations = [question_messages("Who built it?", ["The mill is old. It was built in 1874."])]
    texts: list[str] = []

    def evaluate(data_dir: Path, *, generate: Generate, retrieve: Retrieve, **counts: int) -> dict[str, float]:
        texts.extend(generate(conversations))
        assert retrieve("What does x.floor do?")[0] == "x.floor(): Floors."
        return {"em": 0.5}

    folder = shutil.copytree(settings.target.model, tmp_path / "with_template")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.pad_token = CHATML, tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    floats = TargetConfig(model=str(folder), quantization="none")  # as transformers' own
    settings = dataclasses.replace(settings, target=floats)
    monkeypatch.setattr(target_suite, "evaluate_target", evaluate)
    names = {"x.floor": "x.floor(): Floors.", "x.ceil": "x.ceil(): Lifts.", "y": "y: Another thing."}
    documents = [Document(name, text, title=name) for name, text in names.items()]
    monkeypatch.setattr(target_suite, "stdlib_list", lambda: RagList("", documents, []))
    result = run_suite("target", settings, no_tick).result
    assert complete(result)["quality"] == {"em": 0.5, "chat_not_worse": None}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert texts == target_suite.model_generate(model.eval(), tokenizer)(conversations)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, {"data_dir": None}) for name in ("grammar", "target", "retrieval", "drafters")),
        *((name, {"forced": "gold"}) for name in ("retrieval", "iterative", "heads")),
        *((name, {"full": True}) for name in ("rag", "iterative")),
        ("cpu", {"reranker": "some/model"}),
        ("rag", {"heads": Path()}),
        ("nonsense", {}),
    ],
)
def test_what_a_suite_cannot_do_is_said(name: str, change: dict[str, object], settings: Settings) -> None:
    """Bug guarded: a traceback, or a suite that measures something else in silence."""
    with pytest.raises(ConfigError):
        run_suite(name, dataclasses.replace(settings, **change), no_tick)
