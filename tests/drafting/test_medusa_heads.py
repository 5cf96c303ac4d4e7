"""Medusa and Hydra heads on disk: every published form computes the published formula, all else is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting.medusa_heads import (
    FORMS,
    Tensors,
    hydra_logits,
    hydra_tensors,
    medusa_logits,
    medusa_tensors,
    save_hydra,
    save_medusa,
)

from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.growing.shapes import MEDUSA_TREE
from ragspec.drafting.medusa.checkpoint import read_hydra, read_medusa
from ragspec.drafting.medusa.network import PositionNetwork
from ragspec.errors import ModelError
from ragspec.numerics.cpu.backend import CpuBackend

HIDDEN, VOCAB = 64, 320
LM_HEAD, EMBEDDING = 0.2 * torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def a_target() -> Any:
    """All that heads see of a target."""
    return SimpleNamespace(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=2,
        backend=CpuBackend(),
        embedding=EMBEDDING,
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
    network = PositionNetwork(read_medusa(tmp_path, a_target()), a_target())
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


@pytest.mark.parametrize("form", ["pt", pytest.param("merged", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize("grounded", [True, False])
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("own_embedding", [None, "equal", "own"])
def test_every_form_of_hydra_computes_the_published_formula(
    tmp_path: Path, form: str, grounded: bool, dropout: bool, own_embedding: str | None
) -> None:
    """The tokens stood in another order, a bias or a further block was left out, another embedding was read."""
    made = hydra_tensors(4, 3, grounded, HIDDEN, VOCAB, dropout)
    embedding = EMBEDDING if own_embedding != "own" else EMBEDDING.flip(0)
    stored = made | ({"input_embed_fn.weight": embedding.clone()} if own_embedding else {})
    save_hydra(tmp_path, stored, form)
    network = PositionNetwork(read_hydra(tmp_path, a_target()), a_target())
    assert (network.num_heads, network.is_grounded) == (4, grounded)
    generator = torch.Generator().manual_seed(3)
    states, tokens = torch.randn(7, HIDDEN, generator=generator), torch.randint(VOCAB, (7, 4), generator=generator)
    inputs = network.inputs(states, tokens[:, 0].numpy())
    for head in range(4):
        wanted = hydra_logits(made, states, embedding[tokens[:, : head + 1]], head).numpy()
        assert np.abs(np.asarray(network.logits(inputs, head)) - wanted).max() < 1e-5
        if grounded and head < 3:
            inputs = network.grounded(inputs, tokens[:, head + 1].numpy())


@pytest.mark.parametrize("grounded", [True, False])
def test_each_tensor_of_hydra_is_named_where_it_is_missing_or_broken(tmp_path: Path, grounded: bool) -> None:
    """The published loader is not strict here either."""
    made = hydra_tensors(2, 2, grounded) | {"input_embed_fn.weight": EMBEDDING.clone()}
    for name, tensor in made.items():
        holed = tensor.clone()
        holed.view(-1)[3] = torch.inf
        wrong = [made | {name: holed}, made | {name: tensor[:-1].clone()}]
        if name != "input_embed_fn.weight":
            wrong.append({other: held for other, held in made.items() if other != name})
        for tensors in wrong:
            save_hydra(tmp_path, tensors, hydra_num_layers=2, hydra_num_heads=2, grounded_heads=grounded)
            with pytest.raises(ModelError, match=re.escape(name)):
                read_hydra(tmp_path, a_target())


HYDRA_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "not grounded by default": ({"grounded_heads": ...}, r"hydra_mlp\.0\.0"),
    "more layers": ({"hydra_num_layers": 3}, r"hydra_mlp\.0\.2\.linear\.weight"),
    "fewer layers": ({"hydra_num_layers": 1}, r"hydra_mlp\.\d\.1\.linear"),
    "more heads": ({"hydra_num_heads": 5}, r"hydra_mlp\.4\.0\.linear\.weight"),
    "an offset beyond the target": ({"hidden_state_offset": 3}, "hidden_state_offset 3"),
    "no truth": ({"grounded_heads": "yes"}, "grounded_heads"),
}


@pytest.mark.parametrize("name", HYDRA_CONFIGS)
def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path: Path, name: str) -> None:
    """Defaults of the class differ from those of the trainer: heads were read as if they saw no tokens."""
    config, reason = HYDRA_CONFIGS[name]
    save_hydra(tmp_path, hydra_tensors(), **config)
    with pytest.raises(ModelError, match=reason):
        read_hydra(tmp_path, a_target())


def test_a_state_below_the_last_is_tapped_where_the_config_says_so(tmp_path: Path) -> None:
    """`hidden_state_offset` was ignored."""
    for offset, tap in ((0, -1), (1, 1), (2, 0)):
        save_hydra(tmp_path, hydra_tensors(1), hidden_state_offset=offset)
        assert read_hydra(tmp_path, a_target()).config.tap == tap


def test_a_medusa_head_in_the_place_of_an_eagle_head_says_where_it_belongs(tmp_path: Path) -> None:
    """The refusal named no way out."""
    save_medusa(tmp_path, medusa_tensors(2))
    with pytest.raises(ModelError, match=r"drafting\.medusa\.path"):
        read_head(tmp_path)
    save_hydra(tmp_path / "hydra", hydra_tensors(1))
    with pytest.raises(ModelError, match=r"drafting\.hydra\.path"):
        read_head(tmp_path / "hydra")


def test_the_static_tree_is_the_published_one() -> None:
    """A path mistyped: nodes by depth, closed under parents and better siblings."""
    paths = set(MEDUSA_TREE)
    assert len(paths) == len(MEDUSA_TREE) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])
    assert {(9, 0), (3, 1), (1, 6), (2, 2), (0, 9), (0, 0, 9), (0, 1, 2), (1, 0, 1), (0, 7, 0), (0, 0, 0, 1)} <= paths
