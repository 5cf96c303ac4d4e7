"""One step as one forward: of each scheduled sequence its next known tokens and a draft tree on top, flattened to rows.

Slots are reserved when a batch is built; `keep` or `drop` settles each sequence's slots when the step is decided. Owns no
text and no logits.

    >>> batch = Batch([ScheduledSequence(slots, token_ids)])
    >>> logits = target.forward(batch.token_ids, batch.metadata, batch.logit_rows)
    >>> batch.sequences[0].keep()
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ragspec.numerics.attention import AttentionMetadata, Ints, make_tiles
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.torch.transfer import to_device

NODES = -3
"""A tap of token ids, which are on the host: of all nodes of a sequence's tree, not of the kept positions alone."""


class ScheduledSequence:
    """One sequence's part of a step: known tokens after its kept positions, then nodes 1, 2, ... of a draft tree.

    Node 0, the tree's root, is the last known token: `parents[0]` is -1, every other parent is a lower number. `token_ids`
    has one token a row. `wants_logits` is False for a chunk of a prompt that goes on in the next step. Rows see the tree's
    longest path, the trunk, as context: the metadata of a chain is as long as the chain, not as its square.
    """

    def __init__(
        self,
        slots: SequenceSlots,
        token_ids: Sequence[int] | Ints,
        parents: Sequence[int] = (-1,),
        wants_logits: bool = True,
    ) -> None:
        self.slots, self.token_ids, self.parents, self.wants_logits = slots, token_ids, parents, wants_logits
        self.num_known = len(token_ids) - len(parents) + 1
        self.depths = _depths(parents)
        self.trunk = _trunk(parents, self.depths)
        self.first_row = self.first_logit = 0  # set by the batch
        self.reserved_slots, self.reserved_index = slots.reserve(len(token_ids))

    def logits(self, logits: LogitRows) -> LogitRows:
        """Logits of the tree, row n for node n. Shapes: [W, V] of the batch -> [N, V]."""
        rows: LogitRows = logits[self.first_logit : self.first_logit + len(self.parents)]
        return rows

    def judged_nodes(self, following: Tensor) -> Tensor:
        """Token, parent and following token of every node. Shapes: int64 [N] of the batch -> [nodes, 3]."""
        root = self.first_row + self.num_known - 1
        tokens = following.numpy()[root : root + len(self.parents)]
        return torch.from_numpy(np.column_stack([self.token_ids[self.num_known - 1 :], self.parents, tokens]))

    def kept_rows(self, path: Sequence[int]) -> list[int]:
        """The batch's rows of the known tokens and of the nodes on `path`."""
        root = self.first_row + self.num_known - 1
        return [*range(self.first_row, root + 1), *(root + node for node in path)]

    def keep(self, path: Sequence[int] = ()) -> None:
        """Keep the known tokens and the tree's nodes on `path`, in order; all other slots are spare again."""
        root = self.num_known - 1
        kept = [*range(self.num_known), *(root + node for node in path)]
        self.slots.keep(self.reserved_slots, self.reserved_index, kept)

    def drop(self) -> None:
        """Keep nothing."""
        self.slots.keep(self.reserved_slots, self.reserved_index, [])


class Batch:
    """The rows of all sequences, in order. Raises: OutOfSlots.

    Shapes: token_ids int32 [N]; logit_rows int32 [W], the rows of all nodes whose logits are wanted, roots included.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.sequences = sequences
        token_ids: list[int] = []
        logit_rows: list[int] = []
        for scheduled in sequences:
            scheduled.first_row, scheduled.first_logit = len(token_ids), len(logit_rows)
            token_ids.extend(scheduled.token_ids)
            if scheduled.wants_logits:
                logit_rows += range(len(token_ids) - len(scheduled.parents), len(token_ids))
        self.token_ids = np.array(token_ids, np.int32)
        self.logit_rows = np.array(logit_rows, np.int32)
        self.longest_context = max(s.slots.length + s.num_known for s in sequences)
        self.metadata = _metadata(sequences)

    def features(self, features: Mapping[int, Tensor], paths: Sequence[Sequence[int]]) -> list[dict[int, Tensor]]:
        """Each sequence's features of its known tokens and of the nodes on its path, by tap; of `NODES` all nodes, with their
        tokens and parents.

        Shapes: [N, H] -> [T, H] each; of `NODES` [N] -> [nodes, 3].
        """
        own: list[dict[int, Tensor]] = [{} for _ in self.sequences]
        if not features:
            return own
        kept = [scheduled.kept_rows(path) for scheduled, path in zip(self.sequences, paths, strict=True)]
        states = {tap: stream for tap, stream in features.items() if tap != NODES}
        # Why prompts apart: the states of one sequence would keep those of another's prompt in memory
        prompts = [[n] for n, scheduled in enumerate(self.sequences) if scheduled.num_known > 1]
        decoding = [n for n, scheduled in enumerate(self.sequences) if scheduled.num_known == 1]
        for together in filter(None, [*prompts, decoding]):
            for tap, parts in _split(states, [kept[n] for n in together]).items():
                for n, part in zip(together, parts, strict=True):
                    own[n][tap] = part
        if NODES in features:
            for scheduled, found in zip(self.sequences, own, strict=True):
                found[NODES] = scheduled.judged_nodes(features[NODES])
        return own


def _split(states: Mapping[int, Tensor], kept: Sequence[Sequence[int]]) -> dict[int, Sequence[Tensor]]:
    """One copy of several sequences' rows by tap, split into each sequence's. Shapes: [N, H] -> [T, H] each."""
    if not states:
        return {}
    index = np.array([row for rows in kept for row in rows], np.int64)
    at, sizes = to_device(index, next(iter(states.values())).device), [len(rows) for rows in kept]
    return {tap: stream.index_select(0, at).split(sizes) for tap, stream in states.items()}


def _metadata(sequences: Sequence[ScheduledSequence]) -> AttentionMetadata:
    seen, paths = zip(*(_beside(s.parents, s.trunk) for s in sequences), strict=True)
    flat = [_flat(s.num_known, own) for s, own in zip(sequences, paths, strict=True)]
    path_lengths = [len(path) for s, own in zip(sequences, paths, strict=True) for path in [*[[]] * s.num_known, *own]]
    context_slots: list[Ints] = []
    context_index: list[Ints] = []
    for s in sequences:  # kept positions, known tokens and the trunk, sequence after sequence
        ahead = [*range(s.num_known), *(s.num_known - 1 + node for node in s.trunk)]
        context_slots += [s.slots.slots, s.reserved_slots[ahead]]
        context_index += [s.slots.index, s.reserved_index[ahead]]
    row_start = _starts([len(s.token_ids) for s in sequences])
    return AttentionMetadata(
        slots=np.concatenate([s.reserved_slots for s in sequences]),
        positions=np.concatenate([_positions(s) for s in sequences]),
        row_start=row_start,
        pages=np.concatenate([np.array(s.slots.pages, np.int32) for s in sequences]),
        page_start=_starts([len(s.slots.pages) for s in sequences]),
        context_slots=np.concatenate(context_slots),
        context_index=np.concatenate(context_index),
        context_start=_starts([s.slots.length + s.num_known + len(s.trunk) for s in sequences]),
        context_end=np.concatenate([_context_end(s, own) for s, own in zip(sequences, seen, strict=True)]),
        path_slots=np.concatenate([s.reserved_slots[own] for s, own in zip(sequences, flat, strict=True)]),
        path_index=np.concatenate([s.reserved_index[own] for s, own in zip(sequences, flat, strict=True)]),
        path_start=_starts(path_lengths),
        tiles=make_tiles(row_start),
    )


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _trunk(parents: Sequence[int], depths: list[int]) -> list[int]:
    """The nodes of a longest path, top down, without the root."""
    trunk, node = [], depths.index(max(depths))
    while node:
        trunk.append(node)
        node = parents[node]
    return trunk[::-1]


def _beside(parents: Sequence[int], trunk: list[int]) -> tuple[list[int], list[list[int]]]:
    """For nodes 1, 2, ...: how many nodes of the trunk it sees, and its path from there, itself included."""
    numbers = {node: number for number, node in enumerate(trunk, 1)}
    seen, paths = [0], list[list[int]]([[]])
    for node in range(1, len(parents)):
        seen.append(numbers.get(node, seen[parents[node]]))
        paths.append([] if node in numbers else [*paths[parents[node]], node])
    return seen[1:], paths[1:]


def _flat(num_known: int, paths: list[list[int]]) -> Ints:
    return np.fromiter((num_known - 1 + node for path in paths for node in path), np.int32)


def _positions(scheduled: ScheduledSequence) -> Ints:
    start, end = scheduled.slots.length, scheduled.slots.length + scheduled.num_known
    return np.array([*range(start, end), *(end - 1 + depth for depth in scheduled.depths[1:])], np.int32)


def _context_end(scheduled: ScheduledSequence, seen: list[int]) -> Ints:
    start, end = scheduled.slots.length, scheduled.slots.length + scheduled.num_known
    return np.array([*range(start + 1, end + 1), *(end + count for count in seen)], np.int32)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.array([0, *itertools.accumulate(lengths)], np.int32)
