"""What is kept of a choice: what is left to write, what its parts took, and what makes two requests the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragspec.cluster.routing.request_state import ChoiceState, OutputIdentity, ResponseCache, TrackedRequest
from ragspec.core import CopySource, Delta, FinishReason, GenerationStats, Request, SamplingParams, Segment, SourceKind

HERE, THERE = OutputIdentity("a", 256), OutputIdentity("b", 256)
REQUEST = Request("r", (5, 6, 7), SamplingParams(seed=3, max_tokens=20, logit_bias={4: 1.0, 9: 2.0}))


def digest_of(request: Request) -> bytes:
    return TrackedRequest.of(request, lambda delta: None, 0.0).digest


def delta(*token_ids: int, stats: GenerationStats | None = None) -> Delta:
    return Delta("wire", 0, token_ids, "t" * len(token_ids), (), stats and FinishReason.STOP, stats)


def test_counters_of_a_lost_part_stay() -> None:
    """An answer that was taken up again reported only its last part, or its prompt twice; waiting counted as decoding."""
    choice = ChoiceState(REQUEST, 0, now=100.0)
    choice.start_attempt(101.0)
    choice.receive(delta(1, 2), HERE, 103.0)
    choice.receive(delta(3), HERE, 104.0)
    choice.receive(delta(4, 5, 6), HERE, 106.0)
    choice.lose_attempt(107.0)
    choice.start_attempt(110.0)
    last = GenerationStats(
        num_prompt_tokens=3,
        num_output_tokens=2,
        num_first_tokens=1,
        num_steps=2,
        num_drafted=7,
        num_accepted=0,
        accepted_by_drafter={"copy": 1},
        queue_s=0.5,
        prefill_s=1.0,
        decode_s=2.0,
        seed=3,
        system_fingerprint="a",
    )
    told = choice.receive(delta(7, 8, stats=last), HERE, 113.0)
    assert told.stats == GenerationStats(
        num_prompt_tokens=3,
        num_output_tokens=8,
        num_first_tokens=3,
        num_steps=5,
        num_drafted=10,
        num_accepted=3,
        accepted_by_drafter={"copy": 1},
        num_replays=1,
        queue_s=1.0 + 3.0 + 0.5,
        prefill_s=2.0 + 1.0,
        decode_s=4.0 + 2.0,
        seed=3,
        system_fingerprint="a",
    )


def test_what_is_left_is_what_was_not_told() -> None:
    """Tokens of two parts were put together wrongly, or a draft no longer stood at its place."""
    segment = Segment((1, 2), 12, (3, 4, 5, 6))
    choice = ChoiceState(replace(REQUEST, segment=segment), 0, now=0.0)
    assert choice.remaining() == segment
    for tokens in ((3, 4), (), (9,)):
        choice.start_attempt(0.0)
        if tokens:
            choice.receive(delta(*tokens), HERE, 0.0)
        choice.lose_attempt(0.0)
    assert choice.remaining() == Segment((1, 2, 3, 4, 9), 12, (6,))
    several = ChoiceState(replace(REQUEST, params=SamplingParams(n=3)), 2, now=0.0)
    assert several.remaining() == Segment(choice=2)


def test_vain_parts_are_counted_in_a_row() -> None:
    """A long output on an unlucky cluster was given up, or a request that kills its replicas never was."""
    choice = ChoiceState(REQUEST, 0, now=0.0)
    counts = []
    for tokens in ((), (), (1,), (), ()):
        choice.start_attempt(0.0)
        if tokens:
            choice.receive(delta(*tokens), HERE, 0.0)
        choice.lose_attempt(0.0)
        counts.append(choice.num_vain)
    assert counts == [1, 2, 0, 1, 2]


def test_an_output_of_two_numerics_says_so() -> None:
    """It was called exact, or named one of the two."""
    choice = ChoiceState(REQUEST, 0, now=0.0)
    for identity in (HERE, THERE):
        choice.start_attempt(0.0)
        choice.receive(delta(1), identity, 0.0)
        choice.lose_attempt(0.0)
    choice.start_attempt(0.0)
    told = choice.receive(delta(2, stats=GenerationStats(system_fingerprint="a")), HERE, 0.0)
    assert told.stats is not None
    assert (told.stats.exactness, told.stats.system_fingerprint) == ("none", "a+b")


def test_a_part_lost_before_its_first_token_binds_to_nothing() -> None:
    """A request that no replica had begun waited for one with the numerics of a dead one."""
    choice = ChoiceState(REQUEST, 0, now=0.0)
    choice.start_attempt(0.0)
    choice.lose_attempt(0.0)
    assert choice.identity is None
    choice.start_attempt(0.0)
    choice.receive(delta(1), THERE, 0.0)
    assert choice.identity == THERE


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, prompt_ids=(5, 67)),
        replace(REQUEST, params=replace(REQUEST.params, seed=None)),
        replace(REQUEST, params=replace(REQUEST.params, logit_bias={4: 1.0})),
        replace(REQUEST, salt="x"),
        replace(REQUEST, speculation=False),
        replace(REQUEST, segment=Segment((), 5)),
        replace(REQUEST, sources=(CopySource(SourceKind.INPUT, "text"),)),
        replace(REQUEST, grammar="start: /a/"),
    ],
)
def test_a_different_request_is_not_the_same(other: Request) -> None:
    """An answer to another question, or another tenant's, was given out for one id."""
    assert digest_of(other) != digest_of(REQUEST)


def test_the_same_request_is_the_same() -> None:
    """The order of a mapping, or where a request should run, made a repeated one another."""
    reordered = replace(REQUEST.params, logit_bias={9: 2.0, 4: 1.0})
    same = replace(REQUEST, id="other", params=reordered, affinity="doc")
    assert digest_of(same) == digest_of(REQUEST)


def test_memory_is_bounded_by_all_that_it_holds() -> None:
    """Prompts, sources and log-probabilities were kept without being counted."""

    def tracked_request(name: str, request: Request) -> TrackedRequest:
        tracked = TrackedRequest.of(replace(request, id=name), lambda delta: None, 0.0)
        tracked.delivered.append(delta(*range(10)))
        return tracked

    small = REQUEST
    for large in (
        replace(REQUEST, prompt_ids=tuple(range(500))),
        replace(REQUEST, sources=(CopySource(SourceKind.INPUT, "x" * 4000),)),
        replace(REQUEST, params=SamplingParams(logprobs=20)),
    ):
        memory = ResponseCache(60.0, 1200)
        counts = []
        for request in (small, large):
            for number in range(60):
                memory.add(tracked_request(f"{request is large}{number}", request), 0.0)
            counts.append(len(memory))
        assert 0 < counts[1] < counts[0] < 60
    memory.expire(61.0)
    assert len(memory) == memory._num_tokens == 0
