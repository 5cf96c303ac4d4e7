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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ragspec.cli import terminal
from ragspec.cli.ask import stream_answer
from ragspec.cli.models import better_reader_command
from ragspec.cli.quotes import answer_text, print_sources
from ragspec.cli.terminal import cache_folder, note, one_line, safe, stage
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
from ragspec.training.stdlib_corpus import is_held_out

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
_INDENT = (0, 2, 0, 2)
_NEXT_STEPS = {
    "ragspec index add manual/ --index my-index": "index your own documents",
    'ragspec ask "..." --index my-index': "ask them",
    "ragspec demo --interactive": "ask this index your own questions",
    "ragspec doctor": "what this machine can do",
}


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


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """One question answered with speculation (`fast`) and without (`plain`)."""

    fast: Answer
    plain: Answer

    @property
    def abstained(self) -> bool:
        """Whether no passage was close to the question, so that the target was not asked."""
        return not self.fast.token_ids

    @property
    def identical(self) -> bool:
        return self.fast.token_ids == self.plain.token_ids


class Totals(NamedTuple):
    """Sums over all questions; `acceptance_length` is tokens a step with speculation.

    `num_fast_tokens`, `num_plain_tokens`: tokens decoded in `fast_decode_s` and `plain_decode_s`. Tokens of the prompt's own
    step, more than one where its drafts were right, count in neither.
    """

    num_questions: int
    num_identical: int
    num_tokens: int
    num_fast_tokens: int
    num_plain_tokens: int
    fast_decode_s: float
    plain_decode_s: float
    acceptance_length: float

    @classmethod
    def of(cls, pairs: Sequence[AnswerPair]) -> Totals:
        fast, plain = ([getattr(pair, name).stats.generation for pair in pairs] for name in ("fast", "plain"))
        num_tokens, num_steps = (sum(getattr(s, name) for s in fast) for name in ("num_output_tokens", "num_steps"))
        return cls(
            num_questions=len(pairs),
            num_identical=sum(pair.identical for pair in pairs),
            num_tokens=num_tokens,
            num_fast_tokens=sum(s.num_output_tokens - s.num_first_tokens for s in fast),
            num_plain_tokens=sum(s.num_output_tokens - s.num_first_tokens for s in plain),
            fast_decode_s=sum(s.decode_s for s in fast),
            plain_decode_s=sum(s.decode_s for s in plain),
            acceptance_length=num_tokens / num_steps if num_steps else 0.0,
        )

    @property
    def fast_tokens_per_s(self) -> float:
        return self.num_fast_tokens / self.fast_decode_s if self.fast_decode_s else 0.0

    @property
    def plain_tokens_per_s(self) -> float:
        return self.num_plain_tokens / self.plain_decode_s if self.plain_decode_s else 0.0

    @property
    def speedup(self) -> float:
        return self.fast_tokens_per_s / self.plain_tokens_per_s if self.plain_decode_s else 0.0


class DemoView:
    """Prints to one console, top to bottom."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self) -> None:
        heading = Text.assemble(
            ("ragspec demo", "bold"), ("  answers with quotes, drafted by copying, verified to the bit", "dim")
        )
        self._console.print(heading, Text())

    def question(self, question: str, label: str) -> None:
        self._section(label, Text(safe(question), "bold"))

    @contextmanager
    def live_answer(self) -> Iterator[Callable[[str], object]]:
        """Shows pieces of text as they come. Erases them at the end, so that `pair` can print the marked answer there."""
        text = Text()
        if not self._console.is_terminal:
            yield lambda _: None
            return
        with Live(Padding(text, _INDENT, expand=False), console=self._console, transient=True, refresh_per_second=30):
            yield lambda piece: text.append(safe(piece))

    def pair(self, pair: AnswerPair) -> None:
        fast, stats = pair.fast, pair.fast.stats.generation
        self._console.print(Padding(answer_text(fast), _INDENT, expand=False))
        if pair.abstained:
            self._console.print(Padding(Text("the target was not asked", "dim"), _INDENT, expand=False))
            return
        print_sources(self._console, fast)
        verdict = ("identical tokens", "green") if pair.identical else ("DIFFERENT TOKENS", "bold red")
        line = Text.assemble(
            "  ",
            (f"{stats.num_output_tokens} tokens, ", "dim"),
            (f"{fast.stats.acceptance_length:.1f} a step", "bold"),
            (f" · {fast.stats.tokens_per_s:.0f} tokens/s, plain {pair.plain.stats.tokens_per_s:.0f} · ", "dim"),
            verdict,
        )
        self._console.print(line)
        held_out = sorted({c.document_id for c in fast.citations if is_held_out(c.document_id)})
        if held_out:
            kept_out = Text(f"kept out of the adapter's training: {', '.join(held_out)}", "dim italic")
            self._console.print(Padding(kept_out, _INDENT, expand=False))
        if fast.dropped_passages:
            note(self._console, f"{len(fast.dropped_passages)} retrieved passages did not fit the context")

    def totals(self, totals: Totals, facts: Mapping[str, Any], params: SamplingParams) -> None:
        all_same = totals.num_identical == totals.num_questions
        outputs = f"{totals.num_identical} of {totals.num_questions} token for token identical"
        speed = f"{totals.fast_tokens_per_s:.0f} tokens/s, {totals.fast_decode_s:.2f} s"
        speculative = f"{speed}, {totals.acceptance_length:.1f} tokens a step"
        rows = {
            "decode speed-up": Text(f"{totals.speedup:.1f}x", "bold green"),
            "speculative": Text(speculative),
            "plain": Text(f"{totals.plain_tokens_per_s:.0f} tokens/s, {totals.plain_decode_s:.2f} s"),
            "outputs": Text(outputs, "green" if all_same else "bold red"),
            "sampling": Text(f"temperature {params.temperature:g}, seed {params.seed}"),
            "numerics": Text(f"bitwise self-test passed, fingerprint {facts['system_fingerprint']}"),
            "index": Text(f"generation {facts['index_generation']}"),
            "this run": Text(f"{facts['seconds']} s, peak memory {facts['peak_memory_mb']:,} MB"),
        }
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, value in rows.items():
            grid.add_row(name, value)
        self._section("measured here and now", grid)

    def next_steps(self) -> None:
        grid = Table.grid(padding=(0, 2))
        steps = dict(_NEXT_STEPS)
        if command := better_reader_command(DEFAULT_TARGET):
            steps[command] = "a model that answers more questions right"
        for command, purpose in steps.items():
            grid.add_row(Text(command, "cyan"), Text(purpose, "dim"))
        self._section("next", grid)

    def _section(self, heading: str, content: Text | Table) -> None:
        self._console.print()
        self._console.print(Rule(Text(heading, "dim"), align="left", style="dim"))
        self._console.print(Padding(content, _INDENT, expand=False))
