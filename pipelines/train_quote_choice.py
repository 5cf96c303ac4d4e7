"""Learns the weights by which the spans of passages are chosen for quotes (`ragspec.rag.quote_choice`).

From questions about documentation (the rows that `pipelines.documentation_rows rebuild` writes) and about encyclopedias, health
pages and abstracts; beside a question's own passage stands the passage that is most like the question among the others. And from
questions in the form of `ragspec evaluate` about an index, with the passages that a prompt shows.
Prints the weights, and the share of questions whose best span holds their quote, with all features and with BM25 alone.

    python -m pipelines.train_quote_choice questions.jsonl --index my-index --rows rows.jsonl --data ../shared/data
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from pipelines.train_ranking import Candidates, learned_weights, questions_with_facts, shares
from ragspec.config import EncoderConfig, RetrieverConfig
from ragspec.core import Passage
from ragspec.evaluation.datasets import fixed_sample
from ragspec.evaluation.questions import AskedQuestion, holds_answer
from ragspec.rag.quotable import quotable_runs
from ragspec.rag.quote_choice import SpanFeatures, span_features
from ragspec.rag.wording import TextRules
from ragspec.retrieval.retriever import Retriever
from ragspec.training.documentation import Neighbours
from ragspec.training.reference.mixture import json_lines, question_paragraphs

_NEAREST, _LEAST_SHARED = 4, 0.6


class Quoted(NamedTuple):
    """A question, its passage, and the words that answer it."""

    question: str
    passage: Passage
    quote: str


class Shown(NamedTuple):
    """A question and the passages of its prompt. `answers`: whether a span of one of them does."""

    question: str
    passages: Sequence[Passage]
    answers: Callable[[Passage, int, int], bool]


def documentation(rows: Path) -> Iterator[Quoted]:
    for row in json_lines(rows):
        if row["quote"]:
            title, _, rest = row["lead"].partition("\n")
            heading = rest.partition("\n")[0]
            yield Quoted(row["question"], _passage(row["passage"], title, heading), row["quote"])


def paragraphs(data: Path) -> Iterator[Quoted]:
    for paragraph in question_paragraphs(data):
        passage = _passage(paragraph.text, paragraph.title)
        yield from (Quoted(question.text, passage, question.quote) for question in paragraph.questions)


def _passage(text: str, title: str, heading: str = "") -> Passage:
    return Passage("", 0, text, 0, len(text), title, heading=heading)


def beside_alike(asked: Sequence[Quoted], count: int, num_others: int = 1) -> Iterator[Shown]:
    """A fixed sample of the questions, whose passages stand beside others that are alike."""
    passages = list({each.passage.text: each.passage for each in asked}.values())
    neighbours = Neighbours([passage.text for passage in passages])
    for each in fixed_sample(list(asked), count):
        near = (passages[place] for place in neighbours.nearest(each.question, _NEAREST))
        other = [passage for passage in near if each.quote not in passage.text][:num_others]
        shown = random.Random(each.question).sample([each.passage, *other], 1 + len(other))
        yield Shown(each.question, shown, partial(holds_quote, each))


def over_index(asked: Sequence[AskedQuestion], retrieve: Callable[[str], Sequence[Passage]]) -> Iterator[Shown]:
    """Each question with the passages that a prompt shows for it."""
    for each in asked:
        yield Shown(each.question, retrieve(each.question), partial(_holds_fact, each))


def _holds_fact(asked: AskedQuestion, passage: Passage, start: int, end: int) -> bool:
    return holds_answer(asked, passage, passage.text[start:end])


def candidates_of(asked: Iterable[Shown]) -> Candidates:
    """The spans of all passages of each question."""
    features, gold, question = list[np.ndarray](), list[bool](), list[int]()
    for number, each in enumerate(asked):
        runs = [(passage, run) for passage in each.passages for run in quotable_runs(passage)]
        holds = [each.answers(passage, *span) for passage, run in runs for span in run]
        features.append(span_features(each.question, runs, TextRules(symbols=True, places=True)))
        gold += holds
        question += [number] * len(holds)
    return Candidates(np.concatenate(features), np.array(gold), np.array(question))


def holds_quote(asked: Quoted, passage: Passage, start: int, end: int) -> bool:
    """Whether the span and the quote have most of the shorter of them in common."""
    if passage is not asked.passage or (begin := passage.text.find(asked.quote)) < 0:
        return False
    shared = min(end, begin + len(asked.quote)) - max(start, begin)
    return shared > _LEAST_SHARED * min(end - start, len(asked.quote))


def main(
    questions: Annotated[list[Path], typer.Argument(help="JSON lines of questions.")],
    index: Annotated[Path, typer.Option(help="The folder of the index that the questions are about.")],
    rows: Annotated[Path, typer.Option(help="Questions about documentation, with their passages.")],
    data: Annotated[Path, typer.Option(help="The folder of the data sets.")],
    count: Annotated[int, typer.Option(help="Questions of each set.")] = 4000,
) -> None:
    """Learn the weights of the choice of quotes."""
    retriever = Retriever.from_config(config := RetrieverConfig(index_dir=str(index)), EncoderConfig())
    asked = over_index(
        questions_with_facts(questions), lambda text: retriever.retrieve([text], config.num_passages).passages[0]
    )
    sets = {
        "documentation": candidates_of(beside_alike(list(documentation(rows)), count)),
        "paragraphs": candidates_of(beside_alike(list(paragraphs(data)), count)),
        "questions": candidates_of(asked),
    }
    weights = learned_weights(SpanFeatures, list(sets.values()))
    words = SpanFeatures(1.0, *[0.0] * (len(SpanFeatures._fields) - 1))
    measured = {
        name: {"words": shares(each, words, (1,)), "all": shares(each, weights, (1,))} for name, each in sets.items()
    }
    print(json.dumps({"weights": weights._asdict(), "top1": measured}))


if __name__ == "__main__":
    typer.run(main)
