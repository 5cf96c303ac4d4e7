"""`ragspec demo`: fixed questions about Python's standard library, each decoded with speculation and without.

Owns the demo's run and its index of the standard library's documentation, which `ragspec serve` serves by default. The two
outputs must be the same tokens; the speed-up is the ratio of their decode times. The two decoders alternate in going first, so
that other load on the machine slows both.

The index lies in the user's cache, in a folder named by a hash of documents, encoder and chunking. A damaged index there is built
again. The copy that a service writes to is never rebuilt: it holds other documents too.

    $ ragspec demo --questions 3
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from ragspec.cli import terminal
from ragspec.cli.ask import stream_answer
from ragspec.cli.demo_view import AnswerPair, DemoView, Totals
from ragspec.cli.terminal import cache_folder, one_line, stage
from ragspec.config import (
    DEFAULT_TARGET,
    ChunkingConfig,
    DraftingConfig,
    EncoderConfig,
    EngineConfig,
    IndexConfig,
    RetrieverConfig,
    TargetConfig,
)
from ragspec.core import Document, SamplingParams
from ragspec.disk import saving
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError, SaveError
from ragspec.evaluation.datasets import cached_store
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import ProgressCallback, Retriever

QUESTIONS = (
    "What does json.dumps do?",
    "What does itertools.pairwise do?",
    "How do I use textwrap.shorten?",
    "Which function finds the n smallest elements in a dataset?",
    "What is contextlib.suppress for?",
    "What does the function re.sub do?",
    "How can I tell whether a year is a leap year?",
    "How do I connect to a PostgreSQL database?",
)
"""The adapter's training left out pairwise and re.sub; the standard library leaves out PostgreSQL."""

_RETRIEVAL = RetrieverConfig(abstain_below=0.165)

_WARM_UP = "What is the zen of Python?"
_KV_TOKENS = 8192
_CACHE_NAME = "stdlib"


def run_demo(
    corpus: Sequence[tuple[str, str]],
    target: str | None,
    num_questions: int,
    params: SamplingParams,
    *,
    interactive: bool,
    as_json: bool,
) -> int:
    """Answers from `corpus`, pairs of name and text. Returns 0 if all pairs of outputs were identical, else 1.

    Raises: RagspecError.
    """
    begin = perf_counter()
    target_config = TargetConfig(model=target or DEFAULT_TARGET)
    terminal.stay_offline(target_config)
    console = terminal.stderr_console() if as_json else terminal.stdout_console()
    view = DemoView(console)
    view.title()
    retriever = _load_retriever(console, demo_documents(corpus))
    engine = _load_engine(console, target_config)
    prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
    with Pipeline(retriever, engine, prompts, abstain_below=_RETRIEVAL.abstain_below) as pipeline:
        demo = _Comparison(pipeline, view, params)
        with stage(console, "ready", "Warming up") as ready:
            demo.warm_up()
            ready.detail = "both decoders warmed up"
        pairs = [
            demo.ask(question, f"{n} of {num_questions}", plain_first=n % 2 == 0)
            for n, question in enumerate(QUESTIONS[:num_questions], 1)
        ]
        totals = Totals.of([pair for pair in pairs if not pair.abstained])
        facts = {
            "index_generation": retriever.generation,
            "system_fingerprint": engine.fingerprint,
            "target": target_config.model,
            "seconds": round(perf_counter() - begin, 1),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        }
        if pairs:
            view.totals(totals, facts, params)
        if interactive:
            demo.converse(console)
    view.next_steps()
    if as_json:
        print(json.dumps(totals._asdict() | {"speedup": round(totals.speedup, 3)} | facts))
    return int(totals.num_identical < totals.num_questions)


class _Comparison:
    """Asks one pipeline every question twice, with speculation and without."""

    def __init__(self, pipeline: Pipeline, view: DemoView, params: SamplingParams) -> None:
        self._pipeline, self._view, self._params = pipeline, view, params

    def warm_up(self) -> None:
        for speculation in (True, False):
            self._answer(_WARM_UP, speculation)

    def ask(self, question: str, label: str, *, plain_first: bool) -> AnswerPair:
        self._view.question(question, label)
        plain = self._answer(question, False) if plain_first else None
        fast = self._answer(question, True, live=True)
        pair = AnswerPair(fast, plain or self._answer(question, False))
        self._view.pair(pair)
        return pair

    def converse(self, console: Console) -> None:
        """Until an empty line or the end of the input."""
        console.print(Text("\nYour own questions; an empty line ends.", "bold"))
        while True:
            try:
                question = console.input(Text("? ", "bold cyan")).strip()
            except EOFError:
                return
            if not question:
                return
            try:
                self.ask(question, "yours", plain_first=False)
            except InputError as error:
                terminal.print_error(one_line(error))

    def _answer(self, question: str, speculation: bool, live: bool = False) -> Answer:
        tenant = uuid.uuid4().hex  # Why: a new tenant finds no cached prompt, so both runs prefill all of it
        answer = partial(stream_answer, self._pipeline, question, self._params, speculation=speculation, tenant=tenant)
        if not live:
            return asyncio.run(answer(show=lambda _: None))
        with self._view.live_answer() as show:
            return asyncio.run(answer(show=show))


def _load_retriever(console: Console, documents: list[Document]) -> Retriever:
    with stage(console, "encoder", "Loading the encoder") as loaded:
        encoder = Encoder.load(EncoderConfig())
        loaded.detail = f"{encoder.identity.id}, {encoder.identity.dimension} dimensions"
    with stage(console, "index") as opened:
        retriever = demo_retriever(console, encoder, documents, cache_folder())
        opened.detail = f"{len(documents):,} docstrings of this Python, {count_passages(documents):,} passages"
    return retriever


def _load_engine(console: Console, config: TargetConfig) -> Engine:
    with stage(console, "target", "Loading the target") as loaded:
        engine = load_engine(config, EngineConfig(max_kv_tokens=_KV_TOKENS), DraftingConfig(), say=loaded.say)
        millions = engine.target.num_parameters / 1e6
        loaded.detail = f"{millions:.1f}M parameters, {config.weight_dtype}; bitwise self-test passed"
    return engine


def demo_documents(corpus: Iterable[tuple[str, str]]) -> list[Document]:
    """One document per documented name, titled by it."""
    return [Document(name, text, title=name) for name, text in corpus]


def count_passages(documents: list[Document]) -> int:
    return sum(len(chunk(document, ChunkingConfig())) for document in documents)


def demo_retriever(console: Console, encoder: Encoder, documents: list[Document], cache: Path) -> Retriever:
    """Opens the cached index, or builds it behind a progress bar. Uses a temporary folder if the cache cannot be written.

    Raises: SaveError if neither can be written.
    """
    with _progress(console, documents) as show:

        def opened(folder: Path) -> Retriever:
            store = cached_store(documents, encoder, folder, progress=show)
            return Retriever(encoder, store, _RETRIEVAL, follow=False)

        try:
            return opened(cache / _CACHE_NAME)
        except SaveError as failure:
            terminal.note(console, f"nothing is cached: {one_line(failure)}")
        with tempfile.TemporaryDirectory(prefix="ragspec-") as scratch:  # open files outlive their names
            return opened(Path(scratch))


def standard_library_index(console: Console, encoder: Encoder, corpus: Iterable[tuple[str, str]]) -> Path:
    """The folder of the demo's index, built if it is not in the cache. Raises: SaveError."""
    documents = demo_documents(corpus)
    with _progress(console, documents) as show:
        return cached_store(documents, encoder, cache_folder() / _CACHE_NAME, progress=show).index_dir


def service_index(console: Console, encoder: Encoder, documents: list[Document], cache: Path, home: Path) -> Path:
    """The folder in `home` of an index that a service may add documents to; at first a copy of the cached index.

    Raises: SaveError; StoreError if the index is damaged.
    """
    folder = home / content_key(documents, encoder.identity, IndexConfig())[:24]
    if folder.exists():
        return Store.open(folder, encoder.identity).index_dir
    with _progress(console, documents) as show:
        store = cached_store(documents, encoder, cache / _CACHE_NAME, progress=show)
    with saving(folder):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            os.rename(shutil.copytree(store.index_dir, Path(scratch) / "index"), folder)
    return folder


@contextlib.contextmanager
def _progress(console: Console, documents: list[Document]) -> Iterator[ProgressCallback]:
    texts = TextColumn("{task.description}")
    columns = (SpinnerColumn(), texts, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Passages, encoded once", total=count_passages(documents))
        yield lambda _, num_passages: bar.update(task, completed=num_passages)
