"""Are two ways of decoding the same text, token for token? Counted per setting, so that a difference is found at once."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.evaluation.decoders import Run


class Equality:
    """Every comparison that was made, by name, as (equal, compared)."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}

    def check(self, name: str, expected: Sequence[Run], got: Sequence[Run]) -> None:
        equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, got, strict=True))
        before = self.counts.get(name, (0, 0))
        self.counts[name] = (before[0] + equal, before[1] + len(expected))

    @property
    def identical(self) -> bool | None:
        """True only if something was compared and every comparison found the same tokens. None: nothing was compared."""
        if not self.counts:
            return None
        return all(equal == compared for equal, compared in self.counts.values())

    def as_text(self) -> dict[str, str]:
        return {name: f"{equal}/{compared}" for name, (equal, compared) in self.counts.items()}
