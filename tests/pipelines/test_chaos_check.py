"""A judge that finds what was lost, told twice or changed, and nothing where all is as it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.benchmarks.chaos.check import Expected, StreamLog, Verdict, judge_rows, judge_streams, slowest_gap_s
from ragspec.core import Completion, Delta, FinishReason, GenerationStats, TokenLogprob

TOKENS = (5, 6, 7, 6, 8)
LOGPROBS = tuple(TokenLogprob(token, -0.5) for token in TOKENS)
PROMPT = (1, 2)


def expected(tokens: tuple[int, ...] = TOKENS) -> Expected:
    logprobs = tuple(TokenLogprob(token, -0.5) for token in tokens)
    text = "".join(map(chr, tokens))
    return Expected(PROMPT, Completion("a", 0, tokens, text, FinishReason.STOP, logprobs, GenerationStats()))


def told(tokens: tuple[int, ...] = TOKENS, size: int = 2) -> list[Delta]:
    """As an engine would: some tokens a delta, the last one with the reason."""
    starts = range(0, max(1, len(tokens)), size)
    pieces = [tokens[start : start + size] for start in starts]
    deltas = [
        Delta("a", 0, piece, "".join(map(chr, piece)), tuple(TokenLogprob(token, -0.5) for token in piece))
        for piece in pieces
    ]
    return [*deltas[:-1], replace(deltas[-1], finish_reason=FinishReason.STOP)]


def verdict(deltas: list[Delta], prompt: tuple[int, ...] = PROMPT) -> Verdict:
    return judge_streams({"a": expected()}, {"a": StreamLog(prompt, deltas)})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_is_as_expected_has_no_mark(size: int) -> None:
    """A judge that complains of how tokens were cut into messages."""
    assert verdict(told(size=size)) == Verdict()


@pytest.mark.parametrize(
    "deltas",
    [
        [],
        told()[:-1],
        [*told()[:-1], replace(told()[-1], finish_reason=FinishReason.ERROR)],
        [*told()[:-1], replace(told()[-1], finish_reason=FinishReason.LOST)],
        [*told()[:-1], replace(told()[-1], finish_reason=FinishReason.CANCELLED)],
        [told()[0], told()[2]],
        told()[1:],
    ],
)
def test_a_lost_stream_or_token_is_found(deltas: list[Delta]) -> None:
    """A stream without an end, with an error, or with a hole taken for whole."""
    assert verdict(deltas) == Verdict(lost=("a",))


@pytest.mark.parametrize(
    "deltas",
    [
        [told()[0], *told()],
        [told()[0], told()[1], told()[1], told()[2]],
        [*told(), told()[-1]],
        [*told(), Delta("a", 0, (), "")],
    ],
)
def test_what_is_told_twice_is_found(deltas: list[Delta]) -> None:
    """A replay that tells what was told before, or goes on behind the end."""
    assert "a" in verdict(deltas).doubled


@pytest.mark.parametrize(
    "deltas",
    [
        told((5, 6, 7, 9, 8)),
        told((5, 6, 6, 7, 8)),
        [*told()[:-1], replace(told()[-1], text="?")],
        [*told()[:-1], replace(told()[-1], finish_reason=FinishReason.LENGTH)],
        [*told()[:-1], replace(told()[-1], logprobs=(TokenLogprob(8, -0.5000001),))],
    ],
)
def test_a_changed_token_text_reason_or_probability_is_found(deltas: list[Delta]) -> None:
    """Only the tokens, or only the text, compared."""
    assert verdict(deltas) == Verdict(changed=("a",))


def test_another_prompt_is_a_change() -> None:
    """Other passages found, and by chance the same answer."""
    assert verdict(told(), prompt=(1, 3)) == Verdict(changed=("a",))


def test_streams_that_are_missing_or_uncalled_for_are_found() -> None:
    """Only those looked at that are in both."""
    whole = StreamLog(PROMPT, told())
    assert judge_streams({"a": expected(), "b": expected()}, {"a": whole}).lost == ("b",)
    assert judge_streams({"a": expected()}, {"a": whole, "c": whole}).doubled == ("c",)
    assert judge_streams({"a": expected()}, {"a": StreamLog(error="no index")}).lost == ("a",)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_only_what_is_equal_has_no_mark(wanted: list[int], given_tokens: list[int]) -> None:
    """A difference that falls between the three kinds."""
    found = judge_streams({"a": expected(tuple(wanted))}, {"a": StreamLog(PROMPT, told(tuple(given_tokens)))})
    assert (found == Verdict()) == (wanted == given_tokens)


def test_rows_are_counted_and_compared() -> None:
    """A dictionary of the found rows, in which the second of two hides the first."""
    wanted = {"a": "x", "b": "y", "c": "z"}
    assert judge_rows(wanted, [("c", "z"), ("a", "x"), ("b", "y")]) == Verdict()
    assert judge_rows(wanted, [("a", "x"), ("b", "y"), ("b", "y")]) == Verdict(("c",), ("b",), ())
    assert judge_rows(wanted, [("a", "?"), ("b", "y"), ("c", "?"), ("c", "z")]) == Verdict((), ("c",), ("a", "c"))
    assert judge_rows(wanted, [*wanted.items(), ("d", "w")]).doubled == ("d",)


def test_the_gap_is_that_of_the_slowest_stream_that_was_open() -> None:
    """Streams that had ended or not begun counted, or one that is never told anything again left out."""

    def stream(begin_s: float, *times_s: float, ended: bool = True) -> StreamLog:
        deltas = [Delta("a", 0, (1,), "x") for _ in times_s]
        if ended:
            deltas[-1] = replace(deltas[-1], finish_reason=FinishReason.STOP)
        return StreamLog(PROMPT, deltas, list(times_s), begin_s)

    early, late = stream(0.0, 1.0, 2.0), stream(9.0, 30.0)
    assert slowest_gap_s([early, late], 5.0) is None
    assert slowest_gap_s([early, late, stream(0.0, 4.0, 6.0, 20.0), stream(4.0, 8.0)], 5.0) == 3.0
    assert slowest_gap_s([stream(0.0, 4.0, ended=False), stream(4.0, 8.0)], 5.0) == float("inf")
