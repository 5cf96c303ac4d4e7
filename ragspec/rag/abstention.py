"""The bias with which a target says that the passages hold no answer, fitted to the target and to retrieval's calibrated score.

Owns the form of the fit, which is a file in the folder of the adapter that it belongs to.

    >>> AbstentionFit.beside(Path("ragspec/assets/adapter")).bias(closeness=0.3)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple, Self

from ragspec.errors import ModelError

_FILE = "abstention.json"


class AbstentionFit(NamedTuple):
    """What the first token of `ragspec.rag.wording.ABSTENTION` gets: `intercept + slope * logit(closeness)`, in logits."""

    intercept: float = 0.0
    slope: float = 0.0

    @classmethod
    def beside(cls, adapter: Path | None) -> Self:
        """The fit in an adapter's folder; zero if there is none. Raises: ModelError."""
        if adapter is None or not (path := adapter / _FILE).is_file():
            return cls()
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as cause:
            raise ModelError(f"{path} does not hold intercept and slope: {cause}") from cause

    def bias(self, closeness: float) -> float:
        """From -100 to 100. `closeness`: between 0 and 1, as in `SearchResult`."""
        odds = math.log(max(closeness, 1e-9) / max(1.0 - closeness, 1e-9))
        return max(-100.0, min(100.0, self.intercept + self.slope * odds))
