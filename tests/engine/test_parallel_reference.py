"""transformers' own tensor parallelism, the other way to split a model, agrees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rank_process import Followers
from tiny_target import save_model

from ragspec.config import EngineConfig, TargetConfig
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.ranks import Rendezvous

ENGINE = EngineConfig(max_kv_tokens=512, num_threads=1)

_THEIRS = """
import sys
import numpy, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.integrations import accelerate
accelerate.is_accelerate_available = lambda: True  # asked for before every way to place weights; this one does not use it
from transformers.distributed import DistributedConfig
path, address, rank, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
model = AutoModelForCausalLM.from_pretrained(
    path, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
)
assert 2 * len(model.model.layers[0].self_attn.q_proj.weight.to_local()) == model.config.hidden_size
with torch.no_grad():
    logits = model(torch.from_numpy(numpy.load(out + ".tokens.npy"))[None]).logits[0]
numpy.save(f"{out}.{rank}.npy", (logits.full_tensor() if hasattr(logits, "full_tensor") else logits).numpy())
"""


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with Followers(1) as followers:
        yield followers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_transformers_own_ranks_agree(followers: Followers, kind: str, tmp_path: Path) -> None:
    """The group agrees with one rank of ours because both are wrong in the same way."""
    model = save_model(kind, tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    tokens = np.random.default_rng(5).integers(0, 300, 120)
    np.save(tmp_path / "out.tokens.npy", tokens)
    address = Rendezvous("127.0.0.1").address  # closed again: a port that is free
    arguments = [sys.executable, "-c", _THEIRS, str(model), address]
    theirs = [subprocess.Popen([*arguments, str(rank), str(tmp_path / "out")]) for rank in range(2)]
    assert [process.wait(300) for process in theirs] == [0, 0]
    with followers.target(2, TargetConfig(model=str(model)), ENGINE) as target:
        slots = SequenceSlots(target.pool)
        every = np.arange(len(tokens), dtype=np.int32)
        ours = target.forward(tokens.astype(np.int32), Batch([ScheduledSequence(slots, tokens)]).metadata, every)
    for rank in range(2):
        logits = np.load(tmp_path / f"out.{rank}.npy")
        assert np.allclose(ours, logits, atol=2e-4)
        assert np.array_equal(ours.argmax(-1), logits.argmax(-1))
