"""Stages that work at the same time, with a bounded queue before each.

    items -> queue -> stage -> queue -> stage -> queue -> finished items, as they finish

A stage whose next queue is full waits, and with it all before it and whatever the items come from. What waits in a queue is
worked on together, up to the stage's `max_batch`. An error belongs to its item alone, which then skips the other stages.

    >>> stages = PipelineStage("encode", encode, max_batch=16), PipelineStage("generate", generate, num_workers=64)
    >>> async for results in StagedPipeline(stages).run(questions): ...
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from ragspec.errors import EngineError

T = TypeVar("T")

_CANCEL_AGAIN_S = 0.1
"""Work may answer its cancellation with an error, and then waits for a queue that nobody reads any more."""


class HasId(Protocol):
    """What runs through stages says who it is."""

    @property
    def id(self) -> str: ...


Items = Iterable[HasId] | AsyncIterable[HasId]
"""Read one by one, in a thread unless it is asynchronous, as soon as the first queue has room."""


@dataclass(frozen=True, slots=True)
class ItemResult(Generic[T]):
    """What became of one item: its value, or the error that it met first."""

    id: str
    value: T | None
    error: Exception | None = None

    def result(self) -> T:
        """Raises: the error."""
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


@dataclass(slots=True)
class StageMetrics:
    """What a stage has done so far. Seconds, wall clock.

    `busy_s`: something was at work in it; `waiting_s`: items stood in its queue, added up; `blocked_s`: finished ones had no room
    in the next queue, added up. `depth`: items in its queue now; `max_depth`: at most so far.
    """

    name: str
    num_items: int = 0
    num_failed: int = 0
    num_batches: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    blocked_s: float = 0.0
    depth: int = 0
    max_depth: int = 0
    _num_at_work: int = field(default=0, repr=False)
    _since_s: float = field(default=0.0, repr=False)

    @property
    def items_per_s(self) -> float:
        """While it was busy; 0 before that."""
        return self.num_items / self.busy_s if self.busy_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; seconds to the millisecond."""
        names = ("name", "num_items", "num_failed", "num_batches")
        times = {name: round(getattr(self, name), 3) for name in ("busy_s", "waiting_s", "blocked_s")}
        return (
            {name: getattr(self, name) for name in names} | times | {"depth": self.depth, "max_depth": self.max_depth}
        )

    def enter(self) -> None:
        self.depth += 1
        self.max_depth = max(self.max_depth, self.depth)

    def begin(self, waited_s: Sequence[float]) -> None:
        self.depth -= len(waited_s)
        self.waiting_s += sum(waited_s)
        if not self._num_at_work:
            self._since_s = time.perf_counter()
        self._num_at_work += 1

    def end(self, num_items: int, num_failed: int) -> None:
        self.num_batches += 1
        self.num_items += num_items
        self.num_failed += num_failed
        self._num_at_work -= 1
        if not self._num_at_work:
            self.busy_s += time.perf_counter() - self._since_s


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """`work` turns a list of values into as many results, in their order.

    A plain function runs in threads of the stage, a coroutine function in the event loop. At most `num_workers` batches are at
    work at once. Only values of equal `group` come together. Where `work` raises for several, each is tried alone: one's fault is
    not the others'. Not so an EngineError, which is of what all of them need.
    """

    name: str
    work: Callable[[list[Any]], Sequence[Any]] | Callable[[list[Any]], Awaitable[Sequence[Any]]]
    max_batch: int = 1
    num_workers: int = 1
    group: Callable[[Any], Hashable] = lambda _: None


@dataclass(slots=True)
class _QueuedItem:
    id: str
    value: Any
    entered_s: float = 0.0  # into its queue


class _EndOfRun(NamedTuple):
    """The source is exhausted, or (`error`) something other than an item failed."""

    error: Exception | None = None


class StagedPipeline:
    """Owns the metrics; the queues and tasks belong to a run. Several runs may overlap."""

    def __init__(self, stages: Sequence[PipelineStage], *, max_waiting: int = 32) -> None:
        """`max_waiting`: items that a queue holds at most."""
        self.metrics = tuple(StageMetrics(stage.name) for stage in stages)
        self._stages = tuple(stages)
        self._max_waiting = max_waiting

    async def run(self, items: Items) -> AsyncGenerator[list[ItemResult[Any]]]:
        """All that has finished since the last time, never nothing, until every item has. Reading slowly slows the stages down.

        Leaving the loop early cancels what runs; close it (`contextlib.aclosing`) to have that done at once.
        Raises: what reading `items` raises; then the rest is given up.
        """
        run = _StageRun(self._stages, self.metrics, self._max_waiting)
        try:
            run.start(items)
            while (finished := await run.next()) is not None:
                if finished:
                    yield finished
        finally:
            await run.stop()


class _StageRun:
    """One run: a queue before each stage and one behind the last, and the tasks that move items between them."""

    def __init__(self, stages: tuple[PipelineStage, ...], metrics: tuple[StageMetrics, ...], max_waiting: int) -> None:
        self._stages, self._metrics = stages, metrics
        self._queues = [asyncio.Queue[_QueuedItem](max_waiting) for _ in stages]
        self._finished = asyncio.Queue[ItemResult[Any] | _EndOfRun](max_waiting)
        self._executors: list[ThreadPoolExecutor] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._num_open = 0
        self._exhausted = False
        self._error: Exception | None = None

    def start(self, items: Items) -> None:
        self._spawn(self._feed(items))
        for number, stage in enumerate(self._stages):
            work = self._in_loop(stage)
            for _ in range(stage.num_workers):
                self._spawn(self._work(number, work))

    async def next(self) -> list[ItemResult[Any]] | None:
        """What has finished, perhaps nothing; None at the end. Raises: what ended the run, after all that had finished."""
        if self._error is not None:
            raise self._error
        if self._exhausted and not self._num_open:
            return None
        finished: list[ItemResult[Any]] = []
        for result in await _take_queued(self._finished):
            if isinstance(result, _EndOfRun):
                self._error = self._error or result.error
                self._exhausted = True
            else:
                finished.append(result)
        self._num_open -= len(finished)
        return finished

    async def stop(self) -> None:
        while left := [task for task in self._tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for metrics, queue in zip(self._metrics, self._queues, strict=True):
            metrics.depth -= queue.qsize()

    def _spawn(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.ensure_future(self._guarded(coroutine)))

    async def _guarded(self, coroutine: Awaitable[None]) -> None:
        """Why: a task that fails in silence leaves whoever waits for results waiting for ever."""
        try:
            await coroutine
        except Exception as error:
            await self._finished.put(_EndOfRun(error))

    async def _feed(self, items: Items) -> None:
        async for item in self._each(items):
            self._num_open += 1
            await self._pass_on(0, item.id, item)
        await self._finished.put(_EndOfRun())

    async def _each(self, items: Items) -> AsyncIterator[HasId]:
        if isinstance(items, AsyncIterable):
            async for item in items:
                yield item
            return
        iterator, end = iter(items), object()
        read = self._threaded(lambda: next(iterator, end), 1, "ragspec-items")
        while (item := await read()) is not end:
            yield cast(HasId, item)

    async def _work(self, number: int, work: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> None:
        stage, metrics = self._stages[number], self._metrics[number]
        while True:
            batch = await _take_queued(self._queues[number], stage.max_batch)
            now = time.perf_counter()
            metrics.begin([now - item.entered_s for item in batch])
            groups: dict[Hashable, list[_QueuedItem]] = {}
            results: list[Any] = []
            try:
                for item in batch:
                    groups.setdefault(stage.group(item.value), []).append(item)
                for group in groups.values():
                    results += await _call_stage(work, [item.value for item in group])
            finally:
                metrics.end(len(results), sum(isinstance(result, Exception) for result in results))
            begin = time.perf_counter()
            for item, result in zip([i for group in groups.values() for i in group], results, strict=True):
                await self._pass_on(number + 1, item.id, result)
            metrics.blocked_s += time.perf_counter() - begin

    async def _pass_on(self, number: int, id: str, value: Any) -> None:
        if isinstance(value, Exception):
            await self._finished.put(ItemResult(id, None, value))
        elif number == len(self._stages):
            await self._finished.put(ItemResult(id, value))
        else:
            await self._queues[number].put(item := _QueuedItem(id, value))
            item.entered_s = (
                time.perf_counter()
            )  # Why after: until now there was no room; nobody else has run since then
            self._metrics[number].enter()

    def _in_loop(self, stage: PipelineStage) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        if inspect.iscoroutinefunction(stage.work):
            return stage.work
        return self._threaded(stage.work, stage.num_workers, f"ragspec-{stage.name}")

    def _threaded(self, call: Callable[..., Any], num_threads: int, name: str) -> Callable[..., Awaitable[Any]]:
        executor = ThreadPoolExecutor(num_threads, name)
        self._executors.append(executor)
        loop = asyncio.get_running_loop()
        return lambda *arguments: loop.run_in_executor(executor, call, *arguments)


async def _call_stage(work: Callable[[list[Any]], Awaitable[Sequence[Any]]], values: list[Any]) -> list[Any]:
    """One for each value, exceptions among them."""
    try:
        results = list(await work(values))
    except Exception as error:
        if isinstance(error, EngineError) or len(values) == 1:
            return [error] * len(values)
        return [result for value in values for result in await _call_stage(work, [value])]
    assert len(results) == len(values), "a stage's work returns one result for each value"
    return results


async def _take_queued(queue: asyncio.Queue[T], most: int | None = None) -> list[T]:
    """What waits in a queue, at least one and at most `most`."""
    taken = [await queue.get()]
    while not queue.empty() and (most is None or len(taken) < most):
        taken.append(queue.get_nowait())
    return taken
