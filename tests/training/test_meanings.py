"""Tokens of similar neighbours are alike before any training."""

import random

import numpy as np
import pytest
import torch

from ragspec.training.reference.initialisation.meanings import PLACES, _counts, count_meanings
from ragspec.training.reference.initialisation.model import SIZES, build_target
from ragspec.training.reference.initialisation.stream_layout import MEANING, stream_layout

NAMES, YEARS, VERBS, THE, IN, NEVER = range(20), range(20, 40), range(40, 60), 60, 61, 62


def sentences(count: int = 4_000) -> list[list[int]]:
    """The name verb(s) in year."""
    rng = random.Random(0)
    return [[THE, rng.choice(NAMES), rng.choice(VERBS), IN, rng.choice(YEARS)] for _ in range(count)]


@pytest.fixture(scope="module")
def vectors() -> torch.Tensor:
    return count_meanings(sentences(), vocab_size=64, size=8)


def test_what_stands_in_the_same_places_is_alike(vectors: torch.Tensor) -> None:
    """Neighbours before and after mixed up, or a text's end taken for the next one's beginning: kinds run together."""
    unit = torch.nn.functional.normalize(vectors, dim=1)
    alike = unit @ unit.T
    for kind in (NAMES, YEARS, VERBS):
        own = alike[kind.start : kind.stop, kind.start : kind.stop].mean()
        others = [alike[kind.start : kind.stop, k.start : k.stop].mean() for k in (NAMES, YEARS, VERBS) if k != kind]
        assert own > 0.8 > 0.5 > max(others)


def test_neighbours_are_counted_at_their_places_and_not_across_texts() -> None:
    """Before taken for after, or the end of one text for what stands before the next."""
    flat, column = np.array([0, 1, 2, -1, -1, 3, 0, -1, -1]), np.array([0, 1, 2, 3, -1])
    seen = {place: set(map(tuple, np.argwhere(_counts(flat, place, column, 4, 4)).tolist())) for place in PLACES}
    assert seen == {-2: {(2, 0)}, -1: {(1, 0), (2, 1), (0, 3)}, 1: {(0, 1), (1, 2), (3, 0)}, 2: {(0, 2)}}


def test_lengths_are_even_and_unseen_tokens_mean_nothing(vectors: torch.Tensor) -> None:
    """Frequent tokens that drown the others, or noise where nothing is known."""
    seen = vectors[:NEVER]
    assert torch.allclose(seen.square().mean(1), torch.ones(len(seen)), atol=1e-4)
    assert not vectors[NEVER:].any()


def test_the_same_texts_give_the_same_vectors(vectors: torch.Tensor) -> None:
    """A global generator: workers that start with different weights."""
    torch.manual_seed(7)
    assert torch.equal(vectors, count_meanings(sentences(), vocab_size=64, size=8))


def test_meanings_stand_in_their_slot_of_the_embedding() -> None:
    """Written over a circuit's columns, copying would be lost with them."""
    size = SIZES["tiny"]
    layout = stream_layout(size.hidden_size)
    vectors = torch.randn(size.vocab_size, layout.meaning, generator=torch.Generator().manual_seed(1))
    pieces = [f"<{number}>" for number in range(size.vocab_size)]
    plain, told = (build_target(size, pieces, meanings=each).model for each in (None, vectors))
    meaning = layout.columns(MEANING)
    assert torch.corrcoef(torch.stack([told.embed_tokens.weight[7, meaning], vectors[7]]))[0, 1] > 0.999
    kept = torch.ones(size.hidden_size, dtype=torch.bool)
    kept[meaning] = False
    assert torch.equal(told.embed_tokens.weight[:, kept], plain.embed_tokens.weight[:, kept])
    assert (
        meaning.start == layout.columns(MEANING - 1).stop and told.norm.weight[meaning].max() < plain.norm.weight.min()
    )
