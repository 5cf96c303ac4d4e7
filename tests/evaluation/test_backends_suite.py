"""The suite backends on this machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ragspec.evaluation.suite import Settings, run_suite
from ragspec.evaluation.suites.backends import promises, speeds, suite
from ragspec.evaluation.suites.backends.models import SMALL
from ragspec.numerics.backend import SampledToken
from ragspec.numerics.torch.backend import TorchBackend, TreeNorm
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.numerics.torch.transfer import to_device


def test_the_promises_hold(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a suite that ends without having compared anything."""
    monkeypatch.setattr(suite, "SMALL", SMALL._replace(hidden=64, inner=128, vocab=320))
    monkeypatch.setattr(promises, "_NUM_SAMPLED", 400)
    monkeypatch.setattr(suite, "_NUM_VECTORS", 20_000)
    ticks: list[int] = []
    result = run_suite("backends", settings, lambda stage, done, total: ticks.append(done)).result
    assert ticks
    for key in ("oracle_identical", "rows_invariant", "sampling_equal", "kernels_exact", "bus_small", "filters_exact"):
        assert result[key] is True, key
    scattered, clustered = (result["filters"][f"half{kind}"] for kind in ("", ", in clusters"))
    assert 1.0 <= scattered["searches a query"] < clustered["searches a query"]
    assert scattered["scanned"] <= clustered["scanned"]
    crossed = result["promises"]["torch"]
    assert 0.0 < crossed["read, bytes a row"] <= 16.0 and crossed["sent, bytes a row"] > 8.0
    assert ("steps" in result) == torch.cuda.is_available()


def test_other_tokens_are_noticed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite cannot fail."""
    real = TorchLogits.sample

    def wrong(tokens: list[SampledToken]) -> list[SampledToken]:
        return [t._replace(token_id=t.token_id + (len(tokens) > 9)) for t in tokens]

    monkeypatch.setattr(suite, "SMALL", SMALL._replace(hidden=64, inner=128, vocab=320))
    monkeypatch.setattr(promises, "_NUM_SAMPLED", 400)
    monkeypatch.setattr(suite, "_NUM_VECTORS", 1000)
    monkeypatch.setattr(TorchLogits, "sample", lambda self, draws: wrong(real(self, draws)))
    result = run_suite("backends", dataclasses.replace(settings), lambda *_: None).result
    assert not result["sampling_equal"]
    assert np.asarray(result["rows_invariant"])


def test_a_kernel_that_is_off_and_a_row_of_logits_on_the_bus_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite cannot fail."""
    norm = TreeNorm.forward
    monkeypatch.setattr(TreeNorm, "forward", lambda self, x: norm(self, x) * 1.001)
    assert not promises.kernels_exact(TorchBackend("cpu", torch.float32))
    reads = promises.HostReads()
    with reads:
        torch.zeros(3, 100).numpy()
        assert bool(torch.ones(1) > 0)
        to_device(np.zeros(5), torch.device("cpu"))
    assert (reads.read_bytes, reads.sent_bytes) == (1201, 40)


def test_speeds_that_need_a_gpu_are_computed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the first minutes with a GPU are spent on a misspelt name."""
    for name, value in (
        ("_ROUNDS", 3),
        ("_BATCHES", (3,)),
        ("_NUM_TOKENS", 8),
        ("_COPIED_NUMBERS", 2**12),
        ("_CONTEXT", 40),
    ):
        monkeypatch.setattr(speeds, name, value)
    tiny = SMALL._replace(name="8 B", hidden=64, inner=128, vocab=320)
    result = speeds.speeds(("torch",), (tiny,), None, lambda *_: None, "cpu")
    assert not result["left_out"]
    numbers = [*result["steps"]["8 B, torch"].values(), *(result[metric.name] for metric in suite.METRICS[6:])]
    assert len(numbers) == 10 and all(number > 0.0 for number in numbers)
    measured: list[tuple[int, str]] = []
    monkeypatch.setattr(speeds, "_BUDGET_S", 0.0)
    monkeypatch.setattr(
        speeds, "_measured", lambda t, _: measured.append((t.vocab_size, t.config.dtype)) or {"on over off": 1.0}
    )
    result = speeds.speeds(("torch",), (SMALL._replace(name="0.1 B"), tiny), settings.target, lambda *_: None, "cpu")
    assert result["left_out"] == ["8 B, torch"] and "bandwidth_share" not in result
    assert measured == [(320, "bfloat16")]  # the weights that are there, not random ones
