"""References of the copy drafter: texts of the request as the tokens that the target would write.

A passage in a prompt and the same passage in an answer differ at their first token (a leading space, a quotation mark before it).
So every sentence of a passage is a reference of its own, and an input is entered with and without a leading space.
"""

import copy
import functools
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ragspec.core import CopySource, SourceKind
from ragspec.retrieval.chunking import sentences

_BYTES_KEPT = 64 * 2**20
"""Of cached references. Why a cache: all segments of an output have the same sources, which are tokenised once."""
_TOKEN_BYTES = 72
"""A token's id and offset, each a number in a list."""

_MOST_PARTS = 4
_PART_BEGINS = re.compile(r": +|\n\s*")
"""Where a quote may begin inside a sentence: behind a heading's or a signature's colon, on a line of its own."""
_QUOTES = ('"', "\u201c", "\u00ab", "\u2018")


class Reference(NamedTuple):
    """A run of tokens to copy from. `source`: number of its CopySource in the request, -1 for none.

    `offsets[i]`: the character of the source's text where token i begins. `tail`: index of the first token that is not in the
    source but usually follows it (a closing mark with the passage's number, the end token). `is_part`: a part of the sentence
    before it.
    """

    kind: SourceKind
    token_ids: list[int]
    source: int
    offsets: list[int]
    tail: int
    is_sentence: bool = False
    is_part: bool = False


_Key = tuple[str, int, CopySource, int]
"""Tenant's salt, number of the source, source, and its rank among the passages."""


class ReferenceReader:
    """Tokenises the sources of a request, by the compiled part of the tokenizer."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self._fast = stateless(tokenizer)
        self._eos_ids = list(eos_ids)[:1]
        self.quote_ids = self._encode(_QUOTES[0])[0]
        """Token ids of an opening quotation mark."""
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, list[Reference]] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self.opens_quote = functools.lru_cache(maxsize=65536)(self._opens_quote)

    def read(self, sources: Sequence[CopySource], salt: str = "") -> list[Reference]:
        """All references of a request. Recent sources are cached, for their tenant alone."""
        references: list[Reference] = []
        num_passages = 0
        for number, source in enumerate(sources):
            num_passages += source.kind is SourceKind.PASSAGE
            references += self._cached((salt, number, source, num_passages))
        return references

    def forget(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._known, self._num_bytes = OrderedDict(), 0

    def _cached(self, key: _Key) -> list[Reference]:
        with self._lock:
            if known := self._known.get(key):
                self._known.move_to_end(key)
                return known
        references = self._read(*key)
        with self._lock:
            self._num_bytes += _num_bytes(key, references) if key not in self._known else 0
            self._known[key] = references
            while self._num_bytes > _BYTES_KEPT:
                self._num_bytes -= _num_bytes(*self._known.popitem(last=False))
        return references

    def _read(self, salt: str, number: int, source: CopySource, rank: int) -> list[Reference]:
        """`rank`: the number of the passage among the passages, from 1."""
        if source.kind is SourceKind.PASSAGE:
            return self._passage(number, source, rank)
        if source.kind in (SourceKind.INPUT, SourceKind.PREDICTION):
            return self._whole(number, source, ("", " "), self._eos_ids)
        return self._whole(number, source, (" ",))

    def _whole(
        self, number: int, source: CopySource, prefixes: Sequence[str], tail: Sequence[int] = ()
    ) -> list[Reference]:
        encoded = zip(prefixes, self._encode_all([prefix + source.text for prefix in prefixes]), strict=True)
        return [
            Reference(source.kind, [*ids, *tail], number, [max(0, at - len(prefix)) for at in begins], len(ids))
            for prefix, (ids, begins) in encoded
        ]

    def _passage(self, number: int, source: CopySource, rank: int) -> list[Reference]:
        """The passage as in the prompt, then each sentence and its parts as quotes, closed and numbered.

        Quotes are tokenised between their marks, as the target writes them: a full stop and the closing mark may be one token.
        """
        spans = [(span, part) for span in sentences(source.text) for part in (span, *_parts(source.text, *span))]
        closing = f"{_QUOTES[0]} [{rank}]"
        closed = [source.text[start:end] + closing for _, (start, end) in spans]
        references = self._whole(number, source, (" ",))
        for (whole, (start, end)), text, opened in zip(
            spans, closed, self._encode_all([_QUOTES[0] + text for text in closed]), strict=True
        ):
            ids, begins = opened
            if begins[1:2] == [1]:
                ids, begins = ids[1:], [begin - 1 for begin in begins[1:]]
            else:  # the opening mark shares a token with the sentence
                ids, begins = self._encode(text)
            tail = sum(token_end <= end - start for token_end in [*begins[1:], len(text)])
            offsets = [start + begin for begin in begins[:tail]]
            is_part = (start, end) != whole
            references.append(Reference(source.kind, [*ids, *self._eos_ids], number, offsets, tail, True, is_part))
        return references

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and the character where each token begins."""
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """As `_encode`, of many texts."""
        encodings = self._fast.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, [start for start, _ in encoding.offsets]) for encoding in encodings]

    def _opens_quote(self, token_id: int) -> bool:
        """Whether a token ends with a quotation mark that follows nothing but white space."""
        text = self._fast.decode([token_id], skip_special_tokens=False)
        return text.endswith(_QUOTES) and (len(text) == 1 or text[-2] in " \n(")


_STATELESS = weakref.WeakKeyDictionary[Any, Any]()


def stateless(tokenizer: Any) -> Any:
    """The tokenizer's compiled part, in a state that nothing changes; None if it has no such part."""
    if (found := _STATELESS.get(tokenizer)) is None and hasattr(tokenizer, "backend_tokenizer"):
        found = copy.deepcopy(tokenizer.backend_tokenizer)
        found.no_truncation()
        found.no_padding()
        found.encode_special_tokens = False
        _STATELESS[tokenizer] = found
    return found


def _parts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of a sentence that are quoted alone: from a colon or a line's beginning to the line's or sentence's end."""
    begins = [start, *(start + found.end() for found in _PART_BEGINS.finditer(text[start:end]))]
    for begin in begins[:_MOST_PARTS]:
        line_end = text.find("\n", begin, end)
        ends = {end, line_end if line_end > begin else end}
        yield from ((begin, last) for last in sorted(ends) if begin < last and (begin, last) != (start, end))


def _num_bytes(key: _Key, references: Sequence[Reference]) -> int:
    return 4 * len(key[2].text) + _TOKEN_BYTES * sum(len(reference.token_ids) for reference in references)
