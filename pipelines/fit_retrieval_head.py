"""Finds the head of a target that looks at the text which answers, and how much the choice of quotes should follow it.

    python -m pipelines.fit_retrieval_head QUESTIONS.jsonl --index INDEX --data ../shared/data --rows rows.jsonl
    python -m pipelines.fit_retrieval_head QUESTIONS.jsonl --index INDEX --adapter RUN/adapter

The questions are those of `ragspec evaluate`. The head is the one whose attention alone is right about most of them. Of a grid,
the weight is the one by which most questions have the right likeliest span, every set counting alike: the questions, and
paragraphs and passages of documentation beside two that are alike. Prints `retrieval_head` and `attention_weight` as
`answer_fit.json` holds them, and these shares without the head and with it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import typer
from numpy.typing import NDArray

from pipelines.train_quote_choice import Shown, beside_alike, documentation, over_index, paragraphs
from pipelines.train_ranking import questions_with_facts
from ragspec import Pipeline
from ragspec.config import DEFAULT_TARGET, PipelineConfig
from ragspec.core import Request, SamplingParams
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.quotable import quotable_runs
from ragspec.rag.quote_choice import WEIGHTS, span_features
from ragspec.rag.retrieval_head import PassageTokens, SpanAttention
from ragspec.rag.wording import TextRules

_DISTRACTORS = 2
_GRID = np.arange(0.0, 1.55, 0.1)
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
_RULES = TextRules("blocks", symbols=True, places=True)


class Scored(NamedTuple):
    """The spans of a question's prompt. Shapes: scores, gold [spans]; log_shares [heads, spans]."""

    scores: NDArray[np.float64]
    gold: NDArray[np.bool_]
    log_shares: NDArray[np.float64]


class Prober:
    """Asks a target for the attention of all its heads over a prompt of passages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._engine = cast(Any, pipeline.engine)
        self._prompts = PromptBuilder(self._engine.target.tokenizer, self._engine.max_context_tokens)
        shapes = self._engine.target.shapes
        self.heads = tuple((layer, head) for layer, shape in enumerate(shapes) for head in range(shape.num_heads))

    def scored(self, shown: Shown) -> Iterator[Scored]:
        """Nothing if no span answers, or the attention cannot be read."""
        runs = [(passage, run) for passage in shown.passages for run in quotable_runs(passage)]
        spans = [(passage, *span) for passage, run in runs for span in run]
        names = {passage: str(n) for n, passage in enumerate(shown.passages)}
        told_apart = [(replace(passage, document_id=names[passage]), run) for passage, run in runs]
        gold = np.array([shown.answers(*span) for span in spans], bool)
        prompt = self._prompts.build(shown.question, shown.passages, 96)
        tokens = PassageTokens.of(prompt.prompt_ids, prompt.passages, self._prompts.fast)
        if not gold.any() or prompt.dropped or tokens is None:
            return
        ids = (*prompt.prompt_ids, *self._prompts.plain_ids(['"'])[0])
        (seen,) = self._engine.generate([Request("probe", ids, _PARAMS, attention_heads=self.heads)])
        rows = [SpanAttention(tokens, row).log_shares(spans) for row in seen.attention]
        if rows:
            features = span_features(shown.question, told_apart, _RULES)
            yield Scored(features @ np.array(WEIGHTS), gold, np.array(rows))


def share_right(shown: Sequence[Scored], head: int, weight: float) -> float:
    """The share of questions whose likeliest span answers."""
    right = [each.gold[(each.scores + weight * each.log_shares[head]).argmax()] for each in shown]
    return round(float(np.mean(right)), 3)


def main(
    questions: Annotated[list[Path], typer.Argument(help="JSON lines of questions.")],
    index: Annotated[Path, typer.Option(help="The folder of the index that the questions are about.")],
    data: Annotated[Path | None, typer.Option(help="The folder of the data sets.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Questions about documentation, with their passages.")] = None,
    adapter: Annotated[str, typer.Option(help="The adapter's folder, none, or auto.")] = "auto",
    target: Annotated[str, typer.Option(help="A model of the catalogue.")] = DEFAULT_TARGET,
    count: Annotated[int, typer.Option(help="Questions of each set but the first.")] = 300,
) -> None:
    """Find the retrieval head of one adapter or model."""
    settings = {"retriever": {"index_dir": str(index)}, "target": {"model": target, "adapter": adapter}}
    others = [*([list(paragraphs(data))] if data else []), *([list(documentation(rows))] if rows else [])]
    with Pipeline.from_config(PipelineConfig.model_validate(settings)) as pipeline:
        prober = Prober(pipeline)
        asked = [over_index(questions_with_facts(questions), pipeline.retrieve)]
        asked += [beside_alike(each, count, _DISTRACTORS) for each in others]
        sets = [[scored for shown in each for scored in prober.scored(shown)] for each in asked]
    alone = np.sum([each.gold[each.log_shares.argmax(1)] for each in sets[0]], 0)  # [heads]
    head = int(alone.argmax())
    shares = {float(weight): [share_right(each, head, weight) for each in sets] for weight in _GRID}
    best = max(shares, key=lambda weight: sum(shares[weight]))
    fit = {"retrieval_head": prober.heads[head], "attention_weight": round(best, 1)}
    measured = {"questions": [*map(len, sets)], "without": shares[0.0], "with": shares[best]}
    print(json.dumps(fit | measured | {"head_alone": int(alone.max())}))


if __name__ == "__main__":
    typer.run(main)
