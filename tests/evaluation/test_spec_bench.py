"""The suite `spec_bench`: its lists, its numbers from known rows, and a run that was stopped goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from drafting.eagle_heads import random_head
from stand_ins import no_tick
from transformers import AutoTokenizer

from ragspec.config import EagleConfig, OnlineConfig
from ragspec.errors import ConfigError
from ragspec.evaluation.report import Metric
from ragspec.evaluation.suite import Settings, run_suite
from ragspec.evaluation.suites import spec_bench
from ragspec.evaluation.suites.drift import gsm8k_prompts, measure_drift
from ragspec.evaluation.suites.spec_bench import FOLLOW_UP, SUITE, TASKS, SpecBench, units_of
from ragspec.rag.prompt import PromptBuilder

CATEGORIES = ("writing", "coding", *TASKS[1:])


@pytest.fixture
def tiny(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Three questions of each category, the first category's with two turns; short outputs."""
    monkeypatch.setattr(spec_bench, "TOKENS", 10)
    assert settings.data_dir is not None
    data = shutil.copytree(settings.data_dir, tmp_path / "data")
    (data / "spec_bench").mkdir()
    rows = [
        {
            "question_id": 10 * n + i,
            "category": category,
            "turns": [f"Is there a mill number {i}?", "Why?"][: 2 - (n > 1)],
        }
        for n, category in enumerate(CATEGORIES)
        for i in range(3)
    ]
    (data / "spec_bench" / "question.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return dataclasses.replace(settings, data_dir=data, num_prompts=1)


def test_pairs_and_temperature_1_are_measured_on_few_questions(tiny: Settings) -> None:
    """A run over all questions by all ways, which takes days; a task or a single drafter left out."""
    whole = dataclasses.replace(tiny, num_prompts=None, quick=False)
    units = units_of(whole, None)
    assert len(units) == 2 * 3 * len(CATEGORIES), "with three questions a task, all are few"
    units = units_of(dataclasses.replace(tiny, num_prompts=2), None)
    assert len(units) == 2 * 2 * len(TASKS) and {unit.task for unit in units} == set(TASKS)
    singles = {"plain", "copy", "recycling", "lookahead"}
    assert all(singles <= set(unit.ways) and "copy + recycling" in unit.ways for unit in units)
    with pytest.raises(ConfigError, match="spec_bench and squad"):
        units_of(dataclasses.replace(tiny, data_dir=None), None)


def row(task: str, seconds: dict[str, float], **fields: Any) -> dict[str, Any]:
    ways = {
        name: {"seconds": s, "tokens": 10, "steps": 5, "accepted": 5, "identical": True} | fields.get(name, {})
        for name, s in seconds.items()
    }
    return {"id": "x", "task": task, "temperature": 0.0, "ways": ways}


def test_the_numbers_are_those_of_known_rows() -> None:
    """A mean of seconds instead of ratios, a pair counted as a single drafter, follow-ups counted as a task."""
    rows = [
        row("qa", {"plain": 4.0, "copy": 2.0, "lookahead": 1.0, "copy + lookahead": 0.1}),
        row("qa", {"plain": 1.0, "copy": 1.0, "lookahead": 4.0}),
        row("rag", {"plain": 6.0, "copy": 2.0, "lookahead": 6.5}),
        row(
            FOLLOW_UP,
            {"plain": 1.0, "copy": 1.0, "copy + datastore": 9.0, "plain, half on disk": 8.0, "copy, half on disk": 2.0},
            **{"copy + datastore": {"accepted": 7}},
        ),
    ]
    found = spec_bench.headlines(rows, None)
    assert spec_bench.speedups(rows)["copy"] == {"qa": 1.5, "rag": 3.0, FOLLOW_UP: 1.0}
    assert found["default_over_best_single_min"] == pytest.approx(1.5 / 2.125)
    assert found["default_over_best_single_median"] == pytest.approx((1.5 / 2.125 + 1.0) / 2)
    assert found["worst_single_over_off"] == pytest.approx(6.0 / 6.5)
    assert found["datastore_extra"] == pytest.approx(0.2) and found["identical"] is True
    assert found["larger_than_memory_speedup"] == 4.0
    assert spec_bench.headlines(rows[:3], None)["larger_than_memory_speedup"] is None
    assert spec_bench.acceptance_lengths(rows)["copy"]["qa"] == 2.0
    rows[0]["ways"]["copy"]["identical"] = False
    assert spec_bench.headlines(rows, None)["identical"] is False


def test_a_head_gains_on_what_it_learned_while_serving(settings: Settings, tmp_path: Path) -> None:
    """The stream was answered by a head that does not learn or that had not learned yet, or the tokens changed."""
    tokenizer = AutoTokenizer.from_pretrained(settings.target.model)
    vocab = len(tokenizer)
    random_head("eagle3", tmp_path, hidden=64, vocab=vocab, draft_vocab=vocab, aux_layers=(0, 1, 2))
    asked = [(n, n + 1, n + 2) for n in range(5, 9)]
    eagle = EagleConfig(path=str(tmp_path), dtype="float32", online=OnlineConfig(learning_rate=1e-2))
    ticks: list[int] = []
    found = measure_drift(settings.target, eagle, asked * 4, asked, lambda _, done, total: ticks.append(done))
    assert found.identical and found.gain > 1.5 and ticks == [8, 16]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": f"How many mills are {n}?"}) + "\n" for n in range(3)))
    prompts = gsm8k_prompts(path, 2, PromptBuilder(tokenizer, 256))
    assert len(set(prompts)) == 2 and "mills are 1?" in tokenizer.decode(prompts[1])


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_every_output_is_plain_decodings(
    tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question measured twice or lost, a line that was cut off, any token that differs."""
    measured: list[str] = []
    whole = SpecBench._measured

    def noting(self: SpecBench, unit: spec_bench.Unit) -> dict[str, Any]:
        measured.append(unit.id)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return whole(self, unit)

    monkeypatch.setattr(SpecBench, "_measured", noting)
    with pytest.raises(KeyboardInterrupt):
        run_suite("spec_bench", tiny, no_tick)
    (path,) = (tiny.cache_dir / "spec_bench").glob("*.jsonl")
    assert len(list(spec_bench._whole_lines(path))) == 3
    path.write_text(path.read_text()[:-20])
    outcome = run_suite("spec_bench", tiny, no_tick)
    result = outcome.result
    num_rows = 2 * len(TASKS) + 1
    assert len(measured) == 4 + num_rows - 2 and result["num_prompts"] == num_rows
    assert result["identical"] is True
    numbers = [metric.name for metric in SUITE.metrics if isinstance(metric, Metric)]
    assert [name for name in numbers if result[name] is None] == ["osd_gain"] and "head" in result["missing"]
    tables = SUITE.tables(result)
    assert tables["speed-up, T = 0"].keys() == {*TASKS, FOLLOW_UP}
    assert "spec_bench" in SUITE.draw(outcome, "title")
    again = run_suite("spec_bench", tiny, no_tick).result
    assert len(measured) == 4 + num_rows - 2 and again["tables"] == result["tables"]
