"""Characters of a text counted as UTF-16 does, which is how Java and JavaScript count.

>>> Utf16("a\\U0001f600b").units(2)
3
"""

from __future__ import annotations

import re
from bisect import bisect_left

_WIDE = re.compile("[\U00010000-\U0010ffff]")


class Utf16:
    """Offsets in one text."""

    def __init__(self, text: str) -> None:
        self._wide = [match.start() for match in _WIDE.finditer(text)]

    def units(self, index: int) -> int:
        """How many code units stand before character `index`."""
        return index + bisect_left(self._wide, index)
