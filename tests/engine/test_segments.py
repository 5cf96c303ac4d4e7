"""An output written in segments is the output written in one go: tokens, text and log-probabilities."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from oracle import Plain, decode
from oracle_cases import PARAMS, PROMPTS
from stand_ins import Clock
from tiny_target import SENTENCES, tiny_engine, tiny_target

from ragspec.core import (
    Completion,
    CopySource,
    FinishReason,
    GenerationStats,
    Request,
    SamplingParams,
    Segment,
    SourceKind,
)
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.speculation import OFF

Draft = Callable[[Sequence[int]], tuple[int, ...]]
RANDOM = random.Random(5)
DRAFTS: dict[str, Draft] = {
    "none": lambda _: (),
    "right": lambda rest: tuple(rest),
    "right, and more": lambda rest: (*rest, 7, 8, 9),
    "half right": lambda rest: (*rest[: len(rest) // 2], 3, 3),
    "wrong": lambda rest: tuple(RANDOM.randrange(300) for _ in rest),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", "float32", tmp_path_factory.mktemp("segments"))


def in_segments(
    engine: Engine, request: Request, sizes: Sequence[int], truth: Sequence[int], draft: Draft
) -> list[Completion]:
    """Pauses after every size in turn; the draft of a segment is made from what is really left."""
    parts: list[Completion] = []
    output: tuple[int, ...] = ()
    while not parts or (parts[-1].finish_reason is FinishReason.LENGTH and len(output) < request.params.max_tokens):
        end = len(output) + sizes[len(parts) % len(sizes)]
        segment = Segment(output, end, draft(truth[len(output) :]))
        parts += engine.generate([replace(request, id=f"{request.id}-{len(parts)}", segment=segment)])
        output += parts[-1].token_ids
    return parts


PAIRS = [
    pytest.param(name, draft, marks=[] if (i - j) % 5 in (0, 2) else pytest.mark.slow)
    for (i, name), (j, draft) in itertools.product(enumerate(PARAMS), enumerate(DRAFTS))
]


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_segments_join_to_the_oracles_output(target: Target, name: str, draft: str) -> None:
    """Noise keyed by the place in a segment, penalties that forget earlier segments, a stop across two of them."""
    params, drafter = PARAMS[name], CopyDrafter(target.tokenizer, target.eos_ids)
    sources = tuple(CopySource(SourceKind.PASSAGE, text, str(i)) for i, text in enumerate(SENTENCES))
    with tiny_engine(target, [drafter]) as engine:
        for number, prompt in enumerate(PROMPTS[:3]):
            request = Request(f"{number}", tuple(target.tokenizer(prompt).input_ids), params, sources)
            plain = decode(target, request.prompt_ids, params)
            sizes = ((4,), (1, 3), (100,))[number]
            assert_joins(in_segments(engine, request, sizes, plain.token_ids, DRAFTS[draft]), plain)


def assert_joins(parts: Sequence[Completion], plain: Plain) -> None:
    assert tuple(token for part in parts for token in part.token_ids) == plain.token_ids
    text = "".join(part.text for part in parts)
    assert text.rstrip("\ufffd") == plain.text.rstrip("\ufffd")  # half a character at the end is never told
    assert parts[-1].finish_reason == plain.finish_reason


@pytest.mark.parametrize("length", [1, 2])
def test_a_stop_string_across_segments_ends_the_output(target: Target, length: int) -> None:
    """The part of a stop string that stood in the segment before was forgotten, or its text told twice."""
    prompt = tuple(target.tokenizer("The river").input_ids)
    free = decode(target, prompt, SamplingParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True))
    for start in range(1, 24, 4):
        stop = target.tokenizer.decode(free.token_ids[start : start + 3])
        if "\ufffd" in stop or not stop:
            continue
        params = SamplingParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True, stop=(stop,))
        with tiny_engine(target) as engine:
            parts = in_segments(engine, Request("s", prompt, params), (length,), (), DRAFTS["none"])
        assert_joins(parts, decode(target, prompt, params))


def test_a_right_draft_is_verified_in_one_step(target: Target) -> None:
    """Drafts of a segment were ignored behind an output, or cut at their first token."""
    prompt = tuple(target.tokenizer(PROMPTS[0]).input_ids)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    truth = decode(target, prompt, params).token_ids
    with tiny_engine(target, [CopyDrafter(target.tokenizer, target.eos_ids)], max_nodes=16) as engine:
        for known in (0, 1, 5):
            segment = Segment(truth[:known], 12, truth[known:])
            (part,) = engine.generate([Request(f"d{known}", prompt, params, segment=segment)])
            assert part.token_ids == truth[known:]
            assert part.stats.num_steps == 1
            assert part.stats.num_output_tokens == part.stats.num_first_tokens == 12 - known


@pytest.mark.parametrize(
    ("segment", "params", "reason"),
    [
        (Segment((5, 6), 2), SamplingParams(), "nothing is left"),
        (Segment((), 0), SamplingParams(), "nothing is left"),
        (Segment((5,), 4), SamplingParams(n=2), "set n to 1"),
        (Segment(choice=2), SamplingParams(n=2), "no choice 2 of 2"),
        (Segment(choice=-1), SamplingParams(n=2), "no choice -1 of 2"),
        (Segment((5, 9999), 4), SamplingParams(), "output given holds"),
        (Segment((5,), 4, (-1,)), SamplingParams(), "draft holds"),
        (Segment((5, 1), 4), SamplingParams(), "ends with its token 2"),
    ],
)
def test_a_segment_that_cannot_be_written_is_refused(
    target: Target, segment: Segment, params: SamplingParams, reason: str
) -> None:
    """It ended in the engine's thread, or wrote past the end."""
    with tiny_engine(target) as engine, pytest.raises(InputError, match=reason):
        engine.generate([Request("bad", (5, 6, 7), params, segment=segment)])


@pytest.mark.parametrize("num_given", [0, 4])
def test_one_choice_asked_for_alone_is_the_choice_of_all(target: Target, num_given: int) -> None:
    """A choice taken up again got the noise of choice 0, or waited for choices that nobody writes."""
    params = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=10, ignore_eos=True, logprobs=1)
    request = Request("c", tuple(target.tokenizer("The river").input_ids), params)
    with tiny_engine(target) as engine:
        whole = engine.generate([request])
        for known in whole:
            segment = Segment(known.token_ids[:num_given], choice=known.choice)
            (alone,) = engine.generate([replace(request, segment=segment)])
            assert alone.choice == known.choice
            assert alone.token_ids == known.token_ids[num_given:]
            assert alone.logprobs == known.logprobs[num_given:]
    assert len({one.token_ids for one in whole}) == 3


def test_counters_of_parts_add_up() -> None:
    """A counter was left out of a sum, or what an output is one of was added like a number."""
    own = {"seed": 7, "system_fingerprint": "f", "exactness": "none"}
    total = GenerationStats(num_steps=2, draft_s=0.5, accepted_by_drafter={"a": 1}, positions={"a": ((2, 1),)}, seed=7)
    sources = {"drafted_by_source": {"passage": 4}, "accepted_by_source": {"passage": 3, "history": 1}}
    positions = {"a": ((1, 1), (1, 0))}
    later = GenerationStats(
        num_steps=3, draft_s=0.25, accepted_by_drafter={"a": 2, "b": 1}, positions=positions, **sources, **own
    )
    total.add(later)
    positions = {"a": ((3, 2), (1, 0))}
    drafters = {"a": 3, "b": 1}
    assert total == GenerationStats(
        num_steps=5, draft_s=0.75, accepted_by_drafter=drafters, positions=positions, **sources, **own
    )


def test_copied_tokens_are_counted_by_where_they_came_from(target: Target) -> None:
    """Predicted text that was right was reported as rejected, or passages' tokens as the prediction's."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={1: -100.0})
    request = Request("p", tuple(target.tokenizer("The river").input_ids), params)
    with tiny_engine(target, [CopyDrafter(target.tokenizer, target.eos_ids)], fixed_nodes=8) as engine:
        (plain,) = engine.generate([replace(request, speculation=OFF)])
        right = CopySource(SourceKind.PREDICTION, plain.text)
        elsewhere = CopySource(SourceKind.PASSAGE, "A mill needs water, and water needs rain.", "d#0")
        (predicted,) = engine.generate([replace(request, sources=(elsewhere, right))])
        (from_passage,) = engine.generate([replace(request, sources=(elsewhere,))])
    assert plain.token_ids == predicted.token_ids == from_passage.token_ids
    assert plain.stats.drafted_by_source == {}
    accepted, drafted = predicted.stats.accepted_by_source, predicted.stats.drafted_by_source
    assert 0 < accepted["prediction"] <= min(drafted["prediction"], predicted.stats.num_accepted)
    assert "prediction" not in from_passage.stats.drafted_by_source
    assert sum(drafted.values()) <= predicted.stats.num_drafted


class SlowingClock(Clock):
    """`time.perf_counter` of the engine; only what a test says takes time."""

    def slowed(self, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            self.now += seconds
            return call(*args)

        return slow


@pytest.mark.parametrize("max_num_batched_tokens", [64, 16])
def test_what_drafting_adds_before_the_first_token(
    target: Target, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> None:
    """An answer accepted whole in the prompt's step took no time to draft, or plain decoding was charged for drafts."""
    clock, drafter = SlowingClock(), CopyDrafter(target.tokenizer, target.eos_ids)
    costs = CostTable({64: [1.0, 1.5, 4.0]}, [1, 16, 64])
    monkeypatch.setattr(costs, "refine", lambda *_: None)
    monkeypatch.setattr(drafter, "prepare", clock.slowed(drafter.prepare, 1.0))
    monkeypatch.setattr(drafter, "propose", clock.slowed(drafter.propose, 2.0))
    monkeypatch.setattr(target, "forward_tapped", clock.slowed(target.forward_tapped, 8.0))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    request = Request("p", tuple(range(5, 25)), params)
    with tiny_engine(
        target, [drafter], fixed_nodes=6, costs=costs, max_num_batched_tokens=max_num_batched_tokens
    ) as engine:
        monkeypatch.setattr(time, "perf_counter", clock)
        (plain,) = engine.generate([replace(request, speculation=OFF)])
        (drafted,) = engine.generate([replace(request, salt="b", segment=Segment((), None, plain.token_ids))])
        monkeypatch.undo()
    num_nodes = drafted.stats.num_drafted
    node_s = costs.node_s((20 - 1) % max_num_batched_tokens + 1 + num_nodes, num_nodes, 20, 8.0)
    assert plain.stats.prompt_draft_s == 0.0
    assert (drafted.stats.num_steps, drafted.stats.num_first_tokens) == (1, 6)
    assert 0.0 < num_nodes * node_s < 8.0
    assert drafted.stats.prompt_draft_s == pytest.approx(1.0 + 2.0 + num_nodes * node_s)


def test_segments_leave_no_earlier_answers(target: Target) -> None:
    """Each paused part of one answer was kept as an answer of its own."""
    drafter = CopyDrafter(target.tokenizer, target.eos_ids, earlier_tokens=100)
    request = Request("e", (5, 6, 7), SamplingParams(max_tokens=8, ignore_eos=True))
    with tiny_engine(target, [drafter]) as engine:
        engine.generate([replace(request, segment=Segment((), 4))])
        assert not drafter._earlier
        engine.generate([request])
        assert drafter._earlier
