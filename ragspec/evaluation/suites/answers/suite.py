"""The suite `answers`: what an answer's labels are worth, whether the right passage is found or missed, and JSON schemas.

Sentences of SQuAD's held-out articles and of the documentation's evaluation files are shortened and altered by rule
(`altered_sentences`); the alterations must lose their label. People read supported sentences (`read_sentences`). Retrieval and
abstention are measured on documentation questions (`retrieved`), JSON schemas on the target (`json_outputs`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from ragspec.config import RetrieverConfig
from ragspec.core import Passage
from ragspec.evaluation.datasets import fixed_sample, held_out_articles
from ragspec.evaluation.report import Metric, Result, Table, at_least, at_most, equal_to
from ragspec.evaluation.suite import Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites.answers.altered_sentences import KINDS, measure_alterations
from ragspec.evaluation.suites.answers.json_outputs import measure_json
from ragspec.evaluation.suites.answers.read_sentences import (
    sentences_to_read,
    supported_precision,
    write_sentences,
)
from ragspec.evaluation.suites.answers.retrieved import (
    TOP,
    evaluation_documents,
    measure_retrieval,
    measure_together,
)
from ragspec.evaluation.timing import Tick
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.index_searcher import CALIBRATED_THRESHOLD
from ragspec.training.documentation import documentation_questions

NUM_ALTERED, NUM_ALTERED_QUICK = 500, 100
NUM_QUESTIONS, NUM_QUESTIONS_QUICK = 400, 100
NUM_TOGETHER, NUM_TOGETHER_QUICK = 60, 8
NUM_JSON, NUM_JSON_QUICK = 8, 2


def run_answers(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, InputError."""
    data, quick = settings.require_data("squad, squad_open and docs"), settings.quick
    tick("altered sentences", 0, 1)
    asked = list(documentation_questions(data / "docs", evaluation=True))
    pages = list(dict.fromkeys(question.passage for question in asked))
    seed = settings.plan.seed
    passages = mixed_passages(data, pages, seed)
    altered = measure_alterations(passages, NUM_ALTERED_QUICK if quick else NUM_ALTERED, seed)
    sentences = sentences_to_read(passages, seed)
    write_sentences(sentences, settings.cache_dir)
    read = supported_precision(sentences, settings.verdicts and settings.verdicts / "supported_verdicts.jsonl")
    tick("altered sentences", 1, 1)
    documents = evaluation_documents(data / "docs", quick)
    names = {document.id for document in documents}
    count = settings.num_prompts or (NUM_QUESTIONS_QUICK if quick else NUM_QUESTIONS)
    questions = fixed_sample([question for question in asked if question.path in names], count)
    encoder = Encoder.load(settings.encoder)
    store = settings.store(documents, encoder, tick)
    found = measure_retrieval(store, encoder, questions, tick)
    engine, _ = open_engine(settings.target)
    retriever = Retriever(encoder, store, RetrieverConfig(abstain_below=CALIBRATED_THRESHOLD), follow=False)
    prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
    with Pipeline(retriever, engine, prompts, num_passages=TOP) as pipeline:
        some = questions[: NUM_TOGETHER_QUICK if quick else NUM_TOGETHER]
        together = measure_together(pipeline, retriever, some, tick)
        texts = [each.question for each in questions[: NUM_JSON_QUICK if quick else NUM_JSON]]
        written = measure_json(engine, texts, tick, seed)
    label = "SQuAD, held-out articles; documentation, evaluation files"
    return Outcome({"label": label, "num_prompts": len(questions)} | altered | read | found | together | written)


def mixed_passages(data: Path, pages: Sequence[str], seed: int) -> list[Passage]:
    """Half of them are of SQuAD, half are the `pages`."""
    squad = [p["context"] for article in held_out_articles(data) for p in article["paragraphs"]]
    passages = []
    for name, texts in (("squad", squad), ("docs", list(pages))):
        random.Random(seed).shuffle(texts)
        passages.append([Passage(f"{name}-{n}", 0, text, 0, len(text)) for n, text in enumerate(texts)])
    return [passage for pair in zip(*passages, strict=False) for passage in pair]


def _tables(result: Result) -> dict[str, Table]:
    columns = {"altered": result["num_altered_by_kind"], "still supported": result["altered_by_kind"]}
    return {"altered sentences": {name: {kind: values[kind] for kind in KINDS} for name, values in columns.items()}}


SUITE = Suite(
    "answers",
    run_answers,
    (
        Metric("altered_still_supported", "altered sentences that keep their label", at_most(0.05)),
        Metric("supported_precision", "read sentences labelled supported that a reader confirms", at_least(0.9)),
        Metric("invented_marked", "invented quotations that are marked", equal_to(1.0)),
        Metric("quoted_confirmed", "sentences called quoted that equal their source", equal_to(1.0)),
        Metric("num_altered", "altered sentences", at_least(1)),
        Metric("doc_top3", "documentation questions whose gold passage is among the first three", at_least(0.85)),
        Metric("doc_top1", "the same, the first", at_least(0.65)),
        Metric("wrongly_answered_ratio", "questions that do not abstain although their file is left out", at_most(0.5)),
        Metric("good_answers_lost", "questions with their passage that abstain", at_most(0.03)),
        Metric("wrongly_answered_target", "the first of both, where the target alone abstains"),
        Metric("wrongly_answered_together", "the same, where retrieval and target abstain"),
        Metric("good_answers_lost_together", "the second of both, where retrieval and target abstain"),
        Metric("json_valid", "outputs that follow their JSON schema", equal_to(1.0)),
        Metric("json_identical", "the same with drafts and without", equal_to(True)),
        Metric("retrieval_p50_ms", "one question's retrieval, median, milliseconds"),
    ),
    tables=_tables,
)
