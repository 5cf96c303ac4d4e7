"""P-EAGLE, DFlash and DSpark heads on disk. Reads and writes the published forms and refuses anything else.

    fc.weight  hidden_norm.weight  layers.0.input_layernorm.weight  ...  norm.weight              DFlash
    markov_head.markov_w1.weight  markov_head.markov_w2.weight                                    DSpark has these too
    mask_hidden  fc.weight  layers.0.hidden_norm.weight  ...                                       P-EAGLE, as EAGLE-3

>>> config, tensors = read_block("Qwen3-8B-DFlash-b16")

Sources: the trainers' code (z-lab's DFlash, SpecForge, DeepSpec, speculators), and vLLM's for `dspark_bonus_anchor`.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.block.network import MASK_HIDDEN, BlockCheckpoint, BlockConfig, BlockHead
from ragspec.drafting.eagle.checkpoint import check_head, check_tensors_of, official_form, published_form
from ragspec.drafting.eagle.layout import AUX_KEY, EagleFamily, HeadCheckpoint, check_keys, config_of, flat_config
from ragspec.drafting.heads import files
from ragspec.errors import ModelError

_SECTION = "dflash_config"
_LOOK_AHEAD, _EMBEDDINGS, _MAX_EMBEDDINGS = "LookAheadEmbeddings", "embeddings", 32
_SECTION_KEYS = ("mask_token_id", "target_layer_ids")
_BLOCK_KEYS = (
    "block_size confidence_head_with_markov dspark_bonus_anchor enable_confidence_head markov_head_type markov_rank"
    " mask_token_id parallel_drafting ptd_token_id sample_from_anchor"
).split()
_TRAINING_KEYS = "ce_loss_alpha confidence_head_alpha l1_loss_alpha loss_decay_gamma num_anchors".split()
_IGNORED = (
    "rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight",
    "confidence_head.proj.weight", "confidence_head.proj.bias",
)  # fmt: skip
"""Why DSpark's confidence head: margins of the logits tell better which guesses are accepted (infra/results/heads.md)."""


class BlockFamily(enum.StrEnum):
    """The published kinds; look-ahead embeddings (PaSS) have files of our own."""

    PEAGLE = "peagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    PASS = "pass"


_ARCHITECTURES = {
    BlockFamily.PEAGLE: re.compile(r"(?i)peagle\w*"),
    BlockFamily.DFLASH: re.compile(r"(?i)(qwen3)?dflash(draftmodel|speculator|model)"),
    BlockFamily.DSPARK: re.compile(r"(?i)(qwen3)?dspark(draftmodel|speculator|model)"),
    BlockFamily.PASS: re.compile(_LOOK_AHEAD),
}


def family_of(raw: files.Raw) -> BlockFamily | None:
    """None: no head that drafts blocks."""
    if raw.get("speculators_model_type") in list(BlockFamily):
        return BlockFamily(raw["speculators_model_type"])
    names = raw.get("architectures")
    for family, pattern in _ARCHITECTURES.items():
        if isinstance(names, list) and any(pattern.fullmatch(str(name)) for name in names):
            return family
    return BlockFamily.PEAGLE if raw.get("parallel_drafting") is True else None


def family_in(directory: str | Path) -> BlockFamily | None:
    """As `family_of`, of the head in a directory. Raises: ModelError where there is no config.json."""
    with files.errors_of(directory) as folder:
        return family_of(files.read_json(folder / files.CONFIG))


def read_block(directory: str | Path) -> BlockCheckpoint:
    """Read and check the head in a directory: every tensor is there, has the configured size and is finite.

    Raises: ModelError with the reason, naming the tensor or the key.
    """
    with files.errors_of(directory) as folder:
        raw = files.read_json(folder / files.CONFIG)
        family = family_of(raw)
        if family in (None, BlockFamily.PASS):
            raise ModelError("config.json names no P-EAGLE, DFlash or DSpark head")
        stored = files.read_tensors(folder)
        stored = {name: tensor.detach() for name, tensor in stored.items() if not name.endswith(_IGNORED)}
        if family is BlockFamily.PEAGLE:
            checkpoint = _read_peagle(raw, stored)
        else:
            checkpoint = BlockCheckpoint(_flash_config(family, raw, stored), stored)
        check_block(checkpoint)
        return checkpoint


def _read_peagle(raw: files.Raw, stored: dict[str, Tensor]) -> BlockCheckpoint:
    if MASK_HIDDEN not in stored:
        raise ModelError(f"the head lacks {MASK_HIDDEN}, which a P-EAGLE head has")
    shape, tensors = official_form(_as_eagle(raw), {n: t for n, t in stored.items() if n != MASK_HIDDEN}, {})
    key = "mask_token_id" if raw.get("mask_token_id") is not None else "ptd_token_id"
    return BlockCheckpoint(BlockConfig(shape, files.integer(raw, key)), tensors | {MASK_HIDDEN: stored[MASK_HIDDEN]})


def write_block(directory: Path, checkpoint: BlockCheckpoint) -> None:
    """Write a head in SpecForge's form (P-EAGLE), z-lab's (DFlash) or DeepSpec's (DSpark), each file whole or not at all.

    Raises: ModelError for a head that `read_block` would refuse, SaveError.
    """
    config = checkpoint.config
    check_block(checkpoint)
    raw, tensors = published_form(HeadCheckpoint(config.shape, checkpoint.tensors))
    mask: dict[str, Any] = {"mask_token_id": config.mask_token_id}
    if config.is_causal:
        raw |= {"architectures": ["PEagleDraftModel"], **mask}
    else:
        layers = {"target_layer_ids": [tap - 1 for tap in raw.pop(AUX_KEY)]}
        raw |= {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
        raw |= {_SECTION: mask | layers} if not config.markov_rank else mask | layers
    if config.markov_rank:
        raw |= {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": config.samples_anchor}
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
    files.write_files(directory, raw, files.WEIGHTS, tensors)


def check_block(checkpoint: BlockCheckpoint) -> None:
    """Raises: ModelError naming the first tensor that a head of this configuration has not, or has otherwise."""
    shape, tensors = checkpoint.config.shape, checkpoint.tensors
    if checkpoint.config.is_causal:
        check_head(shape, {name: tensor for name, tensor in tensors.items() if name != MASK_HIDDEN})
        files.check_tensor(MASK_HIDDEN, tensors[MASK_HIDDEN], (1, 1, shape.num_features))
        return
    with torch.device("meta"):
        needed = BlockHead(checkpoint.config).state_dict()
    check_tensors_of(shape, needed, tensors)


def write_look_ahead(directory: Path, embeddings: Tensor) -> None:
    """Shape: [rows, H]. Raises: ModelError for embeddings that `read_look_ahead` would refuse, SaveError."""
    _check(embeddings, embeddings.shape[-1])
    raw = {"architectures": [_LOOK_AHEAD], "hidden_size": embeddings.shape[1]}
    files.write_files(directory, raw, files.WEIGHTS, {_EMBEDDINGS: embeddings})


def read_look_ahead(directory: str | Path, hidden_size: int) -> Tensor:
    """Embeddings for a target of this width. Shape: [rows, H]. Raises: ModelError with the reason."""
    with files.errors_of(directory) as folder:
        tensors = files.read_tensors(folder)
        if list(tensors) != [_EMBEDDINGS]:
            raise ModelError(f"the head has {', '.join(tensors)}, not {_EMBEDDINGS} alone")
        _check(tensors[_EMBEDDINGS], hidden_size)
        return tensors[_EMBEDDINGS]


def _check(embeddings: Tensor, hidden_size: int) -> None:
    files.check_tensor(_EMBEDDINGS, embeddings, (len(embeddings), hidden_size))
    if not 1 <= len(embeddings) <= _MAX_EMBEDDINGS:
        raise ModelError(f"the head has {len(embeddings)} embeddings; 1 to {_MAX_EMBEDDINGS} are served")


def _flash_config(family: BlockFamily, raw: files.Raw, stored: Mapping[str, Tensor]) -> BlockConfig:
    section = files.section_of(raw, _SECTION)
    check_keys(section, _SECTION_KEYS, f" in {_SECTION}")
    given = {**section, **{key: value for key, value in raw.items() if value is not None}}
    merged = flat_config(_as_eagle(given), {})
    if not merged[AUX_KEY]:
        raise ModelError("config.json has no target_layer_ids")
    # The other layers are as the first
    first = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in stored.items()}
    first = {name: tensor for name, tensor in first.items() if not name.startswith("layers.")}
    shape = replace(config_of(EagleFamily.EAGLE3, merged, first), qk_norm=True)
    if shape.window:
        raise ModelError(f"config.json has sliding_window {shape.window}, which is not served for {family} heads")
    rank, samples_anchor = 0, False
    if family is BlockFamily.DSPARK:
        rank = files.integer(given, "markov_rank", 0)
        if rank and (kind := given.get("markov_head_type", "vanilla")) != "vanilla":
            raise ModelError(f"config.json has markov_head_type {kind!r}, which is not served; vanilla is")
        has_bonus_anchor = "speculators_model_type" in given or files.truth(given, "dspark_bonus_anchor")
        samples_anchor = files.truth(given, "sample_from_anchor", not has_bonus_anchor)
    sizes = (files.integer(given, "mask_token_id"), files.integer(given, "block_size"))
    return BlockConfig(shape, *sizes, samples_anchor, rank)


def _as_eagle(raw: files.Raw) -> dict[str, Any]:
    """The config without its block: an EAGLE-3 head's."""
    own = {"architectures", "speculators_model_type", _SECTION, *_BLOCK_KEYS, *_TRAINING_KEYS}
    return {key: value for key, value in raw.items() if key not in own}
