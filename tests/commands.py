"""Calls of the command line in this process."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from ragspec.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


def exit_code(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)
