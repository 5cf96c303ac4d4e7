"""`ragspec feedback export`: what readers said of answers, as questions for `ragspec evaluate`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import Config, Data, group
from ragspec.cli.terminal import data_folder, note, stderr_console
from ragspec.config import load_settings
from ragspec.disk import atomic_writer, saving

feedback = group("feedback", "What readers said of answers.")


@feedback.callback()
def _group() -> None:
    """Why: a group of one command would be that command."""


@feedback.command(epilog="Example: ragspec feedback export --out rated.jsonl")
def export(
    out: Annotated[Path | None, typer.Option(help="A file for the lines; default: standard output.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant; default: of all.")] = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Rated answers of a service, which may be running, as lines that ragspec evaluate reads."""
    from services.settings import ServiceConfig
    from services.stores.rated import rated_questions

    folder = data or Path(load_settings(ServiceConfig, config).service.data_dir or data_folder() / "service")
    ratings, text = Counter[str](), ""
    for line in rated_questions(folder / "conversations.sqlite", tenant):
        ratings[line["evidence"]["rating"]] += 1
        text += json.dumps(line, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        with saving(out), atomic_writer(out) as file:
            file.write(text.encode())
    note(stderr_console(), f"{ratings['up']} answers rated up, {ratings['down']} down")
