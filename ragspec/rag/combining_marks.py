"""What belongs to the character before it: accents, vowel signs, joiners, variation selectors, skin tones, tags."""

from __future__ import annotations

import functools
import unicodedata

_BEFORE = 0x20000
_JOINED = "\u200d\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"


@functools.cache
def marks() -> str:
    """For use between the brackets of a regular expression. Why built: `re` has no name for them."""
    codes = [c for c in range(_BEFORE) if unicodedata.category(chr(c)) in ("Mn", "Mc", "Me")]
    firsts = [c for c, before in zip(codes, [-1, *codes], strict=False) if c != before + 1]
    lasts = [c for c, after in zip(codes, [*codes[1:], -1], strict=True) if c != after - 1]
    return _JOINED + "".join(f"{chr(first)}-{chr(last)}" for first, last in zip(firsts, lasts, strict=True))


@functools.cache
def one_sign() -> str:
    """A regular expression of one character with all that belongs to it: an emoji of several parts, a flag, a letter."""
    mark, flag = f"[{marks()}]", "[\U0001f1e6-\U0001f1ff]"
    return rf"(?:{flag}{{2}}|.{mark}*+(?:(?<=\u200d)\S{mark}*+)*+)"
