"""The longest matches of the output's end, against a search that compares every position."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.core import Request, SourceKind
from ragspec.drafting.references import Reference
from ragspec.drafting.suffix_index import ReferenceIndex, SuffixIndex

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
    sequence = SimpleNamespace(request=Request("a", (9,)), tokens=[9, *output[:3]], num_prompt=1)
    index = SuffixIndex(base, sequence)  # type: ignore[arg-type]
    for token in output[3:]:
        index.append(token)
    expected = every_match(index.tokens.tolist(), len(base.tokens), 5)[:24] if output else []
    assert index.matches(5) == expected


def test_megabytes_of_sources_are_not_read_again_every_step() -> None:
    """A step's search read all sources: 10 MB of them took longer than the forward."""
    rng = np.random.default_rng(0)
    base = ReferenceIndex([reference(rng.integers(0, 5000, 50_000).tolist()) for _ in range(4)])
    for token in (0, 17, 4999):
        places = base.places(token)
        assert (base.tokens[places] == token).all() and len(places) == (base.tokens == token).sum()
        assert len(places) < len(base.tokens) // 1000 and (np.diff(places) > 0).all()
