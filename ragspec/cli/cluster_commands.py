"""The options of the `ragspec cluster` commands; `cluster.py` implements them and is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import Address, AsJson, Debug, Target, group

DeploymentName = Annotated[str, typer.Option("--name", help="The deployment's name.")]

cluster = group("cluster", "Engines, shards and encoders on a Ray cluster.")


@cluster.command()
def up(
    config: Annotated[
        Path | None, typer.Option(help="A YAML configuration with a topology; the options win.", show_default=False)
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines beside each other.", show_default=False)] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Ranks that share an engine's target: 1, 2 or 4.", show_default=False)
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Parts of the index.", show_default=False)] = None,
    index: Annotated[
        Path | None, typer.Option(help="The index's folder; none: engines only.", show_default=False)
    ] = None,
    target: Target = None,
    address: Address = None,
    name: DeploymentName = "ragspec",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use a cluster that anybody who reaches it may use.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Start a deployment, on a cluster of this machine if no other is named, and wait until it serves."""
    from ragspec.cli.cluster import run_up

    overrides = {
        "topology.replicas": replicas,
        "topology.tensor_parallel": tensor_parallel,
        "topology.num_shards": shards,
        "retriever.index_dir": index and str(index),
        "target.model": target,
    }
    run_up(config, overrides, name, address, insecure=insecure, as_json=as_json)


@cluster.command()
def status(
    address: Address = None, name: DeploymentName = "ragspec", as_json: AsJson = False, debug: Debug = False
) -> None:
    """What there is of a deployment, and how it is. Exits 1 if a part of it is not live."""
    from ragspec.cli.cluster import run_status

    raise typer.Exit(run_status(name, address, as_json=as_json))


@cluster.command()
def env(name: DeploymentName = "ragspec", debug: Debug = False) -> None:
    """Print what other programs must have set to find the cluster that was started here, for a shell's `eval`."""
    from ragspec.cli.cluster import run_env

    run_env(name)


@cluster.command()
def down(address: Address = None, name: DeploymentName = "ragspec", debug: Debug = False) -> None:
    """End a deployment, and the cluster if it was started for it. May be repeated, also after a crash."""
    from ragspec.cli.cluster import run_down

    run_down(name, address)
