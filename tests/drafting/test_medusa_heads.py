"""Medusa and Hydra heads on disk: every published form computes the published formula, all else is refused by name."""

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
    hydra_plus_tensors,
    hydra_tensors,
    medusa_logits,
    medusa_tensors,
    save_hydra,
    save_medusa,
)
from transformers import LlamaConfig

from ragspec.drafting.growing.draft import MEDUSA_TREE
from ragspec.drafting.medusa.checkpoint import read_hydra, read_medusa
from ragspec.drafting.medusa.network import PositionNetwork
from ragspec.errors import ModelError
from ragspec.numerics.cpu.backend import CpuBackend

HIDDEN, VOCAB = 64, 320
EMBED = "input_embed_fn.weight"
LM_HEAD, EMBEDDING = 0.2 * torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def a_target() -> Any:
    """All that heads see of a target."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return SimpleNamespace(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=2,
        backend=CpuBackend(),
        embedding=EMBEDDING,
        logits_of=lambda states: states @ LM_HEAD.T,
        text_config=LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, intermediate_size=96, **heads),
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


def refusal(folder: Path, tensors: Tensors, **config: Any) -> str:
    is_hydra = any(name.startswith("hydra") for name in [*tensors, *config])
    (save_hydra if is_hydra else save_medusa)(folder, tensors, **config)
    with pytest.raises(ModelError) as caught:
        (read_hydra if is_hydra else read_medusa)(folder, a_target())
    return str(caught.value)


SIZES = {"hydra_num_layers": 2, "hydra_num_heads": 2}
STRICT: dict[str, tuple[Callable[[], Tensors], dict[str, Any]]] = {
    "medusa": (lambda: medusa_tensors(2), {"medusa_num_heads": 2}),
    "medusa among its target's weights": (lambda: medusa_tensors(2), {"medusa_num_heads": 2, "form": "merged"}),
    "hydra": (lambda: hydra_tensors(2, 2) | {EMBED: EMBEDDING.clone()}, SIZES | {"grounded_heads": True}),
    "hydra, not grounded": (
        lambda: hydra_tensors(2, 2, False) | {EMBED: EMBEDDING.clone()},
        SIZES | {"grounded_heads": False},
    ),
}


@pytest.mark.parametrize("name", STRICT)
def test_each_missing_misshapen_or_broken_tensor_is_named(tmp_path: Path, name: str) -> None:
    """The published loaders are not strict: a wrong name loads silently and only shows as low acceptance."""
    make, config = STRICT[name]
    made = make()
    for tensor_name, tensor in made.items():
        holed = tensor.clone()
        holed.view(-1)[3] = torch.inf
        wrong = [made | {tensor_name: each} for each in (holed, tensor[:-1].clone(), tensor.to(torch.int32))]
        if tensor_name != EMBED:
            wrong.append({other: held for other, held in made.items() if other != tensor_name})
        assert all(tensor_name in refusal(tmp_path, tensors, **config) for tensors in wrong)
    unknown = next(iter(made)).removesuffix("weight") + "scale"
    assert unknown in refusal(tmp_path, made | {unknown: torch.ones(HIDDEN)}, **config)


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
    "Hydra, not grounded by default": ({"grounded_heads": ...}, hydra_tensors, "hydra_mlp.0.0"),
    "Hydra, more layers": ({"hydra_num_layers": 3}, hydra_tensors, "hydra_mlp.0.2.linear.weight"),
    "Hydra, fewer layers": ({"hydra_num_layers": 1}, hydra_tensors, ".1.linear"),
    "Hydra, more heads": ({"hydra_num_heads": 5}, hydra_tensors, "hydra_mlp.4.0.linear.weight"),
    "an offset beyond the target": ({"hidden_state_offset": 3}, hydra_tensors, "hidden_state_offset 3"),
    "no truth": ({"grounded_heads": "yes"}, hydra_tensors, "grounded_heads"),
    "Hydra, cross-attn": ({"hydra_head_arch": "cross-attn"}, hydra_tensors, "hydra_head_arch"),
    "Medusa, a key to come": ({"medusa_choices": [[0]]}, lambda: medusa_tensors(3), "medusa_choices [[0]]"),
    "Hydra, a key to come": ({"hydra_prefix_layers": 2}, hydra_tensors, "hydra_prefix_layers 2"),
    "Hydra, eagle-attn": ({"hydra_head_arch": "eagle-attn"}, hydra_tensors, "hydra_head_arch"),
    "Hydra++ as mlp": ({}, lambda: hydra_plus_tensors(a_target()), "prefix_embeding_layer"),
    "vLLM's Medusa": ({}, lambda: {"blocks.0.layers.0.weight": torch.ones(4, 4)}, "blocks.0.layers.0.weight"),
    "ModelOpt's Medusa": ({}, lambda: {"medusa_heads.0.0.linear.weight": torch.ones(4, 4)}, "medusa_heads.0.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_cannot_be_served_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """A truncated file drafted with random heads; a head of another target drafted noise; a form that is not served was read in
    part; heads were read as if they saw no tokens, since the class's defaults differ from the trainer's."""
    config, make, reason = BAD[name]
    assert reason in refusal(tmp_path, make(), **config)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """A missing or torn file was a traceback."""
    for path, content, named in (
        ("nothing", b"", "config.json"),
        ("config.json", b"{}", "medusa_lm_head.pt"),
        ("medusa_lm_head.pt", b"torn", "medusa_lm_head.pt"),
    ):
        (tmp_path / path).write_bytes(content)
        with pytest.raises(ModelError, match=re.escape(named)):
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
    stored = made | ({EMBED: embedding.clone()} if own_embedding else {})
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


def test_a_state_below_the_last_is_tapped_where_the_config_says_so(tmp_path: Path) -> None:
    """`hidden_state_offset` was ignored."""
    for offset, tap in ((0, -1), (1, 1), (2, 0)):
        save_hydra(tmp_path, hydra_tensors(1), hidden_state_offset=offset)
        assert read_hydra(tmp_path, a_target()).config.tap == tap


def test_the_static_tree_is_the_published_one() -> None:
    """A path mistyped: nodes by depth, closed under parents and better siblings."""
    paths = set(MEDUSA_TREE)
    assert len(paths) == len(MEDUSA_TREE) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])
    assert {(9, 0), (3, 1), (1, 6), (2, 2), (0, 9), (0, 0, 9), (0, 1, 2), (1, 0, 1), (0, 7, 0), (0, 0, 0, 1)} <= paths
