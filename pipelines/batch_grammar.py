"""Correct a file of texts, on this machine or on a Ray cluster; a killed job resumes.

    python -m pipelines.batch_grammar --input texts.jsonl --out corrected
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python -m pipelines.batch_grammar --input texts.jsonl --out /data/corrected --replicas 2

    python -m pipelines.batch_grammar --input manual/ --out corrected        # text files, corrected in corrected/files/

Rows are `{"id": ..., "text": ...}` with optional sampling parameters, or lines of an OpenAI batch file, whose only message is the
text. Results hold the corrected text and its edits, as character spans of the original text. The last line on stdout is a
summary in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

import typer

from pipelines.batch import options
from pipelines.batch.backend import BackendSpec, Runtime
from pipelines.batch.job import Job, Summary, Task, check_paths, run_command
from pipelines.batch.output import OutputFolder
from pipelines.batch.rows import TEXTS, Row, RowResult, correction_result
from pipelines.batch.text_files import collect_texts, holds_texts, write_corrected_files
from ragspec.cli.options import Adapter, Address, Config, Replicas, Target, TensorParallel, overrides
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import PipelineConfig, load_settings
from ragspec.core import SamplingParams
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction, CorrectionRequest
from ragspec.rag.grammar.edit_filters import DEFAULT_FILTER, EditFilter
from ragspec.rag.pipeline_stages import HasId, StagedPipeline

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class GrammarTask(Task):
    """Corrects texts; needs no index."""

    schema = TEXTS
    row_noun = "texts"
    config_sections = ("target", "engine.max_kv_tokens")

    def __init__(self, edit_filter: EditFilter = DEFAULT_FILTER) -> None:
        self._given = self._edit_filter = edit_filter

    def pinned_config(self, config: PipelineConfig) -> AbstractContextManager[PipelineConfig]:
        without_index = config.retriever.model_copy(update={"index_dir": "", "pointer": ""})
        free = config.generation.model_copy(update={"verbatim_quotes": False})  # a correction quotes nothing
        return nullcontext(config.model_copy(update={"retriever": without_index, "generation": free}))

    def text_settings(self, config: PipelineConfig) -> dict[str, Any]:
        return {
            "task": "grammar",
            "max_edit_ratio": self._edit_filter.max_edit_ratio,
            "ignore": sorted(self._edit_filter.ignore),
            **({"structure": True} if self._edit_filter.structure else {}),
        }

    def rules(self, config: PipelineConfig, begun: Mapping[str, Any]) -> None:
        """Settles whether structure stays: jobs of earlier versions go on without."""
        structure = self._given.structure and (not begun or "structure" in begun)
        self._edit_filter = replace(self._given, structure=structure)

    def stages(self, runtime: Runtime) -> StagedPipeline:
        from ragspec.rag.grammar.grammar import Grammar

        return Grammar(runtime.engine, runtime.prompts, max_in_flight=runtime.max_in_flight).stages()

    def request(self, row: Row, params: SamplingParams, config: PipelineConfig) -> HasId:
        return CorrectionRequest(row.id, row.text, params, row.tenant, edit_filter=self._edit_filter)

    def row_result(self, finished: Correction) -> RowResult:
        return correction_result(finished)


@app.command(epilog="Example: python -m pipelines.batch_grammar --input texts.jsonl --out corrected")
def main(
    inputs: options.Inputs,
    out: options.Out,
    config: Config = None,
    target: Target = None,
    adapter: Adapter = None,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest correction of one sentence, for rows without a value of their own.",
            show_default=str(DEFAULT_PARAMS.max_tokens),
        ),
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    max_edit_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of a sentence's words that may change; 1: no limit.")
    ] = DEFAULT_FILTER.max_edit_ratio,
    ignore: Annotated[list[str] | None, typer.Option(help="A word or phrase that stays; may be repeated.")] = None,
    replicas: Replicas = None,
    tensor_parallel: TensorParallel = None,
    cluster: options.Cluster = "",
    resume: options.Resume = True,
    strict: options.Strict = False,
    address: Address = None,
    price_per_hour: options.PricePerHour = None,
) -> None:
    """Correct every text of a file. Rows without a result go to errors.jsonl with the reason, and the job goes on."""
    given = overrides(target=target, adapter=adapter, replicas=replicas, tensor_parallel=tensor_parallel)
    given |= overrides(seed=seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    with options.exit_on_error():
        settings = with_correction_length(load_settings(ClusterConfig, config, **given))
        check_paths(inputs, out)  # before anything is written into the output
        backend = BackendSpec(settings.topology, cluster, address)
        job = Job(inputs, out, settings, settings.generation.seed or 0, resume, backend, price_per_hour)
        task = GrammarTask(EditFilter(max_edit_ratio, frozenset(ignore or ())))
        summary = correct_files(job, task) if holds_texts(inputs) else run_command(job, task)
    if strict and summary.num_failed:
        raise typer.Exit(1)


def correct_files(job: Job, task: GrammarTask) -> Summary:
    """Like `run_command`, from text files to text files. Raises: RagspecError."""
    with OutputFolder(job.out) as output:
        rows = collect_texts(job.inputs, job.out, lambda reason: typer.echo(f"left out: {reason}", err=True))
        summary = run_command(replace(job, inputs=rows), task, output)
        typer.echo(f"{write_corrected_files(job.out)} files in {job.out / 'files'}", err=True)
    return summary


def with_correction_length(settings: ClusterConfig) -> ClusterConfig:
    """Without a setting by the user, `max_tokens` is the default length of a sentence's correction."""
    if "max_tokens" in settings.generation.model_fields_set:
        return settings
    generation = settings.generation.model_copy(update={"max_tokens": DEFAULT_PARAMS.max_tokens})
    return settings.model_copy(update={"generation": generation})


if __name__ == "__main__":
    app()
