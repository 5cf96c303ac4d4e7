"""Fit how readily a target abstains; write `answer_fit.json` into the adapter's folder, or print the fit of a model without one.

    python -m pipelines.fit_abstention QUESTIONS.jsonl --index INDEX --adapter RUN/adapter
    python -m pipelines.fit_abstention QUESTIONS.jsonl --index INDEX --target Qwen2.5-Coder-0.5B-Instruct

    python -m pipelines.fit_abstention QUESTIONS.jsonl --index INDEX --target Qwen2.5-Coder-1.5B-Instruct --layout free

The questions are those of `ragspec evaluate`, some of them not answerable. Each is answered as if the target never abstained. Its
features are the log-probability of the abstention's first token over that of the answer's, in the layout "free" that of "No" over
"Yes", and the logit of `closeness`. Of a grid, the fit is the intercept and slope that refuse most questions that are not
answerable, and at most `--most-lost` of those that are answered right where they are not refused. Prints JSON; `right_lost`: how
many of these the fit refuses.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from ragspec import Pipeline
from ragspec.config import DEFAULT_TARGET, PipelineConfig
from ragspec.core import Request, SamplingParams
from ragspec.disk import write_atomically
from ragspec.errors import InputError
from ragspec.evaluation.questions import AskedQuestion, judge, read_lines
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION, TODAYS_DOUBT, AnswerFit, Doubt, TextRules

SLOPES, INTERCEPTS = np.arange(0.0, -3.25, -0.25), np.arange(-30.0, 30.25, 0.25)
_LEAST_QUESTIONS = 5
MOST_LOST = 0.04
"""Share of the right answers."""


class Case(NamedTuple):
    """`margin`: log-probability of the abstention's first token, or of "No", over the other's. `is_right`: answered right where
    it is not refused."""

    margin: float
    closeness: float
    answerable: bool
    is_right: bool


def main(
    questions: Annotated[list[Path], typer.Argument(help="JSON lines of questions.")],
    index: Annotated[Path, typer.Option(help="The folder of the index that the questions are about.")],
    adapter: Annotated[Path | None, typer.Option(help="The adapter's folder.")] = None,
    target: Annotated[str, typer.Option(help="A model of the catalogue.")] = DEFAULT_TARGET,
    layout: Annotated[str, typer.Option(help="quote, or free.")] = "quote",
    most_lost: Annotated[float, typer.Option(help="Share of the right answers that may be refused.")] = MOST_LOST,
) -> None:
    """Fit the bias on abstention of one adapter or model."""
    model = {"model": target, "adapter": str(adapter) if adapter else "none"}
    retriever = {"index_dir": str(index), "abstain_below": 0.0}
    settings = {"retriever": retriever, "prompts": {"layout": layout}, "target": model}
    config = PipelineConfig.model_validate(settings)
    asked = [line for line in read_lines(questions) if isinstance(line, AskedQuestion)]
    with Pipeline.from_config(config) as pipeline:
        case = partial(doubted_case, pipeline, config) if layout == "free" else partial(case_of, pipeline)
        cases = list(filter(None, map(case, asked)))
    intercept, slope = fitted(cases, most_lost)
    doubts: Doubt = TODAYS_DOUBT if layout == "free" else ""
    fit = AnswerFit.read(config.target.fit_file)._replace(intercept=intercept, slope=slope, doubts=doubts)
    if adapter:
        write_atomically(config.target.fit_file, json.dumps(fit._asdict()) + "\n")
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
    margin = top.get(first, least) - top.get(quote, least)
    return Case(margin, answer.closeness, asked.answerable, asked.answerable and judge(asked, forced).right is True)


def doubted_case(pipeline: Pipeline, config: PipelineConfig, asked: AskedQuestion) -> Case | None:
    """As `case_of`, of a target that answers in its own words."""
    engine: Any = pipeline.engine
    rules = TextRules(fit=AnswerFit(doubts=TODAYS_DOUBT), layout="free")
    prompts = PromptBuilder.of(engine.target.tokenizer, engine.max_context_tokens, config).by(rules)
    answer = pipeline.ask(asked.question, SamplingParams(max_tokens=1))  # a fit in place may refuse it
    prompt, request = prompts.build(asked.question, answer.passages, 96), Request("", (), SamplingParams())
    build = partial(prompts.build, asked.question + prompts.doubt_words, answer.passages, 1)
    doubt = prompts.doubt(build, prompt, answer.closeness, request)
    if doubt is None or answer.closeness is None:
        return None
    plain = Request("plain", prompt.prompt_ids, SamplingParams(max_tokens=96))
    doubted, said = engine.generate([replace(doubt, params=replace(doubt.params, logprobs=20)), plain])
    top = dict(doubted.logprobs[0].top)
    (no, *_), (yes, *_) = prompts.plain_ids(["No", "Yes"])
    least = min(top.values())
    margin = top.get(no, least) - top.get(yes, least)
    is_right = asked.answerable and judge(asked, replace(answer, text=said.text)).right is True
    return Case(margin, answer.closeness, asked.answerable, is_right)


def fitted(cases: list[Case], most_lost: float = MOST_LOST) -> tuple[float, float]:
    """Intercept and slope. Raises: InputError if there are too few questions of a kind."""
    num_answerable = sum(case.answerable for case in cases)
    if min(num_answerable, len(cases) - num_answerable) < _LEAST_QUESTIONS:
        raise InputError(f"a fit needs {_LEAST_QUESTIONS} questions that are answerable, and as many that are not")

    num_right = sum(case.is_right for case in cases)

    def worth(pair: tuple[float, float]) -> tuple[bool, int, int, int]:
        abstained, refused, lost = counts(cases, AnswerFit(*pair)).values()
        return lost <= most_lost * num_right, abstained, -lost, -refused

    return max(((float(i), float(slope)) for slope in SLOPES for i in INTERCEPTS), key=worth)


def counts(cases: list[Case], fit: AnswerFit, name: str = "") -> dict[str, int]:
    abstained = [case for case in cases if case.margin + fit.abstention_bias(case.closeness) > 0]
    return {
        f"not_answerable_abstained{name}": sum(not case.answerable for case in abstained),
        f"answerable_abstained{name}": sum(case.answerable for case in abstained),
        f"right_lost{name}": sum(case.is_right for case in abstained),
    }


if __name__ == "__main__":
    typer.run(main)
