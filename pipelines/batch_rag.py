"""Answer a file of questions, on this machine or on a Ray cluster; a killed job resumes.

    python -m pipelines.batch_rag --input questions.jsonl --index index --out answers
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python -m pipelines.batch_rag --input questions.jsonl --index /data/index --out /data/answers --replicas 2

Rows are `{"id": ..., "question": ...}` with optional sampling parameters, or lines of an OpenAI batch file. A row's seed is a
hash of the job's seed and the row's id, so order, batches and interruptions change no text. The last line on stdout is a
summary in JSON.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.batch import options
from pipelines.batch.backend import BackendSpec, Runtime
from pipelines.batch.job import Job, Task, run_command
from pipelines.batch.rows import QUESTIONS, Row, RowResult, answer_result
from ragspec.cli.options import Adapter, Address, Config, Replicas, Shards, Target, TensorParallel, overrides
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import PipelineConfig, RetrieverConfig, load_settings
from ragspec.core import SamplingParams
from ragspec.errors import ConfigError, RetrievalError
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline_stages import HasId, StagedPipeline
from ragspec.rag.wording import FORMER_RULES, TextRules
from ragspec.retrieval.index.index_directory import reader_lock
from ragspec.retrieval.index.manifest import read_generation

_WINDOW = 256
"""Questions that are retrieved ahead of the engine, which answers those with the same passages one after the other."""
_CHANGES_NO_TEXT = {"index_dir", "pointer", "fail_closed", "gpu_memory_bytes"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class RagTask(Task):
    """Answers questions from one generation of an index."""

    schema = QUESTIONS
    row_noun = "questions"
    config_sections = ("target", "engine.max_kv_tokens", "encoder", "retriever")

    @contextmanager
    def pinned_config(self, config: PipelineConfig) -> Iterator[PipelineConfig]:
        """The configuration's generation, or the current one; a reader lock keeps its files."""
        if not config.retriever.index_dir:
            raise ConfigError("no index: name its folder with --index, or as retriever.index_dir in the configuration")
        with reader_lock(Path(config.retriever.index_dir), config.retriever.pointer) as pointer:
            yield config.model_copy(update={"retriever": config.retriever.model_copy(update={"pointer": pointer})})

    def config_of_begun(self, config: PipelineConfig, begun: Mapping[str, Any]) -> PipelineConfig:
        """The begun layout and passages, which today's defaults may be others. Jobs from before there were a learned fusion and a
        second layout name none: they go on by rank, and quote."""
        if begun and config.prompts.layout == "auto":
            layout = {"layout": begun.get("layout", "quote")}
            config = config.model_copy(update={"prompts": config.prompts.model_copy(update=layout)})
        retriever, before = config.retriever, begun.get("retriever")
        if not isinstance(before, dict):
            return config
        before = {"abstain_below": 0.0, **({"fusion": "rank"} if retriever.mode == "hybrid" else {}), **before}
        names = {"num_passages", "abstain_below", "fusion"} & before.keys() - retriever.model_fields_set
        found = {name: before[name] for name in names}
        return config.model_copy(update={"retriever": retriever.model_copy(update=found)})

    def rules(self, config: PipelineConfig, begun: Mapping[str, Any]) -> TextRules:
        """Those that the job was begun by. Jobs from before there were others name none."""
        if not begun:
            return TextRules.of(config.target, config.wording.layout)
        try:
            return TextRules.from_json(begun["rules"]) if "rules" in begun else FORMER_RULES
        except ValueError as cause:
            raise ConfigError(
                f"the job was begun by rules {begun['rules']} that this version does not know: finish it with the version that "
                "began it, use another folder, or --no-resume to discard its answers"
            ) from cause

    def text_settings(self, config: PipelineConfig) -> dict[str, Any]:
        retriever = config.retriever
        _, manifest = read_generation(Path(retriever.index_dir), retriever.pointer)
        return {
            "encoder": config.encoder.model,
            "retriever": retriever.model_dump(exclude=_CHANGES_NO_TEXT | _unset(retriever)),
            "index_generation": manifest.generation_id,
            **({} if config.wording.layout == "quote" else {"layout": config.wording.layout}),
        }

    def stages(self, runtime: Runtime) -> StagedPipeline:
        from ragspec.rag.pipeline import AsyncPipeline, PipelineLimits

        assert runtime.retriever is not None, "a job with an index has a retriever"
        limits = PipelineLimits(max_in_flight=runtime.max_in_flight, window=_WINDOW)
        return AsyncPipeline(runtime.retriever, runtime.engine, runtime.prompts, limits).stages

    def request(self, row: Row, params: SamplingParams, config: PipelineConfig) -> HasId:
        from ragspec.rag.steps import Question, parse_scope

        retriever, scope = config.retriever, parse_scope(row.tenant, row.filter)
        options = params, retriever.num_passages, scope
        return Question(row.id, row.text, *options, abstain_below=retriever.abstain_below, system=row.system)

    def row_result(self, finished: tuple[Answer, ...]) -> RowResult:
        (answer,) = finished
        if answer.is_partial:
            missing = ", ".join(answer.stats.missing_segments)
            raise RetrievalError(f"parts of the index could not be searched ({missing})")
        return answer_result(answer)


def _unset(retriever: RetrieverConfig) -> set[str]:
    """Why: jobs that began before there were these settings go on."""
    learned = {"fusion"} if retriever.mode != "hybrid" or retriever.fusion == "rank" else set()
    return learned | {name for name in ("abstain_below", "expand_passages") if not getattr(retriever, name)}


@app.command(epilog="Example: python -m pipelines.batch_rag --input questions.jsonl --out answers")
def main(
    inputs: options.Inputs,
    out: options.Out,
    index: Annotated[Path | None, typer.Option(help="The index's folder.")] = None,
    config: Config = None,
    target: Target = None,
    adapter: Adapter = None,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, for rows without a value of their own.")
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    passages: Annotated[int | None, typer.Option(help="Passages given to the target for each question.")] = None,
    replicas: Replicas = None,
    tensor_parallel: TensorParallel = None,
    shards: Shards = None,
    cluster: options.Cluster = "",
    resume: options.Resume = True,
    strict: options.Strict = False,
    address: Address = None,
    price_per_hour: options.PricePerHour = None,
) -> None:
    """Answer every row of a file. Rows without an answer go to errors.jsonl with the reason, and the job goes on."""
    given = overrides(index=index, k=passages, target=target, adapter=adapter, shards=shards)
    given |= overrides(seed=seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    given |= overrides(replicas=replicas, tensor_parallel=tensor_parallel)
    with options.exit_on_error():
        settings = load_settings(ClusterConfig, config, **given)
        backend = BackendSpec(settings.topology, cluster, address)
        job = Job(inputs, out, settings, settings.generation.seed or 0, resume, backend, price_per_hour)
        summary = run_command(job, RagTask())
    if strict and summary.num_failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
