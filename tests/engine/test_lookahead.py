"""Look-ahead: no output changes, the window's rows find n-grams that are accepted, and the window goes where rows are dear."""

import itertools
from collections.abc import Callable

import numpy as np
from oracle_cases import PROMPTS, requests_of, total
from tiny_target import Tiny, tiny_engine

from ragspec.core import SamplingParams
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import NODES
from ragspec.drafting.lookahead import LookaheadAcceptance, LookaheadDrafter, _Lookahead
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots


def test_every_node_has_the_targets_token_behind_it(tiny: Tiny) -> None:
    """Tokens of kept rows alone, of another sequence's rows, or parents of another tree."""
    target = tiny()
    parents = (-1, 0, 1, 0)
    parts = [ScheduledSequence(SequenceSlots(target.pool), range(9 + i, 15 + i), parents) for i in range(2)]
    batch = Batch(parts)
    logits, features = target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows, (NODES,))
    best = np.asarray(logits).argmax(1).reshape(2, 4)
    for i, own in enumerate(batch.features(features, [[3], [3]])):
        nodes = own[NODES].numpy()
        assert nodes.tolist() == [[11 + i + n, parents[n], best[i, n]] for n in range(4)]


def follow(after: Callable[[int], int], num_steps: int) -> list[int]:
    """Tokens decided in each step where the target's token depends on the token before alone, and all nodes are verified."""
    acceptance = LookaheadAcceptance()
    state, tokens, counts = _Lookahead([3, 1, 4, 1, 5, 9, 2, 6], acceptance), [6], []
    for _ in range(num_steps):
        nodes = [[tokens[-1], -1, after(tokens[-1])]]
        numbers: dict[tuple[int, int], int] = {}
        of_proposal = []
        for p in state.draft(tokens[-1], 40, 16):
            parent = of_proposal[p.parent] if p.parent >= 0 else 0
            number = numbers.setdefault((parent, p.token_id), len(nodes))
            nodes += [[p.token_id, parent, after(p.token_id)]] if number == len(nodes) else []
            of_proposal.append(number)
        node, decided = 0, [nodes[0][2]]
        while (node := numbers.get((node, decided[-1]), -1)) >= 0:
            decided.append(nodes[node][2])
        state.observe(nodes, len(decided))
        tokens += decided
        counts.append(len(decided))
        assert len(state.window) == 8
    assert all(b == after(a) for a, b in itertools.pairwise(tokens))
    return counts


def test_the_window_finds_what_the_target_will_say() -> None:
    """Guesses shifted by one place, or n-grams with another step's tokens: nothing would ever be accepted."""
    counts = follow(lambda token: (7 * token + 3) % 50, 60)
    assert np.mean(counts[20:]) >= 4


def test_ngrams_are_bounded_and_longer_ones_replace_their_beginnings() -> None:
    """A pool that grows with every step under one key, or holds an n-gram five times."""
    state = _Lookahead([1, 2], LookaheadAcceptance())
    for number in range(40):
        state._learn([5, number, number])
    assert len(state._pool[5]) == 7 and state._pool[5][-1] == (39, 39)
    state._learn([5, 39, 39, 7])
    state._learn([5, 39])
    assert state._pool[5][-1] == (39, 39, 7) and len(state._pool[5]) == 7
    assert [p.token_id for p in state.draft(5, 3, 2)][:2] == [39, 39]


def test_no_window_where_rows_are_dear(tiny: Tiny) -> None:
    """Guesses for later steps were computed although a row cost as much as a step."""
    target = tiny()
    requests = requests_of(target, SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True), PROMPTS[:1])
    dear = CostTable({64: [1.0, 2.0, 3.0]}, rows=(1, 2, 3))
    dear.refine = lambda *_: None  # type: ignore[method-assign]
    with tiny_engine(target, [LookaheadDrafter()], costs=dear) as engine:
        assert total(engine.generate(requests), "num_drafted") == 0
