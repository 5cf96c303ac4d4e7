"""The service as a Ray Serve application: the same app in every replica, behind Serve's proxies.

    serve run infra/serve/chat.yaml

Serve starts, scales, checks and drains replicas. Engines run beside them, in a deployment of `ragspec.cluster`: the one that
`cluster` names, or one engine for each replica. So the death of an engine ends no stream. A replica that is to end takes nothing
more and has `service.drain_s` seconds for running requests.
"""

from __future__ import annotations

import contextlib
import gc
import math
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI
from pydantic import Field, ValidationError
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingContext

from ragspec.config import ConfigSection, load_settings
from ragspec.errors import ConfigError, EngineError
from services.settings import CANARY_S, ServiceConfig

if TYPE_CHECKING:
    from services.backend import ServiceBackend

_GRACE_S = 10.0
_SPARE_REQUESTS = 16
"""Requests that Serve may pass on above `max_in_flight`. The replica refuses them itself with a time to retry after, and they
delay no health check."""
_BACKPRESSURE = {"status_code": 429, "retry_after_s": 2}
_CHOICES = "choices"
_NUM_CPUS = 0.5
"""CPUs that a replica reserves in Ray, whatever threads it uses. Why so few: Serve's own actors need some on a small machine."""


class ServeArgs(ConfigSection):
    """`args` of an application. `config`: the service's configuration, or the path of its YAML file on every node. `cluster`: the
    name of a deployment of `ragspec cluster up`; empty: every replica starts one engine and opens the index itself.
    `deployment_config`: options of Serve's deployment (`autoscaling_config`, `num_replicas`, `max_ongoing_requests`,
    `ray_actor_options`, ...).
    """

    config: dict[str, Any] | str = Field(default_factory=dict)
    cluster: str = ""
    deployment_config: dict[str, Any] = Field(default_factory=dict)


def build_app(args: dict[str, Any]) -> Application:
    """For `import_path: services.serving:build_app`. Raises: ConfigError."""
    try:
        given = ServeArgs.model_validate(args)
    except ValidationError as cause:
        raise ConfigError(f"args: {'; '.join(fault['msg'] for fault in cause.errors())}") from cause
    settings = settings_of(given)
    if not settings.service.keys_file:
        raise ConfigError("service.keys_file is not set: every replica has to know the same keys (ragspec keys add)")
    if not settings.retriever.index_dir and not given.cluster:
        raise ConfigError("retriever.index_dir is not set: build an index first, where every replica can read it")
    service = settings.service
    if not service.data_dir and _most_replicas(given.deployment_config) != 1:
        raise ConfigError("service.data_dir is not set: several replicas would each know other conversations and files")
    options: dict[str, Any] = {
        "name": "ragspec",
        "max_ongoing_requests": service.limits.max_in_flight + _SPARE_REQUESTS,
        "max_queued_requests": service.limits.max_in_flight,
        "backpressure_config": _BACKPRESSURE,
        "graceful_shutdown_timeout_s": service.drain_s + _GRACE_S,
        "health_check_timeout_s": CANARY_S + _GRACE_S,
        "ray_actor_options": {"num_cpus": _NUM_CPUS},
    } | given.deployment_config
    try:
        return cast(Deployment, serve.deployment(serve.ingress()(Replica))).options(**options).bind(args)
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"deployment_config: {cause}") from cause


def _most_replicas(options: dict[str, Any]) -> Any:
    """Raises: ConfigError."""
    try:
        return options.get("autoscaling_config", {}).get("max_replicas") or options.get("num_replicas") or 1
    except AttributeError as cause:
        raise ConfigError("deployment_config.autoscaling_config is not a mapping") from cause


def settings_of(args: ServeArgs) -> ServiceConfig:
    """Raises: ConfigError."""
    if isinstance(args.config, str):
        return load_settings(ServiceConfig, args.config)
    return load_settings(ServiceConfig, None, **args.config)


class Replica:
    """One copy of the service: a backend and the app around it."""

    def __init__(self, args: dict[str, Any]) -> None:
        """Why the imports are in here: they take seconds, and only replicas need them."""
        from pathlib import Path

        from services.app import build_app as build
        from services.health import ready
        from services.keys import KeyFile
        from services.logs import start_logging

        start_logging()
        given = ServeArgs.model_validate(args)
        settings = settings_of(given)
        ring = KeyFile(Path(settings.service.keys_file))
        with contextlib.ExitStack() as stack:
            self._backend = stack.enter_context(_backend(given.cluster, settings))
            self._app = build(self._backend, ring)
            self._is_ready = ready(self._backend)
            self._stack = stack.pop_all()
        gc.collect()
        gc.freeze()  # Why: a full collection over everything that was loaded stops all streams for a third of a second

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Serve ends a replica that fails this a few times in a row, and starts another."""
        if reason := self._backend.lost:
            raise EngineError(reason)
        if not await self._is_ready():
            raise EngineError("an engine writes no token")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `replicas_wanted`."""
        from ragspec.cluster.routing.router import Router

        engines = [model.engine for model in self._backend.models.values()]
        routers = [engine for engine in engines if isinstance(engine, Router)]
        return {_CHOICES: float(sum(router.num_choices() for router in routers))} if routers else {}

    def __del__(self) -> None:
        if stack := getattr(self, "_stack", None):
            stack.close()


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """A policy for `autoscaling_config: {policy: {policy_function: services.serving:replicas_wanted}}`: one replica for each
    `target_ongoing_requests` choices that its engine writes or that wait for it.

    Why not Serve's own count of requests: eight choices of one request are eight times its work, an upload is none.
    """
    reported = (context.aggregated_metrics or {}).get(_CHOICES) or {}
    if not reported:
        return context.target_num_replicas, {}
    assert context.config is not None
    return max(1, math.ceil(sum(reported.values()) / context.config.get_target_ongoing_requests())), {}


@contextlib.contextmanager
def _backend(cluster: str, settings: ServiceConfig) -> Iterator[ServiceBackend]:
    from ragspec.cluster.deployment import Deployment as EngineDeployment
    from ragspec.cluster.topology import Topology
    from services.backend import clustered

    with contextlib.ExitStack() as stack:
        if not cluster:
            cluster = f"serve-{secrets.token_hex(4)}"
            engine_only = Topology(num_shards=0, num_encoders=0)
            stack.enter_context(EngineDeployment.up(engine_only, settings, name=cluster))
        yield stack.enter_context(clustered(cluster, settings))
