"""The suite speculation on a random target: every kind of row is measured, and a different token is noticed."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from forced_sampler import ForcedSampler

from pipelines.benchmarks import speculation
from pipelines.benchmarks.cases import timing
from pipelines.benchmarks.cases.workloads import CHAT, RAG
from pipelines.benchmarks.harness import Run, draw
from pipelines.benchmarks.speculation import Speculations, drafter_table, run_speculation, summarise
from ragspec.core import Request
from ragspec.engine.loading import load_engine
from ragspec.errors import ModelError
from ragspec.verification.sampling import Sampler

KEYS = (
    *("speedup_vs_plain", "speedup_vs_generate", "speedup_vs_prompt_lookup", "plain_vs_generate", "speedup_end_to_end"),
    *("acceptance_length", "t1_over_t0", "nothing_to_copy", "sources_in_vain", "batch8_speedup_vs_plain"),
    *("default_over_best_single_min", "worst_single_over_off"),
    *("tokens_per_s", "plain_tokens_per_s", "grammar_speedup_vs_plain", "chat_speedup_vs_plain"),
)


@pytest.mark.slow
def test_every_figure_is_measured_and_every_token_is_plain_decoding_s(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a row that is left out in silence, or a figure that no row gives any more."""
    monkeypatch.setattr(speculation, "SPEC_BENCH_TASKS", ("multi-turn",))
    monkeypatch.setattr(
        timing, "answer_grammar", lambda *_: None
    )  # a random target writes what it masks, and so does generate
    rows = list(run_speculation(run))
    result = summarise(rows)
    assert result["identical"] is True and len(rows) == len({row["row"] for row in rows}) >= 20
    assert [key for key in KEYS if result.get(key) is None] == [] and result["agrees_with_generate"] == 1.0
    assert draw(speculation.PLOT, rows, "made up").axes


def test_the_host_is_measured_on_a_device_of_tables(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub whose drafts never come true measures no work, and one whose tokens depend on drafts measures another text."""
    monkeypatch.setattr(speculation, "_STUB_TOKENS", 24)
    rows = {row["row"]: row for row in run_speculation(replace(run, device="stub", quick=True))}
    assert all(row["identical"] and row["host_ms"] > 0.0 and row["plain_host_ms"] > 0.0 for row in rows.values())
    nodes = {
        share: rows[f"8 B, H200, {share} copyable, T=0, 1 side by side"]["nodes_a_tree"] for share in ("0%", "90%")
    }
    assert nodes["0%"] < 1.0 < 4.0 < nodes["90%"]
    assert summarise([*rows.values()])["stub_nothing_to_copy"] > 0.0


def test_a_token_that_depends_on_speculation_is_noticed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a check of equality that cannot fail."""

    def by_speculation(request: Request, seed: int, choice: int) -> Sampler:
        return ForcedSampler((40, 41, 42) if request.speculation else (40, 41, 43))

    monkeypatch.setattr(speculation, "load_engine", partial(load_engine, make_sampler=by_speculation))
    with Speculations(replace(run, peers=False)) as bench:
        rows = [speculation._workload_row(bench, CHAT, 0.0), speculation._batch_row(bench, CHAT)]
    assert [row["identical"] for row in rows] == [False, False]
    assert rows[0]["speedup_vs_plain"] is None, "the outputs are different work"


def test_the_default_is_compared_with_the_best_single_drafter_of_each_workload() -> None:
    """Bug guarded: combinations counted as single drafters; the best drafter of another workload."""
    rows = [
        {"row": f"{name}, T=0", "workload": name, "speedup_vs_plain": speed}
        for name, speed in ((RAG, 3.0), (CHAT, 1.0))
    ]
    for drafters, workload, speed in (
        ("copy", RAG, 2.0),
        ("copy", CHAT, 0.9),
        ("copy + x", CHAT, 9.0),
        ("x", CHAT, 1.25),
    ):
        name = f"{drafters}: {workload}"
        rows.append({"row": name, "drafters": drafters, "workload": workload, "speedup_vs_plain": speed})
    found = summarise(rows)
    assert (found["default_over_best_single_min"], found["default_over_best_single_median"]) == (0.8, 1.15)
    assert found["worst_single_over_off"] == 0.9 and found["chat_speedup_vs_plain"] == 1.0


def test_heads_are_found_by_their_files(tmp_path: Path) -> None:
    """Bug guarded: a Medusa head that is read as an EAGLE head; an empty folder that measures nothing in silence."""
    for name, weights in (("eagle3", "model.safetensors"), ("hydra", "hydra_lm_head.safetensors")):
        (tmp_path / name).mkdir()
        for file in ("config.json", weights):
            (tmp_path / name / file).write_text("{}")
    table = drafter_table(tmp_path)
    assert table["eagle3"].asked == ("eagle",) and table["copy + hydra"].asked == ("copy", "hydra")
    assert drafter_table(None).keys() == table.keys() - {"eagle3", "copy + eagle3", "hydra", "copy + hydra"}
    with pytest.raises(ModelError, match="--heads"):
        drafter_table(tmp_path / "hydra")
