"""Correct a file of texts, on this machine or on a Ray cluster; a killed job goes on where it stopped.

    python -m pipelines.batch_grammar --input texts.jsonl --out corrected
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python -m pipelines.batch_grammar --input texts.jsonl --out /data/corrected --replicas 2

    python -m pipelines.batch_grammar --input manual/ --out corrected        # files of text, as corrected/files/...

Rows are `{"id": ..., "text": ...}`, with sampling parameters beside them if need be, or lines of an OpenAI batch file, whose one
message is the text. Results hold the corrected text and the edits that lead to it, by characters of the text as it was.
The last line on stdout is one JSON object with what was done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.batch import options
from pipelines.batch.job import Job, check_places, fail, finish, judge
from pipelines.batch.machines import Machines, Serving
from pipelines.batch.output import OutputFolder
from pipelines.batch.records import Written, written_correction
from pipelines.batch.rows import TEXTS, Row
from pipelines.batch.summary import Summary
from pipelines.batch.task import Asking, Task
from pipelines.batch.texts import gathered, is_text, spread
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import PipelineConfig, load_settings
from ragspec.errors import RagspecError
from ragspec.rag.grammar.correction_request import DEFAULTS, Manuscript
from ragspec.rag.grammar.edit_filters import CAREFUL, Guard
from ragspec.rag.pipeline_stages import Named, Stages

if TYPE_CHECKING:  # Why: seconds of imports that a job with nothing to do needs none of
    from ragspec.rag.grammar.grammar import Correction

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class GrammarTask(Task):
    """Texts are corrected; no index takes part."""

    form = TEXTS
    rows = "texts"
    sections = ("target", "engine.max_kv_tokens")

    def __init__(self, guard: Guard = CAREFUL) -> None:
        self._guard = guard

    def pinned(self, config: PipelineConfig) -> AbstractContextManager[PipelineConfig]:
        without_index = config.retriever.model_copy(update={"index_dir": "", "pointer": ""})
        return nullcontext(config.model_copy(update={"retriever": without_index}))

    def what_decides(self, config: PipelineConfig) -> dict[str, Any]:
        return {"task": "grammar", "max_edit_ratio": self._guard.max_edit_ratio, "ignore": sorted(self._guard.ignore)}

    def stages(self, served: Serving) -> Stages:
        from ragspec.rag.grammar.grammar import Grammar

        return Grammar(served.engine, served.prompts, max_in_flight=served.max_in_flight).stages()

    def asked(self, row: Row, asking: Asking) -> Named:
        return Manuscript(row.id, row.text, asking.params(row), row.tenant, guard=self._guard)

    def written(self, result: Correction) -> Written:
        return written_correction(result)


@app.command()
def main(
    inputs: options.Inputs,
    out: options.Out,
    config: options.Config = None,
    target: options.Target = None,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest correction of one sentence, for rows that do not say.",
            show_default=str(DEFAULTS.max_tokens),
        ),
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    max_edit_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of a sentence's words that may change; 1: no limit.")
    ] = CAREFUL.max_edit_ratio,
    ignore: Annotated[list[str] | None, typer.Option(help="A word or phrase that stays; may be repeated.")] = None,
    replicas: options.Replicas = None,
    tensor_parallel: options.TensorParallel = None,
    cluster: options.Cluster = "",
    resume: options.Resume = True,
    strict: options.Strict = False,
    address: options.Address = None,
    price_per_hour: options.PricePerHour = None,
) -> None:
    """Correct every text of a file; wrong rows go to errors.jsonl with the reason, and the job goes on."""
    overrides = {
        "target.model": target,
        "generation.seed": seed,
        "generation.max_tokens": max_tokens,
        "generation.temperature": temperature,
        "generation.top_p": top_p,
        "topology.replicas": replicas,
        "topology.tensor_parallel": tensor_parallel,
    }
    try:
        settings = with_own_length(load_settings(ClusterConfig, config, **overrides))
        check_places(inputs, out)  # before anything is written into the output
        texts = is_text(inputs)
    except RagspecError as error:
        fail(error)
    machines = Machines(settings.topology, cluster, address)
    job = Job(inputs, out, settings, settings.generation.seed or 0, resume, machines, price_per_hour)
    task = GrammarTask(Guard(max_edit_ratio, frozenset(ignore or ())))
    judge(of_files(job, task) if texts else finish(job, task), strict)


def of_files(job: Job, task: GrammarTask) -> Summary:
    """As `finish`, from texts as files to texts as files; nobody else changes the folder meanwhile. Raises: typer.Exit."""
    try:
        with OutputFolder(job.out) as folder:
            rows = gathered(job.inputs, job.out, lambda what: say(f"left out: {what}"))
            summary = finish(replace(job, inputs=rows), task, folder)
            say(f"{spread(job.out)} files in {job.out / 'files'}")
    except RagspecError as error:
        fail(error)
    return summary


def with_own_length(settings: ClusterConfig) -> ClusterConfig:
    """Where nobody said how long a correction may be, it is as long as a correction of a sentence is by default."""
    if "max_tokens" in settings.generation.model_fields_set:
        return settings
    generation = settings.generation.model_copy(update={"max_tokens": DEFAULTS.max_tokens})
    return settings.model_copy(update={"generation": generation})


def say(what: str) -> None:
    typer.echo(what, err=True)


if __name__ == "__main__":
    app()
