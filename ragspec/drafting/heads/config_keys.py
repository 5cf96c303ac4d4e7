"""Values of a published config.json, each of the kind that its key asks for. Every function raises ModelError naming the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ragspec.errors import ModelError

Raw = Mapping[str, Any]


def section_of(raw: Raw, key: str) -> Raw:
    section = raw.get(key) or {}
    if not isinstance(section, dict):
        raise ModelError(f"config.json has {key} {section!r}, not a section")
    return section


def _value(section: Raw, key: str, absent: Any, kinds: tuple[type, ...], what: str) -> Any:
    value = absent if section.get(key) is None else section[key]
    if type(value) not in kinds:
        raise ModelError(f"config.json has {key} {value!r}, not {what}")
    return value


def integer(section: Raw, key: str, absent: int | None = None) -> int:
    if absent is None and section.get(key) is None:
        raise ModelError(f"config.json has no {key}")
    return cast(int, _value(section, key, absent, (int,), "a whole number"))


def number(section: Raw, key: str, absent: float) -> float:
    value = _value(section, key, absent, (int, float), "a number")
    if abs(value) > 1e30:
        raise ModelError(f"config.json has {key} {value!r}, not a number")
    return float(value)


def truth(section: Raw, key: str, absent: bool = False) -> bool:
    return cast(bool, _value(section, key, absent, (bool,), "true or false"))
