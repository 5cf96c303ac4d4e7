"""A turn of a chat and the turns before it: from the messages of a request or from the store, with the passages of each turn.

>>> split_messages((Message("user", "When?"), Message("assistant", "In 1874."), Message("user", "Why?")))
('', [QaPair(question='When?', answer='In 1874.')], 'Why?')
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ragspec.core import Message, Passage, SamplingParams, check_text
from ragspec.errors import InputError, SaveError, StoreError
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages, turn_keys
from ragspec.rag.chat.prompt import PastTurn
from ragspec.rag.chat.query_rewriter import AskedBefore
from ragspec.rag.chat.routing import needs_documents
from ragspec.retrieval.expansion import part
from ragspec.retrieval.search.relevance import unit_relevance
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope
from ragspec.retrieval_config import When
from ragspec.speculation import ON, Speculation
from ragspec.tenants import cache_salt_of

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
