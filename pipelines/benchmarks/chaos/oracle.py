"""Expected answers of the suite `chaos`: one undisturbed engine in one process, without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, NamedTuple

from pipelines.batch.records import output_record
from pipelines.batch.rows import QUESTIONS, parse_row
from pipelines.batch_rag import RagTask
from pipelines.benchmarks.chaos.check import Expected
from ragspec.config import PipelineConfig
from ragspec.core import Completion, SamplingParams
from ragspec.engine.loading import load_engine
from ragspec.evaluation.datasets import Question as BenchmarkQuestion
from ragspec.evaluation.suites.retrieval.identity import Answer, answer
from ragspec.numerics.noise import row_seed
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import PreparedQuestion, Question, build_answer, build_request, retrieve_passages
from ragspec.retrieval.retriever import PUBLIC_SCOPE, Retriever
from ragspec.speculation import OFF

_COMPARED_KEYS = (
    "question", "answer", "finish_reason", "system_fingerprint", "citations", "passages", "dropped_passages",
    "index_generation", "seed", "logprobs", "row_digest",
)  # fmt: skip
"""The fields of a row without times and counters, which differ from run to run. The log-probabilities name every
token."""

_NUM_LOOKUPS = 7


class ChaosWorkload(NamedTuple):
    """The requests: streams, rows of a batch job, and lookups."""

    streams: tuple[Question, ...]
    rows: tuple[dict[str, Any], ...]
    lookups: tuple[str, ...]
    seed: int

    @classmethod
    def of(
        cls, listed: Sequence[BenchmarkQuestion], num_streams: int, num_rows: int, max_tokens: int, seed: int
    ) -> ChaosWorkload:
        """Half greedy, half at T=1. Rows request log-probabilities, which name the tokens behind a row's text."""
        texts = [question.text for question in islice(cycle(listed), num_streams + num_rows)]
        streams = []
        for i, text in enumerate(texts[:num_streams]):
            params = SamplingParams(temperature=float(i % 2), max_tokens=max_tokens, seed=row_seed(seed, f"s{i}"))
            streams.append(Question(f"s{i}", text, params))
        shared = {"max_tokens": max_tokens, "logprobs": 0}
        rows = [
            {"id": f"r{i}", "question": text, "temperature": float(i % 2), **shared}
            for i, text in enumerate(texts[num_streams:])
        ]
        return cls(tuple(streams), tuple(rows), tuple(texts[:num_streams][:_NUM_LOOKUPS]), seed)


class ExpectedResults(NamedTuple):
    """Expected streams, rows (their compared fields) and lookups."""

    streams: dict[str, Expected]
    rows: dict[str, str]
    lookups: tuple[Answer, ...]


def expected_results(work: ChaosWorkload, config: PipelineConfig) -> ExpectedResults:
    """Raises: ConfigError, StoreError, ModelError."""
    retriever = Retriever.from_config(config.retriever, config.encoder)
    lookups = retriever.retrieve(work.lookups, config.retriever.num_passages, PUBLIC_SCOPE).passages
    with load_engine(config.target, config.engine, config.drafting) as engine:
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens, config.wording)

        def completed(questions: Iterable[Any]) -> list[tuple[PreparedQuestion, Completion]]:
            plain = [replace(question, speculation=OFF) for question in questions]
            ready = [build_request(found, prompts) for found in retrieve_passages(retriever, plain)]
            return list(zip(ready, engine.generate([each.request for each in ready]), strict=True))

        streams = {
            ready.request.id: Expected(ready.request.prompt_ids, completion)
            for ready, completion in completed(work.streams)
        }
        task, parsed = RagTask(), [parse_row(row, QUESTIONS) for row in work.rows]
        answered = completed(task.request(row, row.params(SamplingParams(), work.seed), config) for row in parsed)
    rows = {}
    for row, (ready, completion) in zip(parsed, answered, strict=True):
        result = task.row_result((build_answer(ready, completion),))
        rows[row.id] = comparable_row(output_record(row, result, "", 0))
    return ExpectedResults(streams, rows, tuple(map(answer, lookups)))


def comparable_row(record: dict[str, Any]) -> str:
    """The compared fields of a row, as text."""
    return json.dumps({key: record.get(key) for key in _COMPARED_KEYS}, sort_keys=True)
