"""Multi-turn retrieval-augmented chat: a follow-up is made standalone, looked up, and asked beside what was said and shown.

    >>> chat = Chat(retriever, prompts, conversations, ChatConfig())
    >>> ready = chat.prepare(ChatTurn(uuid4().hex, (Message("user", "And in 1977?"),), params, SearchScope("acme"), name))
    >>> answer = chat.answered(ready, engine.generate([ready.request])[0])
    >>> chat.remember(ready, answer)

A client may name a conversation that the store keeps, or send all messages each time; then the passages that earlier answers were
given from are found by what was said before them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ragspec.core import Completion, Message, Passage, Request, SamplingParams, check_text
from ragspec.errors import InputError, RagspecError
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.cache_salts import TenantCaches, cache_salt_of
from ragspec.rag.chat.config import ChatConfig
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages
from ragspec.rag.chat.history import ChatHistory, load_history, split_messages
from ragspec.rag.chat.prompt import ChatPrompt, PastTurn, build_chat_prompt
from ragspec.rag.chat.query_rewriter import QueryRewriter
from ragspec.rag.chat.retrieval import ChatContext, ChatRetriever
from ragspec.rag.citations import find_citations
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, RetrieverLike, copy_sources
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope
from ragspec.speculation import ON, Speculation

log = logging.getLogger(__name__)

_LATEST = 4
"""Turns that are copied from where none is read."""


class ChatEngine(EngineLike, Protocol):
    """Runs requests, and forgets what it cached under a salt."""

    def purge(self, salt: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What one asks, after what was said. `id` names the request.

    `messages` are of the roles system, user and assistant and end with the user's. With a `conversation`, a single question goes
    on with what is kept of it; earlier turns that are given stand in place of those. `prediction`: what the asker expects to
    read. `cache_salt` separates caches within the tenant.
    """

    id: str
    messages: tuple[Message, ...]
    params: SamplingParams
    scope: SearchScope = PUBLIC_SCOPE
    conversation: str = ""
    num_passages: int = 3
    retrieve: bool = True
    speculation: Speculation = ON
    prediction: str = ""
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if self.num_passages < 1:
            raise InputError(f"num_passages must be at least 1, not {self.num_passages}")

    @property
    def salt(self) -> str:
        """Of the caches: the tenant's, or a part of them."""
        return cache_salt_of(self.scope.tenant, self.cache_salt)

    @property
    def who(self) -> str:
        """Equal for those who may be told what was shown to each other."""
        return f"{self.cache_salt}\0{self.conversation}\0{self.scope.filter!r}"


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn as the engine is asked for its answer. `asked`: the user's own words; `question`: what was looked up."""

    turn: ChatTurn
    request: Request
    prompt: ChatPrompt
    asked: str
    question: str
    generation: str
    missing: tuple[str, ...]
    retrieve_s: float
    prompt_s: float
    past: ChatHistory = field(repr=False)

    @property
    def conversation(self) -> str:
        return self.turn.conversation

    @property
    def rewritten(self) -> bool:
        return self.question != self.asked

    @property
    def dropped_turns(self) -> int:
        return self.prompt.num_dropped_turns

    @property
    def dropped_passages(self) -> tuple[Passage, ...]:
        """All that did not fit: of earlier turns, then the question's own."""
        return (*self.prompt.dropped_history, *self.prompt.dropped)


class Chat:
    """Owns the order of the steps. Safe to call from several threads; what takes time blocks."""

    def __init__(
        self,
        retriever: RetrieverLike,
        prompts: PromptBuilder,
        conversations: ConversationStore | None,
        config: ChatConfig | None = None,
        engine: ChatEngine | None = None,
    ) -> None:
        """Without `conversations` nothing is kept. `engine`: writes the answers, and may rewrite questions."""
        self._prompts, self._conversations = prompts, conversations
        self._config = config or ChatConfig()
        self._index = ChatRetriever(retriever, self._config)
        self._rewriter = QueryRewriter(self._config, prompts, engine)
        self._engine, self._salts = engine, TenantCaches(engine.purge if engine is not None else _nothing)

    @property
    def conversations(self) -> ConversationStore | None:
        return self._conversations

    def prepare(self, turn: ChatTurn) -> PreparedTurn:
        """Raises: InputError, NotFound, PromptTooLong, RetrievalError, StoreError; EngineError where the target rewrites."""
        system, given, asked = split_messages(turn.messages)
        check_text(asked, "the question")
        self._salts.note(turn.scope.tenant, turn.salt)
        past = load_history(self._conversations, turn.scope.tenant, turn.who, turn.conversation, given, asked)
        begin = time.perf_counter()
        question = asked
        if turn.retrieve and past.said:
            question = self._rewriter.standalone(asked, past.said, turn.salt)
        found = (
            self._index.found(asked, question, past, turn.num_passages, turn.scope)
            if turn.retrieve
            else self._index.not_asked(past, turn.scope)
        )
        retrieve_s = time.perf_counter() - begin
        prompt = self._prompt(system, found, asked, question, turn.params.max_tokens)
        request = Request(
            turn.id,
            prompt.prompt_ids,
            turn.params,
            copy_sources(asked, prompt.passages, _texts(prompt.history or found.history[-_LATEST:]), turn.prediction),
            turn.salt,
            turn.speculation,
            affinity=turn.conversation or past.keys[0],
        )
        prompt_s = time.perf_counter() - begin - retrieve_s
        return PreparedTurn(
            turn, request, prompt, asked, question, found.generation, found.missing, retrieve_s, prompt_s, past
        )

    def answered(self, ready: PreparedTurn, completion: Completion) -> Answer:
        """One choice with its citations."""
        prompt = ready.prompt
        stats = AnswerStats(
            ready.retrieve_s, ready.prompt_s, ready.generation, completion.stats, missing_segments=ready.missing
        )
        return Answer(
            ready.asked,
            completion.text,
            tuple(find_citations(completion.text, prompt.passages)),
            prompt.passages,
            ready.dropped_passages,
            completion.finish_reason,
            completion.token_ids,
            completion.logprobs,
            stats,
        )

    def remember(self, ready: PreparedTurn, answer: Answer) -> bool:
        """Keep the turn for those after it; False if what was said cannot be kept, which takes nothing from the answer."""
        if self._conversations is None:
            return False
        turn, past = ready.turn, ready.past
        cited = tuple(dict.fromkeys(citation.passage_id for citation in answer.citations))
        shown = ShownPassages(answer.passages, ready.generation, cited)
        kept = False
        try:
            if turn.conversation:
                said = [*past.unkept, QaPair(ready.asked, answer.text)]
                self._conversations.append(turn.scope.tenant, turn.conversation, said)
                kept = True
            if answer.passages:
                self._conversations.save_shown(
                    turn.scope.tenant, past.keys[-1], shown, conversation=turn.conversation, earlier=past.keys[:-1]
                )
        except RagspecError as cause:
            log.warning("a turn could not be kept%s: %s", " whole" if kept else "", type(cause).__name__)
            return kept
        return True

    def forget(self, tenant: str, documents: Sequence[str]) -> None:
        """Documents are gone: what was shown of them is known no more, and no cache holds their text.

        Raises: SaveError, StoreError; the caches are emptied all the same.
        """
        self._salts.purge(tenant)
        if self._conversations is not None:
            self._conversations.forget_documents(tenant, documents)

    def _prompt(self, system: str, found: ChatContext, asked: str, question: str, max_tokens: int) -> ChatPrompt:
        """With the turns before, or with what of them the question needs; then all of them are reported as dropped."""
        shown = self._config.history
        if shown == "shown" or (shown == "auto" and not self._prompts.has_context_role):
            return build_chat_prompt(self._prompts, system, found.history, asked, found.passages, max_tokens)
        alone = build_chat_prompt(self._prompts, system, (), question, found.passages, max_tokens)
        passages = tuple(passage for turn in found.history for passage in turn.passages)
        return replace(alone, num_dropped_turns=len(found.history), dropped_history=passages)


def _nothing(_: str) -> None: ...


def _texts(history: Sequence[PastTurn]) -> list[str]:
    """What earlier turns say, the latest first: answers, then passages and questions."""
    turns = history[::-1]
    answers = [turn.answer for turn in turns]
    passages = [passage.text for turn in turns for passage in turn.passages]
    return [*answers, *passages, *(turn.question for turn in turns)]
