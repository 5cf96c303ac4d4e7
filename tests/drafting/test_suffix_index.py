"""Matches of the output's end and the counts of what follows, against searches that compare every position."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.core import SourceKind
from ragspec.drafting.references import Reference
from ragspec.drafting.suffix_index import (
    SEPARATOR,
    GrowingSuffixes,
    ReferenceIndex,
    SortedSuffixes,
    VisibleSuffixes,
    longest_matches,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def reference(token_ids: list[int]) -> Reference:
    return Reference(SourceKind.PASSAGE, token_ids, 0, list(range(len(token_ids))), len(token_ids))


def every_match(tokens: list[int], output_begin: int, most: int) -> list[tuple[int, int]]:
    suffix, found = tokens[max(output_begin, len(tokens) - most) :], []
    for end in range(1, len(tokens)):
        length = 0
        while length < min(len(suffix), end) and tokens[end - 1 - length] == suffix[-1 - length]:
            length += 1
        if length:
            found.append((end, length))
    return sorted(found, key=lambda match: (-match[1], -match[0]))


@given(st.lists(TOKENS, max_size=4), TOKENS)
@settings(deadline=None)
def test_the_longest_matches_come_first(texts: list[list[int]], output: list[int]) -> None:
    """An index over tokens that loses a match, or prefers an older or a shorter one."""
    base = ReferenceIndex([reference(text) for text in texts])
    text = np.array([*base.tokens.tolist(), *output, 1, 2], np.int32)
    end = len(base.tokens) + len(output)
    expected = every_match(text[:end].tolist(), len(base.tokens), 5)[:24] if output else []
    found = longest_matches(text, base.order, len(base.tokens), end, 5)
    assert [(at, length) for at, length in found.tolist()] == expected


@given(st.lists(TOKENS, min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
@settings(deadline=None)
def test_counts_are_those_of_a_search_that_compares_every_place(
    texts: list[list[int]], end: list[int], data: st.DataObject
) -> None:
    """A match that stands in no visible text, a wrong count, or a follower behind a text's end."""
    seen = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    tokens = np.array([token for text in texts for token in (*text, SEPARATOR)], np.int32)
    suffixes = SortedSuffixes.build(tokens)
    text_of = np.searchsorted(np.flatnonzero(tokens == SEPARATOR), suffixes.order)
    visible = np.concatenate([[0], np.cumsum(np.array(seen)[text_of])]).astype(np.int32)
    view = VisibleSuffixes(suffixes, visible)
    shown = [text for text, is_seen in zip(texts, seen, strict=True) if is_seen]

    def counts(pattern: list[int]) -> Counter[int]:
        """How often each token follows; the key -1: how often the pattern occurs."""
        found = Counter[int]()
        for text in shown:
            for at in range(len(text) - len(pattern) + 1):
                if text[at : at + len(pattern)] == pattern:
                    found[-1] += 1
                    found.update(text[at + len(pattern) : at + len(pattern) + 1])
        return found

    length = view.longest(np.array(end, np.int32))
    occurs = [n for n in range(1, len(end) + 1) if counts(end[-n:])[-1]]
    assert length == max(occurs, default=0)
    low, high = suffixes.find(np.array(end[-length:] if length else [], np.int32))
    followers = view.followers(low, high, length, 9)
    expected = counts(end[-length:] if length else [])
    if length:
        assert view.num_visible(low, high) == expected.pop(-1)
    else:
        expected.pop(-1, None)
    assert {token: count for token, _, _, count in followers} == expected
    assert [count for *_, count in followers] == sorted(expected.values(), reverse=True)
    assert view.followers(low, high, length, 2) == followers[:2]
    for token, *bounds, _ in followers:
        assert suffixes.find(np.array([token], np.int32), (low, high), length) == tuple(bounds)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=30), st.integers(1, 60))
@settings(deadline=None)
def test_the_latest_texts_are_held_and_no_more_than_fit(texts: list[list[int]], most: int) -> None:
    """Memory that grows with every text, a lost recent text, or a run for each text that was ever added."""
    held = GrowingSuffixes(most)
    for text in texts:
        held.append(text)
        assert held.num_tokens <= most
    tokens = [token for run in held.runs for token in run.suffixes.tokens.tolist()]
    added = [token for text in texts for token in (*text, SEPARATOR)]
    assert tokens == (added[-len(tokens) :] if tokens else [])
    if texts and len(texts[-1]) < most:
        assert tokens[-len(texts[-1]) - 1 :] == [*texts[-1], SEPARATOR]
    for run in held.runs:
        assert run.suffixes.order.tolist() == SortedSuffixes.build(run.suffixes.tokens).order.tolist()


def test_many_texts_lie_in_few_runs() -> None:
    """Every search visited as many runs as there were answers."""
    held = GrowingSuffixes(10_000)
    for number in range(2_000):
        held.append([number % 7] * 20)
    assert held.num_tokens > 8_000 and len(held.runs) < 20
