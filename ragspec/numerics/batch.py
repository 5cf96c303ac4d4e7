"""One step as one forward: of each scheduled sequence its next known tokens and a draft tree on top, flattened to rows.

Slots are reserved when a batch is built; `keep` or `drop` settles each sequence's slots when the step is decided. Owns no
text and no logits.

    >>> batch = Batch([ScheduledSequence(slots, token_ids)])
    >>> logits = target.forward(batch.token_ids, batch.metadata, batch.logit_rows)
    >>> batch.sequences[0].keep()
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.attention import AttentionMetadata, Ints, make_tiles
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.compiled import compiled
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


@compiled(nogil=True)
def _layout(lengths: Any, num_known: Any, parents: Any, node_start: Any, num_rows: int) -> Any:
    """Where rows stand and which rows they see: position and end of context of each row, the rows after the kept positions that
    are context (known tokens, then the trunk) with each sequence's first, and the rows of each row's path beside the trunk.

    Shapes: lengths, num_known int64 [B]: kept positions and known tokens; parents int64 [nodes]; node_start int64 [B + 1].
    """
    count, most = len(lengths), 0
    positions, context_end = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    ahead, ahead_start = np.empty(num_rows, np.int64), np.zeros(count + 1, np.int32)
    depths, seen = np.zeros(len(parents), np.int64), np.zeros(len(parents), np.int64)
    path_start, first = np.zeros(num_rows + 1, np.int32), 0
    for b in range(count):  # first depths and trunks, and how long the paths are
        low, high, root = node_start[b], node_start[b + 1], first + num_known[b] - 1
        deepest, num = 0, ahead_start[b]
        for row in range(first, root + 1):
            positions[row] = lengths[b] + row - first
            context_end[row] = positions[row] + 1
            ahead[num] = row
            num += 1
        for node in range(low + 1, high):
            depths[node] = depths[low + parents[node]] + 1
            deepest = node - low if depths[node] > depths[low + deepest] else deepest
        length, node = depths[low + deepest], deepest
        while node:
            seen[low + node] = depths[low + node]  # a mark of the trunk
            ahead[num + depths[low + node] - 1] = root + node
            node = parents[low + node]
        ahead_start[b + 1] = num + length
        for node in range(low + 1, high):
            row, above = root + node - low, parents[node]
            positions[row] = positions[root] + depths[node]
            if not seen[node]:
                path_start[row + 1] = path_start[root + above + 1] + 1
                most += path_start[row + 1]
                seen[node] = seen[low + above]
            context_end[row] = context_end[root] + seen[node]
        first = root + high - low
    for row in range(num_rows):
        path_start[row + 1] += path_start[row]
    path_rows, first = np.empty(most, np.int64), 0
    for b in range(count):
        root = first + num_known[b] - 1
        for node in range(1, node_start[b + 1] - node_start[b]):
            begin, end = path_start[root + node], path_start[root + node + 1]
            if end > begin:
                above = path_start[root + parents[node_start[b] + node]]
                path_rows[begin : end - 1] = path_rows[above : above + end - 1 - begin]
                path_rows[end - 1] = root + node
        first = root + node_start[b + 1] - node_start[b]
    return positions, context_end, ahead[: ahead_start[count]], ahead_start, path_start, path_rows


def _metadata(sequences: Sequence[ScheduledSequence]) -> AttentionMetadata:
    lengths, num_known, num_rows = np.array([(s.slots.length, s.num_known, len(s.token_ids)) for s in sequences]).T
    parents = np.fromiter(itertools.chain.from_iterable(s.parents for s in sequences), np.int64)
    node_start = np.concatenate([[0], np.cumsum(num_rows - num_known + 1)])
    layout = _layout(lengths, num_known, parents, node_start, num_rows.sum())
    positions, context_end, ahead, ahead_start, path_start, path_rows = layout
    slots = np.concatenate([s.reserved_slots for s in sequences])
    index = np.concatenate([s.reserved_index for s in sequences])
    slots_ahead, index_ahead = slots[ahead], index[ahead]
    context_slots: list[Ints] = []
    context_index: list[Ints] = []
    for s, (low, high) in zip(sequences, itertools.pairwise(ahead_start.tolist()), strict=True):
        context_slots += [s.slots.slots, slots_ahead[low:high]]
        context_index += [s.slots.index, index_ahead[low:high]]
    row_start, pages = _starts(num_rows), [s.slots.page_array for s in sequences]
    return AttentionMetadata(
        slots=slots,
        positions=positions,
        row_start=row_start,
        pages=np.concatenate(pages),
        page_start=_starts([len(own) for own in pages]),
        context_slots=np.concatenate(context_slots),
        context_index=np.concatenate(context_index),
        context_start=_starts(lengths + np.diff(ahead_start)),
        context_end=context_end,
        path_slots=slots[path_rows],
        path_index=index[path_rows],
        path_start=path_start,
        tiles=make_tiles(row_start),
    )


def _starts(lengths: Sequence[int] | NDArray[np.integer[Any]]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
