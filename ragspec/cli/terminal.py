"""What every command shares: a quiet process, text that cannot steer a terminal, one line for an error.

Other libraries' progress bars and warnings are switched off before they are imported; whoever set their variables is obeyed.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.text import Text

_SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_UNSAFE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def prepare_process() -> None:
    """Only what ragspec says reaches the terminal. Call before torch is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("ragspec").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):  # Why: a terminal that cannot show a character shows a substitute
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def stay_offline(*models: str) -> None:
    """Where every model is a folder, nothing asks the network, not even for news about it."""
    if all(Path(model).is_dir() for model in models):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def cache_folder() -> Path:
    """Where rebuilt things are kept: $XDG_CACHE_HOME/ragspec, else ~/.cache/ragspec."""
    return _folder("XDG_CACHE_HOME", "~/.cache")


def data_folder() -> Path:
    """Where a service keeps what it is given: $XDG_DATA_HOME/ragspec, else ~/.local/share/ragspec."""
    return _folder("XDG_DATA_HOME", "~/.local/share")


def _folder(variable: str, usual: str) -> Path:
    named = os.environ.get(variable, "")
    base = Path(named) if Path(named).is_absolute() else Path(os.path.expanduser(usual))
    return base / "ragspec"


def stdout_console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def safe(text: str) -> str:
    """`text` without control characters: a document must not move the cursor or recolour the terminal."""
    return text.translate(_UNSAFE)


def one_line(error: BaseException) -> str:
    return " ".join(safe(str(error)).split()) or type(error).__name__


def print_error(message: str) -> None:
    stderr_console().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def note(console: Console, message: str) -> None:
    console.print(Text(f"note: {safe(message)}", "yellow"))


class Stage:
    """What a stage says about itself when it is over."""

    detail = ""


@contextmanager
def stage(console: Console, name: str, doing: str = "") -> Iterator[Stage]:
    """A spinner while the block runs (none without `doing`), then one line with detail and seconds; an error leaves none."""
    begin, current = perf_counter(), Stage()
    with console.status(Text(f"{doing} …", "dim")) if doing else nullcontext():
        yield current
    line = Text.assemble(("✓ ", "green"), f"{name:<11}", (current.detail, "dim"))
    seconds = f"{perf_counter() - begin:.1f} s"
    gap = console.width - line.cell_len - len(seconds) - 1
    console.print(Text.assemble(line, " " * max(gap, 1), (seconds, "dim")), soft_wrap=gap < 1)
