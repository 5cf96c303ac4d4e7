"""The suite backends on this machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ragspec.evaluation.suite import Settings, run_suite
from ragspec.evaluation.suites import backends
from ragspec.evaluation.suites.backends import SMALL
from ragspec.numerics.torch.sampling import TorchLogits


def test_the_promises_hold(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a suite that ends without having compared anything."""
    monkeypatch.setattr(backends, "SMALL", SMALL._replace(hidden=64, inner=128, vocab=320))
    monkeypatch.setattr(backends, "_NUM_SAMPLED", 400)
    ticks: list[int] = []
    result = run_suite("backends", settings, lambda stage, done, total: ticks.append(done)).result
    assert ticks
    assert result["oracle_identical"] and result["rows_invariant"] and result["sampling_equal"]
    assert ("steps" in result) == torch.cuda.is_available()


def test_other_tokens_are_noticed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite cannot fail."""
    real = TorchLogits.sample
    monkeypatch.setattr(backends, "SMALL", SMALL._replace(hidden=64, inner=128, vocab=320))
    monkeypatch.setattr(backends, "_NUM_SAMPLED", 400)
    monkeypatch.setattr(TorchLogits, "sample", lambda self, draws: [t + (len(draws) > 9) for t in real(self, draws)])
    result = run_suite("backends", dataclasses.replace(settings), lambda *_: None).result
    assert not result["sampling_equal"]
    assert np.asarray(result["rows_invariant"])
