"""Builds the prompt of a chat: [system][earlier turns with their passages as shown][question][its passages].

Every prompt of a conversation begins with the previous prompt, so the prefix cache holds its keys and values. The exception is a
turn without an answer: its question becomes part of the next question, and its passages are dropped. The first passages of a
conversation bring the instruction into its system message.
If not everything fits, the prompt drops, in this order: passages of all turns but the last; the oldest turns, `_STEP` at a time
so that the prefix stays the same for some turns; the question's lowest-ranked passages; the last turn. All of it is reported.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragspec.config import PassageOrder
from ragspec.core import Message, Passage
from ragspec.errors import PromptTooLong
from ragspec.rag.prompt import Prompt, PromptBuilder, in_order
from ragspec.retrieval.expansion import widths

_STEP = 4


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A finished turn with the passages in its prompt. Either text may be empty."""

    question: str
    answer: str
    passages: tuple[Passage, ...] = ()

    def without_passages(self) -> PastTurn:
        return replace(self, passages=())


@dataclass(frozen=True, slots=True)
class ChatPrompt(Prompt):
    """`history`: the earlier turns as they are in the prompt. `dropped_history`: dropped passages of these turns and of the
    `num_dropped_turns` dropped turns."""

    history: tuple[PastTurn, ...] = ()
    num_dropped_turns: int = 0
    dropped_history: tuple[Passage, ...] = ()


class _Truncation(NamedTuple):
    """How much is dropped: oldest turns, turns whose passages are dropped, and the question's last passages."""

    num_turns: int
    num_without_passages: int
    num_passages: int


def build_chat_prompt(
    prompts: PromptBuilder,
    system: str,
    history: Sequence[PastTurn],
    question: str,
    passages: Sequence[Passage],
    max_tokens: int,
    order: PassageOrder = "rank",
) -> ChatPrompt:
    """The longest prompt that leaves room for `max_tokens` of output. Passages, given best first, have neighbours only where
    nothing is dropped.

    Raises: InputError for a text no tokenizer should see; PromptTooLong if system and question alone do not fit.
    """
    room = prompts.max_context_tokens - max_tokens
    oversized, history = _split_oversized(history, prompts.max_chars)
    unanswered = [passage for turn in history if not turn.answer.strip() for passage in turn.passages]
    history = [turn if turn.answer.strip() else turn.without_passages() for turn in history]
    *wider, passages = widths(passages)

    def tokens_of(turns: Sequence[PastTurn], shown: Sequence[Passage]) -> tuple[int, ...]:
        return prompts.tokens(_messages(prompts, system, turns, question, in_order(shown, order)[0]))

    passages = next((some for some in wider if len(tokens_of(history, some)) <= room), passages)

    @functools.cache
    def tokens(cut: _Truncation) -> tuple[int, ...]:
        return tokens_of(_remaining_turns(history, cut), passages[: len(passages) - cut.num_passages])

    cut = _Truncation(0, 0, 0)
    if len(tokens(cut)) > room:
        least = tokens(_Truncation(len(history), len(history), len(passages)))
        if len(least) > room:
            raise PromptTooLong(len(least), max(room, 0), max_tokens)
        cut = _smallest_fitting(lambda cut: len(tokens(cut)) <= room, len(history), len(passages))
    num_kept = len(passages) - cut.num_passages
    dropped = [*oversized, *history[: max(cut.num_turns, cut.num_without_passages)]]
    return ChatPrompt.of(
        tokens(cut),
        passages[:num_kept],
        passages[num_kept:],
        order,
        history=tuple(_remaining_turns(history, cut)),
        num_dropped_turns=len(oversized) + cut.num_turns,
        dropped_history=(*unanswered, *(passage for turn in dropped for passage in turn.passages)),
    )


def _smallest_fitting(fits: Callable[[_Truncation], bool], num_turns: int, num_passages: int) -> _Truncation:
    for cuts in _truncations(num_turns, num_passages):
        if fits(cuts[0]):  # Why before bisecting: most prompts fit whole
            return cuts[0]
        first = bisect_left(cuts, True, key=fits)
        if first < len(cuts):
            return cuts[first]
    raise AssertionError("the least prompt fits")


def _split_oversized(history: Sequence[PastTurn], max_chars: int) -> tuple[Sequence[PastTurn], Sequence[PastTurn]]:
    """(the oldest turns, which have too many characters to fit, the others): so no more than a context is tokenised."""
    left = max_chars
    for number in reversed(range(len(history))):
        left -= len(history[number].question) + len(history[number].answer)
        if left < 0:
            return history[: number + 1], history[number + 1 :]
    return (), history


def _truncations(num_turns: int, num_passages: int) -> Iterator[list[_Truncation]]:
    """Lists of truncations, each from the smallest to the largest."""
    last = num_turns - 1
    if num_turns:
        bare = [0, last]
        dropped = [*range(_STEP, last, _STEP), last]
        yield [_Truncation(0, number, 0) for number in bare] + [_Truncation(number, last, 0) for number in dropped]
        yield [_Truncation(last, num_turns, number) for number in range(max(num_passages, 1))]
    yield [_Truncation(num_turns, num_turns, number) for number in range(num_passages + 1)]


def _remaining_turns(history: Sequence[PastTurn], cut: _Truncation) -> list[PastTurn]:
    return [
        turn.without_passages() if number < cut.num_without_passages else turn
        for number, turn in enumerate(history)
        if number >= cut.num_turns
    ]


def _messages(
    prompts: PromptBuilder, system: str, history: Sequence[PastTurn], question: str, passages: Sequence[Passage]
) -> list[Message]:
    messages = [Message("system", system)] if system.strip() else []
    unanswered = ""  # Why: many templates refuse two messages of the user in a row
    for turn in history:
        asked = "\n\n".join(filter(str.strip, (unanswered, turn.question)))
        unanswered = "" if turn.answer.strip() else asked
        if turn.answer.strip():
            messages += [*_question_messages(prompts, asked, turn.passages), Message("assistant", turn.answer)]
    return messages + _question_messages(prompts, "\n\n".join(filter(str.strip, (unanswered, question))), passages)


def _question_messages(prompts: PromptBuilder, question: str, passages: Sequence[Passage]) -> list[Message]:
    if not question.strip():
        return []
    return [Message("user", question), *([prompts.context(passages)] if passages else [])]
