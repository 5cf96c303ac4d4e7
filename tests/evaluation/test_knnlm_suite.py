"""The KNN-LM part of a benchmark: what it compares is what it says, and its numbers are those of the runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragspec.config import TargetConfig
from ragspec.errors import InputError
from ragspec.evaluation.suites.iterative import knnlm
from ragspec.evaluation.suites.iterative.knnlm import (
    SIZES,
    KnnPlan,
    PairedRuns,
    RemoteKnn,
    TimedPrompt,
    measure_knnlm,
    service_time,
)
from ragspec.rag.knnlm.generation import KnnStats
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.knnlm.datastore import Datastore
from ragspec.retrieval.knnlm.neighbours import Neighbours, PrefetchRequest

PLAN = KnnPlan(
    num_entries=3_000,
    num_prompts=2,
    num_prompt_tokens=20,
    num_tokens=10,
    num_neighbours=(1, 8),
    sampled=(8,),
    num_runs=2,
    b_over_a=5.0,
)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Articles in wikitext's form; short ones are not taken."""
    folder = tmp_path / "data" / "wikitext2"
    folder.mkdir(parents=True)
    for name, start in (("valid", 0), ("test", 50)):
        articles = [
            f"\n = Town {start + i} = \n \n" + f" The old mill of Town {start + i} stands by the river . " * 60
            for i in range(4)
        ]
        (folder / f"{name}.txt").write_text("".join(["\n = Stub = \n \n Short . \n", *articles]))
    return tmp_path / "data"


class Slow:
    def __init__(self, store: Datastore) -> None:
        self._store, self._service_s = store, 0.0

    def slow_down(self, service_s: float) -> None:
        self._service_s = service_s

    @property
    def target(self) -> EncoderIdentity:
        return self._store.target

    def search(self, queries: np.ndarray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        time.sleep(self._service_s)
        return self._store.search(queries, k, wanted)


@contextmanager
def open_slow(folder: Path) -> Iterator[Slow]:
    yield Slow(Datastore.open(folder))


@pytest.mark.slow
def test_every_setting_gets_a_row_and_is_compared(
    data_dir: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting left out, a comparison of nothing, an index built again in every run."""
    ticks: list[tuple[str, int, int]] = []
    config = TargetConfig(model=str(tiny_dir))
    fewer = replace(PLAN, num_prompts=1, num_runs=1)
    result = measure_knnlm(
        config, data_dir, tmp_path / "cache", PLAN, lambda *tick: ticks.append(tick), RemoteKnn(fewer, open_slow)
    )
    rows = result["knnlm"]
    settings = [(row["store"], row["k"], row["temperature"]) for row in rows]
    assert settings == [(store, k, t) for store in ("local", "remote") for k, t in ((1, 0.0), (8, 0.0), (8, 1.0))]
    assert (
        all(row["identical"] for row in rows)
        and result["knnlm_bitwise"]
        and result["knnlm_entries"] >= PLAN.num_entries
    )
    for row in rows:
        assert row["baseline_s"] > 0 and row["speculative_s"] > 0 and row["optimum"] >= 1.0 and 0 <= row["gamma"] <= 1
    assert all(row["b_ms"] >= 1e3 * result["knnlm_service_s"] for row in rows if row["store"] == "remote")
    assert ticks[3] == ("knnlm local, k = 1, T = 0", 4, 4)
    assert len(ticks) == 3 * 4 + 3, "the datastore elsewhere, where most time is waiting, has a plan of its own"

    monkeypatch.setattr(knnlm, "build_datastore", None)
    only_local = measure_knnlm(config, data_dir, tmp_path / "cache", PLAN, lambda *tick: None)
    assert len(only_local["knnlm"]) == 3 and "knnlm_service_s" not in only_local


def test_without_the_texts_it_says_which(tmp_path: Path, tiny_dir: Path) -> None:
    """A FileNotFoundError after minutes of self-tests."""
    with pytest.raises(InputError, match=r"wikitext2/valid\.txt"):
        measure_knnlm(TargetConfig(model=str(tiny_dir)), tmp_path, tmp_path, PLAN, lambda *tick: None)


def test_the_service_time_makes_a_search_so_many_steps() -> None:
    """b / a of another datastore than the one that is measured."""
    rows = [{"k": 1, "a_ms": 9.0, "b_ms": 1.0}, {"k": 8, "a_ms": 2.0, "b_ms": 10.0}]
    assert service_time(rows, 40.0) == pytest.approx(0.070)
    assert service_time(rows, 3.0) == 0.0


def test_a_row_is_the_median_of_ratios_beside_what_was_predicted() -> None:
    """A ratio of medians, guesses behind a wrong one in gamma, a prediction for free verifications."""
    plain = KnnStats(num_verifications=100, num_queries=100, step_s=0.5, verification_s=2.0)
    guessed = KnnStats(num_verifications=25, num_queries=125, num_right=75, num_wrong=25)
    runs = PairedRuns(
        [[TimedPrompt(seconds, plain, (1, 2))] for seconds in (10.0, 12.0, 30.0)],
        [[TimedPrompt(seconds, guessed, (1, 2))] for seconds in (5.0, 3.0, 10.0)],
    )
    row = runs.row([0.04] * len(SIZES))
    assert row["speedup"] == 3.0 and row["baseline_s"] == 12.0 and row["speculative_s"] == 5.0
    assert (row["gamma"], row["mean_stride"], row["identical"]) == (0.75, 5.0, True)
    assert (row["a_ms"], row["b_ms"], row["b_over_a"]) == pytest.approx((5.0, 20.0, 4.0))
    best = max((1 - 0.75**s) / 0.25 * 25 / (5 * s + 20) for s in range(1, 65))
    assert row["optimum"] == pytest.approx(best) and row["share_of_optimum"] == pytest.approx(3.0 / best)
    slower = runs.row([0.04 + 0.01 * (size - 1) for size in SIZES])
    assert slower["optimum"] < best and slower["b_16_over_b"] == pytest.approx((20 + 150) / 20)
    other = [*runs.speculative[:2], [TimedPrompt(10.0, guessed, (1, 3))]]
    assert not PairedRuns(runs.baseline, other).row([0.04] * len(SIZES))["identical"]
