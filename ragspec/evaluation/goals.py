"""What the headline numbers of a suite must reach, and how they are shown beside it.

>>> rows_of({"lost": 0}, {"lost": "answers without an end"}, {"lost": ("0", lambda value: value == 0)})
[('lost', '0', 'answers without an end (goal: 0; met)')]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragspec.evaluation.report import Result

Goals = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""By the number's name: the goal in words, and whether a value reaches it."""


def met(result: Mapping[str, Any], goals: Goals) -> dict[str, bool]:
    """Of every goal that the result has a number for: whether it is reached."""
    return {name: bool(reached(result[name])) for name, (_, reached) in goals.items() if result.get(name) is not None}


def rows_of(result: Result, meanings: Mapping[str, str], goals: Goals) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what stands first, and the result's notes."""
    reached = met(result, goals)

    def meaning(name: str, text: str) -> str:
        return (
            text if name not in reached else f"{text} (goal: {goals[name][0]}; {'met' if reached[name] else 'MISSED'})"
        )

    known = [(name, shown(result[name]), meaning(name, text)) for name, text in meanings.items() if name in result]
    return known + [("note", "", text) for text in result.get("notes", ())]


def shown(value: Any) -> str:
    """A number for people, with three digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
