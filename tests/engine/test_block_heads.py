"""P-EAGLE, DFlash and DSpark in the engine: states and blocks are the papers', and they change no output."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import noted
from drafting.block_heads import BLOCK, FORMS, MASK, RANK, TAPS, block_states, network_for, save_block
from drafting.eagle_reference import head_logits, head_outputs
from head_parts import differs, features_of, free
from oracle_cases import PARAMS, generated, names_of, requests_of, total, watched_beside_half
from safetensors.torch import load_file, save_file
from tiny_target import Tiny, save_model
from torch import Tensor

from ragspec.config import DraftingConfig, EagleConfig, EngineConfig, OnlineConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.block.checkpoint import BlockFamily, read_block
from ragspec.drafting.block.drafter import BlockDrafter
from ragspec.drafting.block.network import BlockNetwork
from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint
from ragspec.drafting.growing.draft import make_shape
from ragspec.drafting.heads.learning import Objective
from ragspec.engine.loading import load_engine
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import block_config, fresh_head, head_config, write_trained


def num_guesses(form: str) -> int:
    return BLOCK - form.startswith(("DFlash", "DSpark, SpecForge"))


class Watched(BlockDrafter):
    """Notes, at every draft, the text, the states of its guesses and how much of the text it had not read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], Tensor, int]] = []

    def _states(self, drafts: Any) -> tuple[Tensor, int]:
        states, num_rows = super()._states(drafts)
        for draft, own in zip(drafts, states, strict=True):
            unread = int((~draft.memory._read[: draft.memory.end]).sum())
            self.seen.append((list(draft.sequence.tokens), own.clone(), unread))
        return states, num_rows


def drafter_for(target: Target, folder: Path, form: str, tree: str = "dynamic", **options: Any) -> Watched:
    return Watched(network_for(target, folder, form), make_shape(tree, 3, 2, BLOCK), free(), **options)


def wanted_states(target: Target, folder: Path, form: str, tokens: list[int]) -> Tensor:
    """The states of all guesses behind a text, in float64 over the whole of it. Shape: [guesses, H]."""
    tensors, features = load_file(folder / "model.safetensors"), features_of(target, tokens[:-1], TAPS).double()
    if not form.startswith("P-EAGLE"):
        states = block_states(tensors, target.embedding, features, [tokens[-1], *[MASK] * (BLOCK - 1)])
        return states[BLOCK - num_guesses(form) :]
    features = torch.cat([features, tensors["mask_hidden"].double().flatten().expand(BLOCK - 1, -1)])
    return head_outputs(as_eagle(folder), None, [*tokens, *[MASK] * (BLOCK - 1)], features)[-BLOCK:]


def as_eagle(folder: Path) -> HeadCheckpoint:
    config, tensors = read_block(folder)
    return HeadCheckpoint(config.shape, tensors)


def wanted_logits(target: Target, folder: Path, form: str, states: Tensor) -> Tensor:
    """Without the bias by the previous token. Shapes: [N, H] -> [N, V]."""
    if form.startswith("P-EAGLE"):
        return head_logits(as_eagle(folder), states)
    own = load_file(folder / "model.safetensors").get("lm_head.weight")
    if own is None:
        own = target.logits_of(torch.eye(target.hidden_size)).T
    return states @ own.double().T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"num_kv_slots": 256}])
def test_states_logits_and_blocks_are_the_papers(
    tiny: Tiny, tmp_path: Path, form: str, options: dict[str, Any]
) -> None:
    """A mask inside the block, a position one off, a row that guesses its neighbour's token, keys of a rejected block."""
    target = tiny()
    watched = drafter_for(target, tmp_path, form, "chain", max_read=256)
    drafts = noted(watched)
    watched_beside_half(target, watched, "greedy", **options)
    seen = {tuple(tokens): states for tokens, states, unread in watched.seen if not unread}
    assert len(seen) > 8
    bias = load_file(tmp_path / "model.safetensors")
    chains = {tuple(tokens): [node.token_id for node in chain] for tokens, chain in drafts}
    for tokens in list(seen)[:: 1 + len(seen) // 8]:
        states = wanted_states(target, tmp_path, form, list(tokens))
        assert torch.allclose(seen[tokens].double(), states, rtol=0, atol=1e-5)
        logits = wanted_logits(target, tmp_path, form, states)
        assert torch.allclose(watched.network.base_logits(seen[tokens]).double(), logits, rtol=0, atol=1e-5)
        last, chain = tokens[-1], list[int]()
        for row in logits[: len(chains[tokens])]:
            if form.startswith("DSpark"):
                own = bias["markov_head.markov_w1.weight"][last].double()
                row = row + bias["markov_head.markov_w2.weight"].double() @ own
            chain.append(last := int(row.argmax()))
        assert chains[tokens] == chain
    assert max(map(len, chains.values())) == num_guesses(form)


@pytest.mark.parametrize(
    "family", [f if f is BlockFamily.DSPARK else pytest.param(f, marks=pytest.mark.slow) for f in BlockFamily]
)
def test_a_head_trains_on_the_states_that_it_drafts_from(tiny: Tiny, tmp_path: Path, family: BlockFamily) -> None:
    """A mask, a position or a guess shifted by one learns from texts what it is never asked when it is served."""
    target, frozen = (
        tiny(),
        FrozenTarget.load(TargetConfig(model=str(save_model("llama", tmp_path / "target"))), dtype=torch.float32),
    )
    num_layers = 1 if family is BlockFamily.PEAGLE else 2
    shape = head_config(frozen, EagleFamily.EAGLE3, (0, 1, 2), None, num_layers)
    head = fresh_head(block_config(shape, family, 4, RANK), frozen, None, seed=3)
    write_trained(tmp_path / "head", head, head.state_dict(), "target")
    network = BlockNetwork(read_block(tmp_path / "head"), target, 400, torch.float32)
    watched = Watched(network, make_shape("chain", 1, 1, 4), free(), max_read=256)
    generated(target, [watched], [requests_of(target, PARAMS["greedy"])[:3]])
    whole = [(tokens, states) for tokens, states, unread in watched.seen if not unread]
    assert len(whole) > 8
    for tokens, states in whole[:: len(whole) // 8]:
        ids = torch.tensor([tokens])
        features = frozen.states(ids, head.config.aux_layers).features
        rows = torch.tensor([[len(tokens) - 2]])
        with torch.no_grad():
            expected = head.unroll(frozen.embed(ids), features, rows, Objective(4))[:, 0, 0]
        assert torch.allclose(states, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["DFlash, z-lab", "DSpark, DeepSpec", "P-EAGLE, SpecForge"])
def test_json_follows_its_schema_as_without_drafts(tiny: Tiny, tmp_path: Path, form: str) -> None:
    """A grammar's sampler and a block disagreed about the next token."""
    target = tiny()
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    params = [SamplingParams(json_schema=schema, temperature=i / 2, seed=i, max_tokens=40) for i in range(3)]
    requests = [Request(f"{i}", tuple(range(20 + i, 40)), own) for i, own in enumerate(params)]
    plain = [done.token_ids for done in generated(target, [], [requests])]
    drafted = generated(target, [drafter_for(target, tmp_path, form)], [requests], fixed_nodes=6)
    assert [done.token_ids for done in drafted] == plain
    assert total(drafted, "num_drafted") > 0


@pytest.mark.parametrize("form", ["DFlash, z-lab", "DSpark, DeepSpec", "P-EAGLE, speculators"])
def test_a_block_head_is_served_by_its_directory(tiny: Tiny, tmp_path: Path, form: str) -> None:
    """Only EAGLE's loader was asked: the head was refused. Its products in int8 stay near."""
    target = tiny()
    save_model("llama", tmp_path / "target")
    save_block(tmp_path / "head", form, target)
    heads = DraftingConfig(drafters=("copy", "block"), eagle_heads={"block": EagleConfig(path=str(tmp_path / "head"))})
    settings = TargetConfig(model=str(tmp_path / "target"))
    with load_engine(settings, EngineConfig(max_kv_tokens=1024, num_threads=1), heads) as engine:
        assert names_of(engine) == ["copy", "block"]
    exact, rough = (network_for(target, tmp_path / form, form, d) for d in (torch.float32, torch.int8))
    states = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(1))
    logits = [np.asarray(net.level_logits(net.base_logits(states), torch.arange(4))) for net in (exact, rough)]
    assert not differs(torch.tensor(logits[1]), torch.tensor(logits[0]).double(), torch.int8)
    online = EagleConfig(path=str(tmp_path / "head"), online=OnlineConfig(enabled=True))
    with pytest.raises(ConfigError, match="do not learn"):
        load_engine(settings, EngineConfig(max_kv_tokens=1024, num_threads=1), DraftingConfig(eagle=online))


@pytest.mark.parametrize("form", FORMS)
def test_each_tensor_is_named_where_it_is_missing_or_broken(tiny: Tiny, tmp_path: Path, form: str) -> None:
    """A head read with a weight left out drafts noise."""
    tensors = save_block(tmp_path, form, tiny())
    for name in (name for name in tensors if "confidence" not in name):
        cut = tensors[name][..., :-1] if tensors[name].shape[-1] > 1 else tensors[name].repeat(2)
        for wrong in ({name: cut}, {name: torch.full_like(tensors[name], torch.nan)}, {}):
            held = {other: t.contiguous() for other, t in (tensors | wrong).items() if wrong or other != name}
            if not wrong and (name in ("embed_tokens.weight", "lm_head.weight") or form.startswith("P-EAGLE")):
                continue  # the target's; or tests of EAGLE's names
            save_file(held, tmp_path / "model.safetensors")
            with pytest.raises(ModelError, match=name.replace("layers.0.", "").replace(".", r"\.")):
                read_block(tmp_path)


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        ("DFlash, z-lab", {"block_size": 1}, "1 rows"),
        ("DFlash, z-lab", {"dflash_config": {"mask_token_id": MASK}}, "target_layer_ids"),
        ("DFlash, z-lab", {"dflash_config": {"mask_token_id": 10**6, "target_layer_ids": [0, 1]}}, "mask token"),
        ("DFlash, z-lab", {"dflash_config": {"mask_token_id": MASK, "gru": True}}, "gru True in dflash_config"),
        ("DFlash, z-lab", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, "sliding_window 64"),
        ("DSpark, DeepSpec", {"markov_head_type": "rnn"}, "markov_head_type 'rnn'"),
        ("DSpark, DeepSpec", {"markov_rank": 4}, "markov_head"),
        ("P-EAGLE, SpecForge", {"mask_token_id": None}, "ptd_token_id"),
    ],
)
def test_other_configs_are_refused_by_name(
    tiny: Tiny, tmp_path: Path, form: str, changes: dict[str, Any], named: str
) -> None:
    """A key that no code reads, read as nothing."""
    save_block(tmp_path, form, tiny())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=named):
        read_block(tmp_path)
