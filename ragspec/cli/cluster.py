"""`ragspec cluster up|status|env|down`: a deployment on a Ray cluster; without one, Ray is started on this machine.

Each command imports what it needs when it runs, so that `ragspec --help` loads neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from pipelines.batch.ray_session import (
    clusters_folder,
    has_token_auth,
    local_cluster_address,
    prepare_token,
    ray_session,
)
from ragspec.cli import options
from ragspec.cli.options import Adapter, Address, AsJson, Config, Target, group, overrides
from ragspec.cli.terminal import plain_table, safe, stage, stay_offline, stderr_console, stdout_console
from ragspec.config import load_settings
from ragspec.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from ragspec.cluster.registry import Status

DeploymentName = Annotated[str, typer.Option("--name", help="The deployment's name.")]

cluster = group("cluster", "Engines, shards and encoders on a Ray cluster.")
_STATES = {"live": "green", "starting": "yellow", "lost": "bold red"}


@cluster.command(epilog="Example: ragspec cluster up --index my-index --replicas 2")
def up(
    config: Config = None,
    replicas: options.Replicas = None,
    tensor_parallel: options.TensorParallel = None,
    shards: options.Shards = None,
    index: Annotated[Path | None, typer.Option(help="The index's folder; none: engines only.")] = None,
    target: Target = None,
    adapter: Adapter = None,
    address: Address = None,
    name: DeploymentName = "ragspec",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use a cluster that anybody who reaches it may use.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a deployment, on a cluster of this machine if no other is named, and wait until it serves."""
    from ragspec.cluster.topology import ClusterConfig

    given = overrides(replicas=replicas, tensor_parallel=tensor_parallel, shards=shards)
    given |= overrides(index=index, target=target, adapter=adapter)
    settings = load_settings(ClusterConfig, config, **given)
    topology = settings.topology
    if not settings.retriever.index_dir and "num_shards" not in topology.model_fields_set:
        topology = topology.model_copy(update={"num_shards": 0, "num_encoders": 0})
    stay_offline(settings.target)
    console = stderr_console()
    with contextlib.ExitStack() as undo:  # if anything fails, everything that was started here is ended
        address = _cluster_for(name, address, insecure, console, undo)
        with ray_session(address), stage(console, "deployment", "starting engines, shards and encoders") as done:
            from ragspec.cluster.deployment import Deployment

            deployment = Deployment.up(topology, settings, name=name, detached=True)
            undo.pop_all()
            done.detail = f"{name} at {address}"
            _show(deployment.status(), as_json=as_json)


@cluster.command("status", epilog="Example: ragspec cluster status --json")
def show_status(address: Address = None, name: DeploymentName = "ragspec", as_json: AsJson = False) -> None:
    """What there is of a deployment, and how it is. Exits 1 if a part of it is not live."""
    with ray_session(_known_address(name, address)):
        from ragspec.cluster.registry import status_of

        status = status_of(name)
    _show(status, as_json=as_json)
    raise typer.Exit(int(not status.is_complete))


@cluster.command(epilog="Example: ragspec cluster env")
def env(name: DeploymentName = "ragspec") -> None:
    """Print what other programs must have set to find the cluster that was started here, for a shell's `eval`."""
    from ragspec.cluster.local_cluster import LocalCluster

    nodes = LocalCluster.recorded(clusters_folder() / name)
    if nodes is None or not nodes.running:
        raise EngineError(f"no cluster was started here for {name!r}: start one with ragspec cluster up")
    for variable, value in {"RAY_ADDRESS": nodes.address, **nodes.environment}.items():
        print(f"export {variable}={shlex.quote(value)}")


@cluster.command(epilog="Example: ragspec cluster down")
def down(address: Address = None, name: DeploymentName = "ragspec") -> None:
    """End a deployment, and the cluster if it was started for it. May be repeated, also after a crash."""
    from ragspec.cluster.local_cluster import LocalCluster

    console = stderr_console()
    address = address or os.environ.get("RAY_ADDRESS")
    own = None if address else LocalCluster.recorded(clusters_folder() / name)
    if own is not None:
        with stage(console, "down", "ending the cluster") as done:
            own.close()  # the deployment ends with its cluster
            done.detail = f"{name} and the cluster at {own.address}"
    elif address:
        with ray_session(address), stage(console, "down", "ending the deployment") as done:
            from ragspec.cluster.registry import teardown

            teardown(name)
            done.detail = f"{name}; the cluster at {address} goes on"
    else:
        console.print(Text(f"nothing to take down: no cluster was started here for {name}", "dim"))


def _cluster_for(name: str, address: str | None, insecure: bool, console: Console, undo: contextlib.ExitStack) -> str:
    """The address of the cluster to use; if none is named, starts one."""
    from ragspec.cluster.local_cluster import LocalCluster

    if address := address or os.environ.get("RAY_ADDRESS") or local_cluster_address(name):
        prepare_token(address)
        if not insecure and not has_token_auth(address):
            raise ConfigError(
                f"the cluster at {address} would take orders from anybody who reaches it: give it a token "
                "(RAY_AUTH_MODE=token), or say --insecure"
            )
        return address
    if stale := LocalCluster.recorded(clusters_folder() / name):
        stale.close()
    with stage(console, "ray", "starting Ray on this machine") as done:
        nodes = undo.enter_context(LocalCluster(clusters_folder() / name, os.environ))
        nodes.add()
        done.detail = nodes.address
    return local_cluster_address(name)


def _known_address(name: str, address: str | None) -> str:
    if found := address or os.environ.get("RAY_ADDRESS") or local_cluster_address(name):
        return found
    raise EngineError(
        f"no cluster was started here for {name!r}: name one with --address, or start one with ragspec cluster up"
    )


def _show(status: Status, *, as_json: bool) -> None:
    if as_json:
        replicas = [replica._asdict() for replica in status.replicas]
        shown = {"name": status.name, "nodes": status.nodes, "complete": status.is_complete, "replicas": replicas}
        print(json.dumps(shown | {"weights": status.weights}))
        return
    headings = ("replica", "kind", "state", "node", "pid", "started", "numerics", "load", "last error")
    table = plain_table(*headings, right=("started", "load"))
    for replica in status.replicas:
        table.add_row(
            replica.name,
            replica.kind,
            Text(replica.state, _STATES[replica.state]),
            replica.node[:8],
            " ".join(map(str, replica.pids)),
            time.strftime("%H:%M:%S", time.localtime(replica.epoch)) if replica.epoch else "",
            replica.fingerprint,
            "" if replica.load is None else str(replica.load),
            Text(safe(replica.error)),
        )
    stdout_console().print(table)
