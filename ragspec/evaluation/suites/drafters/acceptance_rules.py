"""Expected tokens a step by acceptance rule, from the probabilities of a real target and head behind the same
prefixes.

The target runs as in the engine. The head runs as in training (`ragspec.training.heads.eagle_model`), one step a
level; that is slow, but independent of the drafter. Drafts are chains of 4, or trees of 14 nodes with two children
each, three levels deep. Published rules run as served (`ragspec.verification.rejection`).

    >>> laws = TargetAndHead.load(TargetConfig(), head_dir)
    >>> with laws.behind(prefix_ids) as place: place.draft_probs([()])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.config import TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.eagle.checkpoint import check_fits, read_head
from ragspec.drafting.eagle.network import taps_of
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.evaluation.suites.drafters.variants import CHAIN, TREE
from ragspec.evaluation.timing import Tick
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.noise import gumbel_row, row_seed
from ragspec.speculation import AcceptanceRule
from ragspec.training.heads.eagle_model import EagleHead, build_head
from ragspec.training.heads.head import Objective
from ragspec.tree import DraftTree, Draw, Origin
from ragspec.verification.probabilities import KeyedRandom, RandomStream, draw_iid, draw_without_replacement
from ragspec.verification.rejection import AcceptancePolicy, rejection_sample
from ragspec.verification.sampling import KeyedSampler
from ragspec.verification.verify import verify

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]

_NUM_SLOTS = 2048
_OF_TARGET = "embed_tokens.weight"


class TargetAndHead(NamedTuple):
    """A target and one of its heads. `taps`: the target's layers that the head reads."""

    target: Target
    head: EagleHead
    taps: tuple[int, ...]

    @classmethod
    def load(cls, config: TargetConfig, head_dir: Path) -> TargetAndHead:
        """Raises: ModelError."""
        target = Target.load(config, _NUM_SLOTS)
        head_config, tensors = read_head(head_dir)
        check_fits(head_config, target.vocab_size, target.hidden_size, target.num_layers)
        dialect = (head_config.norm_before_residual, head_config.norm_before_fc, head_config.norm_output)
        if any(dialect) or head_config.window or head_config.rope or head_config.num_layers > 1:
            raise ModelError(f"the head {head_dir} is of a dialect that is served, but not computed here")
        head = build_head(head_config)
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        weights.pop(_OF_TARGET, None)
        try:
            head.load_state_dict(weights)
        except RuntimeError as cause:
            raise ModelError(
                f"the head {head_dir} has tensors that are served, but not computed here: {cause}"
            ) from cause
        return cls(target, head.eval().requires_grad_(False), taps_of(head_config, target.num_layers))

    @contextmanager
    def behind(self, prefix_ids: Sequence[int]) -> Iterator[PrefixPredictions]:
        """Read a prefix of at least two tokens."""
        slots = SequenceSlots(self.target.pool)
        try:
            known = np.array(prefix_ids[:-1], np.int32)
            batch = Batch([ScheduledSequence(slots, known)])
            _, tapped = self.target.forward_tapped(known, batch.metadata, batch.logit_rows, self.taps)
            batch.sequences[0].keep()
            features = torch.cat([tapped[tap] for tap in self.taps], -1)  # [T - 1, F]
            yield PrefixPredictions(self, slots, list(prefix_ids), features)
        finally:
            slots.release()


class PrefixPredictions:
    """Probabilities behind a prefix of T tokens: the target has read T - 1 of them, the last token is the root of
    trees."""

    def __init__(self, laws: TargetAndHead, slots: SequenceSlots, prefix_ids: list[int], features: Tensor) -> None:
        self._laws, self._slots = laws, slots
        self._prefix_ids = prefix_ids
        self._features = features

    @torch.no_grad()
    def draft_probs(self, paths: Sequence[Tokens]) -> Floats:
        """The head's probabilities behind paths of equal length D, at temperature 1. Shapes: B paths -> float64
        [B, V]."""
        target, head, _ = self._laws
        size, num_steps = len(paths), len(paths[0]) + 1
        ids = torch.tensor([[*self._prefix_ids, *path] for path in paths])
        embedded = target.embedding[ids].float()  # [B, T + D, H]
        # Why the last row again: what the target has not read yet is hidden from the pair that drafts
        unread = self._features[-1:].expand(num_steps, -1)
        features = torch.cat([self._features, unread])[None].expand(size, -1, -1)
        last_pair = torch.full((size, 1), len(self._prefix_ids) - 2)
        state = head.unroll(embedded, features, last_pair, Objective(num_steps))[-1, :, 0]
        logits = head.logits(state, lambda states: target.logits_of(states.to(target.embedding.dtype)))
        probs, draft_ids = torch.softmax(logits.double(), -1), head.draft_token_ids()
        if draft_ids is None:
            return np.asarray(probs.numpy())
        full = np.zeros((size, target.vocab_size))  # tokens outside the draft vocabulary have no probability
        full[:, draft_ids.numpy()] = probs.numpy()
        return full

    def target_probs(self, tree: DraftTree) -> Floats:
        """The target's probabilities at every node of a tree whose root is the last token, at temperature 1.
        Shape: float64 [N, V]."""
        batch = Batch([ScheduledSequence(self._slots, tree.token_ids, tree.parents)])
        logits = self._laws.target.forward(batch.token_ids, batch.metadata, batch.logit_rows)
        batch.sequences[0].drop()
        mass = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        return np.asarray(mass / mass.sum(-1, keepdims=True))


NUM_WALKS = 8
"""Verifications of every sampled draft."""

_DEPTHS = {CHAIN: 4, TREE: 3}
_WIDTHS = {CHAIN: 1, TREE: 2}
_ORIGIN = Origin("rule")

Choose = Callable[[Floats, int, int], Draw]
"""(head's law [V], number of children, depth of the parent) -> the children."""


class Method(NamedTuple):
    """A rule, and how its drafts are sampled. KEYED follows the target's own sample."""

    name: str
    rule: AcceptanceRule
    replacement: bool = True
    coupled: bool = False


_KEYED = (
    Method("keyed, coupled", AcceptanceRule.KEYED, coupled=True),
    Method("keyed, uncoupled", AcceptanceRule.KEYED),
)
METHODS: dict[str, tuple[Method, ...]] = {
    CHAIN: (
        *_KEYED,
        Method("chain", AcceptanceRule.CHAIN),
        Method("block", AcceptanceRule.BLOCK),
    ),
    TREE: (
        *_KEYED,
        Method("iid", AcceptanceRule.IID),
        Method("without replacement", AcceptanceRule.WITHOUT_REPLACEMENT, replacement=False),
        Method("traversal, iid", AcceptanceRule.TRAVERSAL),
        Method("traversal, without replacement", AcceptanceRule.TRAVERSAL, replacement=False),
    ),
}


def rule_table(
    laws: TargetAndHead, prefixes: Sequence[tuple[int, ...]], seed: int, tick: Tick
) -> dict[str, dict[str, float | None]]:
    """Mean tokens a step, the bonus token included, by rule and shape; None where a rule does not fit the shape."""
    lengths: dict[str, dict[str, list[int]]] = {}
    for number, prefix in enumerate(prefixes, 1):
        with laws.behind(prefix) as place:
            for shape, methods in METHODS.items():
                for method in methods:
                    noise = row_seed(seed, f"{number}, {method.name}, {shape}")
                    found = step_lengths(place, prefix[-1], shape, method, noise)
                    lengths.setdefault(method.name, {}).setdefault(shape, []).extend(found)
        tick("acceptance rules", number, len(prefixes))
    return {
        name: {shape: float(np.mean(own[shape])) if shape in own else None for shape in METHODS}
        for name, own in lengths.items()
    }


def step_lengths(place: PrefixPredictions, root: int, shape: str, method: Method, seed: int) -> list[int]:
    """Tokens of some steps of one method, each step with its own noise."""
    if method.rule is AcceptanceRule.KEYED and method.coupled:
        return [_keyed_lengths(place, root, shape, True, [seed + i])[0] for i in range(NUM_WALKS // 2)]
    if method.rule is AcceptanceRule.KEYED:
        return _keyed_lengths(place, root, shape, False, [seed + i for i in range(NUM_WALKS)])
    chance = KeyedRandom(seed, 0, 0, RandomStream.DRAFT)

    def choose(law: Floats, count: int, _: int) -> Draw:
        draw = draw_iid if method.replacement else draw_without_replacement
        return Draw(draw(law, count, chance), law, method.replacement)

    lengths: list[int] = []
    for _ in range(NUM_WALKS // 2):  # a draw of the draft is as much chance as its verification
        tree, draws = sample_draft(place, root, shape, choose)
        laws = place.target_probs(tree)
        for walk_number in range(2):
            verifying = KeyedRandom(seed + walk_number, 0, len(lengths), RandomStream.VERIFY)
            verdict = rejection_sample(
                AcceptancePolicy(method.rule), tree, draws, laws.__getitem__, verifying, len(tree) + 1
            )
            lengths.append(len(verdict.tokens))
    return lengths


def sample_draft(place: PrefixPredictions, root: int, shape: str, choose: Choose) -> tuple[DraftTree, dict[int, Draw]]:
    """Sample a draft level by level; repeated tokens share a node."""
    tree, draws, level = DraftTree(root), dict[int, Draw](), [0]
    for depth in range(_DEPTHS[shape]):
        paths = [tuple(tree.token_ids[node] for node in tree.ancestors(parent)[1:]) for parent in level]
        first = len(tree)
        for parent, law in zip(level, place.draft_probs(paths), strict=True):
            draws[parent] = choose(law, _WIDTHS[shape], depth)
            for token in draws[parent].tokens:
                tree.add(parent, token, tree.path_probs[parent], _ORIGIN)
        level = list(range(first, len(tree)))
    return tree, draws


def _keyed_lengths(place: PrefixPredictions, root: int, shape: str, coupled: bool, seeds: list[int]) -> list[int]:
    """Walk one draft by samples of several seeds; a coupled draft knows the first seed's noise."""

    def choose(law: Floats, count: int, depth: int) -> Draw:
        noise = gumbel_row(seeds[0], 0, depth, len(law)) if coupled else 0.0
        with np.errstate(divide="ignore"):
            ranked = np.argsort(-(np.log(law) + noise), kind="stable")
        return Draw(tuple(ranked[:count].tolist()))

    tree, _ = sample_draft(place, root, shape, choose)
    with np.errstate(divide="ignore"):
        logits = np.log(place.target_probs(tree)).astype(np.float32)  # [N, V]
    request = Request("", (), SamplingParams(temperature=1.0))

    def num_tokens(sampler: KeyedSampler) -> int:
        return len(verify(tree, lambda node: sampler(logits[node]), len(tree)).tokens)

    return [num_tokens(KeyedSampler(request, seed, 0, (), [])) for seed in seeds]
