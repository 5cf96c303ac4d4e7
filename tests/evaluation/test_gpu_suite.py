"""The suite gpu, computed on the CPU: the first minutes with a GPU must not be spent on a misspelt name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines.benchmarks import gpu, serve
from pipelines.benchmarks.gpu import Shape
from pipelines.benchmarks.harness import RowFile, Run
from ragspec.errors import ConfigError


def test_speeds_that_need_a_gpu_are_computed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a figure that no row gives; models begun after the time is used up."""
    sizes = {
        "_ROUNDS": 3,
        "_BATCHES": (3,),
        "_NUM_TOKENS": 8,
        "_NUM_PAIRS": 1,
        "_COPIED_NUMBERS": 2**12,
        "_CONTEXT": 40,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(gpu, name, value)
    tiny = Shape("8 B", hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocab=320)
    rows = list(gpu.rows_of(run, (tiny,), ("torch",), "cpu"))
    result = gpu.summarise(rows)
    assert all(result[metric.name] > 0.0 for metric in gpu.SUITE.metrics)
    monkeypatch.setattr(gpu, "_BUDGET_S", 0.0)
    assert len(list(gpu.rows_of(run, (tiny, tiny), ("torch",), "cpu"))) == 1


@pytest.mark.slow
def test_users_are_measured_and_a_second_run_starts_no_engine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a figure that no row gives; a run that was stopped begins with the first model again."""
    for module, name, value in ((gpu, "_NUM_PAIRS", 1), (serve, "_USERS", (1, 3)), (serve, "_NUM_TOKENS", 6)):
        monkeypatch.setattr(module, name, value)
    tiny = Shape("8 B", hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocab=320)
    rows = list(serve.rows_of(replace(run, kept=RowFile(tmp_path / "rows")), (tiny,), "cpu"))
    assert [row["users"] for row in rows] == [1, 3]
    assert all(serve.summarise(rows)[metric.name] > 0.0 for metric in serve.SUITE.metrics)
    monkeypatch.setattr(serve, "_started", lambda *_: pytest.fail("an engine was started"))
    assert list(serve.rows_of(replace(run, kept=RowFile(tmp_path / "rows")), (tiny,), "cpu")) == rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_suite_says_so(run: Run) -> None:
    """Bug guarded: figures of the CPU under the name of a GPU."""
    for suite in (gpu.SUITE, serve.SUITE):
        with pytest.raises(ConfigError, match="CUDA"):
            list(suite.run(run))
