"""Shared by all commands: a quiet process, folders, consoles, and text that cannot control a terminal.

Owns the process's environment: it switches off progress bars and warnings of other libraries before they are imported. Variables
that the user has set stay.
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

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints.target_files import is_local

_SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_KEPT_PRODUCTS = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "64")
"""oneDNN compiles a product for every number of rows; torch and oneDNN keep 1,024 of them each by default. Texts of many lengths
then hold 0.4 GB and more, and nothing gets faster by it (measured with the encoder). torch reads both as it loads."""
_UNSAFE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def prepare_process() -> None:
    """Keeps other libraries' messages off the terminal, and their caches small. Call before torch is imported."""
    for name, value in (_SETTINGS | _KEPT_PRODUCTS).items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("ragspec").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets an escape
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def stay_offline(target: TargetConfig) -> None:
    """Switches the Hugging Face hub offline if the target is on this machine."""
    if is_local(target):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ragspec, else ~/.cache/ragspec."""
    return _folder("XDG_CACHE_HOME", "~/.cache")


def data_folder() -> Path:
    """$XDG_DATA_HOME/ragspec, else ~/.local/share/ragspec."""
    return _folder("XDG_DATA_HOME", "~/.local/share")


def _folder(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    base = Path(named) if Path(named).is_absolute() else Path(os.path.expanduser(default))
    return base / "ragspec"


def stdout_console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def safe(text: str) -> str:
    """`text` without control characters, so that a document cannot move the cursor or recolour the terminal."""
    return text.translate(_UNSAFE)


def one_line(error: BaseException) -> str:
    return " ".join(safe(str(error)).split()) or type(error).__name__


def print_error(message: str) -> None:
    stderr_console().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def note(console: Console, message: str) -> None:
    console.print(Text(f"note: {safe(message)}", "yellow"))


class Stage:
    """A step of a start, with its seconds so far. Set `detail` inside the block; `stage` prints it at the end."""

    def __init__(self, console: Console, doing: str) -> None:
        self._console, self._doing, self._begin = console, doing, perf_counter()
        self.detail = ""

    @property
    def seconds(self) -> float:
        return perf_counter() - self._begin

    def say(self, doing: str) -> None:
        """What goes on now: shown by the spinner, or as a line where the output is no terminal."""
        self._doing = doing
        if not self._console.is_terminal:
            self._console.print(Text(f"  {doing} ({self.seconds:.0f} s)", "dim"), soft_wrap=True)

    def __rich__(self) -> Text:
        return Text(f"{self._doing} … {self.seconds:.0f} s", "dim")


@contextmanager
def stage(console: Console, name: str, doing: str = "") -> Iterator[Stage]:
    """Shows a spinner while the block runs, then a line with detail and seconds. No spinner without `doing`; no line on error."""
    current = Stage(console, doing)
    with console.status(current) if doing else nullcontext():
        yield current
    line = Text.assemble(("✓ ", "green"), f"{name:<11}", (current.detail, "dim"))
    seconds = f"{current.seconds:.1f} s"
    gap = console.width - line.cell_len - len(seconds) - 1
    console.print(Text.assemble(line, " " * max(gap, 1), (seconds, "dim")), soft_wrap=gap < 1)
