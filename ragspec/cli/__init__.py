"""The command line, `ragspec`: the only part of the library that prints, and that sees the environment.

app.py       the commands and how they end
terminal.py  consoles, quiet libraries, text made safe for a terminal
ask.py       one question
demo.py      questions from the standard library's documentation, with speculation on and off
doctor.py    what this machine can do
serve.py     the service; keys.py who may ask it
"""

from __future__ import annotations

from ragspec.cli.app import main

__all__ = ["main"]
