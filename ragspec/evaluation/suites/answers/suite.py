"""The suite `answers`: what an answer's labels are worth.

Sentences of SQuAD's held-out articles and of the documentation's evaluation files are shortened and altered by rule
(`altered_sentences`); the alterations must lose their label.
"""

from __future__ import annotations

import random
from pathlib import Path

from ragspec.core import Passage
from ragspec.evaluation.datasets import held_out_articles
from ragspec.evaluation.report import Metric, Result, Table, at_least, at_most, equal_to
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.suites.answers.altered_sentences import KINDS, measure_alterations
from ragspec.evaluation.timing import Tick
from ragspec.training.documentation import documentation_questions

NUM_ALTERED, NUM_ALTERED_QUICK = 500, 100


def run_answers(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, InputError."""
    data = settings.require_data("squad, squad_open and docs")
    tick("altered sentences", 0, 1)
    altered = measure_support(data, NUM_ALTERED_QUICK if settings.quick else NUM_ALTERED, settings.plan.seed)
    tick("altered sentences", 1, 1)
    return Outcome({"label": "SQuAD, held-out articles; documentation, evaluation files"} | altered)


def measure_support(data: Path, count: int, seed: int) -> Result:
    """Half of the sentences are of SQuAD, half of the documentation."""
    squad = [p["context"] for article in held_out_articles(data) for p in article["paragraphs"]]
    pages = dict.fromkeys(q.passage for q in documentation_questions(data / "docs", evaluation=True))
    passages = []
    for name, texts in (("squad", squad), ("docs", list(pages))):
        random.Random(seed).shuffle(texts)
        passages.append([Passage(f"{name}-{n}", 0, text, 0, len(text)) for n, text in enumerate(texts)])
    mixed = [passage for pair in zip(*passages, strict=False) for passage in pair]
    return measure_alterations(mixed, count, seed)


def _tables(result: Result) -> dict[str, Table]:
    columns = {"altered": result["num_altered_by_kind"], "still supported": result["altered_by_kind"]}
    return {"altered sentences": {name: {kind: values[kind] for kind in KINDS} for name, values in columns.items()}}


SUITE = Suite(
    "answers",
    run_answers,
    (
        Metric("altered_still_supported", "altered sentences that keep their label", at_most(0.05)),
        Metric("invented_marked", "invented quotations that are marked", equal_to(1.0)),
        Metric("quoted_confirmed", "sentences called quoted that equal their source", equal_to(1.0)),
        Metric("num_altered", "altered sentences", at_least(1)),
    ),
    tables=_tables,
)
