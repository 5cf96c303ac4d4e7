"""What an engine meets in the world: edges of every size, callers that misbehave, steps that fail, and closing time."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from drafters import Perfect, Random
from oracle import decode, next_logits
from stand_ins import Heard
from tiny_target import CONTEXT, Tiny, tiny_engine, tiny_tokenizer, written

from ragspec.config import DraftingConfig, DraftTreeConfig, EngineConfig, TargetConfig
from ragspec.core import Delta, FinishReason, Request, SamplingParams, Segment
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.scheduler import Scheduler
from ragspec.engine.target import Target
from ragspec.engine.text import IncrementalDetokenizer
from ragspec.errors import Cancelled, EngineClosed, EngineError, InputError, ModelError, PromptTooLong
from ragspec.numerics.attention import PAGE
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots

SHORT = SamplingParams(max_tokens=4)


def ask(name: str, prompt: tuple[int, ...] = (5, 6, 7), params: SamplingParams = SHORT, salt: str = "") -> Request:
    return Request(name, prompt, params, salt=salt)


def assert_healthy(engine: Engine) -> None:
    """Still answers rightly, and no slot is lost."""
    request = ask("healthy", (9, 8, 7))
    assert engine.generate([request])[0].token_ids == decode(engine.target, request.prompt_ids, SHORT).token_ids
    assert engine.idle()
    engine.check_integrity()


@pytest.fixture
def engine(tiny: Tiny) -> Iterator[Engine]:
    """Without drafters; answers rightly when the test has ended."""
    with tiny_engine(tiny()) as engine:
        yield engine
        assert_healthy(engine)


@pytest.mark.parametrize("length", [1, CONTEXT - 4, CONTEXT - 1])
def test_prompts_of_every_length_with_deep_drafts(tiny: Tiny, length: int) -> None:
    """A draft reached past the last position of the context and failed the step, or read behind a table."""
    target = tiny()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    request = ask("a", tuple(range(2, 2 + length)), params)
    plain = decode(target, request.prompt_ids, params)
    assert len(plain.token_ids) == min(12, CONTEXT - length)
    for drafter in (Perfect({("a", 0): (*plain.token_ids, *range(40))}), Random(target.vocab_size)):
        with tiny_engine(target, [drafter], max_nodes=40) as engine:
            (completion,) = engine.generate([request])
            assert completion.token_ids == plain.token_ids
            assert completion.finish_reason is FinishReason.LENGTH
            assert_healthy(engine)


def test_a_prompt_that_does_not_fit_says_both_numbers(tiny: Tiny) -> None:
    """The engine waited for ever for room that it can never have."""
    target = tiny()
    with tiny_engine(target) as engine:
        for length in (CONTEXT, CONTEXT + 1, 5000):
            with pytest.raises(PromptTooLong) as caught:
                engine.submit(ask("a", (3,) * length), Heard())
            assert (caught.value.num_prompt_tokens, caught.value.max_prompt_tokens) == (length, CONTEXT - 1)
    with tiny_engine(target, num_kv_slots=96) as engine:
        with pytest.raises(PromptTooLong):
            engine.generate([ask("a", (3,) * 64)])
        (completion,) = engine.generate([ask("a", (3,) * 63, SamplingParams(max_tokens=50))])
        assert len(completion.token_ids) == 1
        assert_healthy(engine)


def test_the_vocabulary_has_two_ends(engine: Engine) -> None:
    """Token ids at the edge refused, or ids past it read as somebody else's memory."""
    target = engine.target
    last = target.vocab_size - 1
    request = ask("a", (0, last, last, 0))
    assert engine.generate([request])[0].token_ids == decode(target, request.prompt_ids, SHORT).token_ids
    for prompt in ((), (0, last + 1), (-1, 3), (10**12,)):
        with pytest.raises(InputError):
            engine.submit(ask("a", prompt), Heard())
    for bias in ({last + 1: 1.0}, {-1: 1.0}):
        with pytest.raises(InputError):
            engine.submit(ask("a", params=SamplingParams(logit_bias=bias)), Heard())


@pytest.mark.parametrize("num_rows", [1, 33, 127])
def test_forwards_of_odd_shapes(tiny: Tiny, num_rows: int) -> None:
    """No wanted row, one of many, or all of them."""
    target = tiny()
    tokens = np.random.default_rng(num_rows).integers(0, target.vocab_size, num_rows).astype(np.int32)
    for wanted in ([], [0], [num_rows - 1], list(range(num_rows))):
        slots = SequenceSlots(target.pool)
        metadata = Batch([ScheduledSequence(slots, tokens)]).metadata
        logits = target.forward(tokens, metadata, np.array(wanted, np.int32))
        slots.release()
        assert logits.shape == (len(wanted), target.vocab_size)
        for got, row in zip(logits, wanted, strict=True):
            np.testing.assert_array_equal(got, next_logits(target, tokens[: row + 1].tolist()))


def test_duplicate_ids_are_refused_while_one_runs(engine: Engine) -> None:
    """Two requests' tokens in one stream; an id that stays taken after its end."""
    running = Heard()
    engine.submit(ask("a", params=SamplingParams(max_tokens=200)), running)
    with pytest.raises(InputError, match="'a'"):
        engine.submit(ask("a"), Heard())
    engine.cancel("a")
    assert running.ended.wait(60)
    with pytest.raises(InputError):
        engine.generate([ask("b"), ask("b")])
    assert len(engine.generate([ask("a"), ask("b")])) == 2


def test_generate_starts_all_or_none(engine: Engine) -> None:
    """One bad request in a list left its neighbours running with nobody to hear them."""
    with pytest.raises(InputError):
        engine.generate([ask("good", params=SamplingParams(max_tokens=200)), ask("bad", ())])
    assert len(engine.generate([ask("good"), ask("bad")])) == 2
    assert engine.generate([]) == []


def test_cancelling_takes_one_step(engine: Engine) -> None:
    """Tokens computed for somebody who has left; pages that stay taken."""
    long = SamplingParams(max_tokens=200, n=2, temperature=1.0, seed=3)
    listener = Heard(2, lambda delta: engine.cancel("a") if delta.finish_reason is None else None)
    engine.submit(ask("a", params=long), listener)
    assert listener.ended.wait(60)
    assert_healthy(engine)
    assert listener.num_tokens <= 2
    assert [d.finish_reason for d in listener.deltas if d.finish_reason] == [FinishReason.CANCELLED] * 2
    engine.cancel("a")
    engine.cancel("never seen")


def test_waiting_requests_can_be_cancelled(tiny: Tiny) -> None:
    """A request in the queue ran although its owner had left."""
    target = tiny()
    with tiny_engine(target, max_num_seqs=1) as engine:
        first, waiting = Heard(), Heard()
        engine.submit(ask("a", params=SamplingParams(max_tokens=100)), first)
        engine.submit(ask("b"), waiting)
        engine.cancel("b")
        assert waiting.ended.wait(60)
        assert waiting.deltas[-1].finish_reason is FinishReason.CANCELLED
        assert waiting.num_tokens == 0
        assert waiting.deltas[-1].stats is not None
        assert first.ended.wait(60)
        assert first.num_tokens == 100
        assert_healthy(engine)


def test_a_listener_that_raises_harms_only_itself(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in one caller's callback ended every running request, or the engine's thread."""
    target = tiny()
    params = SamplingParams(max_tokens=60, n=2, temperature=1.0, seed=2)
    expected = decode(target, (5, 6, 7), replace(params, n=1)).token_ids
    broken = Mock(side_effect=ZeroDivisionError("a bug in somebody's callback"))
    with tiny_engine(target) as engine:
        good, bad, worse = Heard(2), Heard(2, broken), Heard(1, broken)
        engine.submit(ask("good", params=params), good)
        engine.submit(ask("bad", params=params), bad)
        engine.submit(ask("worse", params=SamplingParams(max_tokens=1)), worse)
        assert good.ended.wait(60)
        assert worse.ended.wait(60)
        assert_healthy(engine)
    assert bad.num_tokens <= 4
    assert tuple(t for d in good.deltas if d.choice == 0 for t in d.token_ids) == expected
    assert "listener" in caplog.text


@pytest.mark.parametrize(
    ("where", "drafted"), [("observe", True), ("observe", False), ("finish", False), ("insert", True)]
)
def test_what_fails_behind_the_last_token_ends_the_request_there(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, drafted: bool, where: str
) -> None:
    """One more token than asked for was decided; with a draft the engine turned for ever over a request without an end."""
    target, params = tiny(), SamplingParams(max_tokens=6)
    answer = decode(target, (5, 6, 7), params).token_ids
    with tiny_engine(target, [Perfect({("a", 0): answer})] if drafted else []) as engine:
        owner: Any = PrefixCache if where == "insert" else Planner
        kept = getattr(owner, where)

        def failing(self: Any, *args: Any) -> None:
            ended = where == "insert" and len(args[1]) > 3  # not after the prompt, but at the end
            first = args[0][0] if where == "observe" else args[0]
            if ended or (where != "insert" and first.key == ("a", 0) and first.finish_reason is not None):
                raise MemoryError("no memory behind the last token")
            kept(self, *args)

        monkeypatch.setattr(owner, where, failing)
        listener = Heard()
        engine.submit(ask("a", params=params), listener)
        assert listener.ended.wait(30)
        assert listener.num_tokens == 6
        ends = [delta.finish_reason for delta in listener.deltas if delta.finish_reason is not None]
        assert ends == [FinishReason.LENGTH]
        monkeypatch.undo()
        assert_healthy(engine)


def test_a_text_that_cannot_be_made_is_an_error_and_not_silence(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener of an output that no tokenizer can read was never told its end."""
    take, listener = IncrementalDetokenizer.take, Heard()

    def failing(text: IncrementalDetokenizer) -> str:
        if text._stop == ("never",):
            raise UnicodeError("half a character")
        return take(text)

    monkeypatch.setattr(IncrementalDetokenizer, "take", failing)
    monkeypatch.setattr(
        Admission, "_text", lambda self, request: IncrementalDetokenizer(self._target.tokenizer, request.params.stop)
    )
    with tiny_engine(tiny()) as engine:
        engine.submit(ask("a", params=SamplingParams(max_tokens=6, stop=("never",))), listener)
        assert listener.ended.wait(30)
        assert (listener.deltas[-1].finish_reason, listener.deltas[-1].error) == (
            FinishReason.ERROR,
            "UnicodeError: half a character",
        )
        assert_healthy(engine)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("a", (5.9, 6, 7), SHORT), "no whole number"),  # type: ignore[arg-type]
        (Request("a", (5, 6, 7), SHORT, salt=["x"]), "salt"),  # type: ignore[arg-type]
        (replace(ask("a"), segment=Segment((5, "6"))), "no whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_request_is_refused_and_ends_no_other(tiny: Tiny, request_: Request, reason: str) -> None:
    """A salt that no table can hold ended every request that ran; half a token id was cut to a whole one."""
    with tiny_engine(tiny()) as engine:
        with pytest.raises(InputError, match=reason):
            engine.generate([request_])
        assert_healthy(engine)


def test_pages_below_what_a_running_sequence_holds_are_not_promised(tiny: Tiny) -> None:
    """Counted as free to take, they never were: everything else that was remembered was forgotten for them, step by step."""
    target = tiny()
    target.reset_pool(16 * PAGE)
    scheduler = Scheduler(target.pool, EngineConfig(max_kv_tokens=16 * PAGE, max_num_batched_tokens=64))
    cache = scheduler.prefixes
    assert cache is not None

    other, ended, running = (written(target.pool, num_pages * PAGE) for num_pages in (2, 4, 6))
    system, asked = list(range(4 * PAGE)), list(range(500, 500 + 2 * PAGE))
    cache.insert("", list(range(900, 900 + 2 * PAGE)), other.slots)
    cache.insert("", system, ended.slots)  # its slots are the node that the running one's question hangs below
    cache.insert("", [*system, *asked], running.slots)
    other.release()
    ended.release()
    assert target.pool.num_free_pages == 4
    assert not scheduler._free(7)
    assert len(cache.match("", list(range(900, 900 + 2 * PAGE)))) == 2 * PAGE
    assert scheduler._free(6)


def test_a_step_that_fails_leaves_those_alone_that_were_not_in_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that still waited for room in a step ended with somebody else's error."""
    target = tiny()
    forward, calls = target.forward_tapped, [0]

    def failing(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError("no memory for the long prompt")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward_tapped", failing)
    with tiny_engine(target, max_num_batched_tokens=64) as engine:
        long, short = Heard(), Heard()
        engine.between_steps(lambda: (engine.submit(ask("long", (5,) * 200), long), engine.submit(ask("short"), short)))
        assert long.ended.wait(60)
        assert short.ended.wait(60)
    assert long.deltas[-1].finish_reason is FinishReason.ERROR
    assert short.deltas[-1].finish_reason is not FinishReason.ERROR


def test_a_lost_slot_is_found(engine: Engine) -> None:
    """A check of integrity that cannot fail: a page taken by nobody, a holder too many."""
    target = engine.target
    engine.generate([ask("a", tuple(range(2, 40)))])
    engine.check_integrity()
    page = target.pool.take_page()
    with pytest.raises(EngineError, match=f"KV slot {page * PAGE} counts 1 holders and has 0"):
        engine.check_integrity()
    target.pool.release(np.arange(page * PAGE, (page + 1) * PAGE, dtype=np.int32))


def test_closing_ends_what_runs(tiny: Tiny) -> None:
    """A caller waits for ever after `close`, or a request is accepted that nobody will run."""
    target = tiny()
    engine = tiny_engine(target, max_num_seqs=1)
    running, waiting = Heard(), Heard()
    engine.submit(ask("a", params=SamplingParams(max_tokens=240)), running)
    engine.submit(ask("b"), waiting)
    assert running.began.wait(60)
    engine.close()
    assert running.deltas[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert waiting.ended.is_set()
    engine.close()
    for call in (lambda: engine.submit(ask("c"), Heard()), lambda: engine.generate([ask("c")])):
        with pytest.raises(EngineClosed):
            call()
    engine.cancel("a")
    engine.purge("")


def test_nobody_waits_for_an_engine_that_closes_meanwhile(tiny: Tiny) -> None:
    """A request that slipped in between the last step and the end of the thread was never answered."""
    target = tiny()
    for _ in range(6):
        engine = tiny_engine(target)
        outcomes: list[str] = []

        def call(engine: Engine = engine, outcomes: list[str] = outcomes) -> None:
            for i in range(50):
                try:
                    engine.generate([ask(f"{threading.get_ident()} {i}")])
                    outcomes.append("done")
                except (EngineClosed, Cancelled) as error:
                    outcomes.append(type(error).__name__)
                    return

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


async def _gather(engine: Engine, request: Request, most: int = 10**9) -> list[Delta]:
    deltas = []
    stream = engine.stream(request)
    async for delta in stream:
        deltas.append(delta)
        if len(deltas) == most:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return deltas


def test_streams(engine: Engine) -> None:
    """A stream that does not end, loses tokens, or goes on after its reader has left."""
    target = engine.target
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=6, n=2)
    expected = [decode(target, (5, 6, 7), replace(params, n=1), choice) for choice in (0, 1)]

    async def several() -> list[list[Delta]]:
        return await asyncio.gather(*(_gather(engine, ask(f"r{i}", params=params)) for i in range(4)))

    for deltas in asyncio.run(several()):
        for choice, plain in enumerate(expected):
            own = [d for d in deltas if d.choice == choice]
            assert tuple(t for d in own for t in d.token_ids) == plain.token_ids
            assert [d.finish_reason for d in own if d.finish_reason] == [FinishReason.LENGTH]
    left = asyncio.run(_gather(engine, ask("left", params=SamplingParams(max_tokens=240)), most=2))
    assert len(left) == 2


def test_one_tenants_prefix_is_never_anothers(engine: Engine) -> None:
    """Cached text found across salts, by its timing or its bits; a purge that misses, or purges others."""
    prompt = tuple(range(2, 60))
    engine.generate([ask("a", prompt, salt="one")])
    (other,) = engine.generate([ask("b", prompt, salt="two")])
    (same,) = engine.generate([ask("c", prompt, salt="one")])
    assert (other.stats.num_cached_tokens, same.stats.num_cached_tokens) == (0, 57)
    engine.purge("one")
    (after,) = engine.generate([ask("d", prompt, salt="one")])
    (kept,) = engine.generate([ask("e", prompt, salt="two")])
    assert (after.stats.num_cached_tokens, kept.stats.num_cached_tokens) == (0, 57)
    for salt in ("one\0part", "onerous"):
        engine.generate([ask("f", prompt, salt=salt)])
    engine.purge("one")  # all parts of it, whoever used them
    parts = [engine.generate([ask("g", prompt, salt=salt)])[0] for salt in ("one\0part", "onerous")]
    assert [each.stats.num_cached_tokens for each in parts] == [0, 57]


def test_a_cache_of_single_tokens_does_not_block_the_pool(tiny: Tiny) -> None:
    """Prompts that grow by one token leave one cached slot a page: the pool is full of almost empty pages."""
    target = tiny()
    text = tuple(2 + (7 * i) % 300 for i in range(200))
    requests = [ask("a", text[:length], SamplingParams(max_tokens=2)) for length in range(1, 200, 6)]
    expected = [decode(target, request.prompt_ids, request.params).token_ids for request in requests]
    with tiny_engine(target, num_kv_slots=256) as engine:
        assert [engine.generate([request])[0].token_ids for request in requests] == expected
        assert_healthy(engine)


@pytest.mark.parametrize(
    ("target_settings", "engine_settings"),
    [
        ({"max_model_len": 16}, {}),
        ({}, {"max_kv_tokens": 64}),
        ({}, {"max_kv_tokens": 160, "max_num_batched_tokens": 16, "max_num_seqs": 1}),
        ({"max_model_len": 10**6}, {"enable_prefix_caching": False, "num_threads": 1}),
    ],
)
def test_the_smallest_settings_load(
    tiny: Tiny, target_settings: dict[str, int], engine_settings: dict[str, int]
) -> None:
    """Settings that the configuration allows failed inside the self-test or the measurement of costs."""
    model = tiny().config.model
    config = TargetConfig(model=model, **target_settings)  # type: ignore[arg-type]
    drafting = DraftingConfig(drafters=("copy",), tree=DraftTreeConfig(max_nodes=8))
    with load_engine(config, EngineConfig(**engine_settings), drafting) as engine:  # type: ignore[arg-type]
        (completion,) = engine.generate([ask("a", (5, 6, 7), SHORT)])
        assert completion.token_ids == decode(engine.target, (5, 6, 7), SHORT).token_ids
        assert completion.stats.system_fingerprint.startswith("rs_")


def test_models_that_cannot_be_used_say_why(tiny: Tiny, tmp_path: Path) -> None:
    """A traceback of another library, or weights made up where the file is missing."""
    config = TargetConfig(model=str(tmp_path))
    with pytest.raises(ModelError, match=r"no config\.json"):
        Target.load(config, 64)
    shutil.copy(Path(tiny().config.model) / "config.json", tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot load the target"):
        Target.load(config, 64)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ModelError, match="cannot load the target"):
        Target.load(config, 64)


def test_a_prefix_that_many_share_counts_once(tiny: Tiny) -> None:
    """Sixty-four choices over one prompt, and a cache that was said to be full."""
    target = tiny()
    scheduler = Scheduler(target.pool, EngineConfig(max_kv_tokens=16 * PAGE, max_num_batched_tokens=64))
    first, second = written(target.pool, 2 * PAGE), SequenceSlots(target.pool)
    second.share(first.slots)
    scheduler.running = [SimpleNamespace(slots=each) for each in (first, second, None)]  # type: ignore[misc]
    assert scheduler.load().kv_usage == 2 * PAGE / target.pool.num_slots
    second.release()
    first.release()
