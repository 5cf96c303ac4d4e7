"""Learns the weights by which the best passages of a search are ordered (`ragspec.retrieval.search.relevance`).

From questions about a share of the documentation's training files, which no suite asks; about the articles of SQuAD's development
set that the suites of answers do not hold out, which the suite `retrieval` asks too, beside the held-out ones; and about
paragraphs of encyclopedias, health pages and abstracts (SelQA, MedQuAD, PubMedQA).
Or from questions in the form of `ragspec evaluate` about an index, which move the weights in place as little as helps.
Prints the weights, and how often the right passage is the first and among the first three, before and after.

    python -m pipelines.train_ranking --data ../shared/data --cache ~/.cache/ragspec/ranking
    python -m pipelines.train_ranking --questions questions.jsonl --index my-index
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from ragspec.config import EncoderConfig, RetrieverConfig
from ragspec.core import Document, Passage
from ragspec.errors import InputError
from ragspec.evaluation.datasets import WHOLE, WholeTexts, cached_store, fixed_sample, json_rows, squad_collection
from ragspec.evaluation.questions import AskedQuestion, Dialogue, holds_answer, read_lines
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.search.index_searcher import IndexSearcher, encode_queries
from ragspec.retrieval.search.relevance import WEIGHTS, Features
from ragspec.training.documentation import documentation_files, documentation_questions

_QUERIES_AT_ONCE = 64
_VARIED = ("selqa", "medquad", "pubmedqa")
_LESS_WEIGHT = 1e-3
"""Times the sum of the squared weights: part of the loss."""


class Asked(NamedTuple):
    """A question; and whether a passage answers it, by its words or its document."""

    text: str
    is_answer: Callable[[Passage], bool]

    @classmethod
    def by_words(cls, text: str, quote: str) -> Self:
        return cls(text, lambda passage: quote in passage.text)

    @classmethod
    def by_document(cls, text: str, ids: Collection[str]) -> Self:
        return cls(text, lambda passage: passage.document_id in ids)

    @classmethod
    def by_fact(cls, question: AskedQuestion) -> Self:
        return cls(question.question, lambda passage: holds_answer(question, passage, passage.text))


def questions_with_facts(paths: Sequence[Path]) -> list[AskedQuestion]:
    """The questions that stand alone and name a fact. Raises: InputError."""
    lines = read_lines(paths)
    alone = [line.turns[0] if isinstance(line, Dialogue) else line for line in lines]
    return [line for line in alone if isinstance(line, AskedQuestion) and line.pattern]


Weights = TypeVar("Weights", bound=Any)
"""A NamedTuple with a weight for each feature."""


class Candidates(NamedTuple):
    """The passages or spans that are read for each question; a question's candidates come in the order of their fused ranks.

    Shapes: features [C, features] float64, gold [C] bool, question [C] int64, ascending.
    """

    features: NDArray[np.float64]
    gold: NDArray[np.bool_]
    question: NDArray[np.int64]


def candidates_of(store: Store, encoder: TextEncoder, asked: Sequence[Asked]) -> Candidates:
    searcher = IndexSearcher(store, RetrieverConfig())
    features, gold, question = list[Features](), list[bool](), list[int]()
    for first in range(0, len(asked), _QUERIES_AT_ONCE):
        some = asked[first : first + _QUERIES_AT_ONCE]
        queries = encode_queries([each.text for each in some], "hybrid", encoder, searcher.terms)
        for number, read in enumerate(searcher.read_candidates(queries)):
            for passage, values in read:
                features.append(values)
                gold.append(some[number].is_answer(passage))
                question.append(first + number)
    return Candidates(np.array(features), np.array(gold), np.array(question))


def learned_weights(features: type[Weights], sets: Sequence[Candidates], start: Sequence[float] = ()) -> Weights:
    """Minimises the negative logarithm of the probability that a softmax over a question's candidates gives to the gold
    ones; every set counts alike. `start`: the weights from which the distance is kept small; by default zeros."""
    origin = torch.tensor(start or [0.0] * len(features._fields), dtype=torch.float64)
    weights = origin.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimiser.zero_grad()
        total = _LESS_WEIGHT * ((weights - origin) ** 2).sum() + sum(_loss_of(each, weights) for each in sets)
        total.backward()
        return total.detach()

    optimiser.step(loss)
    fitted: Weights = features(*(round(float(weight), 3) for weight in weights.detach()))
    return fitted


def _loss_of(candidates: Candidates, weights: torch.Tensor) -> torch.Tensor:
    scores = torch.exp(torch.from_numpy(candidates.features) @ weights)  # [C]
    question, gold = torch.from_numpy(candidates.question), torch.from_numpy(candidates.gold)
    sums = torch.zeros(2, int(question[-1]) + 1, dtype=torch.float64)
    sums[0].index_add_(0, question, scores)
    sums[1].index_add_(0, question, scores * gold)
    is_answered = sums[1] > 0
    return -(sums[1][is_answered].log() - sums[0][is_answered].log()).mean()


def shares(candidates: Candidates, weights: Sequence[float] | None, tops: Sequence[int] = (1, 3)) -> list[float]:
    """The share of questions with a gold passage among the first; `weights` None: in the order of the fused ranks."""
    scores = np.zeros(len(candidates.gold)) if weights is None else candidates.features @ np.array(weights)
    order = np.lexsort((np.arange(len(scores)), -scores, candidates.question))
    places = np.arange(len(order)) - np.searchsorted(candidates.question, candidates.question)
    found = candidates.gold[order]
    return [len(set(candidates.question[found & (places < top)])) / len(set(candidates.question)) for top in tops]


def documentation(data: Path, share: float, count: int) -> tuple[list[Any], list[Asked]]:
    """Documents of the training files, and questions about them."""

    def is_chosen(name: str) -> bool:
        number = int.from_bytes(hashlib.sha256(f"ranking {name}".encode()).digest()[:4])
        return number < share * 2**32

    folder = data / "docs"
    named = documentation_files(folder, evaluation=False, suffixes=(".md", ".rst"))
    documents = [each for path, name in named if is_chosen(name) for each in read_file(path, name)]
    questions = [q for q in documentation_questions(folder, evaluation=False) if is_chosen(q.path)]
    return documents, [Asked.by_words(q.question, q.quote) for q in fixed_sample(questions, count)]


def squad(data: Path, count: int) -> tuple[list[Any], list[Asked]]:
    """All paragraphs and distractors, and questions about the articles that are not held out."""
    collection, held_out = squad_collection(data)
    ids = [each for each in collection.queries if each not in held_out][:count]
    golds = [(collection.queries[each], collection.relevant[each]) for each in ids]
    return list(collection.documents), [Asked.by_document(text, gold) for text, gold in golds]


def varied(data: Path, count: int) -> tuple[list[Any], list[Asked]]:
    """Paragraphs of encyclopedias, health pages and abstracts, and questions that people asked without seeing them."""
    found = ((name, row) for name in _VARIED for _, row in json_rows(data / "qa_more" / f"{name}.jsonl"))
    rows = [(name, row) for name, row in found if not row["is_impossible"]]
    chosen = fixed_sample(rows, count)
    ids = {row["context"]: f"{name}-{number}" for number, (name, row) in enumerate(chosen)}
    documents = [Document(ids[row["context"]], row["context"], title=row["title"]) for _, row in chosen]
    documents = list({document.id: document for document in documents}.values())
    return documents, [Asked.by_document(row["question"], (ids[row["context"]],)) for _, row in chosen]


def published_sets(
    data: Path, cache: Path, encoder: TextEncoder, count: int, docs_share: float
) -> dict[str, Candidates]:
    pages, about_pages = documentation(data, docs_share, count)
    paragraphs, about_paragraphs = squad(data, count)
    texts, about_texts = varied(data, count)
    whole = WholeTexts(encoder)
    return {
        "documentation": candidates_of(cached_store(pages, encoder, cache), encoder, about_pages),
        "varied": candidates_of(cached_store(texts, whole, cache, WHOLE), whole, about_texts),
        "squad": candidates_of(cached_store(paragraphs, whole, cache, WHOLE), whole, about_paragraphs),
    }


def main(
    data: Annotated[Path | None, typer.Option(help="The folder of the data sets.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Keeps the data sets' indexes.")] = None,
    questions: Annotated[
        list[Path] | None, typer.Option(help="JSON lines of questions; from the weights in place.")
    ] = None,
    index: Annotated[Path | None, typer.Option(help="The folder of the index that the questions are about.")] = None,
    count: Annotated[int, typer.Option(help="Questions of each set.")] = 1500,
    docs_share: Annotated[float, typer.Option(help="Share of the documentation's training files.")] = 0.12,
) -> None:
    """Learn the weights of the order of passages."""
    encoder = Encoder.load(EncoderConfig())
    if questions and index:
        asked = [Asked.by_fact(question) for question in questions_with_facts(questions)]
        sets = {"questions": candidates_of(Store.open(index), encoder, asked)}
    elif data and cache:
        sets = published_sets(data, cache, encoder, count, docs_share)
    else:
        raise InputError("name --data and --cache, or --questions and --index")
    weights = learned_weights(Features, list(sets.values()), WEIGHTS if questions else ())
    before = WEIGHTS if questions else None
    measured = {name: {"before": shares(each, before), "after": shares(each, weights)} for name, each in sets.items()}
    print(json.dumps({"weights": weights._asdict(), "top1_top3": measured}))


if __name__ == "__main__":
    typer.run(main)
