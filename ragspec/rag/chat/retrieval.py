"""Retrieval for a chat turn: the question's passages, passages carried over, and earlier passages that still exist.

>>> ChatRetriever(retriever, ChatConfig()).retrieve(turn, user_question, question, history).passages
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ragspec.config import ChatConfig
from ragspec.core import Passage
from ragspec.errors import RetrievalError, StoreError
from ragspec.rag.chat.history import ChatHistory, ChatTurn
from ragspec.rag.chat.prompt import PastTurn
from ragspec.rag.steps import RetrieverLike
from ragspec.retrieval.expansion import JoinedPassage, is_part, widths
from ragspec.retrieval.search.filters import ComparisonFilter, CompoundFilter
from ragspec.retrieval.search.segment_search import SearchScope

log = logging.getLogger(__name__)

WHOLE_INDEX = "*"
"""Stands in `missing` if no part of the index could be searched."""

_CARRIED_TURNS = 2
_MAX_CONFIRMED = 1024
"""Passages searched to confirm earlier passages after the index changed; a passage that is not among them is dropped."""
_MAX_QUERY_PASSAGES, _MAX_QUERY_CHARS = 100, 80
"""The query for it: the beginnings of the latest passages."""


@dataclass(frozen=True, slots=True)
class ChatContext:
    """The passages of a turn, and the earlier turns without passages that no longer exist. `closeness`: the calibrated score of
    the best passage; None if it was not asked for, or if passages of earlier turns were carried over."""

    passages: tuple[Passage, ...] = ()
    history: tuple[PastTurn, ...] = ()
    generation: str = ""
    missing: tuple[str, ...] = ()
    closeness: float | None = None


class ChatRetriever:
    def __init__(self, retriever: RetrieverLike, config: ChatConfig) -> None:
        self._retriever, self._config = retriever, config

    def retrieve(self, turn: ChatTurn, user_question: str, question: str, history: ChatHistory) -> ChatContext:
        """Passages for `question`, the rewritten form of `user_question`; none if the turn does not retrieve.

        Raises: RetrievalError, StoreError, unless the configuration allows answers without an index.
        """
        try:
            if not turn.retrieve:
                return ChatContext(history=self._confirmed(history, turn.scope))
            result = self._retriever.retrieve([question], turn.num_passages, turn.scope)
            turns = self._confirmed(history, turn.scope, result.generation)
        except (RetrievalError, StoreError):
            if not self._config.answer_without_index:
                raise
            log.warning("a turn is answered without passages: the index does not answer")
            return ChatContext(history=tuple(each.without_passages() for each in history.turns), missing=(WHOLE_INDEX,))
        own = result.passages[0]
        own_ids = {passage.id for passage in own}
        is_follow_up = question != user_question or self._config.rewriter == "off"
        carried = [p for p in self._carried(history, turns) if p.id not in own_ids] if is_follow_up else []
        closeness = result.closeness[0] if result.closeness and not carried else None
        passages = (*own, *carried[: self._config.max_carried])
        return ChatContext(passages, turns, result.generation, result.missing, closeness)

    def _confirmed(self, history: ChatHistory, scope: SearchScope, generation: str = "") -> tuple[PastTurn, ...]:
        """The earlier turns without passages that are no longer in the index, the others at their places there.

        Passages of the current generation are in it. The others are searched for in their documents, with their own words,
        because BM25 finds no passage without a word of the query.
        """
        stale = history.passages_of_other_generations(generation)
        if not stale:
            return history.turns
        documents = tuple(sorted({passage.document_id for passage in stale}))
        same = ComparisonFilter(type="in", key="document.id", value=documents)
        both = same if scope.filter is None else CompoundFilter(type="and", filters=(scope.filter, same))
        query = " ".join(dict.fromkeys(passage.text[:_MAX_QUERY_CHARS] for passage in stale[-_MAX_QUERY_PASSAGES:]))
        result = self._retriever.retrieve([query], _MAX_CONFIRMED, SearchScope(scope.tenant, both))
        existing = {(passage.id, passage.text): passage for passage in result.passages[0]}
        wholes = next(widths(result.passages[0]))
        gone = [passage for passage in stale if not is_part(passage, wholes)]
        return history.turns_without({(passage.id, passage.text) for passage in gone} - existing.keys(), existing)

    def _carried(self, history: ChatHistory, turns: Sequence[PastTurn]) -> list[Passage]:
        """The passages that the latest answers cite, or else their best passage; the latest first, without their neighbours."""
        carried: dict[str, Passage] = {}
        latest = list(zip(turns, history.shown, strict=True))[: -_CARRIED_TURNS - 1 : -1]
        for turn, shown in latest:
            used = [passage for passage in turn.passages if passage.id in shown.cited] or turn.passages[:1]
            carried |= {passage.id: passage for passage in used if passage.id not in carried}
        return [passage.hit if isinstance(passage, JoinedPassage) else passage for passage in carried.values()]
