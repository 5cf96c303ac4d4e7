"""The command line, `ragspec`: the only part of the library that prints, and that sees the environment.

app.py       the commands and how they end; index_commands.py and cluster_commands.py groups of them, options.py what they share
terminal.py  consoles, quiet libraries, text made safe for a terminal
ask.py       one question; correct.py texts
demo.py      questions from the standard library's documentation, with speculation on and off
doctor.py    what this machine can do
index.py     documents; cluster.py deployments
serve.py     the service; keys.py who may ask it
"""

from __future__ import annotations

from ragspec.cli.app import main

__all__ = ["main"]
