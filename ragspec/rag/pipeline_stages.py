"""Pipeline stages that run concurrently, with a bounded queue before each.

    items -> queue -> stage -> queue -> stage -> queue -> results, in the order in which they finish

A stage whose next queue is full waits, and so do all stages before it and the source of the items. A stage takes up to
`max_batch` queued items at once. An item that raises an error skips the remaining stages.

    >>> stages = PipelineStage("encode", encode, max_batch=16), PipelineStage("generate", generate, num_workers=64)
    >>> async for results in StagedPipeline(stages).run(questions): ...
"""

import asyncio
import bisect
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
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from ragspec.errors import EngineError

T = TypeVar("T")

_CANCEL_AGAIN_S = 0.1
"""A cancelled worker whose work raises another error waits for room in a queue without a reader, so it is cancelled again."""


class HasId(Protocol):
    """An item; results carry its id."""

    @property
    def id(self) -> str: ...


Items = Iterable[HasId] | AsyncIterable[HasId]
"""Read one at a time when the first queue has room; in a thread unless asynchronous."""


@dataclass(frozen=True, slots=True)
class ItemResult(Generic[T]):
    """The value of one item, or its first error."""

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
    """Counters of a stage. Seconds, wall clock.

    `busy_s`: time with at least one batch at work. `waiting_s`: time in the queue, summed over items. `blocked_s`: time without
    room in the next queue, summed over batches. `depth`: items in the queue now; `max_depth`: the most so far.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; seconds to the millisecond."""
        fields = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}

    def enqueue(self) -> None:
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
    """`work` maps a list of values to as many results, in order.

    A plain function runs in the stage's threads, a coroutine function in the event loop; at most `num_workers` batches run at
    once. Only values with equal `group` share a call. If `work` raises for several values, each is tried alone, so that one bad
    item does not fail its neighbours; except an EngineError, which concerns them all. With an `order`, up to `window` values wait
    for the stage, and the next value is the first in that order behind the last one taken; at the end it begins anew.
    """

    name: str
    work: Callable[[list[Any]], Sequence[Any]] | Callable[[list[Any]], Awaitable[Sequence[Any]]]
    max_batch: int = 1
    num_workers: int = 1
    group: Callable[[Any], Hashable] = lambda _: None
    order: Callable[[Any], Any] | None = None
    window: int = 256


class StagedPipeline:
    """Owns the metrics; queues and tasks belong to a run. Runs may overlap."""

    def __init__(self, stages: Sequence[PipelineStage], *, max_waiting: int = 32) -> None:
        """`max_waiting`: the most items in one queue."""
        self.metrics = tuple(StageMetrics(stage.name) for stage in stages)
        self._stages, self._max_waiting = tuple(stages), max_waiting

    def run(self, items: Items) -> AsyncGenerator[list[ItemResult[Any]]]:
        """Non-empty lists of results until every item has one. Reading slowly slows the stages down.

        Leaving the loop early cancels the run; `contextlib.aclosing` cancels it at once.
        Raises: what reading `items` raises; then unfinished items are abandoned.
        """
        return _StageRun(self._stages, self.metrics, self._max_waiting).results(items)


@dataclass(slots=True)
class _QueuedItem:
    id: str
    value: Any
    entered_s: float = 0.0


class _OrderedQueue(asyncio.Queue[_QueuedItem]):
    """As `PipelineStage.order` says."""

    def __init__(self, stage: PipelineStage) -> None:
        assert stage.order is not None
        self._order, self._last = stage.order, None
        super().__init__(stage.window)

    def _init(self, maxsize: int) -> None:
        self._queue: list[tuple[Any, _QueuedItem]] = []

    def _put(self, item: _QueuedItem) -> None:
        bisect.insort(self._queue, (self._order(item.value), item), key=itemgetter(0))

    def _get(self) -> _QueuedItem:
        at = 0 if self._last is None else bisect.bisect_left(self._queue, self._last, key=itemgetter(0))
        self._last, item = self._queue.pop(at % len(self._queue))
        return item


class _EndOfRun(NamedTuple):
    """Every item has its result, or (`error`) something other than an item failed."""

    error: Exception | None


class _StageRun:
    """The queues of one run and the tasks that move items between them."""

    def __init__(self, stages: tuple[PipelineStage, ...], metrics: tuple[StageMetrics, ...], max_waiting: int) -> None:
        self._stages, self._metrics = stages, metrics
        self._queues = [
            _OrderedQueue(each) if each.order else asyncio.Queue[_QueuedItem](max_waiting) for each in stages
        ]
        self._results = asyncio.Queue[ItemResult[Any] | _EndOfRun](max_waiting)
        self._executors: list[ThreadPoolExecutor] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def results(self, items: Items) -> AsyncGenerator[list[ItemResult[Any]]]:
        try:
            self._start(self._feed(items))
            for number, stage in enumerate(self._stages):
                work = self._asynchronous(stage)
                for _ in range(stage.num_workers):
                    self._start(self._work(number, work))
            end = None
            while end is None:
                taken = await _take_queued(self._results)
                end = next((each for each in taken if isinstance(each, _EndOfRun)), None)
                if results := [each for each in taken if isinstance(each, ItemResult)]:
                    yield results
            if end.error is not None:
                raise end.error
        finally:
            await self._stop()

    def _start(self, coroutine: Awaitable[None]) -> None:
        self._tasks.append(asyncio.ensure_future(self._until_end(coroutine)))

    async def _until_end(self, coroutine: Awaitable[None]) -> None:
        """End the run when the task returns or fails: only `_feed` returns."""
        error = None
        try:
            await coroutine
        except Exception as cause:
            error = cause
        await self._results.put(_EndOfRun(error))

    async def _stop(self) -> None:
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for metrics, queue in zip(self._metrics, self._queues, strict=True):
            metrics.depth -= queue.qsize()

    async def _feed(self, items: Items) -> None:
        """Read all items, then wait until they have left every stage."""
        async for item in self._read(items):
            await self._pass_on(0, item.id, item)
        for queue in self._queues:
            await queue.join()

    async def _read(self, items: Items) -> AsyncIterator[HasId]:
        if isinstance(items, AsyncIterable):
            async for item in items:
                yield item
            return
        iterator, end = iter(items), object()
        read = self._threaded(lambda: next(iterator, end), 1, "ragspec-items")
        while (item := await read()) is not end:
            yield cast(HasId, item)

    async def _work(self, number: int, work: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> None:
        stage, metrics, queue = self._stages[number], self._metrics[number], self._queues[number]
        while True:
            batch = await _take_queued(queue, stage.max_batch)
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
                queue.task_done()
            metrics.blocked_s += time.perf_counter() - begin

    async def _pass_on(self, number: int, id: str, value: Any) -> None:
        if isinstance(value, Exception):
            await self._results.put(ItemResult(id, None, value))
        elif number == len(self._stages):
            await self._results.put(ItemResult(id, value))
        else:
            await self._queues[number].put(item := _QueuedItem(id, value))
            item.entered_s = time.perf_counter()  # Why here: now the queue has room, and no other task has run since
            self._metrics[number].enqueue()

    def _asynchronous(self, stage: PipelineStage) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        if inspect.iscoroutinefunction(stage.work):
            return stage.work
        return self._threaded(stage.work, stage.num_workers, f"ragspec-{stage.name}")

    def _threaded(self, call: Callable[..., Any], num_threads: int, name: str) -> Callable[..., Awaitable[Any]]:
        executor = ThreadPoolExecutor(num_threads, name)
        self._executors.append(executor)
        loop = asyncio.get_running_loop()
        return lambda *arguments: loop.run_in_executor(executor, call, *arguments)


async def _call_stage(work: Callable[[list[Any]], Awaitable[Sequence[Any]]], values: list[Any]) -> list[Any]:
    """One result or exception for each value."""
    try:
        results = list(await work(values))
    except Exception as error:
        if isinstance(error, EngineError) or len(values) == 1:
            return [error] * len(values)
        return [result for value in values for result in await _call_stage(work, [value])]
    assert len(results) == len(values), "a stage's work returns one result for each value"
    return results


async def _take_queued(queue: asyncio.Queue[T], max_items: int | None = None) -> list[T]:
    """Everything in the queue, at least one item and at most `max_items`."""
    taken = [await queue.get()]
    while not queue.empty() and (max_items is None or len(taken) < max_items):
        taken.append(queue.get_nowait())
    return taken
