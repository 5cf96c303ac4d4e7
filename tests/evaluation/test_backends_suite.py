"""The suite backends on this machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.evaluation.suite import Settings, run_suite
from ragspec.evaluation.suites.backends import promises, speeds, suite
from ragspec.evaluation.suites.backends.models import SMALL, random_target
from ragspec.numerics.backend import SampledToken
from ragspec.numerics.torch.backend import TorchBackend, TreeNorm
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.numerics.torch.transfer import to_device


def test_the_promises_hold(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a suite that ends without having compared anything."""
    monkeypatch.setattr(suite, "SMALL", SMALL._replace(hidden=64, inner=128, vocab=320))
    monkeypatch.setattr(promises, "_NUM_SAMPLED", 400)
    ticks: list[int] = []
    result = run_suite("backends", settings, lambda stage, done, total: ticks.append(done)).result
    assert ticks
    for key in ("oracle_identical", "rows_invariant", "sampling_equal", "kernels_exact", "bus_small"):
        assert result[key] is True, key
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
    tokenizer = target_folder(settings.target)
    monkeypatch.setattr(speeds, "_ROUNDS", 3)
    monkeypatch.setattr(speeds, "_BATCHES", (1, 3))
    config = TargetConfig(model=tokenizer, backend="torch")
    target = random_target(SMALL._replace(hidden=64, inner=128, vocab=320), tokenizer, config)
    assert speeds.on_over_off(target) > 0.0
    assert speeds.fast_forward_s(target, 16) > 0.0
