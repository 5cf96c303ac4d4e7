"""`ragspec keys add|list|revoke`: the keys that a service accepts.

Owns the commands' output; the file is `services.keys`'. A key is shown once, when it is made; the file holds its hash.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ragspec.cli.options import AsJson, group
from ragspec.cli.terminal import safe, stderr_console, stdout_console

keys = group("keys", "Who may ask a service.")

File = Annotated[Path, typer.Option("--file", help="The keys file.")]
Most = Annotated[int | None, typer.Option(min=1, show_default=False)]
_DEFAULT = Path("keys.json")


@keys.command()
def add(
    file: File = _DEFAULT,
    tenant: Annotated[
        str, typer.Option(help="Whose documents and caches it uses beside those of everybody; default: its own.")
    ] = "",
    name: Annotated[str, typer.Option("--id", help="Names the key in logs and to revoke.", show_default=False)] = "",
    trusted: Annotated[
        bool, typer.Option("--trusted", help="It may see how answers were made, and the counters.")
    ] = False,
    requests_per_minute: Most = None,
    concurrency: Most = None,
    tokens_per_minute: Most = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once and cannot be read again."""
    from services.keys import add_key
    from services.settings import KeyLimits

    options = {
        "requests_per_minute": requests_per_minute,
        "concurrency": concurrency,
        "tokens_per_minute": tokens_per_minute,
    }
    given = {limit: value for limit, value in options.items() if value is not None}
    limits = KeyLimits(**given) if given else None
    key, record = add_key(file, tenant, key_id=name, trusted=trusted, limits=limits)
    if as_json:
        print(json.dumps({"key": key, "id": record.id, "tenant": record.tenant, "trusted": trusted}))
        return
    stdout_console().print(Text(key), soft_wrap=True)
    stderr_console().print(Text(f"{record.id} is in {file}; services that use it know the key within a second", "dim"))


@keys.command("list")
def list_keys(file: File = _DEFAULT, as_json: AsJson = False) -> None:
    """Which keys there are; not what they are."""
    from services.keys import read_keys

    records = read_keys(file)
    if as_json:
        print(json.dumps([record.model_dump(exclude={"sha256"}, exclude_none=True) for record in records]))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("id", "tenant", "trusted", "created", "limits"):
        table.add_column(heading, overflow="fold")
    for record in records:
        limits = record.limits.model_dump(exclude_none=True) if record.limits else {}
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in limits.items())
        table.add_row(safe(record.id), safe(record.tenant), "yes" if record.trusted else "", record.created, shown)
    stdout_console().print(table)


@keys.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID")], file: File = _DEFAULT) -> None:
    """Take a key out: services that use the file refuse it within a second."""
    from services.keys import revoke_key

    revoke_key(file, key_id)
    stderr_console().print(Text(f"{safe(key_id)} is no key any more", "dim"))
