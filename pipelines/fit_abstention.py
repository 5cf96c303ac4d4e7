"""Fit how readily a target with an adapter abstains, and write `abstention.json` into the adapter's folder.

    python -m pipelines.fit_abstention QUESTIONS.jsonl --index INDEX --adapter RUN/adapter

The questions are those of `ragspec evaluate`, some of them not answerable. Each is answered without a bias. Its features are the
log-probability of the abstention's first token over that of the answer's, and the logit of `closeness`. A logistic regression
weighs them; the intercept is the highest with which at most `--lost` of the right answers are lost. Prints counts as JSON.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from sklearn.linear_model import LogisticRegression

from ragspec import Pipeline
from ragspec.config import PipelineConfig
from ragspec.core import SamplingParams
from ragspec.disk import write_atomically
from ragspec.errors import InputError
from ragspec.evaluation.questions import AskedQuestion, judge, read_lines
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION, FIT_FILE, AnswerFit, logit

_LEAST_QUESTIONS = 5
"""Right answers, and questions that are not answerable."""


class Case(NamedTuple):
    """`margin`: log-probability of the abstention's first token over the next other token's. `is_right`: answered right."""

    margin: float
    closeness: float
    answerable: bool
    is_right: bool


def main(
    questions: Annotated[list[Path], typer.Argument(help="JSON lines of questions.")],
    index: Annotated[Path, typer.Option(help="The folder of the index that the questions are about.")],
    adapter: Annotated[Path, typer.Option(help="The adapter's folder.")],
    lost: Annotated[float, typer.Option(help="The share of right answers that may be lost.")] = 0.05,
) -> None:
    """Fit the bias on abstention of one adapter."""
    config = PipelineConfig.model_validate(
        {"retriever": {"index_dir": str(index)}, "target": {"adapter": str(adapter)}}
    )
    asked = [line for line in read_lines(questions) if isinstance(line, AskedQuestion)]
    with Pipeline.from_config(config) as pipeline:
        cases = list(filter(None, (case_of(pipeline, question) for question in asked)))
    fit = fitted(cases, lost)
    write_atomically(adapter / FIT_FILE, json.dumps(fit._asdict()) + "\n")
    print(json.dumps({**fit._asdict(), **counts(cases, AnswerFit()), **counts(cases, fit, "_fitted")}))


def case_of(pipeline: Pipeline, asked: AskedQuestion) -> Case | None:
    """None for a question that gets no passage."""
    engine: Any = pipeline.engine
    prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
    (first, *_), (quote, *_) = prompts.plain_ids([ABSTENTION, '"'])
    neutral = {first: 0.0}
    answer = pipeline.ask(asked.question, SamplingParams(max_tokens=96, logprobs=20, first_token_bias=neutral))
    if answer.closeness is None or not answer.logprobs:
        return None
    top = dict(answer.logprobs[0].top)
    least = min(top.values())
    forced = pipeline.ask(asked.question, SamplingParams(max_tokens=96, first_token_bias={first: -100.0}))
    return Case(
        top.get(first, least) - top.get(quote, least),
        answer.closeness,
        asked.answerable,
        asked.answerable and judge(asked, forced).right is True,
    )


def fitted(cases: list[Case], lost: float) -> AnswerFit:
    """Raises: InputError if there are too few questions of a kind."""
    right = [case for case in cases if case.is_right]
    if min(len(right), sum(not case.answerable for case in cases)) < _LEAST_QUESTIONS:
        raise InputError(f"a fit needs {_LEAST_QUESTIONS} right answers and as many questions that are not answerable")
    features = np.array([(case.margin, logit(case.closeness)) for case in cases])
    model = LogisticRegression(class_weight="balanced").fit(features, [not case.is_right for case in cases])
    of_margin, of_closeness = model.coef_[0]
    slope = float(of_closeness / of_margin) if of_margin > 0 and of_closeness < 0 else 0.0
    room = sorted(-case.margin - slope * logit(case.closeness) for case in right)
    return AnswerFit(math.floor(100 * room[int(lost * len(room))]) / 100, round(slope, 3))


def counts(cases: list[Case], fit: AnswerFit, name: str = "") -> dict[str, int]:
    abstained = [case for case in cases if case.margin + fit.bias(case.closeness) > 0]
    return {
        f"not_answerable_abstained{name}": sum(not case.answerable for case in abstained),
        f"answerable_abstained{name}": sum(case.answerable for case in abstained),
        f"right_lost{name}": sum(case.is_right for case in abstained),
    }


if __name__ == "__main__":
    typer.run(main)
