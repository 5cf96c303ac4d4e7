"""Expected answers of the suite `chaos`: one undisturbed engine in one process, without speculation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.batch.records import output_record
from pipelines.batch.rows import QUESTIONS, parse_row
from pipelines.batch_rag import RagTask
from pipelines.benchmarks.chaos.check import Expected
from ragspec.config import PipelineConfig
from ragspec.core import SamplingParams
from ragspec.engine.loading import load_engine
from ragspec.evaluation.datasets import Question as BenchmarkQuestion
from ragspec.evaluation.suites.retrieval.identity import Answer, answer
from ragspec.numerics.noise import row_seed
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Question, build_answer, build_request, retrieve_passages
from ragspec.retrieval.retriever import PUBLIC_SCOPE, Retriever
from ragspec.speculation import OFF

_COMPARED_KEYS = (
    "question", "answer", "finish_reason", "system_fingerprint", "citations", "passages", "dropped_passages",
    "index_generation", "seed", "logprobs", "row_digest",
)  # fmt: skip
"""The fields of a row without times and counters, which differ from run to run. The log-probabilities name every
token."""


@dataclass(frozen=True, slots=True)
class ChaosWorkload:
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
        streams = tuple(
            Question(f"s{i}", _text(listed, i), _params(f"s{i}", i, max_tokens, seed)) for i in range(num_streams)
        )
        rows = tuple(
            {
                "id": f"r{i}",
                "question": _text(listed, num_streams + i),
                "temperature": float(i % 2),
                "max_tokens": max_tokens,
                "logprobs": 0,
            }
            for i in range(num_rows)
        )
        return cls(streams, rows, tuple(question.text for question in streams[:7]), seed)


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """Expected streams, rows (their compared fields) and lookups."""

    streams: dict[str, Expected]
    rows: dict[str, str]
    lookups: tuple[Answer, ...]


def expected_results(work: ChaosWorkload, config: PipelineConfig) -> ExpectedResults:
    """Raises: ConfigError, StoreError, ModelError."""
    retriever = Retriever.from_config(config.retriever, config.encoder)
    passages = retriever.retrieve(work.lookups, config.retriever.num_passages, PUBLIC_SCOPE).passages
    with load_engine(config.target, config.engine, config.drafting) as engine:
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        ready = [
            build_request(found, prompts) for found in retrieve_passages(retriever, [_plain(q) for q in work.streams])
        ]
        completions = engine.generate([each.request for each in ready])
        streams = {
            each.request.id: Expected(each.request.prompt_ids, completion)
            for each, completion in zip(ready, completions, strict=True)
        }
        parsed = [parse_row(row, QUESTIONS) for row in work.rows]
        asked = [_plain(RagTask().request(row, row.params(SamplingParams(), work.seed), config)) for row in parsed]
        ready = [build_request(found, prompts) for found in retrieve_passages(retriever, asked)]
        completions = engine.generate([each.request for each in ready])
    answers = [build_answer(each, completion) for each, completion in zip(ready, completions, strict=True)]
    records = [
        output_record(row, RagTask().row_result((each,)), "", 0) for row, each in zip(parsed, answers, strict=True)
    ]
    return ExpectedResults(
        streams,
        {row.id: comparable_row(r) for row, r in zip(parsed, records, strict=True)},
        tuple(map(answer, passages)),
    )


def comparable_row(record: dict[str, Any]) -> str:
    """The compared fields of a row, as text."""
    return json.dumps({key: record.get(key) for key in _COMPARED_KEYS}, sort_keys=True)


def _plain(question: Any) -> Question:
    return replace(question, speculation=OFF)


def _text(listed: Sequence[BenchmarkQuestion], number: int) -> str:
    return listed[number % len(listed)].text


def _params(name: str, number: int, max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=float(number % 2), max_tokens=max_tokens, seed=row_seed(seed, name))
