"""One tenant's many requests delay another's few by a bounded number of steps, and change no token of anybody's."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from oracle import decode
from tiny_target import Tiny, tiny_engine

from ragspec.config import EngineConfig
from ragspec.core import Delta, Request, SamplingParams
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.admission import Admission
from ragspec.engine.client import Collector
from ragspec.engine.engine import Engine
from ragspec.engine.scheduler import Scheduler
from ragspec.engine.target import Target
from ragspec.numerics.kv_cache import KvPool
from ragspec.tenants import cache_salt_of

GREEDY = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)


class Linear(CostTable):
    """Every row costs as much as the first."""

    def __init__(self) -> None:
        super().__init__({64: [1.0, 2.0]}, rows=(1, 2))

    def refine(self, num_rows: int, context: int, seconds: float) -> None:
        """The machine's speed decides nothing."""


def flood(count: int, prompt: int = 8, n: int = 1, max_tokens: int = 24) -> list[Request]:
    """One tenant's requests; each names another part of its caches."""
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=5, n=n, ignore_eos=True)
    return [
        Request(f"a{i}", tuple(range(3 + i, 3 + i + prompt)), params, salt=cache_salt_of("ann", str(i % 3)))
        for i in range(count)
    ]


def by_the_end_of(few: Request, many: Sequence[Request], engine: Engine, after: int = 1) -> tuple[int, int]:
    """How many choices of `many` had ended, and had begun, when `few` ended, which came when `after` of them had begun."""
    ended, begun, seen = set[tuple[str, int]](), set[tuple[str, int]](), list[tuple[int, int]]()
    arrived = threading.Event()
    collector = Collector([*many, few])

    def listener(delta: Delta) -> None:
        begun.add((delta.request_id, delta.choice))
        if len(begun) >= after:
            arrived.set()
        if delta.finish_reason is not None and delta.request_id == few.id:
            seen.append((len(ended), len(begun)))
        elif delta.finish_reason is not None:
            ended.add((delta.request_id, delta.choice))
        collector(delta)

    engine.submit_all(many, listener)
    assert arrived.wait(60.0)
    engine.submit(few, listener)
    completions = collector.wait()
    asked = [request for request in (*many, few) for _ in request.choices]
    for completion, request in list(zip(completions, asked, strict=True))[::-6]:
        plain = decode(engine.target, request.prompt_ids, request.params, completion.choice)
        assert completion.token_ids == plain.token_ids
    return seen[0]


@pytest.mark.parametrize("enable_prefix_caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_request_does_not_wait_for_another_tenant_s_hundreds(tiny: Tiny, enable_prefix_caching: bool) -> None:
    """First come, first served: 30 streams of 8 choices, and another's chat waited for all of them."""
    few = Request("b", (40, 41, 42), GREEDY, salt="bob")
    with tiny_engine(tiny(), max_num_seqs=4, enable_prefix_caching=enable_prefix_caching) as engine:
        num_ended, num_begun = by_the_end_of(few, flood(12, n=4), engine, after=4)
        assert engine.load().num_preemptions > 0
    assert num_ended <= 12 and num_begun <= 16


def test_it_does_not_wait_for_memory_either(tiny: Tiny) -> None:
    """There are places, but another tenant's sequences hold every page."""
    few = Request("b", tuple(range(40, 72)), GREEDY, salt="bob")
    with tiny_engine(tiny(), num_kv_slots=192, max_num_seqs=64) as engine:
        num_ended, _ = by_the_end_of(few, flood(24, prompt=30), engine)
    assert num_ended <= 12


def test_long_prompts_of_one_tenant_leave_room_in_every_step(tiny: Tiny) -> None:
    """Prompts are read in order of arrival: a question waits for all the pages before it."""
    few = Request("b", (40, 41, 42), GREEDY, salt="bob")
    with tiny_engine(tiny(), costs=Linear(), max_num_seqs=32) as engine:
        num_ended, _ = by_the_end_of(few, flood(24, prompt=90, max_tokens=2), engine)
    assert num_ended <= 6


class Waiting:
    """A scheduler without an engine: sequences of tenants, each with some pending tokens."""

    def __init__(self, target: Target, cost_s: Callable[[int, int], float], **config: Any) -> None:
        target.pool = KvPool(target.shapes, 2048)
        self.scheduler = Scheduler(target.pool, EngineConfig(max_kv_tokens=2048, **config), 0, cost_s)
        self._admission = Admission(target, "tiny")

    def add(self, tenant: str, number: int, length: int) -> None:
        for each in range(number):
            request = Request(f"{tenant}{each}", tuple(range(5, 5 + length)), GREEDY, salt=tenant)
            (sequence,) = self._admission.sequences(request, lambda delta: None, lambda request: {})
            self.scheduler.waiting.append(sequence)

    def step(self) -> dict[str, int]:
        """Rows of each tenant in the next step, which then counts as made."""
        rows: dict[str, int] = {}
        for sequence, num_tokens in self.scheduler.schedule():
            rows[sequence.request.salt] = rows.get(sequence.request.salt, 0) + num_tokens
            assert sequence.slots is not None
            slots, index = sequence.slots.reserve(num_tokens)
            sequence.slots.keep(slots, index, list(range(num_tokens)))
            if sequence.num_pending == 0:
                sequence.tokens.append(7)
        return rows


def linear(rows: int, context: int) -> float:
    return float(rows)


def test_a_step_of_several_tenants_is_at_most_twice_as_long_as_a_fair_one(tiny: Tiny) -> None:
    """Everybody's tokens wait for the rows of the one that runs most, in every step."""
    waiting = Waiting(tiny(), linear, max_num_seqs=40)
    waiting.add("ann", 30, 8)
    assert sum(waiting.step().values()) == 30 * 8, "alone it may have all"
    waiting.add("bob", 1, 8)
    for _ in range(20):
        rows = waiting.step()
        assert rows["bob"] >= 1 and rows["ann"] <= 3 * rows["bob"]
    steps = [sequence.last_step for sequence in waiting.scheduler.running if sequence.request.salt == "ann"]
    assert max(steps) - min(steps) <= 10, "its own sequences take turns"


def test_where_rows_are_cheap_they_are_used(tiny: Tiny) -> None:
    """Fairness halves the throughput of a device on which a step of many rows takes as long as one of few."""
    waiting = Waiting(tiny(), lambda rows, context: 1.0, max_num_seqs=40)
    waiting.add("ann", 30, 8)
    waiting.add("bob", 1, 8)
    assert waiting.step() == {"ann": 240, "bob": 8}
    assert waiting.step() == {"ann": 30, "bob": 1}


def test_a_long_prompt_holds_who_decodes_for_one_short_step_at_a_time(tiny: Tiny) -> None:
    """Everybody's next token waited for 512 rows of somebody's prompt, though 96 are read as fast a row."""

    def cost_s(rows: int, context: int) -> float:
        return 5.0 + rows

    waiting = Waiting(tiny(), cost_s, max_num_seqs=40, max_num_batched_tokens=512)
    waiting.add("ann", 4, 1)
    waiting.step()
    waiting.add("ann", 1, 240)
    scheduler, seconds = waiting.scheduler, list[float]()
    while any(sequence.num_pending > 1 for sequence in [*scheduler.running, *scheduler.waiting]):
        decoding = [s for s in scheduler.running if s.num_pending == 1]
        seconds.append(cost_s(sum(waiting.step().values()), 0))
        assert all(s.last_step == scheduler.load().num_steps for s in decoding), "no decode is left out of a step"
    assert max(seconds) <= 5 + 4 + 96 and len(seconds) > 1
    assert 240 / sum(seconds) > 0.85 * 512 / cost_s(516, 0), "the prompt itself loses little"


def test_where_rows_are_free_a_prompt_is_read_at_once(tiny: Tiny) -> None:
    """Chunks of a size that suits a CPU made a prompt wait for many steps on a device that reads it in one."""
    waiting = Waiting(tiny(), lambda rows, context: 1.0, max_num_seqs=40, max_num_batched_tokens=256)
    waiting.add("ann", 4, 1)
    waiting.step()
    waiting.add("ann", 1, 240)
    assert waiting.step() == {"ann": 244}


def test_more_tenants_than_rows_take_turns(tiny: Tiny) -> None:
    """With more of them than a step has rows, the last ones get none until others end."""
    waiting = Waiting(tiny(), linear, max_num_seqs=64, max_num_batched_tokens=32)
    for number in range(48):
        waiting.add(f"t{number}", 1, 1)
    rows = [waiting.step() for _ in range(6)]
    assert [sum(each.values()) for each in rows] == [32] * 6
    assert all(sum(each.get(f"t{number}", 0) for each in rows) >= 3 for number in range(48))


def test_prompts_that_begin_alike_are_read_once(tiny: Tiny) -> None:
    """Questions about the same passages that came together each read them; or one waited for the end of a long prompt."""
    shared = [5 + i * i % 50 for i in range(100)]
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, ignore_eos=True)
    requests = [Request(f"r{i}", (*shared, 60, 61, 62 + i), params, salt="ann") for i in range(6)]
    requests += [Request("long", (*shared, *range(40, 90), *range(40, 90)), params, salt="ann")]
    requests += [Request("other", (*shared, 60, 61, 62), params, salt="bob")]
    with tiny_engine(tiny(), num_kv_slots=2048, max_num_seqs=16, max_num_batched_tokens=32) as engine:
        completions = engine.generate(requests)
        for completion, request in zip(completions, requests, strict=True):
            assert completion.token_ids == decode(engine.target, request.prompt_ids, params).token_ids
        engine.check_integrity()
    cached = {c.request_id: c.stats.num_cached_tokens for c in completions}
    assert cached["r0"] == cached["other"] == 0
    assert cached["long"] >= 64 and all(cached[f"r{i}"] >= 64 for i in range(1, 6))


def test_a_pinned_beginning_is_read_for_nobody_again(tiny: Tiny) -> None:
    """Each tenant's first question read the instruction anew; or a full cache, or a deletion, ended that."""
    beginning = tuple(5 + i * i % 50 for i in range(50))
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, ignore_eos=True)
    with tiny_engine(tiny(), num_kv_slots=1024, max_num_seqs=4) as engine:
        engine.pin(beginning)
        engine.pin(beginning)
        for salt in ("ann", "bob", ""):
            requests = [Request(f"{salt}{i}", (*beginning, *range(i, 90)), params, salt=salt) for i in range(10, 30)]
            completions = engine.generate(requests)
            assert min(each.stats.num_cached_tokens for each in completions) >= len(beginning)
            assert completions[0].token_ids == decode(engine.target, requests[0].prompt_ids, params).token_ids
            engine.purge(salt)
            engine.check_integrity()
        (other,) = engine.generate([Request("other", (*beginning[:-1], 3, 4), params, salt="ann")])
        assert other.stats.num_cached_tokens == 0, "only the whole of it is everybody's"
