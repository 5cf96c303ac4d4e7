"""One step as one forward: of each scheduled sequence its next known tokens and a draft tree on top, flattened to rows.

Slots are reserved when a batch is built; `keep` or `drop` settles them when the step is decided. Owns no
text and no logits.

    >>> batch = Batch([ScheduledSequence(slots, token_ids)])
    >>> logits = target.forward(batch.token_ids, batch.metadata, batch.logit_rows)
    >>> batch.keep(())
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
from ragspec.numerics.compiled import assign, compiled
from ragspec.numerics.kv_cache import LENGTH, NUM_PAGES, SequenceSlots, arrays_at, keep_rows, reserve_rows
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
        slots.take_pages(len(token_ids))

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


class Batch:
    """The rows of all sequences, in order; their slots are reserved.

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
        self._addresses = np.array([s.slots.address for s in sequences])
        self._num_known = np.array([s.num_known for s in sequences])
        self._row_start = np.array([*(s.first_row for s in sequences), len(token_ids)])
        self._slots, self._index = np.empty(len(token_ids), np.int32), np.empty(len(token_ids), np.int32)
        reserve_rows(self._addresses, self._row_start, self._slots, self._index)
        self.metadata = self._metadata()
        self.longest_context = max(s.slots.length + s.num_known for s in sequences)

    def keep(self, *paths: Sequence[int]) -> None:
        """Keep each sequence's known tokens and the tree's nodes on its path, in order; all other slots are spare again."""
        rows = [s.num_known - 1 + node for s, path in zip(self.sequences, paths, strict=True) for node in path]
        self._keep(self._num_known, rows, paths)

    def drop(self) -> None:
        """Keep nothing."""
        self._keep(np.zeros_like(self._num_known), [], [()] * len(self.sequences))

    def _keep(self, num_known: NDArray[np.int64], rows: list[int], paths: Sequence[Sequence[int]]) -> None:
        chosen = num_known, np.array(rows, np.int64), np.cumsum([0, *map(len, paths)])
        keep_rows(self._addresses, self._row_start, self._slots, self._index, *chosen)

    def _metadata(self) -> AttentionMetadata:
        parents = np.fromiter(itertools.chain.from_iterable(s.parents for s in self.sequences), np.int64)
        nodes = self._row_start, self._num_known, parents
        positions, context_end, ahead, ahead_start, path_start, path_rows = _layout(self._addresses, *nodes)
        context = _context(self._addresses, self._slots, self._index, ahead, ahead_start)
        context_slots, context_index, context_start, pages, page_start = context
        row_start = self._row_start.astype(np.int32)
        return AttentionMetadata(
            slots=self._slots,
            positions=positions,
            row_start=row_start,
            pages=pages,
            page_start=page_start,
            context_slots=context_slots,
            context_index=context_index,
            context_start=context_start,
            context_end=context_end,
            path_slots=self._slots[path_rows],
            path_index=self._index[path_rows],
            path_start=path_start,
            tiles=make_tiles(row_start),
        )

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
def _layout(addresses: Any, row_start: Any, num_known: Any, parents: Any) -> Any:
    """Where rows stand and which rows they see: position and end of context of each row, the rows after the kept positions that
    are context (known tokens, then the trunk) with each sequence's first, and the rows of each row's path beside the trunk.

    Shapes: addresses, num_known int64 [B], of sequences and their known tokens; row_start int64 [B + 1]; parents int64 [nodes].
    """
    count, num_rows, most = len(addresses), row_start[-1], 0
    node_start = np.zeros(count + 1, np.int64)
    for b in range(count):
        node_start[b + 1] = node_start[b] + row_start[b + 1] - row_start[b] - num_known[b] + 1
    positions, context_end = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    ahead, ahead_start = np.empty(num_rows, np.int64), np.zeros(count + 1, np.int32)
    depths, seen = np.zeros(len(parents), np.int64), np.zeros(len(parents), np.int64)
    path_start, first = np.zeros(num_rows + 1, np.int32), 0
    for b in range(count):  # first depths and trunks, and how long the paths are
        low, high, root = node_start[b], node_start[b + 1], first + num_known[b] - 1
        deepest, num, length = 0, ahead_start[b], arrays_at(addresses[b])[0][LENGTH]
        for row in range(first, root + 1):
            positions[row] = length + row - first
            context_end[row] = positions[row] + 1
            ahead[num] = row
            num += 1
        for node in range(low + 1, high):
            depths[node] = depths[low + parents[node]] + 1
            deepest = node - low if depths[node] > depths[low + deepest] else deepest
        num_trunk, node = depths[low + deepest], deepest
        while node:
            seen[low + node] = depths[low + node]  # a mark of the trunk
            ahead[num + depths[low + node] - 1] = root + node
            node = parents[low + node]
        ahead_start[b + 1] = num + num_trunk
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
                assign(path_rows[begin : end - 1], path_rows[above : above + end - 1 - begin])
                path_rows[end - 1] = root + node
        first = root + node_start[b + 1] - node_start[b]
    return positions, context_end, ahead[: ahead_start[count]], ahead_start, path_start, path_rows


@compiled(nogil=True)
def _context(addresses: Any, slots: Any, index: Any, ahead: Any, ahead_start: Any) -> Any:
    """Slots and index of each sequence's context, which is its kept positions and the rows `ahead`, and its pages."""
    count = len(addresses)
    context_start, page_start = np.zeros(count + 1, np.int32), np.zeros(count + 1, np.int32)
    for b, address in enumerate(addresses):
        state = arrays_at(address)[0]
        context_start[b + 1] = context_start[b] + state[LENGTH] + ahead_start[b + 1] - ahead_start[b]
        page_start[b + 1] = page_start[b] + state[NUM_PAGES]
    context_slots, context_index = np.empty(context_start[count], np.int32), np.empty(context_start[count], np.int32)
    pages = np.empty(page_start[count], np.int32)
    for b, address in enumerate(addresses):
        state, own_slots, own_index, _, own_pages = arrays_at(address)
        assign(pages[page_start[b] : page_start[b + 1]], own_pages[: state[NUM_PAGES]])
        first, end = context_start[b], context_start[b] + state[LENGTH]
        assign(context_slots[first:end], own_slots[: state[LENGTH]])
        assign(context_index[first:end], own_index[: state[LENGTH]])
        for n, row in enumerate(ahead[ahead_start[b] : ahead_start[b + 1]]):
            context_slots[end + n], context_index[end + n] = slots[row], index[row]
    return context_slots, context_index, context_start, pages, page_start
