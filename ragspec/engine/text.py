"""Incremental detokenization: text as tokens arrive, and where a stop string ends it.

A token may end inside a character and a stop string may span tokens, so text is held back until it is certain: the text sent so
far is always a prefix of the final text.

    >>> text = IncrementalDetokenizer(tokenizer, stop=("\\n",))
    >>> stopped = text.push(token_id); piece = text.take()
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ragspec.core import SamplingParams

_UNFINISHED = "\ufffd"


class IncrementalDetokenizer:
    """The text of one choice. A complete stop string cuts the text before it; its tokens stay in the output."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._decode = decoder_of(tokenizer)
        self._stop = stop
        self._longest_stop = max((len(s) for s in stop), default=0)
        self._ids: list[int] = []
        self._prefix, self._read = 0, 0  # [prefix, read) was decoded last
        self._known = 0  # characters of the text from `prefix` on that are in `text` already
        self.text = ""  # everything certain so far
        self._sent = 0
        self._search_from = 0
        self._stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token. True: the token completes a stop string. Without `may_stop`, stop strings completed so far never count."""
        self._ids.append(token_id)
        window = str(self._decode(self._ids[self._prefix :]))
        unfinished = window.endswith(_UNFINISHED)
        if unfinished and len(self._ids) - self._read < 8:
            return False
        piece = window[self._known : len(window) - unfinished]  # the last token may still complete a character
        self._prefix, self._read = self._read, len(self._ids)
        self._known = len(self._decode(self._ids[self._prefix :])) - unfinished
        if not may_stop:
            self._search_from = len(self.text) + len(piece)
        return self._append(piece)

    def finish(self) -> None:
        """No more tokens come: release all text that was held back. Half a character is dropped."""
        if not self._stopped and self._read < len(self._ids):
            rest = self._decode(self._ids[self._prefix :])[self._known :]
            self._read = len(self._ids)
            self._append(rest.rstrip(_UNFINISHED))
        self._longest_stop = 0

    def take(self) -> str:
        """New certain text, without a possible beginning of a stop string."""
        end = len(self.text)
        if not self._stopped:
            end -= self._held_back()
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _append(self, piece: str) -> bool:
        new = max(self._search_from, len(self.text))  # a stop string must end after this point
        self.text += piece
        if not self._longest_stop:
            return False
        found = [at for s in self._stop if (at := self.text.find(s, max(0, new - len(s) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._stopped = True
        return self._stopped

    def _held_back(self) -> int:
        most = min(self._longest_stop - 1, len(self.text))
        for length in range(most, 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], Any]:
    """The text of token ids without special tokens. Why not transformers' own way: its checks take as long again."""
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def detokenize(tokenizer: PreTrainedTokenizerBase, output_ids: Sequence[int], params: SamplingParams) -> str:
    """The text of a whole output, equal to all streamed pieces together."""
    text = IncrementalDetokenizer(tokenizer, params.stop)
    for count, token in enumerate(output_ids, 1):
        if text.push(token, may_stop=count > params.min_tokens):
            break
    text.finish()
    return text.text
