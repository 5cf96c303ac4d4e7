"""EAGLE heads on disk: reads published checkpoints, refuses anything else, writes the published layout.

>>> config, tensors = read_head("EAGLE3-LLaMA3.1-Instruct-8B")
>>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ragspec.drafting.eagle.dialects import official_form, published_form
from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint, HeadConfig
from ragspec.drafting.eagle.network import EagleHead
from ragspec.drafting.heads.files import CONFIG, WEIGHTS, check_tensors, read_json, read_tensors, write_files
from ragspec.errors import ModelError


def read_head(directory: str | Path, positions_per_layer: int | None = None) -> HeadCheckpoint:
    """Read and check the head in a directory: every tensor is there, has the configured size and is finite.

    A head without `embed_tokens.weight` uses the target's embedding. A head without a rope base has 10000, never the
    target's. `positions_per_layer`: of a PosS head, whose files do not say it. Raises: ModelError with the reason, naming
    the tensor or the key.
    """
    directory = Path(directory)
    try:
        raw = read_json(directory / CONFIG)
        checkpoint = official_form(raw, read_tensors(directory), positions_per_layer)
        check_head(checkpoint.config, checkpoint.tensors)
    except ModelError as cause:
        raise ModelError(f"{directory}: {cause}") from cause
    return checkpoint


def write_head(directory: str | Path, checkpoint: HeadCheckpoint) -> None:
    """Write config.json and model.safetensors in the published layout, each file whole or not at all.

    Raises: ModelError for a head that `read_head` would refuse, SaveError.
    """
    check_head(checkpoint.config, checkpoint.tensors)
    raw, tensors = published_form(checkpoint)
    write_files(Path(directory), raw, WEIGHTS, tensors)


def check_head(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ModelError naming the first tensor that a head of this configuration has not, or has otherwise."""
    check_tensors(tensors, *_expected(config, tensors))
    if ("d2t" in tensors) != ("t2d" in tensors):
        raise ModelError("the head has only one of d2t and t2d")
    if "d2t" in tensors:
        _check_vocabulary(tensors["d2t"], tensors["t2d"])


def _expected(config: HeadConfig, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors that a head of this configuration has, and those that it may have, without memory."""
    norms = tensors.get("fc_norm.weight")
    num_taps = config.num_features // config.target_hidden_size
    has_norm_a_tap = norms is not None and norms.ndim == 2 and len(norms) == num_taps
    with torch.device("meta"):
        needed = EagleHead(config, num_taps if has_norm_a_tap else 1).state_dict()
        table = torch.empty(config.vocab_size, config.hidden_size)
        if config.family is EagleFamily.EAGLE:
            return needed, {"embed_tokens.weight": table, "lm_head.weight": table}
        if config.hidden_size != config.target_hidden_size:
            needed["embed_tokens.weight"] = table
        d2t = torch.empty(config.draft_vocab_size, dtype=torch.int64)
        t2d = torch.empty(config.vocab_size, dtype=torch.bool)
        return needed, {"embed_tokens.weight": table, "d2t": d2t, "t2d": t2d}


def _check_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """d2t [Vd] holds offsets: draft token i is the target's token i + d2t[i]. t2d [V] marks these tokens."""
    if _reaches(torch.arange(len(d2t)) + d2t, t2d):
        return
    if _reaches(d2t, t2d):
        raise ModelError("the head's d2t holds token ids; the published layout holds offsets, id minus row")
    raise ModelError("the head's d2t and t2d name different tokens")


def _reaches(ids: Tensor, t2d: Tensor) -> bool:
    if bool((ids < 0).any()) or bool((ids >= len(t2d)).any()) or not bool((ids[1:] > ids[:-1]).all()):
        return False
    return int(t2d.sum()) == len(ids) and bool(t2d[ids].all())
