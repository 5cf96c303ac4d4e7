"""Log-probabilities in OpenAI's format: each token as text and as bytes.

Owns the text and bytes of single tokens. A token may be part of a character: its text then spells its bytes, as in
"bytes:\\xe2\\x80". Control tokens are left out, as from the content.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ragspec.core import TokenLogprob

_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SPACE = bytes_to_unicode()[ord(" ")]
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Where each token begins in a text, in characters. A token inside a character begins where the character does."""

    def __init__(self) -> None:
        self._decoder = _UTF8("replace")
        self._count = 0

    def of_next(self, data: bytes) -> int:
        begun = self._decoder.getstate()[0]
        broken = bool(begun) and not _is_prefix(begun + data[:1])  # the begun character has become one U+FFFD
        offset = self._count + broken
        self._count += len(self._decoder.decode(data))
        return offset


class TokenTexts:
    """The texts of single tokens of one vocabulary. Safe to call from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._control = frozenset(tokenizer.all_special_ids)
        self._by_bytes = tokenizer.convert_tokens_to_ids(_SPACE) not in (None, tokenizer.unk_token_id)
        self.bytes_of = functools.lru_cache(maxsize=65_536)(self._bytes_of)

    def chat(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """`choices[].logprobs.content`."""
        return [
            self._entry(each.token_id, each.logprob) | {"top_logprobs": [self._entry(*other) for other in each.top]}
            for each in self._shown(logprobs)
        ]

    def completion(self, logprobs: Iterable[TokenLogprob], offsets: TextOffsets) -> dict[str, Any]:
        """`choices[].logprobs` of a completion; `offsets` has seen the tokens before these."""
        shown = self._shown(logprobs)
        return {
            "tokens": [self.text_of(each.token_id) for each in shown],
            "token_logprobs": [each.logprob for each in shown],
            "top_logprobs": [{self.text_of(token): logprob for token, logprob in each.top} for each in shown],
            "text_offset": [offsets.of_next(self.bytes_of(each.token_id)) for each in shown],
        }

    def text_of(self, token_id: int) -> str:
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _shown(self, logprobs: Iterable[TokenLogprob]) -> Sequence[TokenLogprob]:
        return [each for each in logprobs if each.token_id not in self._control]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text_of(token_id), "logprob": logprob, "bytes": list(self.bytes_of(token_id))}

    def _bytes_of(self, token_id: int) -> bytes:
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if token_id not in self._control:
            if self._by_bytes and all(letter in _BYTE_OF for letter in piece):
                return bytes(_BYTE_OF[letter] for letter in piece)
            if one := _ONE_BYTE.fullmatch(piece):
                return bytes([int(one[1], 16)])
            if "\u2581" in piece:  # sentencepiece's space
                return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()


def _is_prefix(data: bytes) -> bool:
    """Whether these bytes are valid UTF-8 or the beginning of it."""
    try:
        _UTF8("strict").decode(data)
    except UnicodeDecodeError:
        return False
    return True
