"""What all Ray actors of ragspec share: a health check of their own, restarts by Ray, how their clients name them, calls with a
deadline, and Ray's errors as ragspec's.

>>> with ActorPool(ShardActor, count=3, prefix="shard") as pool:
...     ClusterRetriever(config, encoder, pool.replicas)
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import ray
from ray.exceptions import ActorDiedError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from ragspec.errors import EngineError, RagspecError

_log = logging.getLogger(__name__)

HEALTH, ORDERED = "health", "ordered"
"""Concurrency groups: their methods answer while another method of the actor computes. Calls of one client to ORDERED methods run
one after another."""

_GROUPS = {HEALTH: 2, ORDERED: 1}
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Why: threads of several processes share the cores, and would spin while others compute (measured: 2 ms became 9)."""

_MAX_CPUS_PER_WORKER = 0.5
_WORKER_SHARE = 0.9
"""The share of all CPUs that the workers together may reserve: a pool that wants more would wait for ever."""

_START_TIMEOUT_S = 300.0
_SLICE_S = 0.25

Method = TypeVar("Method", bound=Callable[..., Any])


def in_group(group: str) -> Callable[[Method], Method]:
    """Decorates a method of an actor: it runs in this concurrency group."""
    decorate: Any = ray.method(
        concurrency_group=group
    )  # Why Any: Ray's type changes the method's, which subclasses override
    return decorate  # type: ignore[no-any-return]


class Replica(NamedTuple):
    """An actor by its name in the deployment, as "engine-0" or "shard-2". The handle stays valid when Ray restarts the actor."""

    name: str
    actor: Any


class ActorStatus(NamedTuple):
    """Where an actor runs. `started_s`: Unix time of its process's start, which grows with each restart."""

    pids: tuple[int, ...]
    node_id: str
    started_s: float


class WorkerActor:
    """Base of all actors. `load` is idempotent; calls load on demand what they need."""

    _started_s = time.time()

    @in_group(HEALTH)
    def ping(self) -> None:
        """Answers while the process lives and is not stopped."""

    @in_group(HEALTH)
    def status(self) -> ActorStatus:
        return ActorStatus((os.getpid(),), ray.get_runtime_context().get_node_id(), self._started_s)

    def load(self) -> None:
        """Load models before the first call. Raises: ModelError."""


def end_process(why: str) -> NoReturn:
    """End this process at once; Ray restarts the actor."""
    _log.error("%s", why)
    os._exit(1)


@contextmanager
def ended_if_lost(model: object) -> Iterator[None]:
    """Behind the block the process ends if the encoder or reranker computes no more; Ray starts it again."""
    try:
        yield
    finally:
        if why := getattr(model, "lost", ""):
            end_process(why)


def remote_class(actor_class: type, max_concurrency: int = 1) -> Any:
    """The Ray class of an actor that Ray restarts without end. Calls that run when it dies are not repeated: their callers
    decide where to repeat them."""
    remote: Any = ray.remote  # Why: its types know no concurrency groups
    return remote(
        concurrency_groups=_GROUPS,
        max_concurrency=max_concurrency,
        max_restarts=-1,
        max_task_retries=0,
        runtime_env={"env_vars": _ENVIRONMENT},
    )(actor_class)


class ActorPool(AbstractContextManager["ActorPool"]):
    """Actors that one process starts for itself, without a deployment. They end with `close` or with the process."""

    def __init__(self, actor_class: type, arguments: tuple[Any, ...] = (), count: int = 1, *, prefix: str) -> None:
        """Waits until all answer. Needs Ray to be initialised. Raises: EngineError."""
        start = remote_class(actor_class).options(num_cpus=cpus_per_worker(count)).remote
        self.replicas = [Replica(f"{prefix}-{number}", start(*arguments)) for number in range(count)]
        try:
            wait_for_all([replica.actor.ping.remote() for replica in self.replicas], _START_TIMEOUT_S, prefix)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for _, actor in self.replicas if ray.is_initialized() else ():
            ray.kill(actor)

    def __exit__(self, *_: object) -> None:
        self.close()


def cpus_per_worker(num_workers: int) -> float:
    """The CPUs one worker reserves: half a CPU, or less where the cluster has few."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    share = _WORKER_SHARE * float(resources.get("CPU", 1.0)) / num_workers
    return min(_MAX_CPUS_PER_WORKER, round(share, 4))


def wait_for_all(calls: Sequence[Any], timeout_s: float, name: str) -> list[Any]:
    """The results of all calls. `name`: of the actor, in errors.

    Raises: the actor's own error if it is one of ragspec's, else EngineError: lost, failed, or not in time.
    """
    _, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    if waiting:
        raise EngineError(f"{name} did not answer within {timeout_s:g} s")
    try:
        results: list[Any] = ray.get(list(calls))
    except RayError as error:
        raise ragspec_error(error, name) from error
    return results


def wait_for(call: Any, timeout_s: float, check_open: Callable[[], None]) -> Any:
    """The result of a call. `check_open` raises when nobody waits for it any more.

    Waits in slices: if this process itself is stopped for a while, that counts as one slice, and an actor that answered meanwhile
    is not taken for hung. Raises: TimeoutError, RayError.
    """
    for _ in range(math.ceil(timeout_s / _SLICE_S)):
        check_open()
        if ray.wait([call], timeout=_SLICE_S)[0]:
            return ray.get(call)
    raise TimeoutError


def wait_until_healthy(actor: Any, hang_s: float, check_open: Callable[[], None]) -> Any:
    """The actor's status, once it answers. An actor that does not answer for `hang_s` is killed.

    Why the kill: Ray restarts an actor that dies, and a killed actor even if SIGSTOP stopped it, but detects no hang.
    Raises: ActorDiedError if Ray does not restart it; the errors of its `status` and of `check_open`.
    """
    while True:
        try:
            return wait_for(actor.status.remote(), hang_s, check_open)
        except TimeoutError:
            _log.warning("an actor did not answer for %g s and is killed", hang_s)
            ray.kill(actor, no_restart=False)
        except ActorDiedError:
            raise
        except RayActorError:  # Ray is restarting it
            time.sleep(_SLICE_S)


def ragspec_error(error: RayError, name: str) -> RagspecError:
    """The ragspec error that an actor's code raised, or an EngineError in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RagspecError):
        return cause
    lines = _lines(error)
    if isinstance(error, RayTaskError):
        return EngineError(f"{name} failed: {lines[-1]}")
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return EngineError(f"{name}: Ray's object store is full: {lines[0]}")
    return EngineError(f"{name} is lost: {lines[-1].partition('. ')[0]}")


def last_line(error: BaseException) -> str:
    """Ray puts the root cause into the last line of an error; the error's type if it has no text."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


@contextmanager
def ignore_dead_actors() -> Iterator[None]:
    """For calls to actors that may have ended; Ray raises ValueError for an unknown name."""
    try:
        yield
    except (RagspecError, RayError, ValueError):
        pass
