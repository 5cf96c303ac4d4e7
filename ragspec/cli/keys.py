"""`ragspec keys add|list|rotate|revoke|usage`: the keys that a service accepts, and what their tenants store.

Owns the commands' output; the file is `services.keys`'. A key is shown once, when it is made; the file holds its hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ragspec.cli.options import AsJson, Config, Data, group
from ragspec.cli.terminal import data_folder, plain_table, safe, stderr_console, stdout_console
from ragspec.config import load_settings

if TYPE_CHECKING:
    from services.keys import KeyRecord

keys = group("keys", "Who may ask a service.")

File = Annotated[
    Path | None, typer.Option("--file", help="The keys file; default: that of the configuration, else keys.json.")
]
Most = Annotated[int | None, typer.Option(min=1)]


def _keys_file(file: Path | None, config: Path | None) -> Path:
    from services.settings import ServiceConfig

    return file or Path(load_settings(ServiceConfig, config).service.keys_file or "keys.json")


@keys.command(epilog="Example: ragspec keys add --file keys.json --tenant ann")
def add(
    file: File = None,
    config: Config = None,
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

    numbers = zip(KeyLimits.model_fields, (requests_per_minute, concurrency, tokens_per_minute), strict=True)
    given = {name: number for name, number in numbers if number is not None}  # a None would mean "no limit"
    limits = KeyLimits(**given) if given else None
    file = _keys_file(file, config)
    _show(*add_key(file, tenant, key_id=name, trusted=trusted, limits=limits), file, as_json)


@keys.command(epilog="Example: ragspec keys rotate ID --file keys.json")
def rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    file: File = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make a key with another's tenant, trust and limits. Revoke the old one when all clients have the new one."""
    from services.keys import rotate_key

    file = _keys_file(file, config)
    _show(*rotate_key(file, key_id), file, as_json)


def _show(key: str, record: KeyRecord, file: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"key": key, "id": record.id, "tenant": record.tenant, "trusted": record.trusted}))
        return
    stdout_console().print(Text(key), soft_wrap=True)
    stderr_console().print(Text(f"{record.id} is in {file}; services that use it know the key within a second", "dim"))


@keys.command("list", epilog="Example: ragspec keys list --file keys.json")
def list_keys(file: File = None, config: Config = None, as_json: AsJson = False) -> None:
    """Which keys there are; not what they are."""
    from services.keys import read_keys

    records = read_keys(_keys_file(file, config))
    if as_json:
        print(json.dumps([record.model_dump(exclude={"sha256"}, exclude_none=True) for record in records]))
        return
    table = plain_table("id", "tenant", "trusted", "created", "limits")
    for record in records:
        limits = record.limits.model_dump(exclude_none=True) if record.limits else {}
        cells = safe(record.id), safe(record.tenant), "yes" if record.trusted else "", record.created
        table.add_row(*cells, _shown_limits(limits))
    stdout_console().print(table)


@keys.command(epilog="Example: ragspec keys revoke ID --file keys.json")
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID")], file: File = None, config: Config = None) -> None:
    """Take a key out: services that use the file refuse it within a second."""
    from services.keys import revoke_key

    revoke_key(_keys_file(file, config), key_id)
    stderr_console().print(Text(f"{safe(key_id)} is no key any more", "dim"))


@keys.command(epilog="Example: ragspec keys usage")
def usage(
    data: Data = None,
    file: Annotated[Path | None, typer.Option("--file", help="The keys file, for the keys' limits.")] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """What each tenant stores, of how much, and what its keys may do, the largest first."""
    from ragspec.rag.chat.conversations import MAX_BYTES_PER_TENANT as MAX_CONVERSATION_BYTES
    from services.keys import read_keys
    from services.settings import ServiceConfig
    from services.stores.records import MAX_BYTES_PER_TENANT, StoredBytes, stored_bytes

    service = load_settings(ServiceConfig, config).service
    stored = stored_bytes(data or Path(service.data_dir or data_folder() / "service"))
    keys_file = file or (Path(service.keys_file) if service.keys_file else None)
    limits: dict[str, dict[str, Any]] = {}
    for record in read_keys(keys_file) if keys_file else ():
        own = record.limits.over(service.limits.key) if record.limits else service.limits.key
        limits.setdefault(record.tenant, {})[record.id] = own.model_dump(exclude_none=True)
        stored.setdefault(record.tenant, StoredBytes())
    order = sorted(stored, key=lambda tenant: -stored[tenant].file_bytes - stored[tenant].conversation_bytes)
    report = {
        tenant: {
            **asdict(stored[tenant]),
            "max_file_bytes": MAX_BYTES_PER_TENANT,
            "file_share": stored[tenant].fullest_bytes / MAX_BYTES_PER_TENANT,
            "max_conversation_bytes": MAX_CONVERSATION_BYTES,
            "conversation_share": stored[tenant].conversation_bytes / MAX_CONVERSATION_BYTES,
            "keys": limits.get(tenant, {}),
        }
        for tenant in order
    }
    if as_json:
        print(json.dumps(report))
    else:
        stdout_console().print(_usage_table(report))


def _usage_table(report: Mapping[str, Mapping[str, Any]]) -> Table:
    numbers = ("files", "MiB", "used", "conversations", "MiB", "used")
    table = plain_table("tenant", *numbers, "limits of its keys", right=numbers)
    for tenant, row in report.items():
        cells = [safe(tenant)]
        for kind in ("file", "conversation"):
            cells += [str(row[f"num_{kind}s"]), f"{row[f'{kind}_bytes'] / 2**20:.1f}", f"{row[f'{kind}_share']:.1%}"]
        shown = (f"{safe(key_id)}: {_shown_limits(limits)}" for key_id, limits in row["keys"].items())
        table.add_row(*cells, "\n".join(shown))
    return table


def _shown_limits(limits: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in limits.items())
