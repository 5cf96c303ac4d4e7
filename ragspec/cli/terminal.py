"""Shared by all commands: a quiet process, folders, consoles, progress, and text that cannot control a terminal.

Owns the process's environment: it switches off progress bars and warnings of other libraries before they are imported. Variables
that the user has set stay.
"""

import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table
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
_LOG_EVERY_S = 10.0
_BAR_CHARS = 24
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


def stay_offline(*targets: TargetConfig) -> None:
    """Switches the Hugging Face hub offline if all targets are on this machine."""
    if all(map(is_local, targets)):
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


def plain_table(*headings: str, right: Collection[str] = ()) -> Table:
    """A table without lines; the columns of the headings in `right` are numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    return table


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
    """The progress of one piece of work (a `Say`): its stage, the share that is done, and the time left.

    A terminal shows one line that changes. A log gets a line every ten seconds, and a line for each stage if `logs_stages`.
    Set `detail` inside the block of `stage`, which prints it at the end behind `mark`.
    """

    def __init__(self, console: Console, doing: str, logs_stages: bool) -> None:
        self._console, self._doing, self._logs_stages = console, doing, logs_stages
        self._begin = perf_counter()
        self._stage_begin = self._logged = self._begin
        self._done = self._total = 0
        self.mark = Text("✓ ", "green")
        self.detail = ""

    @property
    def seconds(self) -> float:
        return perf_counter() - self._begin

    def __call__(self, stage: str, done: int = 0, total: int = 0, /) -> None:
        now, is_new = perf_counter(), stage != self._doing
        if is_new:
            self._doing, self._stage_begin = stage, now
        self._done, self._total = done, total
        is_due = (is_new and self._logs_stages) or now - self._logged > _LOG_EVERY_S
        if is_due and not self._console.is_terminal:
            self._logged = now
            self._console.print(Text.assemble("  ", self.__rich__()), style="dim", soft_wrap=True)

    def __rich__(self) -> Text:
        line = Text(f"{safe(self._doing)} … ", "dim")
        if self._total:
            num_filled = _BAR_CHARS * self._done // self._total
            line.append("━" * num_filled, "green").append("─" * (_BAR_CHARS - num_filled))
            line.append(f" {self._done:,} of {self._total:,}, ")
        elif self._done:
            line.append(f"{self._done:,}, ")
        line.append(f"{self.seconds:.0f} s")
        if self._total and self._done:
            left = (perf_counter() - self._stage_begin) * (self._total - self._done) / self._done
            line.append(f", {left:.0f} s left")
        return line


@contextmanager
def loading(console: Console, doing: str, logs_stages: bool = False) -> Iterator[Stage]:
    """Shows the progress of the block on `console`, and leaves nothing there at its end."""
    current = Stage(console, doing, logs_stages)
    with console.status(current):
        yield current


@contextmanager
def stage(console: Console, name: str, doing: str) -> Iterator[Stage]:
    """Shows the progress of the block on `console`, then one line with its detail and its seconds; no line on an error."""
    with loading(console, doing, logs_stages=True) as current:
        yield current
    line = Text.assemble(current.mark, f"{name:<11}", (safe(current.detail), "dim"))
    seconds = f"{current.seconds:.1f} s"
    gap = console.width - line.cell_len - len(seconds) - 1
    console.print(Text.assemble(line, " " * max(gap, 1), (seconds, "dim")), soft_wrap=gap < 1)
