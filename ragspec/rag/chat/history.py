"""A turn of a chat, the turns before it with the passages of each, and the prompt of them all.

A history comes from the messages of a request or from the store.

    >>> split_messages((Message("user", "When?"), Message("assistant", "In 1874."), Message("user", "Why?")))
    ('', [QaPair(question='When?', answer='In 1874.')], 'Why?')

The prompt is [system][earlier turns with their passages as shown][question][its passages]. Every prompt of a conversation begins
with the previous prompt, so the prefix cache holds its keys and values. The exception is a turn without an answer: its question
becomes part of the next question, and its passages are dropped. The first passages of a conversation bring the instruction into
its system message.
If not everything fits, the prompt drops, in this order: passages of all turns but the last; the oldest turns, `_STEP` at a time
so that the prefix stays the same for some turns; the question's lowest-ranked passages; the last turn. All of it is reported.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragspec.config import PassageOrder
from ragspec.core import Message, Passage, SamplingParams, check_text
from ragspec.errors import InputError, PromptTooLong, SaveError, StoreError
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages, turn_keys
from ragspec.rag.chat.query_rewriter import AskedBefore
from ragspec.rag.chat.routing import needs_documents
from ragspec.rag.prompt import Prompt, PromptBuilder, in_order
from ragspec.rag.quote_choice import LatestQuote, is_record
from ragspec.rag.support import Evidence
from ragspec.rag.wording import TextRules, parse_answer
from ragspec.retrieval.expansion import part, widths
from ragspec.retrieval.search.relevance import unit_relevance
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope
from ragspec.retrieval_config import When
from ragspec.speculation import ON, Speculation
from ragspec.tenants import cache_salt_of

_STEP = 4
_LEAST_LEAD = -0.1
"""Of a quote that is given again, as in `Evidence.lead`. Fitted to the follow-ups of `dialogues.jsonl` in
`pipelines/benchmarks/documentation/tuning`: no quote of an earlier question had it there, and half of the right ones have."""


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
    bare, whole = history[: cut.num_without_passages], history[cut.num_without_passages :]
    return [*(turn.without_passages() for turn in bare), *whole][cut.num_turns :]


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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request of a chat. `id` becomes the engine request's id.

    `messages` have the roles system, user and assistant; the last is the user's. `conversation`: the id of a stored conversation
    that precedes the messages; earlier turns in `messages` replace its turns. `prediction`: text that the answer may repeat.
    `when` it is searched for: "auto" leaves out what `routing` says needs no documents. `cache_salt` separates caches within the
    tenant. `abstain_below` as in `RetrieverConfig`. `keep`: store the turn.
    """

    id: str
    messages: tuple[Message, ...]
    params: SamplingParams
    scope: SearchScope = PUBLIC_SCOPE
    conversation: str = ""
    num_passages: int = 3
    when: When = "always"
    speculation: Speculation = ON
    prediction: str = ""
    cache_salt: str = ""
    abstain_below: float = 0.0
    keep: bool = True

    def __post_init__(self) -> None:
        if self.num_passages < 1:
            raise InputError(f"num_passages must be at least 1, not {self.num_passages}")

    def searches(self, question: str) -> bool:
        """Whether passages are retrieved for the question."""
        return self.when == "always" or (self.when == "auto" and needs_documents(question))

    @property
    def salt(self) -> str:
        return cache_salt_of(self.scope.tenant, self.cache_salt)

    @property
    def visibility(self) -> str:
        """Turns with equal visibility may see each other's passages."""
        return f"{self.cache_salt}\0{self.conversation}\0{self.scope.filter!r}"


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The turns before a question, the oldest first, and the passages shown with each.

    `keys`: the digests of the turns, and of the new question. `unsaved`: turns missing from the named conversation.
    """

    pairs: tuple[QaPair, ...]
    shown: tuple[ShownPassages, ...]
    keys: tuple[str, ...]
    unsaved: tuple[QaPair, ...] = ()

    @property
    def turns(self) -> tuple[PastTurn, ...]:
        return tuple(PastTurn(*pair, shown.passages) for pair, shown in zip(self.pairs, self.shown, strict=True))

    @property
    def asked(self) -> list[AskedBefore]:
        """The earlier questions, each with the titles of the passages that its answer cites, if they are close to it."""
        cited = [
            [p.title for p in shown.passages if p.id in shown.cited and p.title and unit_relevance(p.score) >= 0.5]
            for shown in self.shown
        ]
        return [AskedBefore(pair.question, tuple(own)) for pair, own in zip(self.pairs, cited, strict=True)]

    @property
    def latest(self) -> ShownPassages | None:
        """Of the latest turn that showed passages; its order and rules are the conversation's. None if no turn showed any."""
        return next((shown for shown in reversed(self.shown) if shown.passages), None)

    def passages_of_other_generations(self, generation: str) -> list[Passage]:
        """Passages retrieved in another generation than this one; all of them if it is empty."""
        return [p for shown in self.shown if not generation or shown.generation != generation for p in shown.passages]

    def turns_without(
        self, gone: Collection[tuple[str, str]], existing: Mapping[tuple[str, str], Passage]
    ) -> tuple[PastTurn, ...]:
        """`turns` without the passages of these ids and texts; the others are numbered anew.

        A passage stands where the `existing` passage of its id and text does: an edit before it may have moved it.
        """
        kept = [
            tuple(_placed(p, existing.get((p.id, p.text), p)) for p in turn.passages if (p.id, p.text) not in gone)
            for turn in self.turns
        ]
        return tuple(replace(turn, passages=own) for turn, own in zip(self.turns, kept, strict=True))


def _placed(passage: Passage, now: Passage) -> Passage:
    """The passage at its place in the document now, under the document's names now."""
    if passage is now:
        return passage
    return replace(part(now, passage.text, now.start, now.end, now.blocks), score=passage.score)


def split_messages(messages: Sequence[Message]) -> tuple[str, list[QaPair], str]:
    """(system text, finished turns, question). Consecutive messages of one role are joined.

    Raises: InputError unless the last message is the user's and all roles are system, user or assistant.
    """
    if not messages or messages[-1].role != "user":
        raise InputError("a conversation must end with a message of the user")
    system: list[str] = []
    pairs: list[QaPair] = []
    for message in messages:
        if message.role == "user" or message.content.strip():  # an answer may be empty, and clients send it back
            check_text(message.content, f"a message of the {message.role}")
        if message.role == "system":
            system.append(message.content)
        elif message.role == "user":
            is_open = bool(pairs) and not pairs[-1].answer.strip()
            question = f"{pairs.pop().question}\n\n{message.content}" if is_open else message.content
            pairs.append(QaPair(question, ""))
        elif message.role == "assistant":
            last = pairs.pop() if pairs else QaPair("", "")
            pairs.append(QaPair(last.question, "\n\n".join(filter(None, (last.answer, message.content)))))
        else:
            raise InputError(f"unknown role {message.role!r}; known are system, user, assistant")
    *finished, (question, _) = pairs
    return "\n\n".join(filter(str.strip, system)), finished, question


def load_history(
    store: ConversationStore | None, turn: ChatTurn, given: Sequence[QaPair], question: str
) -> ChatHistory:
    """The turns before the question: the given turns, or else the stored turns of the conversation.

    If no conversation is named and the store fails, the turns have no passages.
    Raises: NotFound, StoreError, SaveError for a named conversation.
    """
    pairs, unsaved = tuple(given), tuple[QaPair, ...]()
    if turn.conversation:
        if store is None:
            raise InputError("conversations are not kept here; send all messages instead")
        saved = tuple(store.turns(turn.scope.tenant, turn.conversation))
        pairs = pairs or saved
        unsaved = pairs[len(saved) :] if pairs[: len(saved)] == saved else ()
    keys = turn_keys(turn.visibility, pairs, question)
    shown: dict[str, ShownPassages] = {}
    try:
        if store is not None:
            shown = store.load_shown(turn.scope.tenant, keys[:-1])
    except (SaveError, StoreError) as cause:
        if turn.conversation:
            raise
        log.warning("the passages of earlier turns cannot be read: %s", cause)
    return ChatHistory(pairs, tuple(shown.get(key, ShownPassages(())) for key in keys[:-1]), tuple(keys), unsaved)


def used_quotes(question: str, latest: Sequence[QaPair], passages: Sequence[Passage], rules: TextRules) -> list[str]:
    """The quote of the latest answer, unless it is as close to another question as any other span of the passages, or is a
    record, of which another value may be asked."""
    quotes = [answer.quote for pair in latest if pair.question != question and (answer := parse_answer(pair.answer))]
    if rules.places:
        quotes = [quote for quote in quotes if not is_record(quote)]
    evidence = Evidence(passages if quotes else (), question, by_blocks=rules.quotes == "blocks")
    return [quote for quote in quotes if evidence.lead(quote) < _LEAST_LEAD]


def latest_quote(history: Sequence[PastTurn], shown: Sequence[ShownPassages]) -> LatestQuote | None:
    """Of the latest answer, where its passage is now; None if the passage is gone."""
    answer = parse_answer(history[-1].answer) if history else None
    if answer is None:
        return None
    cited = [each for each in history[-1].passages if each.id in shown[-1].cited and answer.quote in each.text]
    return LatestQuote.of(cited[0], answer.quote) if cited else None
