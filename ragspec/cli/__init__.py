"""The command line, `ragspec`: the only part of the library that prints, and that sees the environment.

app.py        the commands and their exit codes; options.py the options that several commands share
terminal.py   consoles, progress, quiet libraries, text made safe for a terminal
ask.py        `ask`, and how answers and their sources are printed
correct.py    `correct`
demo.py       `demo`
doctor.py     `doctor`
evaluate.py   `evaluate`
index.py      `index`; keys.py `keys`; models.py `models`
cluster.py    `cluster`; serve.py `serve`
standard_library.py   the index of Python's documentation
"""

from ragspec.cli.app import main

__all__ = ["main"]
