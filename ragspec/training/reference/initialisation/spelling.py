"""How a token is spelt, as a vector: what tells a word from one with a letter swapped, dropped or doubled.

A misspelt word falls into other tokens than the word itself, which share nothing with it. Its letters do: the average of
its tokens' letters and pairs of letters is near the word that was meant. In few dimensions by singular values.

>>> vectors = spellings(["Ġthere", "Ġt", "e", "hre", "Ġhouse"], size=4)
>>> vectors.shape
torch.Size([5, 4])
"""

import itertools
from collections.abc import Sequence
from string import ascii_lowercase

import torch
from torch import Tensor

PAIR = 0.5
"""Weight of two letters in a row beside that of a letter, of the first letter, and of beginning a word: 1."""


def spellings(pieces: Sequence[str], size: int) -> Tensor:
    """A row of norm 1 for each token of letters, zeros for others. Shape: [num pieces, size]."""
    table = torch.stack([_counts(piece) for piece in pieces])
    directions = torch.linalg.svd(table, full_matrices=False)[2][:size]  # [at most size, features]
    rows = torch.nn.functional.pad(table @ directions.T, (0, size - len(directions)))
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return unit


def is_letters(piece: str) -> bool:
    """Whether a token, as the vocabulary writes it, is part of a word."""
    text = piece.removeprefix("Ġ")
    return text.isascii() and text.isalpha()


def _counts(piece: str) -> Tensor:
    """Letters, pairs of letters, then the first letter of a word and that there is one. Shape: [features]."""
    size = len(ascii_lowercase)
    letters, pairs, opening = torch.zeros(size), torch.zeros(size, size), torch.zeros(size + 1)
    if is_letters(piece):
        numbers = [ascii_lowercase.index(letter) for letter in piece.removeprefix("Ġ").lower()]
        for number in numbers:
            letters[number] += 1
        for first, second in itertools.pairwise(numbers):
            pairs[first, second] += PAIR
        if piece.startswith("Ġ"):
            opening[numbers[0]] = opening[size] = 1
    return torch.cat([letters, pairs.flatten(), opening])
