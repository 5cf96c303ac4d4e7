"""What a follower reads is what rank 0 computes: every array of a step, for any shape of batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.engine import rank_messages
from ragspec.engine.rank_messages import ForwardInput, MessageKind, receive, send, send_forward
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.ranks import Ranks


class Line(Ranks):
    """Keeps what is said until it is heard; a listener must ask for just as many words as were said."""

    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []
        self.hears = False

    def broadcast(self, words: torch.Tensor) -> None:
        if self.hears:
            words.copy_(self.said.pop(0))
        else:
            self.said.append(words.clone())


def heard(line: Line) -> rank_messages.Message:
    line.hears = True
    message = receive(line)
    assert not line.said
    return message


def assert_arrives(step: ForwardInput) -> int:
    """Number of broadcasts that it took."""
    line = Line()
    send_forward(line, step, num_threads=3)
    num_broadcasts = len(line.said)
    kind, num_threads, found = heard(line)
    assert (kind, num_threads) == (MessageKind.FORWARD, 3)
    assert np.array_equal(found.token_ids, step.token_ids)
    assert np.array_equal(found.logit_rows, step.logit_rows)
    assert list(found.taps) == list(step.taps)
    for name, values in step.metadata._asdict().items():
        got = getattr(found.metadata, name)
        assert got.dtype == values.dtype == np.int32, name
        assert got.shape == values.shape and np.array_equal(got, values), name
        assert got.flags.c_contiguous
    return num_broadcasts


def random_parents(draw: np.random.Generator, num_nodes: int) -> list[int]:
    return [-1, *(int(draw.integers(0, node)) for node in range(1, num_nodes))]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_any_step_arrives_whole(seed: int, num_sequences: int, longest: int) -> None:
    """A context that shares a prefix, whose slots are no run, or an empty tree came out as another one."""
    draw = np.random.default_rng(seed)
    pool = KvPool([AttentionShape(1, 1, 16, 1.0)], 4096)
    sequences = [SequenceSlots(pool) for _ in range(num_sequences)]
    for sequence in sequences[1::2]:
        if sequences[0].length:
            sequence.share(sequences[0].slots[: int(draw.integers(1, sequences[0].length + 1))])
        slots, index = sequence.reserve(longest)
        chosen = sorted(draw.choice(longest, int(draw.integers(1, longest + 1)), replace=False).tolist())
        sequence.keep(slots, index, chosen)
    scheduled = []
    for sequence in sequences:
        num_known, parents = int(draw.integers(1, longest + 1)), random_parents(draw, int(draw.integers(1, 12)))
        scheduled.append(ScheduledSequence(sequence, [0] * (num_known + len(parents) - 1), parents))
    rows = Batch(scheduled).metadata
    num_rows = len(rows.slots)
    wanted = np.flatnonzero(draw.random(num_rows) < 0.3).astype(np.int32)
    assert_arrives(
        ForwardInput(draw.integers(0, 9999, num_rows).astype(np.int32), rows, wanted, (2, 0)[: num_rows % 3])
    )


@pytest.mark.parametrize(("num_tokens", "num_broadcasts"), [(1, 1), (64, 1), (2000, 2)])
def test_a_decode_step_is_one_broadcast(num_tokens: int, num_broadcasts: int) -> None:
    """Two broadcasts a token, or a long prompt cut off at the end of the first."""
    slots = SequenceSlots(KvPool([AttentionShape(1, 1, 16, 1.0)], 4096))
    slots.keep(*slots.reserve(1500), list(range(1500)))
    tokens = np.arange(num_tokens, dtype=np.int32)
    batch = Batch([ScheduledSequence(slots, tokens)])
    assert assert_arrives(ForwardInput(tokens, batch.metadata, tokens[-1:])) == num_broadcasts


@pytest.mark.parametrize("kind", [MessageKind.HEARTBEAT, MessageKind.STOP])
def test_a_message_without_a_step(kind: MessageKind) -> None:
    """A beat read as a step without rows."""
    line = Line()
    send(line, kind)
    assert heard(line) == (kind, 0, None)


@pytest.mark.parametrize("size", [2000, rank_messages._CAPACITY, rank_messages._CAPACITY + 1])
def test_the_edge_of_the_first_broadcast(size: int) -> None:
    """The word that just fits, or just does not, was lost."""
    slots = SequenceSlots(KvPool([AttentionShape(1, 1, 16, 1.0)], 8192))
    batch = Batch([ScheduledSequence(slots, [0, 0])])
    line = Line()
    send_forward(line, ForwardInput(np.zeros(2, np.int32), batch.metadata, np.empty(0, np.int32)), 1)
    num_head_words = 2 + rank_messages._NUM_SECTIONS
    spare = rank_messages._CAPACITY - int(np.sum(line.said[0].numpy()[2:num_head_words])) - num_head_words
    wanted = np.arange(spare + size - rank_messages._CAPACITY, dtype=np.int32)
    num_broadcasts = assert_arrives(ForwardInput(np.zeros(2, np.int32), batch.metadata, wanted))
    assert num_broadcasts == (2 if size > rank_messages._CAPACITY else 1)
