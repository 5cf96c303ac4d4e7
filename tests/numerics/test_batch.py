"""A step's rows: every sequence gets the states of its own kept positions."""

import torch

from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.batch import NODES, Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots


def test_each_sequence_gets_its_own_rows_and_no_other_prompts_memory() -> None:
    """Rows of another sequence or of a node that was not accepted; or a decoding sequence kept a whole prompt in memory."""
    pool = KvPool([AttentionShape(1, 1, 8, 1.0)], 256)
    parents = (-1, 0, 1, 0)
    decoding = [ScheduledSequence(SequenceSlots(pool), range(4), parents) for _ in range(2)]
    prompt = ScheduledSequence(SequenceSlots(pool), range(100), wants_logits=False)
    batch = Batch([decoding[0], prompt, decoding[1]])
    states = {3: torch.arange(108.0)[:, None].repeat(1, 5), 7: -torch.arange(108.0)[:, None]}
    tokens = {NODES: torch.arange(108)}
    first, middle, last = batch.features(states | tokens, [[1, 2], [], [3]])
    for own, rows in ((first, [0, 1, 2]), (middle, [*range(4, 104)]), (last, [104, 107])):
        assert own[3].tolist() == [[row] * 5 for row in rows] and own[7].flatten().tolist() == [-row for row in rows]
        assert own[3].untyped_storage().nbytes() <= max(len(rows), 5) * 5 * 4
    assert last[NODES].tolist() == [[n, parents[n], 104 + n] for n in range(4)]
    assert Batch([ScheduledSequence(SequenceSlots(pool), [1])]).features({}, [[]]) == [{}]
