"""Hydra++ in the engine: its states are those of the whole prefix model, heads read them, and it changes no output."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafting.medusa_heads import PREFIX, hydra_logits, hydra_plus_tensors, position_drafter, prefix_model, save_hydra
from head_parts import NotesReads, differs
from oracle import fresh_forward
from oracle_cases import watched_beside_half
from tiny_target import Tiny

from ragspec.drafting.growing.draft import DraftBatch, ScheduledDraft
from ragspec.drafting.medusa.checkpoint import read_hydra
from ragspec.drafting.medusa.drafter import PrefixHydraDrafter
from ragspec.drafting.medusa.network import PrefixNetwork
from ragspec.engine.target import FINAL, Target
from ragspec.errors import ModelError
from ragspec.numerics.cpu.int8 import Int8Layer


def whole(target: Target, states: torch.Tensor) -> torch.Tensor:
    """The prefix model over all states at once. Shapes: [T, H] -> [T, H]."""
    with torch.no_grad():
        return prefix_model(target)(inputs_embeds=states[None]).last_hidden_state[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_states_and_logits_are_the_published_modules(tiny: Tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    """A norm left out, positions one off, keys of the first reading lost when accepted states follow."""
    target = tiny()
    tensors = hydra_plus_tensors(target)
    save_hydra(tmp_path, tensors, hydra_head_arch="prefix-mlp")
    network = PrefixNetwork(read_hydra(tmp_path, target), target, 300, dtype)
    assert isinstance(network._layer, Int8Layer) == (dtype == torch.int8)
    generator = torch.Generator().manual_seed(2)
    states, ids = torch.randn(43, target.hidden_size, generator=generator), np.arange(43, dtype=np.int32)
    cache, slots = network.make_cache(target.pool), np.arange(50, 93, dtype=np.int32)
    first = DraftBatch([ScheduledDraft(slots[:40], 40, 40, slots[:0])]).chains()
    then = DraftBatch([ScheduledDraft(slots, 3, 43, slots[:0])]).chains()
    ours = [network.first(ids[:40], states[:40], cache, first), network.first(ids[40:], states[40:], cache, then)]
    wanted = whole(target, states)
    assert not differs(torch.cat(ours), wanted.double(), dtype)
    embedded = target.embedding[torch.from_numpy(ids).long()][:, None].float()
    logits = torch.tensor(network.logits(network.inputs(wanted, ids), 0))
    assert not differs(logits, hydra_logits(tensors, wanted, embedded, 0).double(), dtype)


class Watched(NotesReads, PrefixHydraDrafter): ...


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"num_kv_slots": 256}])
def test_states_are_right_after_prefixes_chunks_and_preemption(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Keys of a rejected node's slot stayed, or a chunk's states were lost."""
    target = tiny()
    made = position_drafter(target, tmp_path, "hydra++")
    assert isinstance(made, PrefixHydraDrafter)
    watched = Watched(made.network, made._settings.shape, made._costs, max_read=256)
    watched_beside_half(target, watched, "T=1", **options)
    seen = [(tokens, state) for tokens, state, unread in watched.seen if not unread]
    assert len(seen) > 8
    for tokens, state in seen[:: 1 + len(seen) // 12]:
        assert torch.allclose(
            state, whole(target, fresh_forward(target, tokens[:-1], (FINAL,))[1][FINAL])[-1], atol=5e-4
        )


def test_each_tensor_of_the_prefix_is_named_where_it_is_missing_or_broken(tiny: Tiny, tmp_path: Path) -> None:
    """The published loader is not strict: a prefix of another target drafted noise."""
    target = tiny()
    made = hydra_plus_tensors(target, 1)
    for name in [name for name in made if name.startswith(PREFIX) and "inv_freq" not in name]:
        wrong = [made | {name: made[name][:-1].clone()}, made | {name: torch.full_like(made[name], torch.nan)}]
        if "embed_tokens" not in name:
            wrong.append({other: held for other, held in made.items() if other != name})
        for tensors in wrong:
            save_hydra(tmp_path, tensors, hydra_head_arch="prefix-mlp")
            with pytest.raises(ModelError, match=name.replace(".", r"\.")):
                read_hydra(tmp_path, target)
