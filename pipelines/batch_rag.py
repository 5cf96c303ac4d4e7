"""Answer a file of questions, on this machine or on a Ray cluster; a killed job goes on where it stopped.

    python -m pipelines.batch_rag --input questions.jsonl --index index --out answers
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python -m pipelines.batch_rag --input questions.jsonl --index /data/index --out /data/answers --replicas 2

Rows are `{"id": ..., "question": ...}`, with sampling parameters beside them if need be, or lines of an OpenAI batch file.
The seed of a row comes from the job's seed and the row's id, so neither order nor batches nor an interruption change a text.
The last line on stdout is one JSON object with what was done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.batch import options
from pipelines.batch.job import Job, fail, finish, judge
from pipelines.batch.machines import Machines, Serving
from pipelines.batch.records import Written, written_answer
from pipelines.batch.rows import QUESTIONS, Row
from pipelines.batch.task import Asking, Task
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import PipelineConfig, load_settings
from ragspec.errors import ConfigError, RagspecError, RetrievalError
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline_stages import Named, Stages
from ragspec.retrieval.index.manifest import read_generation
from ragspec.retrieval.index.reader_lock import reader_lock

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class RagTask(Task):
    """Questions are answered from one generation of an index."""

    form = QUESTIONS
    rows = "questions"
    sections = ("target", "engine.max_kv_tokens", "encoder", "retriever")

    @contextmanager
    def pinned(self, config: PipelineConfig) -> Iterator[PipelineConfig]:
        """The generation that is named, or the one that is current now; its files stay."""
        if not config.retriever.index_dir:
            raise ConfigError("no index: name its folder with --index, or as retriever.index_dir in the configuration")
        with reader_lock(Path(config.retriever.index_dir), config.retriever.pointer) as pointer:
            yield config.model_copy(update={"retriever": config.retriever.model_copy(update={"pointer": pointer})})

    def what_decides(self, config: PipelineConfig) -> dict[str, Any]:
        retriever = config.retriever
        _, manifest = read_generation(Path(retriever.index_dir), retriever.pointer)
        return {
            "encoder": config.encoder.model,
            "retriever": retriever.model_dump(exclude={"index_dir", "pointer", "fail_closed"}),
            "index_generation": manifest.generation_id,
        }

    def stages(self, served: Serving) -> Stages:
        from ragspec.rag.async_pipeline import Flow, FlowLimits

        assert served.retriever is not None, "a job with an index has a retriever"
        limits = FlowLimits(max_in_flight=served.max_in_flight)
        return Flow(served.retriever, served.engine, served.prompts, limits).stages

    def asked(self, row: Row, asking: Asking) -> Named:
        from ragspec.rag.steps import Question, scope_of

        num_passages = asking.config.retriever.num_passages
        return Question(row.id, row.text, asking.params(row), num_passages, scope_of(row.tenant, row.filter))

    def written(self, result: tuple[Answer, ...]) -> Written:
        (answer,) = result
        if answer.is_partial:
            missing = ", ".join(answer.stats.missing_segments)
            raise RetrievalError(f"parts of the index could not be searched ({missing})")
        return written_answer(answer)


@app.command()
def main(
    inputs: options.Inputs,
    out: options.Out,
    index: Annotated[Path | None, typer.Option(help="The index's folder.")] = None,
    config: options.Config = None,
    target: options.Target = None,
    seed: options.Seed = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, for rows that do not say.")] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    passages: Annotated[int | None, typer.Option(help="Passages given to the target for each question.")] = None,
    replicas: options.Replicas = None,
    tensor_parallel: options.TensorParallel = None,
    shards: options.Shards = None,
    cluster: options.Cluster = "",
    resume: options.Resume = True,
    strict: options.Strict = False,
    address: options.Address = None,
    price_per_hour: options.PricePerHour = None,
) -> None:
    """Answer every row of a file; wrong rows go to errors.jsonl with the reason, and the job goes on."""
    overrides = {
        "retriever.index_dir": str(index) if index else None,
        "retriever.num_passages": passages,
        "target.model": target,
        "generation.seed": seed,
        "generation.max_tokens": max_tokens,
        "generation.temperature": temperature,
        "generation.top_p": top_p,
        "topology.replicas": replicas,
        "topology.tensor_parallel": tensor_parallel,
        "topology.num_shards": shards,
    }
    try:
        settings = load_settings(ClusterConfig, config, **overrides)
    except RagspecError as error:
        fail(error)
    machines = Machines(settings.topology, cluster, address)
    job = Job(inputs, out, settings, settings.generation.seed or 0, resume, machines, price_per_hour)
    judge(finish(job, RagTask()), strict)


if __name__ == "__main__":
    app()
