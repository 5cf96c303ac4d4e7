"""Medusa heads on disk: every published form is read as the same heads, everything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting.medusa_heads import FORMS, Tensors, medusa_logits, medusa_tensors, save_medusa

from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.growing.shapes import MEDUSA_TREE
from ragspec.drafting.medusa.checkpoint import read_medusa
from ragspec.drafting.medusa.network import MedusaNetwork
from ragspec.errors import ModelError
from ragspec.numerics.cpu.backend import CpuBackend

HIDDEN, VOCAB = 64, 320
LM_HEAD = 0.2 * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def a_target() -> Any:
    """All that heads see of a target."""
    return SimpleNamespace(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=2,
        backend=CpuBackend(),
        embedding=torch.zeros(VOCAB, HIDDEN),
        logits_of=lambda states: states @ LM_HEAD.T,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_output", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_published_form_computes_the_published_formula(
    tmp_path: Path, form: str, with_output: bool, num_layers: int
) -> None:
    """Two heads of five were served because the config says two; a legacy file's missing output layer was noise."""
    made = medusa_tensors(5, num_layers, HIDDEN, VOCAB, with_output)
    save_medusa(tmp_path, made, form, medusa_num_layers=num_layers)
    network = MedusaNetwork(read_medusa(tmp_path, a_target()), a_target())
    assert network.num_heads == 5
    states = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
    for head in range(5):
        wanted = medusa_logits(made, states, head, None if with_output else LM_HEAD).numpy()
        assert np.abs(np.asarray(network.logits(states, head)) - wanted).max() < 1e-5


def refusal(folder: Path, tensors: Tensors, form: str = "pt", **config: Any) -> str:
    save_medusa(folder, tensors, form, **config)
    with pytest.raises(ModelError) as caught:
        read_medusa(folder, a_target())
    return str(caught.value)


@pytest.mark.parametrize("form", ["pt", "merged"])
def test_each_missing_misshapen_or_broken_tensor_is_named(tmp_path: Path, form: str) -> None:
    """The published loader is not strict: a wrong name loads silently and only shows as low acceptance."""
    made = medusa_tensors(3)
    for name, tensor in made.items():
        holed = tensor.clone()
        holed.view(-1)[3] = torch.nan
        changes: list[Tensors] = [{name: holed}, {name: tensor[:-1].clone()}, {name: tensor.to(torch.int32)}]
        for change in changes:
            assert name in refusal(tmp_path, made | change, form)
        left = {other: held for other, held in made.items() if other != name}
        if not name.startswith("2.0"):  # a last head whose tensors are all there but one
            assert name in refusal(tmp_path, left, form)
    unknown = made | {"1.0.linear.scale": torch.ones(HIDDEN)}
    assert "1.0.linear.scale" in refusal(tmp_path, unknown, form)
    assert "2.0.linear.bias" in refusal(tmp_path, {n: t for n, t in made.items() if n != "2.0.linear.bias"}, form)
    assert "1.1.linear.weight" in refusal(tmp_path, made | {"1.1.linear.weight": torch.ones(HIDDEN, HIDDEN)}, form)


BAD: dict[str, tuple[dict[str, Any], Callable[[], Tensors], str]] = {
    "fewer heads than the config says": ({"medusa_num_heads": 4}, lambda: medusa_tensors(3), "3.0.linear.weight"),
    "a gap": ({}, lambda: {n: t for n, t in medusa_tensors(3).items() if n[0] != "1"}, "1.0.linear.weight"),
    "more layers in the config": ({"medusa_num_layers": 2}, lambda: medusa_tensors(3), "0.1.linear.weight"),
    "fewer layers in the config": ({}, lambda: medusa_tensors(3, 2), "0.1.linear.weight"),
    "no number": ({"medusa_num_layers": "1"}, lambda: medusa_tensors(3), "medusa_num_layers"),
    "no layers": ({"medusa_num_layers": 0}, lambda: medusa_tensors(3), "medusa_num_layers 0"),
    "countless heads": ({"medusa_num_heads": 10**9}, lambda: medusa_tensors(3), "medusa_num_heads"),
    "a countless head": ({}, lambda: {"99999999.0.linear.weight": torch.ones(2)}, "99999999.0.linear.weight"),
    "another width": ({}, lambda: medusa_tensors(3, hidden=32), r"0.0.linear.weight"),
    "another vocabulary": ({}, lambda: medusa_tensors(3, vocab=300), r"0.1.weight"),
    "one output layer only": (
        {},
        lambda: medusa_tensors(2, with_output=False) | {"0.1.weight": torch.ones(VOCAB, HIDDEN)},
        "1.1.weight",
    ),
    "no Medusa head": ({}, lambda: {"fc.weight": torch.ones(2, 2)}, "no Medusa head"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_cannot_be_served_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """A truncated file drafted with random heads; a head of another target drafted noise."""
    config, make, reason = BAD[name]
    assert reason in refusal(tmp_path, make(), **config)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """A missing or torn file was a traceback."""
    with pytest.raises(ModelError, match=r"config\.json"):
        read_medusa(tmp_path, a_target())
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt"):
        read_medusa(tmp_path, a_target())
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt"):
        read_medusa(tmp_path, a_target())


def test_a_medusa_head_in_the_place_of_an_eagle_head_says_where_it_belongs(tmp_path: Path) -> None:
    """The refusal named no way out."""
    save_medusa(tmp_path, medusa_tensors(2))
    with pytest.raises(ModelError, match=r"drafting\.medusa\.path"):
        read_head(tmp_path)


def test_the_static_tree_is_the_published_one() -> None:
    """A path mistyped: nodes by depth, closed under parents and better siblings."""
    paths = set(MEDUSA_TREE)
    assert len(paths) == len(MEDUSA_TREE) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])
    assert {(9, 0), (3, 1), (1, 6), (2, 2), (0, 9), (0, 0, 9), (0, 1, 2), (1, 0, 1), (0, 7, 0), (0, 0, 0, 1)} <= paths
