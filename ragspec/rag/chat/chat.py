"""Multi-turn RAG: rewrite a follow-up question, retrieve, and build a prompt with the earlier turns and their passages; and one
conversation from Python.

    >>> chat = Chat(retriever, prompts, conversations, ChatConfig())
    >>> turn = ChatTurn(uuid4().hex, (Message("user", "And in 1977?"),), params, SearchScope("acme"), conversation_id)
    >>> prepared = chat.prepare(turn)
    >>> (answer,), is_kept = chat.answers(prepared, engine.generate([prepared.request]))

    >>> with pipeline.chat() as session:
    ...     print(session.ask("When was the old mill built?").text)
    ...     for piece in session.stream("And who built it?"): ...
    ...     session.save("mill.json")
    >>> with pipeline.chat(saved="mill.json") as session: ...

A client either names a conversation that the store keeps, or sends all messages every time. In both cases the store finds the
passages of earlier turns, by a digest of the turns. A session prepares and keeps its turns as the service does, so both give the
same text. The store is the only form of a conversation; `SavedConversation` is its copy in a file.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, Unpack

from pydantic import TypeAdapter, ValidationError

from ragspec.config import ChatConfig, PassageOrder
from ragspec.core import Completion, Message, Passage, Request, SamplingOptions, SamplingParams, check_text
from ragspec.disk import saving, write_atomically
from ragspec.errors import InputError, RagspecError, RetrievalError, StoreError
from ragspec.rag import steps
from ragspec.rag.answer import Answer, AnswerStream
from ragspec.rag.chat.conversations import ConversationStore, QaPair, ShownPassages, turn_keys
from ragspec.rag.chat.history import (
    ChatHistory,
    ChatPrompt,
    ChatTurn,
    PastTurn,
    build_chat_prompt,
    latest_quote,
    load_history,
    split_messages,
    used_quotes,
)
from ragspec.rag.chat.query_rewriter import QueryRewriter
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.support import Support, find_support
from ragspec.rag.wording import FollowUps
from ragspec.retrieval.expansion import JoinedPassage, is_part, widths
from ragspec.retrieval.retriever import FROM_MEMORY, RetrievalResult, RetrievalTimes
from ragspec.retrieval.search.filters import ComparisonFilter, CompoundFilter
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval_config import When
from ragspec.speculation import Speculation, SpeculationGiven
from ragspec.tenants import TenantCaches

log = logging.getLogger(__name__)

_PREDICTED_CHARS = 16
"""Characters of a prediction that are read for each token that may be written: four times as many as most texts have."""
_MAX_COPIED_TURNS = 4
"""Earlier turns that may be copied from when the prompt has none."""


@dataclass(frozen=True, slots=True)
class PreparedTurn(steps.PreparedQuestion):
    """A turn with its prompt and engine request. `question`: the user's question as rewritten for retrieval. `num_deletions`: of
    the tenant before it. `searched`: whether passages were looked for."""

    prompt: ChatPrompt
    turn: ChatTurn
    question: str
    history: ChatHistory = field(repr=False)
    num_deletions: int
    searched: bool

    @property
    def dropped_passages(self) -> tuple[Passage, ...]:
        """Passages that did not fit: of earlier turns, then the question's own."""
        return (*self.prompt.dropped_history, *self.prompt.dropped)


class Chat:
    """Prepares turns and stores them. Safe to call from several threads; every method may block."""

    def __init__(
        self,
        retriever: steps.RetrieverLike,
        prompts: PromptBuilder,
        conversations: ConversationStore | None,
        config: ChatConfig | None = None,
        engine: steps.EngineLike | None = None,
    ) -> None:
        """Without `conversations` nothing is stored. `engine`: generates the answers, and may rewrite questions."""
        self.conversations = conversations
        self._prompts, self._config = prompts, config or ChatConfig()
        self._retriever = ChatRetriever(retriever, self._config)
        self._rewriter = QueryRewriter(self._config, prompts, engine)
        self.caches = TenantCaches(engine.purge if engine is not None else lambda _: None)
        self._num_deletions = Counter[str]()  # by tenant

    def prepare(self, turn: ChatTurn) -> PreparedTurn:
        """Raises: InputError, NotFound, PromptTooLong, RetrievalError, StoreError; EngineError if the target rewrites."""
        system, given, user_question = split_messages(turn.messages)
        check_text(user_question, "the question")
        self.caches.note(turn.salt)
        num_deletions = self._num_deletions[turn.scope.tenant]
        history = load_history(self.conversations, turn, given, user_question)
        latest, prompts = history.latest, self._prompts
        if latest is not None:
            prompts = prompts.by(latest.rules.with_target_of(prompts.rules))
        if prompts.rules.routing == "none" and turn.when == "auto":
            turn = replace(turn, when="always")
        begin, question, searched = time.perf_counter(), user_question, turn.searches(user_question)
        if searched and history.pairs:
            question = self._rewriter.standalone(user_question, history.asked, turn.salt)
        if searched or turn.when == "never":
            context = self._retriever.retrieve(turn, user_question, question, history, prompts.rules.follow_ups)
        else:  # Why without passages: they bring the instruction to answer from them
            context = ChatContext(history=tuple(each.without_passages() for each in history.turns))
        retrieve_s = time.perf_counter() - begin
        order = latest.order if latest else prompts.passage_order
        prompt = self._prompt(prompts, system, context, user_question, question, turn.params.max_tokens, order)
        most = self._prompts.max_chars  # Why cut: no answer is longer, and whatever is given is tokenised
        earlier = _cut(_history_texts(prompt.history or context.history[-_MAX_COPIED_TURNS:]), most)
        predicted = turn.prediction[: min(most, _PREDICTED_CHARS * turn.params.max_tokens)]
        used = used_quotes(user_question, history.pairs[-1:], prompt.passages, prompts.rules)
        grammar = prompts.answer_grammar(turn.params, turn.speculation, prompt.passages, used)
        # Why the whole question where earlier turns are hidden: the prompt names nothing else
        own_words = prompts.rules.follow_ups == "cited" and self._config.history != "hidden"
        asked = user_question if own_words else question
        read_on = latest_quote(context.history, history.shown) if question != user_question else None
        choice = asked, prompt, context.closeness, used
        biased = partial(prompts.biased, turn.params, *choice, holds_quotes=bool(grammar), latest=read_on)
        request = Request(
            turn.id,
            prompt.prompt_ids,
            turn.params,
            steps.copy_sources(user_question, prompt.passages, earlier, predicted),
            turn.salt,
            turn.speculation,
            grammar=grammar,
            affinity=turn.conversation or history.keys[0],
        )
        judged = None if context.num_further else context.closeness  # the doubt knows the scores of whole questions
        close = judged if prompts.rules.follow_ups == "carried" else context.closeness  # a carried passage has none
        language = prompts.unknown_language(user_question)
        found_none = prompts.rules.says_none_found and context.found_none
        said = steps.abstention(turn.params, context.passages, close, turn.abstain_below, language, found_none)
        doubted = user_question + prompts.doubt_words, question + prompts.doubt_words
        build = partial(self._prompt, prompts, system, context, *doubted, 1, order)
        doubt = None if said else prompts.doubt(build, prompt, judged, request)
        look = None if said else prompts.look(prompt, request, biased)
        request = request if look else replace(request, params=biased())
        found = context.generation, context.missing, retrieve_s, time.perf_counter() - begin - retrieve_s
        built = user_question, prompt, request, *found, prompts, said, context.closeness
        own = turn, question, history, num_deletions, searched
        return PreparedTurn(*built, *own, times=context.times, doubt=doubt, look=look)

    def answers(self, prepared: PreparedTurn, completions: Sequence[Completion]) -> tuple[list[Answer], bool]:
        """The cited answers of these choices, and whether the first choice, with which the conversation goes on, was stored."""
        answers = [steps.build_answer(prepared, completion) for completion in completions]
        is_first = bool(completions) and not completions[0].choice
        return answers, is_first and self.remember(prepared, answers[0])

    def remember(self, prepared: PreparedTurn, answer: Answer) -> bool:
        """Store the turn for later turns; whether its messages were stored. A failing store is logged, not raised."""
        if self.conversations is None:
            return False
        turn, history = prepared.turn, prepared.history
        if not turn.keep:
            return False
        tenant, keys = turn.scope.tenant, history.keys
        cited = tuple(dict.fromkeys(citation.passage_id for citation in answer.citations))
        ranks = answer.ranks if answer.passage_order == "shared" else ()
        if ranks and not cited:  # the best passage is carried over, and is not the first
            cited = (answer.passages[ranks.index(1)].id,)
        shown = ShownPassages(answer.passages, prepared.generation, cited, ranks, prepared.prompts.rules)
        is_stored = False
        try:
            if turn.conversation:
                said = answer.text.replace("\0", "\ufffd")  # Why: no later prompt may hold NUL
                pairs = [*history.unsaved, QaPair(prepared.user_question, said)]
                self.conversations.append(tenant, turn.conversation, pairs, keys[-len(pairs) :])
                is_stored = True
            if answer.passages:
                self.conversations.save_shown(
                    tenant, keys[-1], shown, conversation=turn.conversation, earlier=keys[:-1]
                )
                if self._num_deletions[tenant] != prepared.num_deletions:  # Why last: a deletion counts before it looks
                    self.conversations.drop_shown(tenant, keys[-1])
        except RagspecError as cause:
            log.warning("a turn could not be kept%s: %s", " whole" if is_stored else "", type(cause).__name__)
            return is_stored
        return True

    def supported(self, turn: QaPair, shown: ShownPassages) -> Support:
        """A stored answer with its citations and labels, which are found again in the passages that are kept."""
        asked = None if self._prompts.quotes_first else turn.question
        return find_support(turn.answer, shown.passages, asked)

    def forget(self, tenant: str, documents: Sequence[str]) -> None:
        """Remove deleted documents from stored turns, and empty the tenant's caches.

        Raises: SaveError, StoreError; the caches are emptied in any case.
        """
        self._num_deletions[tenant] += 1
        self.caches.purge(tenant)
        if self.conversations is not None:
            self.conversations.forget_documents(tenant, documents)

    def _prompt(
        self,
        prompts: PromptBuilder,
        system: str,
        context: ChatContext,
        user_question: str,
        question: str,
        max_tokens: int,
        order: PassageOrder,
    ) -> ChatPrompt:
        """With earlier turns or, if they are hidden, without; then all turns are reported as dropped."""
        is_hidden = self._config.history == "hidden"
        history, asked = ((), question) if is_hidden else (context.history, user_question)
        prompt = build_chat_prompt(prompts, system, history, asked, context.passages, max_tokens, order)
        if not is_hidden:
            return prompt
        passages = tuple(passage for turn in context.history for passage in turn.passages)
        return replace(prompt, num_dropped_turns=len(context.history), dropped_history=passages)


def _history_texts(history: Sequence[PastTurn]) -> list[str]:
    """The texts of earlier turns, the latest first: answers, then passages, then questions."""
    turns = history[::-1]
    answers = [turn.answer for turn in turns]
    passages = [passage.text for turn in turns for passage in turn.passages]
    return [*answers, *passages, *(turn.question for turn in turns)]


def _cut(texts: Iterable[str], num_chars: int) -> Iterator[str]:
    """The first `num_chars` characters of the texts together."""
    for text in texts:
        yield text[:num_chars]
        num_chars = max(0, num_chars - len(text))


WHOLE_INDEX = "*"
"""Stands in `missing` if a search of the index failed; passages that an earlier search of the turn found are shown."""

_CARRIED_TURNS = 2
_MAX_CONFIRMED = 1024
"""Passages searched to confirm earlier passages after the index changed; a passage that is not among them is dropped."""
_MAX_QUERY_PASSAGES, _MAX_QUERY_CHARS = 100, 80
"""The query for it: the beginnings of the latest passages."""


@dataclass(frozen=True, slots=True)
class ChatContext:
    """The passages of a turn, and the earlier turns without passages that no longer exist. `closeness`: the calibrated score of
    the best passage; None but in mode hybrid. `num_further`: passages beside those of the completed question."""

    passages: tuple[Passage, ...] = ()
    history: tuple[PastTurn, ...] = ()
    generation: str = ""
    missing: tuple[str, ...] = ()
    closeness: float | None = None
    num_further: int = 0
    times: RetrievalTimes = FROM_MEMORY

    @property
    def found_none(self) -> bool:
        """Whether a search of the whole index found no passage, and no earlier turn holds one."""
        is_searched = bool(self.generation) and not self.missing
        return is_searched and not self.passages and not any(past.passages for past in self.history)


class ChatRetriever:
    def __init__(self, retriever: steps.RetrieverLike, config: ChatConfig) -> None:
        self._retriever, self._config = retriever, config

    def retrieve(
        self, turn: ChatTurn, user_question: str, question: str, history: ChatHistory, follow_ups: FollowUps
    ) -> ChatContext:
        """Passages for `question`, the rewritten form of `user_question`, and further ones for a follow-up question, as
        `TextRules.follow_ups` says; none if the turn does not retrieve.

        Raises: RetrievalError, StoreError, unless the configuration allows answers without an index. Passages that were found
        before a failure stay.
        """
        results, cited, missing = list[RetrievalResult](), list[Sequence[Passage]](), list[str]()
        turns = tuple(each.without_passages() for each in history.turns)
        try:
            if turn.when == "never":
                return ChatContext(history=self._confirmed(history, turn.scope))
            results.append(self._retriever.retrieve([question], turn.num_passages, turn.scope))
            turns = self._confirmed(history, turn.scope, results[0].generation)
            is_follow_up = question != user_question or self._config.rewriter == "off"
            cited = self._cited(history, turns) if is_follow_up and self._config.max_carried else []
            if cited and follow_ups == "cited":
                most = turn.num_passages + self._config.max_carried
                results.append(self._retriever.retrieve([user_question], most, _within(turn.scope, cited[0])))
        except (RetrievalError, StoreError):
            if not self._config.answer_without_index:
                raise
            log.warning("a turn is answered without passages, or with some of them: the index does not answer")
            missing.append(WHOLE_INDEX)
            if not results:
                return ChatContext(history=turns, missing=(WHOLE_INDEX,))
        own, *further = (result.passages[0] for result in results)
        if follow_ups == "carried":
            further = [[p.hit if isinstance(p, JoinedPassage) else p for p in used] for used in cited]
        own_ids = {passage.id for passage in own}
        kept = {passage.id: passage for passage in chain(*further) if passage.id not in own_ids}
        passages = (*own, *islice(kept.values(), self._config.max_carried))
        times = [result.times for result in results]
        return ChatContext(
            passages,
            turns,
            results[0].generation,
            tuple(dict.fromkeys(chain(missing, *(result.missing for result in results)))),
            max((result.closeness[0] for result in results if result.closeness), default=None),
            num_further=len(passages) - len(own),
            times=RetrievalTimes(sum(each.encode_s for each in times), sum(each.search_s for each in times)),
        )

    def _confirmed(self, history: ChatHistory, scope: SearchScope, generation: str = "") -> tuple[PastTurn, ...]:
        """The earlier turns without passages that are no longer in the index, the others at their places there.

        Passages of the current generation are in it. The others are searched for in their documents, with their own words,
        because BM25 finds no passage without a word of the query.
        """
        stale = history.passages_of_other_generations(generation)
        if not stale:
            return history.turns
        query = " ".join(dict.fromkeys(passage.text[:_MAX_QUERY_CHARS] for passage in stale[-_MAX_QUERY_PASSAGES:]))
        result = self._retriever.retrieve([query], _MAX_CONFIRMED, _within(scope, stale))
        existing = {(passage.id, passage.text): passage for passage in result.passages[0]}
        wholes = next(widths(result.passages[0]))
        gone = [passage for passage in stale if not is_part(passage, wholes)]
        return history.turns_without({(passage.id, passage.text) for passage in gone} - existing.keys(), existing)

    def _cited(self, history: ChatHistory, turns: Sequence[PastTurn]) -> list[Sequence[Passage]]:
        """The passages that each of the latest answers cites, or else its best passage; the latest first, none empty."""
        latest = list(zip(turns, history.shown, strict=True))[: -_CARRIED_TURNS - 1 : -1]
        cited = [[p for p in past.passages if p.id in shown.cited] or past.passages[:1] for past, shown in latest]
        return list(filter(None, cited))


def _within(scope: SearchScope, passages: Sequence[Passage]) -> SearchScope:
    """The documents of these passages, as far as they are in the scope."""
    documents = tuple(sorted({passage.document_id for passage in passages}))
    same = ComparisonFilter(type="in", key="document.id", value=documents)
    both = same if scope.filter is None else CompoundFilter(type="and", filters=(scope.filter, same))
    return SearchScope(scope.tenant, both)


class TurnOptions(SamplingOptions, total=False):
    """`retrieve`: when passages are retrieved; False is "never", left out is the setting. `prediction`: text that the answer may
    repeat."""

    num_passages: int | None
    speculation: SpeculationGiven
    retrieve: When | bool
    prediction: str


@dataclass(frozen=True)
class SavedConversation:
    """A conversation in a file: its turns, the passages of each, and the system message before them."""

    turns: tuple[QaPair, ...]
    shown: tuple[ShownPassages, ...]
    system: str = ""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises: InputError."""
        try:
            found = TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except (OSError, ValidationError) as cause:
            raise InputError(f"{path} is no saved conversation: {cause}") from cause
        if len(found.turns) != len(found.shown):
            raise InputError(
                f"{path} is no saved conversation: it has {len(found.turns)} turns, {len(found.shown)} shown"
            )
        return found

    def save(self, path: str | Path) -> None:
        """Raises: SaveError."""
        with saving(Path(path)):
            write_atomically(Path(path), json.dumps(TypeAdapter(type(self)).dump_python(self, mode="json"), indent=1))


class ChatSession(steps.Closeable):
    """Asks one question at a time. `id` names the conversation in its store."""

    def __init__(self, chat: Chat, engine: steps.EngineLike, turn: ChatTurn, *, owns_store: bool = False) -> None:
        """`turn`: a turn without a question, whose settings all turns share. Without a conversation it begins a new one.

        Raises: NotFound, SaveError, StoreCorrupt.
        """
        assert chat.conversations is not None, "a session needs a store"
        self._chat, self._engine, self._store, self._owns_store = chat, engine, chat.conversations, owns_store
        self.id = turn.conversation or self._store.create(turn.scope.tenant).id
        self._store.find(turn.scope.tenant, self.id)
        self._turn = replace(turn, conversation=self.id)
        self.kept = True
        """Whether the store has kept the latest turn; a turn that it could not keep is missing from the next prompt."""

    def restore(self, saved: SavedConversation) -> None:
        """Append the turns of a file. Raises: NoRoom, SaveError."""
        tenant, keys = self._turn.scope.tenant, turn_keys(self._turn.visibility, saved.turns, "")
        self._store.append(tenant, self.id, saved.turns)
        for key, shown in zip(keys[:-1], saved.shown, strict=True):
            self._store.save_shown(tenant, key, shown, conversation=self.id)

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON. Raises: SaveError, StoreCorrupt."""
        history = load_history(self._store, self._turn, (), "")
        system = "\n\n".join(message.content for message in self._turn.messages)
        SavedConversation(history.pairs, history.shown, system).save(path)

    @property
    def turns(self) -> tuple[PastTurn, ...]:
        """The turns so far, each with the passages that it was shown. Raises: NotFound, SaveError, StoreCorrupt."""
        return load_history(self._store, self._turn, (), "").turns

    def ask(self, question: str, params: SamplingParams | None = None, **options: Unpack[TurnOptions]) -> Answer:
        """The answer to the next question; of several choices the first. Single sampling parameters replace those of `params`.

        Raises: InputError, PromptTooLong, NotFound, RetrievalError, StoreError, EngineError.
        """
        ((prepared, completions),) = steps.generate_answers([self._prepare(question, params, **options)], self._engine)
        return self._finish(prepared, completions[0])

    def stream(
        self, question: str, params: SamplingParams | None = None, **options: Unpack[TurnOptions]
    ) -> AnswerStream:
        """As `ask`, in pieces of text as they are decided. A stream that is left early leaves no turn. One choice."""
        options["n"] = 1
        pieces = steps.stream_answer(self._engine, lambda: self._prepare(question, params, **options), self._finish)
        return AnswerStream(pieces)

    def close(self) -> None:
        """Close the store, if the session opened it."""
        if self._owns_store:
            self._store.close()

    def _prepare(
        self,
        question: str,
        params: SamplingParams | None = None,
        *,
        num_passages: int | None = None,
        speculation: SpeculationGiven = True,
        retrieve: When | bool = True,
        prediction: str = "",
        **sampling: Any,
    ) -> PreparedTurn:
        (params,) = steps.params_of_each([question], params, self._turn.params, sampling)
        turn = replace(
            self._turn,
            id=uuid.uuid4().hex,
            messages=(*self._turn.messages, Message("user", question)),
            params=params,
            num_passages=self._turn.num_passages if num_passages is None else num_passages,
            speculation=Speculation.of(speculation),
            when=retrieve if isinstance(retrieve, str) else self._turn.when if retrieve else "never",
            prediction=prediction,
        )
        return self._chat.prepare(turn)

    def _finish(self, prepared: PreparedTurn, completion: Completion) -> Answer:
        (answer,), self.kept = self._chat.answers(prepared, [completion])
        return answer
