"""Stages: every item once, bounded queues, errors that stay with their item, and an end that leaves nothing running.

Nothing here depends on time: what must wait waits for an event.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import EngineError, InputError
from ragspec.rag.pipeline_stages import ItemResult, Items, PipelineStage, StagedPipeline


class Number(NamedTuple):
    id: str
    value: int


def numbers(count: int) -> list[Number]:
    return [Number(f"n{i}", i) for i in range(count)]


async def collected(stages: StagedPipeline, items: Items) -> list[ItemResult[Any]]:
    async with aclosing(stages.run(items)) as batches:
        return [finished async for batch in batches for finished in batch]


async def collected_at_once(
    work: Callable[[list[Any]], list[Any]], max_batch: int
) -> tuple[StagedPipeline, list[ItemResult[Any]]]:
    """Nine items: the first at work, and the others in the queue before it ends."""
    gate = asyncio.Event()
    stages = StagedPipeline((PipelineStage("s", held(gate, work), max_batch),), max_waiting=8)
    task = asyncio.ensure_future(collected(stages, aiter_of(numbers(9))))
    await settled()
    gate.set()
    return stages, await task


async def settled() -> None:
    """Everything in the loop that can go on has gone on. Only where no thread takes part."""
    for _ in range(500):
        await asyncio.sleep(0)


def same(values: Sequence[Any]) -> Sequence[Any]:
    return values


async def same_soon(values: Sequence[Any]) -> Sequence[Any]:
    await asyncio.sleep(0)
    return values


def held(gate: asyncio.Event, work: Callable[[list[Any]], Any] = same) -> Callable[[list[Any]], Awaitable[list[Any]]]:
    """Work that waits for the gate."""

    async def held_work(values: list[Any]) -> list[Any]:
        await gate.wait()
        return work(values)

    return held_work


STAGE = st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())


@settings(max_examples=15, deadline=None)
@given(st.lists(STAGE, min_size=1, max_size=4), st.integers(0, 60), st.integers(1, 5), st.sets(st.integers(0, 59)))
def test_every_item_comes_out_once_with_its_own_result(
    shapes: list[tuple[int, int, bool, bool]], count: int, max_waiting: int, wrong: set[int]
) -> None:
    """An item is lost or comes twice, or gets its neighbour's result or error, in some shape of stages."""

    def checked(values: list[Any]) -> list[Any]:
        if bad := [value for value in values if value.value in wrong]:
            raise InputError(f"{bad[0].value} is wrong")
        return values

    async def checked_soon(values: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return checked(values)

    stages = [
        PipelineStage(
            str(i), checked_soon if soon else checked, batch, workers, lambda v, n=3 if grouped else 1: v.value % n
        )
        for i, (batch, workers, soon, grouped) in enumerate(shapes)
    ]
    finished = asyncio.run(collected(StagedPipeline(stages, max_waiting=max_waiting), numbers(count)))
    assert sorted(each.id for each in finished) == sorted(number.id for number in numbers(count))
    for each in finished:
        number = int(each.id[1:])
        if number in wrong:
            assert (each.value, str(each.error)) == (None, f"{number} is wrong")
        else:
            assert (each.value, each.error) == (Number(each.id, number), None)


async def test_queues_are_bounded_and_a_slow_stage_stops_the_source() -> None:
    """A million questions read into memory, or a thousand prompts before one engine."""

    gate, num_read = asyncio.Event(), 0

    async def endless() -> AsyncIterator[Number]:
        nonlocal num_read
        while num_read < 10_000:
            num_read += 1
            yield Number(f"n{num_read}", num_read)

    stages = StagedPipeline(
        (PipelineStage("a", same_soon, num_workers=2), PipelineStage("b", held(gate), num_workers=3)), max_waiting=4
    )
    async with aclosing(stages.run(endless())) as batches:
        first = asyncio.ensure_future(anext(batches))
        await settled()
        # 3 at work in b, 4 before it, 2 done in a and not passed on, 4 before a, 1 in the source's hand
        assert num_read == 3 + 4 + 2 + 4 + 1
        assert [metrics.depth for metrics in stages.metrics] == [4, 4]
        gate.set()
        await first
        await settled()  # nobody reads on: what is finished has bounds, too
        bound = 4 + 3 + 4 + 2 + 4 + 1
        assert num_read <= len(first.result()) + bound < 100
    assert [metrics.max_depth for metrics in stages.metrics] == [4, 4]
    assert [metrics.depth for metrics in stages.metrics] == [0, 0], "what was given up still counts as waiting"


async def test_stages_work_side_by_side() -> None:
    """One stage after the other: the index waits while the engine writes."""
    looked_up = asyncio.Event()

    async def look_up(values: list[Number]) -> list[Number]:
        if values[0].value == 1:
            looked_up.set()
        return values

    # the first is only written once the second was looked up
    stages = PipelineStage("look up", look_up), PipelineStage("write", held(looked_up))
    async with asyncio.timeout(20):
        assert len(await collected(StagedPipeline(stages), numbers(2))) == 2


async def test_computing_stages_leave_the_loop_free() -> None:
    """Ten seconds of computing in the loop, in which no stream moves; a source that reads a slow disk does the same."""
    in_loop = threading.Event()

    def waits(values: list[Any]) -> list[Any]:
        assert in_loop.wait(20), "the loop stood still"
        return values

    def reads() -> Iterator[Number]:
        assert in_loop.wait(20), "the loop stood still"
        yield from numbers(2)

    asyncio.get_running_loop().call_later(0.01, in_loop.set)
    results = await collected(StagedPipeline((PipelineStage("compute", waits),)), reads())
    assert [each.error for each in results] == [None, None]


async def test_what_waits_is_worked_on_together() -> None:
    """An encoder that is asked for one text at a time while a hundred wait."""
    sizes: list[int] = []

    def work(values: list[Any]) -> list[Any]:
        sizes.append(len(values))
        return values

    stages, _ = await collected_at_once(work, max_batch=5)
    (metrics,) = stages.metrics
    assert sizes == [1, 5, 3], "nothing was to wait for company, and what waited was to come together"
    assert (metrics.num_items, metrics.num_batches, metrics.num_failed, metrics.max_depth) == (9, 3, 0, 8)
    assert metrics.busy_s > 0 and metrics.waiting_s > 0
    assert metrics.to_dict()["num_batches"] == 3


async def test_values_that_are_alike_come_one_after_the_other() -> None:
    """Prompts about one document came to the engine days apart; or the first ones in their order were never overtaken."""
    gate, seen = asyncio.Event(), list[int]()

    def work(values: list[Number]) -> list[Number]:
        seen.extend(number.value for number in values)
        return values

    stage = PipelineStage("s", held(gate, work), order=lambda number: number.value % 5, window=20)
    task = asyncio.ensure_future(collected(StagedPipeline((stage,), max_waiting=8), aiter_of(numbers(23)[3:])))
    await settled()
    gate.set()
    await task
    assert seen == [3, 8, 13, 18, 4, 9, 14, 19, 5, 10, 15, 20, 6, 11, 16, 21, 7, 12, 17, 22]


async def aiter_of(items: list[Number]) -> AsyncIterator[Number]:
    """The first alone, the others as fast as they are taken."""
    for item in items:
        yield item
        if item is items[0]:
            for _ in range(5):
                await asyncio.sleep(0)


async def test_only_a_group_comes_together() -> None:
    """Two tenants' questions in one call of the index."""
    batches: list[list[int]] = []

    def work(values: list[Number]) -> list[Number]:
        batches.append([number.value for number in values])
        return values

    await collected(StagedPipeline((PipelineStage("s", work, 8, group=lambda n: n.value % 2),)), numbers(30))
    assert all(len({value % 2 for value in batch}) == 1 for batch in batches)
    assert sorted(value for batch in batches for value in batch) == list(range(30))


async def test_a_lost_index_is_told_once_a_batch() -> None:
    """Sixteen time-outs one after the other, because each question of a failed call is tried alone."""
    calls: list[int] = []

    def work(values: list[Any]) -> list[Any]:
        calls.append(len(values))
        raise EngineError("lost")

    _, finished = await collected_at_once(work, max_batch=16)
    assert calls == [1, 8]
    assert [str(each.error) for each in finished] == ["lost"] * 9
    with pytest.raises(EngineError, match="lost"):
        finished[0].result()


async def test_a_defect_met_by_one_is_not_its_neighbours() -> None:
    """Fifteen rows without an answer because a bug is met by the sixteenth."""

    def work(values: list[Number]) -> list[Number]:
        if any(number.value == 4 for number in values):
            raise ZeroDivisionError
        return values

    _, finished = await collected_at_once(work, max_batch=16)
    assert [each.id for each in finished if each.error] == ["n4"] and len(finished) == 9


async def test_what_had_finished_is_given_before_the_error_that_ends_the_run() -> None:
    """Answers that were paid for and are not written down, because the input broke at the same moment."""

    async def source() -> AsyncIterator[Number]:
        for number in numbers(3):
            yield number
        await settled()
        raise InputError("the file was changed")

    got: list[str] = []
    async with aclosing(StagedPipeline((PipelineStage("s", same_soon),)).run(source())) as batches:
        first = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        for _ in range(3):
            await settled()  # the error is in the queue, behind all results
        got += [finished.id for finished in await first]
        with pytest.raises(InputError, match="the file was changed"):
            while True:
                got += [finished.id for finished in await anext(batches)]
    assert got == ["n0", "n1", "n2"]


@pytest.mark.parametrize("fails", [False, True])
async def test_leaving_early_cancels_what_runs(fails: bool) -> None:
    """A closed browser tab whose thousand questions go on; a worker that answers its cancellation with an error, and waits for
    ever for room in a queue that nobody reads."""
    before, cancelled = asyncio.all_tasks(), list[int]()

    async def work(values: list[Number]) -> list[Number]:
        if values[0].value < 3:
            return values
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(values[0].value)
            if fails:
                raise ValueError("cancelled work that fails") from None
            raise
        return values

    stages = StagedPipeline((PipelineStage("write", work, num_workers=4),), max_waiting=1)
    async with asyncio.timeout(20), aclosing(stages.run(aiter_of(numbers(50)))) as batches:
        await anext(batches)
        await settled()
    assert asyncio.all_tasks() == before, "tasks are left"
    assert 1 <= len(cancelled) <= 4


def test_a_source_that_fails_ends_the_run_with_its_error() -> None:
    """A file that cannot be read any more looks like the end of the input."""

    def failing() -> Iterator[Number]:
        yield from numbers(3)
        raise InputError("the file was changed")

    with pytest.raises(InputError, match="the file was changed"):
        asyncio.run(collected(StagedPipeline((PipelineStage("s", same),)), failing()))


def test_work_that_breaks_its_promise_is_no_silence() -> None:
    """A stage that drops a result: whoever waits for all of them waits for ever."""

    def drops(values: list[Any]) -> list[Any]:
        return values[1:]

    with pytest.raises(AssertionError, match="one result for each value"):
        asyncio.run(asyncio.wait_for(collected(StagedPipeline((PipelineStage("s", drops),)), numbers(2)), 20))
