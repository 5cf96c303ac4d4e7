"""`ragspec index`: its commands' options. What they do is in `index.py`, imported when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.options import PASSED_ON, AsJson, Debug, Index, group, pass_on

index = group("index", "Documents in, out and checked.")


@index.command(context_settings=PASSED_ON)
def add(context: typer.Context) -> None:
    """Put files and folders in: ragspec index add manual/ faq.jsonl --index DIR"""
    pass_on("pipelines.build_index", context.args, "ragspec index add")


@index.command()
def delete(
    index: Index,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Documents by id.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="All documents of a source; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be deleted; change nothing.")] = False,
    debug: Debug = False,
) -> None:
    """Take documents out, by id or by source."""
    from ragspec.cli.index import run_delete

    if not ids and not source:
        raise typer.BadParameter("name documents by id, or a source with --source")
    run_delete(index, ids or (), source or (), dry_run=dry_run)


@index.command("list")
def list_documents(
    index: Index,
    limit: Annotated[int, typer.Option(help="Most documents to show.", min=0)] = 50,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What is in the index."""
    from ragspec.cli.index import run_list

    run_list(index, limit, as_json=as_json)


@index.command()
def verify(index: Index, debug: Debug = False) -> None:
    """Compare every hash, then check that the files make sense together. Exits 1 with the first thing that is wrong."""
    from ragspec.cli.index import run_verify

    run_verify(index)


@index.command()
def compact(
    index: Index,
    dense: Annotated[str | None, typer.Option(help="How vectors are searched from now on: exact, hnsw or ivf.")] = None,
    purge: Annotated[
        bool, typer.Option(help="Remove deleted text from the disk now, not with a later change.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Merge segments and drop what was deleted; with exact search, answers stay the same."""
    from ragspec.cli.index import run_compact
    from ragspec.config import DenseConfig, load_config

    overrides = {"index.dense.kind": dense}
    wanted: DenseConfig | None = load_config(None, **overrides).index.dense if dense else None
    run_compact(index, wanted, purge=purge)
