"""A stream keeps its delivered tokens, and the statistics of all its attempts."""

from dataclasses import replace

from ragspec.cluster.routing.stream import OutputIdentity, Stream
from ragspec.core import Delta, FinishReason, GenerationStats, Request, SamplingParams, Segment

HERE, THERE = OutputIdentity("a", 256), OutputIdentity("b", 256)
REQUEST = Request("r", (5, 6, 7), SamplingParams(seed=3, max_tokens=20, logit_bias={4: 1.0, 9: 2.0}))


def stream_of(request: Request = REQUEST, choice: int = 0, now: float = 0.0) -> Stream:
    return Stream(request, choice, None, now)


def delta(*token_ids: int, stats: GenerationStats | None = None) -> Delta:
    return Delta("wire", 0, token_ids, "t" * len(token_ids), (), stats and FinishReason.STOP, stats)


def lose_one_part(stream: Stream, *token_ids: int) -> None:
    """After so many of its tokens, all at once."""
    stream.start("r~1", 0.0)
    if token_ids:
        stream.receive(delta(*token_ids), HERE, 0.0)
    stream.lose(0.0)


def test_counters_of_a_lost_part_stay() -> None:
    """An answer that was taken up again reported only its last part, or its prompt twice; waiting counted as decoding."""
    stream = stream_of(now=100.0)
    stream.start("r~1", 101.0)
    stream.receive(delta(1, 2), HERE, 103.0)
    stream.receive(delta(3), HERE, 104.0)
    stream.receive(delta(4, 5, 6), HERE, 106.0)
    stream.lose(107.0)
    stream.start("r~1", 110.0)
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
    expected = replace(
        last,
        num_output_tokens=8,
        num_first_tokens=3,
        num_steps=5,
        num_drafted=10,
        num_accepted=3,
        num_replays=1,
        queue_s=1.0 + 3.0 + 0.5,
        prefill_s=2.0 + 1.0,
        decode_s=4.0 + 2.0,
    )
    assert stream.receive(delta(7, 8, stats=last), HERE, 113.0).stats == expected


def test_what_is_left_is_what_was_not_told() -> None:
    """Tokens of two parts were put together wrongly, or a draft no longer stood at its place."""
    segment = Segment((1, 2), 12, (3, 4, 5, 6))
    stream = stream_of(replace(REQUEST, segment=segment))
    assert stream.request().segment == segment
    for tokens in ((3, 4), (), (9,)):
        lose_one_part(stream, *tokens)
    assert stream.request().segment == Segment((1, 2, 3, 4, 9), 12, (6,))
    several = stream_of(replace(REQUEST, params=SamplingParams(n=3)), choice=2)
    assert several.request().segment == Segment(choice=2)


def test_vain_parts_are_counted_in_a_row() -> None:
    """A long output on an unlucky cluster was given up, or a request that kills its replicas never was."""
    stream = stream_of()
    counts = []
    for tokens in ((), (), (1,), (), ()):
        lose_one_part(stream, *tokens)
        counts.append(stream.num_vain)
    assert counts == [1, 2, 0, 1, 2]


def test_a_part_lost_before_its_first_token_binds_to_nothing() -> None:
    """A request that no replica had begun waited for one with the numerics of a dead one."""
    stream = stream_of()
    lose_one_part(stream)
    assert stream.identity is None
    stream.start("r~1", 0.0)
    stream.receive(delta(1), THERE, 0.0)
    assert stream.identity == THERE
