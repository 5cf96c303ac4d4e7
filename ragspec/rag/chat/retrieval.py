"""What a turn of a chat is answered from: its own passages, those carried over, and what earlier turns may still show."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ragspec.core import Passage
from ragspec.errors import RetrievalError, StoreError
from ragspec.rag.chat.config import ChatConfig
from ragspec.rag.chat.history import ChatHistory
from ragspec.rag.chat.prompt import PastTurn
from ragspec.rag.steps import RetrieverLike
from ragspec.retrieval.search.filters import ComparisonFilter, CompoundFilter
from ragspec.retrieval.search.segment_search import SearchScope

log = logging.getLogger(__name__)

WHOLE_INDEX = "*"
"""Stands in `missing` where nothing could be searched."""

_MOST_CONFIRMED = 1024
"""Passages of earlier turns' documents that are looked through after the index has changed; one beyond is shown no more."""
_MOST_STALE, _CHARS = 100, 80
"""They are looked for by the beginnings of the latest that were shown."""


@dataclass(frozen=True, slots=True)
class ChatContext:
    """What retrieval gave for a turn, and what of the turns before may still be shown."""

    passages: tuple[Passage, ...] = ()
    history: tuple[PastTurn, ...] = ()
    generation: str = ""
    missing: tuple[str, ...] = ()


class ChatRetriever:
    """Asks the index for a chat."""

    def __init__(self, retriever: RetrieverLike, config: ChatConfig) -> None:
        self._retriever, self._config = retriever, config

    def found(self, asked: str, question: str, past: ChatHistory, k: int, scope: SearchScope) -> ChatContext:
        """The question's passages, then those carried over; and the turns before with what may still be shown of them."""
        try:
            found = self._retriever.retrieve([question], k, scope)
            history = self._confirmed(past, scope, found.generation)
        except (RetrievalError, StoreError) as error:
            return self._without_index(past, error)
        fresh = found.passages[0]
        known = {passage.id for passage in fresh}
        leans = question != asked or self._config.rewriter == "off"
        carried = [p for p in self._carried(past, history) if p.id not in known] if leans else []
        return ChatContext((*fresh, *carried[: self._config.max_carried]), history, found.generation, found.missing)

    def not_asked(self, past: ChatHistory, scope: SearchScope) -> ChatContext:
        """Nothing of the question's own; the turns before with what may still be shown of them."""
        try:
            return ChatContext(history=self._confirmed(past, scope))
        except (RetrievalError, StoreError) as error:
            return self._without_index(past, error)

    def _without_index(self, past: ChatHistory, error: RetrievalError | StoreError) -> ChatContext:
        """Nothing but what was said, where that is allowed."""
        if not self._config.answer_without_index:
            raise error
        log.warning("a turn is answered without passages: the index does not answer")
        return ChatContext(history=tuple(turn.bare() for turn in past.history), missing=(WHOLE_INDEX,))

    def _confirmed(self, past: ChatHistory, scope: SearchScope, generation: str = "") -> tuple[PastTurn, ...]:
        """The turns with those of their passages that are in the index still.

        Of this generation all are; for others the index is asked, since documents may have been changed or deleted. It is asked
        in their own words: a search by words finds no passage that has none of the question's.
        """
        stale = past.of_other_generations(generation)
        if not stale:
            return past.history
        names = tuple(sorted({passage.document_id for passage in stale}))
        same = ComparisonFilter(type="in", key="document.id", value=names)
        both = same if scope.filter is None else CompoundFilter(type="and", filters=(scope.filter, same))
        words = " ".join(dict.fromkeys(passage.text[:_CHARS] for passage in stale[-_MOST_STALE:]))
        found = self._retriever.retrieve([words], _MOST_CONFIRMED, SearchScope(scope.tenant, both))
        there = {(passage.id, passage.text) for passage in found.passages[0]}
        return past.without({(passage.id, passage.text) for passage in stale} - there)

    def _carried(self, past: ChatHistory, history: Sequence[PastTurn]) -> list[Passage]:
        """What the latest answers were given from, the latest first: the passages they cite, else the best."""
        carried: dict[str, Passage] = {}
        for turn, cited in list(zip(history, past.cited, strict=True))[: -self._config.carried_turns - 1 : -1]:
            used = [passage for passage in turn.passages if passage.id in cited] or turn.passages[:1]
            carried |= {passage.id: passage for passage in used if passage.id not in carried}
        return list(carried.values())
