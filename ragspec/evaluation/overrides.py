"""Overrides of an engine's decisions: forced answers, which measure the engine whatever the target's skill, and trees
of a fixed size, which measure drafters apart from the cost model.

Every forward runs as usual; only the decision of each token is replaced. Results with forced answers are labelled
"forced".

    >>> answers = ForcedAnswers()
    >>> engine = load_engine(target, config, drafting, make_sampler=answers)
    >>> answers.force("question-1", token_ids)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Passage, Request
from ragspec.drafting.cost_model import StepPlan
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.drafting.safe_drafter import SafeDrafter
from ragspec.errors import InputError
from ragspec.evaluation.datasets import Question, json_rows
from ragspec.rag.wording import ABSTENTION, quoted_answer
from ragspec.retrieval.chunking import sentences
from ragspec.training.sentences import best_sentence, common_answer
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler, Sampler


@dataclass(slots=True)
class ForcedSampler:
    """Decides the given tokens in order, whatever the logits; `repeats` the last given token for ever.

    With a `sampler`, every token is sampled as well, and then overruled. Without `repeats`, samples follow the given tokens.
    """

    token_ids: Sequence[int]
    sampler: Sampler | None = None
    repeats: bool = True
    index: int = 0

    def __call__(self, logits: NDArray[np.float32]) -> int:
        sampled = self.sampler(logits) if self.sampler else 0
        at = min(self.index, len(self.token_ids) - 1) if self.repeats else self.index
        self.index += 1
        return self.token_ids[at] if at < len(self.token_ids) else sampled


class ForcedAnswers:
    """A sampler factory: requests with an answer are forced, all others are decided as usual."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[int, ...]] = {}

    def force(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Raises: InputError for an empty answer."""
        if not token_ids:
            raise InputError(f"the forced answer of {request_id!r} is empty")
        self._answers[request_id] = tuple(token_ids)

    def get(self, request_id: str) -> tuple[int, ...] | None:
        return self._answers.get(request_id)

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        given = self.get(request.id)
        return keyed_sampler(request, seed, choice) if given is None else ForcedSampler(given)


class OverruledAnswers(ForcedAnswers):
    """Every token is sampled by the request's parameters as well, and then overruled by its answer.

    Without `repeats`, an answer serves one request, and the engine decides what follows the answer.
    """

    def __init__(self, repeats: bool = True) -> None:
        super().__init__()
        self._repeats = repeats

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        keyed = keyed_sampler(request, seed, choice)
        given = self.get(request.id) if self._repeats else self._answers.pop(request.id, None)
        return keyed if given is None else ForcedSampler(given, keyed, self._repeats)


def keyed_sampler(request: Request, seed: int, choice: int) -> KeyedSampler:
    """The engine's own sampler of a request that continues an output."""
    return KeyedSampler(request, seed, choice, (), list(request.segment.output_ids))


def read_answers(path: Path) -> dict[str, str]:
    """Answers by id from JSON lines `{"id": ..., "answer": ...}`. Raises: InputError with the line."""
    answers: dict[str, str] = {}
    for where, row in json_rows(path):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) and row[key] for key in ("id", "answer")):
            raise InputError(f'{where}: must be an object with the texts "id" and "answer"')
        if row["id"] in answers:
            raise InputError(f"{where}: the id {row['id']!r} comes twice")
        answers[row["id"]] = row["answer"]
    return answers


def gold_answers(questions: Iterable[Question], passages: Iterable[Sequence[Passage]]) -> dict[str, str]:
    """The answer of a perfect reader of the retrieved passages: the supporting sentence, its number, the short
    answer.

    If no retrieved passage of the gold document holds the answer, the abstention.
    """
    return {q.id: _gold_answer(q, found) for q, found in zip(questions, passages, strict=True)}


def answer_ids(tokenizer: Any, answer: str, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The answer's tokens as the target would write them, with the end of text."""
    return (*tokenizer(answer, add_special_tokens=False)["input_ids"], *eos_ids[:1])


def _gold_answer(question: Question, passages: Sequence[Passage]) -> str:
    answer = common_answer(list(question.answers))
    for number, passage in enumerate(passages, 1):
        if passage.document_id == question.gold and answer in passage.text:
            spans = [passage.text[start:end] for start, end in sentences(passage.text)]
            index = best_sentence(question.text, answer, spans)
            if index is not None:
                return quoted_answer(spans[index], number, "" if answer == spans[index] else answer)
    return ABSTENTION


class _FreeStep(StepPlan):
    """Time does not count: every draft saves time, and no tree is cut for its cost."""

    def token_s(self) -> float:
        return 0.0

    def saved_s(self, gains: Sequence[float]) -> float:
        return 1e9 * len(gains)

    def least_prob(self, spare_rows: int) -> float:
        return 0.0

    def fit(self, spare_rows: int) -> list[DraftTree]:
        return [tree.best(min(tree.num_drafted, spare_rows // len(self.trees))) for tree in self.trees]


class FixedTreePlanner(Planner):
    """Asks every drafter in every step and keeps the best `max_tree_nodes` nodes of each tree, whatever they cost."""

    step_plan = _FreeStep

    def is_due(self, drafter: SafeDrafter, sequence: SequenceView) -> bool:
        return True

    def limited(self, tree: DraftTree, sequence: SequenceView) -> DraftTree:
        return tree.best(self._max_nodes)
