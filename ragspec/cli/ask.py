"""`ragspec ask`: streams the answer to one question, then prints its sources and statistics.

Owns the command's output. Retrieval and generation are the pipeline's.

    $ ragspec ask "When did it rain?" --index my-index
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from ragspec.cli.models import better_reader_command
from ragspec.cli.quotes import print_sources
from ragspec.cli.terminal import note, safe, stay_offline, stderr_console, stdout_console
from ragspec.config import PipelineConfig, Settings
from ragspec.core import SamplingParams
from ragspec.errors import InputError
from ragspec.rag.answer import Answer
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.iterative.policies import POLICIES
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.steps import default_params
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.search.filters import parse_filter

STANDARD_LIBRARY = (
    "no index is configured: the docstrings of Python's standard library answer (--index names your documents)"
)


def run_ask(
    question: str,
    settings: PipelineConfig,
    options: Mapping[str, Any],
    *,
    num_passages: int | None,
    iterative: str | None,
    as_json: bool,
    corpus: Sequence[tuple[str, str]] | None = None,
) -> None:
    """Checks the whole call before it loads a model. `corpus`: the standard library's docstrings, if no index is configured.

    `options` are keyword arguments of `Pipeline.ask`, with the filter as JSON. `num_passages`: what the caller asked for;
    `iterative` names a policy. Raises: RagspecError.
    """
    params = default_params(settings.generation)
    options = {**options, "filter": _filter(options["filter"])}
    arguments = {} if num_passages is None else {"num_passages": num_passages}
    policy = POLICIES[iterative](**arguments) if iterative else None
    stay_offline(settings.target)
    errors, encoder = stderr_console(), None
    if corpus is not None:
        note(errors, STANDARD_LIBRARY)
        encoder = Encoder.load(settings.encoder)
        settings = with_standard_library(errors, settings, encoder, corpus)
    with errors.status(Text("Opening the index and the target …", "dim")) as status:
        load = partial(IterativePipeline.from_config, policy=policy) if policy else Pipeline.from_config
        pipeline = load(settings, encoder=encoder, say=lambda text: status.update(Text(f"{text} …", "dim")))
    if policy:
        options["guessing"] = options["speculation"]
    with pipeline:
        if as_json:
            print(json.dumps(pipeline.ask(question, params, **options).to_dict()))
            return
        answer = asyncio.run(stream_answer(pipeline, question, params, _write, **options))
    console = stdout_console()
    console.print()
    print_sources(console, answer)
    if answer.dropped_passages:
        names = ", ".join(passage.id for passage in answer.dropped_passages)
        note(errors, f"{len(answer.dropped_passages)} retrieved passages did not fit the context: {names}")
    errors.print(Text(summary(answer), "dim"))
    if command := better_reader_command(settings.target.model):
        errors.print(Text(f"a larger model answers more questions right: {command}", "dim"))


def with_standard_library(
    console: Console, settings: Settings, encoder: Encoder, corpus: Sequence[tuple[str, str]]
) -> Settings:
    """The settings with the index of the docstrings, which is built once. Raises: SaveError."""
    from ragspec.cli.demo import standard_library_index  # Why here: the demo imports this module

    folder = standard_library_index(console, encoder, corpus)
    return settings.model_copy(update={"retriever": settings.retriever.model_copy(update={"index_dir": str(folder)})})


async def stream_answer(
    pipeline: Pipeline | IterativePipeline,
    question: str,
    params: SamplingParams,
    show: Callable[[str], object],
    **options: Any,
) -> Answer:
    """Calls `show` with each piece of text and returns the whole answer. `options` are those of `Pipeline.stream`."""
    async for piece in pipeline.stream(question, params, **options):
        if isinstance(piece, str):
            show(piece)
        else:
            answer = piece
    return answer


def _filter(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        value: Mapping[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise InputError(f"the filter is not JSON: {cause}") from cause
    parse_filter(value)
    return value


def summary(answer: Answer) -> str:
    stats, rounds = answer.stats, answer.stats.iterative
    guessed = f"{rounds.num_right + rounds.num_wrong} guessed, {rounds.num_wrong} wrong" if rounds else ""
    retrievals = f"{rounds.num_rounds} rounds, {rounds.num_retrievals} retrievals ({guessed}); " if rounds else ""
    return (
        f"{retrievals}{stats.generation.num_output_tokens} tokens, {stats.acceptance_length:.1f} a step, "
        f"{stats.tokens_per_s:.0f} tokens/s; seed {answer.seed}, index {stats.index_generation}, "
        f"numerics {answer.system_fingerprint}"
    )


def _write(piece: str) -> None:
    """Removes control characters if stdout is a terminal."""
    sys.stdout.write(safe(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()
