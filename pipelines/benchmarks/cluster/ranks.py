"""Tensor parallel in the suite `cluster`: groups of 1, 2 and 4 ranks in Ray actors, each target and type of weights in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ragspec.cluster.shell import Handle, Role, shell_class
from ragspec.config import EngineConfig, TargetConfig
from ragspec.engine.parallel import load_follower
from ragspec.evaluation.cases import Case
from ragspec.evaluation.comparison import Tick
from ragspec.evaluation.ranks_part import Measured, compared, measure_ranks
from ragspec.evaluation.report import Result
from ragspec.numerics.ranks import ONE_RANK, DistributedRanks, Meeting

SIZES = (1, 2, 4)
_KV_TOKENS = 4096
_TIMEOUT_S = 900.0
_RANK_TIMEOUT_S = 60.0
"""Four ranks on two cores beside anything else may wait long for each other; nothing here is about noticing a lost one."""

_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "eos_token_id": None,
}
RANDOM: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "random Llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "random Qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "head_dim": 32}),
}


class RankProbe:
    """The process of one rank; serves one group after the other."""

    def meet(self) -> str:
        """Of rank 0: where the others are to come."""
        self._meeting = Meeting("127.0.0.1")
        return self._meeting.address

    def follow(self, config: TargetConfig, address: str, rank: int, size: int) -> None:
        """Ends with rank 0's engine."""
        ranks = DistributedRanks(address, rank, size, timeout_s=_RANK_TIMEOUT_S)
        load_follower(config, EngineConfig(max_kv_tokens=_KV_TOKENS, num_threads=1), ranks).run()

    def lead(self, config: TargetConfig, cases: Sequence[Case], size: int, seed: int) -> Measured:
        if size == 1:
            return measure_ranks(config, cases, ONE_RANK, seed)
        ranks = DistributedRanks(self._meeting, 0, size, timeout_s=_RANK_TIMEOUT_S)
        return measure_ranks(config, cases, ranks, seed)


@contextlib.contextmanager
def rank_probes() -> Iterator[list[Any]]:
    """The processes of the largest group, ended in the end."""
    shells = [shell_class().options(num_cpus=0.1).remote() for _ in range(max(SIZES))]
    try:
        ray.get([shell.become.remote(Role("engine", RankProbe)) for shell in shells], timeout=_TIMEOUT_S)
        yield [Handle(shell) for shell in shells]
    finally:
        for shell in shells:
            ray.kill(shell)


def random_model(name: str, tokenizer_path: str, folder: Path) -> Path:
    """A small random model with grouped queries and the tokenizer of another; the same weights every time."""
    config_class, model_class, extra = RANDOM[name]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    path = folder / f"{name.replace(' ', '_').lower()}-{len(tokenizer)}"
    if not (path / "complete").is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config_class(vocab_size=len(tokenizer), **_SHAPE, **extra))
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
        (path / "complete").touch()
    return path


def tensor_parallel(
    targets: Sequence[tuple[str, TargetConfig]], cases: Sequence[Case], seed: int, tick: Tick
) -> list[Result]:
    """One row for each target and size of group, compared with one rank. Raises: what a rank raises."""
    rows: list[Result] = []
    with rank_probes() as probes:
        for name, config in targets:
            alone: Measured | None = None
            for size in SIZES:
                measured = _measured(probes, config, cases, size, seed)
                alone = alone or measured
                rows.append({"target": name, "dtype": config.dtype, "ranks": size} | compared(alone, measured))
                tick("tensor parallel", len(rows), len(targets) * len(SIZES))
    return rows


def tp_headlines(rows: Sequence[Result]) -> Result:
    """Of all groups of more than one rank."""
    groups = [row for row in rows if row["ranks"] > 1]
    num_identical, num_compared = (sum(row[key] for row in groups) for key in ("num_identical", "num_compared"))
    return {
        "tp_identical": num_identical / num_compared if num_compared else None,
        "tp_bitwise": all(row["bitwise"] for row in groups) if groups else None,
    }


def _measured(probes: Sequence[Any], config: TargetConfig, cases: Sequence[Case], size: int, seed: int) -> Measured:
    address = ray.get(probes[0].meet.remote()) if size > 1 else ""
    follows = [probe.follow.remote(config, address, rank, size) for rank, probe in enumerate(probes[1:size], 1)]
    lead = probes[0].lead.remote(config, cases, size, seed)
    measured: Measured = ray.get(lead, timeout=_TIMEOUT_S)
    ray.get(follows, timeout=_RANK_TIMEOUT_S)
    return measured
