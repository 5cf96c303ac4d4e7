"""The command line, `ragspec`: the only part of the library that prints, and that sees the environment.

app.py        the commands and their exit codes; options.py the options that several commands share
terminal.py   consoles, quiet libraries, text made safe for a terminal
ask.py        `ask`; quotes.py prints its sources
correct.py    `correct`
demo.py       `demo`, its index and its screen output
doctor.py     `doctor`
evaluate.py   `evaluate`
index.py      `index`; keys.py `keys`; models.py `models`
cluster.py    `cluster`; serve.py `serve`
"""

from __future__ import annotations

from ragspec.cli.app import main

__all__ = ["main"]
