"""Corrections: which tokens of a corrected sentence are a choice, and where heads should look while it is written.

Owns the alignment of a sentence with its correction, by tokens for what is copied and by words for what is spelt.
"""

import difflib

from transformers import PreTrainedTokenizerFast

from ragspec.training.reference.batches import EDIT_WEIGHT
from ragspec.training.reference.guidance import Guide
from ragspec.training.reference.initialisation.spelling import is_letters
from ragspec.training.reference.text_format import GRAMMAR_REQUEST, USER
from ragspec.training.reference.token_row import Row
from ragspec.training.reference.tokenizer import token_pieces


class CorrectionGuides:
    """Adds weights and guides of corrections to rows of one tokenizer's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, assistant_id: int) -> None:
        self._assistant_id = assistant_id
        self._num_request_tokens = len(
            tokenizer(USER + GRAMMAR_REQUEST.rstrip(), add_special_tokens=False)["input_ids"]
        )
        pieces = token_pieces(tokenizer)
        self._is_letters = [is_letters(piece) for piece in pieces]
        self._opens_word = [piece.startswith("Ġ") for piece in pieces]

    def guide(self, row: Row, begin: int, ids: list[int]) -> None:
        """What is kept of a sentence is copied from it; what is not is a choice. `ids`: of the example at `begin` of the row."""
        answers, shown = ids.index(self._assistant_id) + 1, self._num_request_tokens
        kept = difflib.SequenceMatcher(None, ids[shown:answers], ids[answers:], autojunk=False).get_matching_blocks()
        first, last = begin + answers, begin + len(ids) - 1
        begins = {(0, 0), (1, 0)}  # with or without a token for the space before the sentence
        goes_on = {first + b.b + i for b in kept for i in range(b.size) if i or (b.a, b.b) in begins}
        for at in range(first, last):
            if at not in goes_on:
                row.weights[at] = EDIT_WEIGHT
        departs = set(range(first, last))
        for block in kept:
            for i in range(block.size):
                at, source = first + block.b + i, begin + shown + block.a + i
                departs.discard(at)
                row.looks[Guide.COPY].append((at - 1, [source]))
                row.looks[Guide.LOCATE].append((at, [source]))
        row.looks[Guide.EDIT] += [(at - 1, [first - 1]) for at in sorted(departs)]
        self._guide_spelling(row, begin, ids, answers)

    def _guide_spelling(self, row: Row, begin: int, ids: list[int], answers: int) -> None:
        """Each word of a corrected sentence to the word it stands for, where as many stand for as many."""
        shown, written = self._words(ids, self._num_request_tokens, answers), self._words(ids, answers, len(ids))
        for word in shown:
            row.looks[Guide.WORD] += [(begin + at, [begin + word.start]) for at in word]
        before, after = ([tuple(ids[at] for at in word) for word in words] for words in (shown, written))
        for _, a, a_end, b, b_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if a_end - a == b_end - b:
                for source, word in zip(shown[a:a_end], written[b:b_end], strict=True):
                    keys = [begin + at for at in source]
                    row.looks[Guide.SPELL] += [(begin + at - 1, keys) for at in word]

    def _words(self, ids: list[int], first: int, last: int) -> list[range]:
        """The tokens of each word in [first, last)."""
        words: list[range] = []
        for at in range(first, last):
            if not self._is_letters[ids[at]]:
                continue
            if words and words[-1].stop == at and not self._opens_word[ids[at]]:
                words[-1] = range(words[-1].start, at + 1)
            else:
                words.append(range(at, at + 1))
        return words
