"""`ragspec demo`: fixed questions about Python's standard library, each decoded with speculation and without.

Owns the demo's run and its output. The two outputs must be the same tokens; the speed-up is the ratio of their decode times. The
two decoders alternate in going first, so that other load on the machine slows both. Only the modules that the questions are about
are indexed, so that the first answer comes soon.

    $ ragspec demo --questions 3
"""

from __future__ import annotations

import json
import resource
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ragspec.cli import terminal
from ragspec.cli.ask import answer_text, print_sources, stream_answer
from ragspec.cli.models import better_reader_command
from ragspec.cli.standard_library import DEMO_MODULES, Corpus, cached_library, documents_of
from ragspec.config import PipelineConfig, RetrieverConfig
from ragspec.core import Document, GenerationStats, SamplingParams, Say
from ragspec.engine.loading import load_engine
from ragspec.errors import SaveError
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever
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

_RETRIEVAL = RetrieverConfig(abstain_below=0.07)
"""In this index the answerable questions are at least 0.10 close to a passage, and the one about PostgreSQL is 0.04."""

_WARM_UP = "What is the zen of Python?"
_KV_TOKENS = 8192
_INDENT = (0, 2, 0, 2)
_NEXT_STEPS = {
    "ragspec index add manual/ --index my-index": "index your own documents",
    'ragspec ask "..." --index my-index': "ask them",
    'ragspec ask "..."': "ask the whole standard library; its other modules are indexed then, once",
    "ragspec doctor": "what this machine can do",
}


def run_demo(
    corpus: Corpus, settings: PipelineConfig, num_questions: int, params: SamplingParams, *, as_json: bool
) -> int:
    """Answers from the `DEMO_MODULES` of `corpus`, with encoder, target, drafters and engine of `settings`.

    Returns 0 if all pairs of outputs were identical, else 1.

    Raises: RagspecError.
    """
    begin = perf_counter()
    terminal.stay_offline(settings.target)
    console = terminal.stderr_console() if as_json else terminal.stdout_console()
    title = Text.assemble(("ragspec demo", "bold"), ("  answers with quotes, drafted by copying, verified", "dim"))
    console.print(title)
    console.print()
    with terminal.stage(console, "encoder", "loading the encoder") as shown:
        encoder = Encoder.load(settings.encoder)
        shown.detail = f"{encoder.identity.id}, {encoder.identity.dimension} dimensions"
    with terminal.stage(console, "index", "opening the index") as shown:
        documents = documents_of(corpus, DEMO_MODULES)
        store = open_library(console, documents, encoder, terminal.cache_folder(), shown)
        retriever = Retriever(encoder, store, _RETRIEVAL, follow=False)
        shown.detail = f"{len(documents)} docstrings of {len(DEMO_MODULES)} modules: {', '.join(sorted(DEMO_MODULES))}"
    with terminal.stage(console, "target", "loading the target") as shown:
        config = settings.engine
        if "max_kv_tokens" not in config.model_fields_set:
            config = config.model_copy(update={"max_kv_tokens": _KV_TOKENS})
        engine = load_engine(settings.target, config, settings.drafting, say=shown)
        millions = engine.target.num_parameters / 1e6
        shown.detail = f"{millions:.1f}M parameters, {engine.target.config.weight_dtype}; bitwise self-test passed"
    prompts = PromptBuilder.of(engine.target.tokenizer, engine.target.max_context_tokens, settings)
    with Pipeline(retriever, engine, prompts, abstain_below=_RETRIEVAL.abstain_below) as pipeline:
        demo = _Comparison(console, pipeline, params)
        with terminal.stage(console, "ready", "warming up") as shown:
            demo.warm_up()
            shown.detail = "both decoders warmed up"
        pairs = [
            demo.ask(question, f"{number} of {num_questions}", plain_first=number % 2 == 0)
            for number, question in enumerate(QUESTIONS[:num_questions], 1)
        ]
        totals = Totals.of([pair for pair in pairs if not pair.abstained])
        facts = {
            "index_generation": retriever.generation,
            "system_fingerprint": engine.fingerprint,
            "target": settings.target.model,
            "seconds": round(perf_counter() - begin, 1),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        }
        if pairs:
            _print_totals(console, totals, facts, params)
    steps = dict(_NEXT_STEPS)
    if command := better_reader_command(settings.target.model):
        steps[command] = "a model that answers more questions right"
    _print_section(console, "next", _grid({name: Text(purpose, "dim") for name, purpose in steps.items()}, "cyan"))
    if as_json:
        print(json.dumps(totals.to_dict() | facts))
    return int(totals.num_identical < totals.num_questions)


def open_library(console: Console, documents: Sequence[Document], encoder: Encoder, cache: Path, say: Say) -> Store:
    """The index of these documents, in a temporary folder if the cache cannot be written. Raises: SaveError."""
    try:
        return cached_library(documents, encoder, cache, say)
    except SaveError as failure:
        terminal.note(console, f"nothing is cached: {terminal.one_line(failure)}")
    with tempfile.TemporaryDirectory(prefix="ragspec-") as scratch:  # open files outlive their names
        return cached_library(documents, encoder, Path(scratch), say)


class AnswerPair(NamedTuple):
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
    """Sums over all questions.

    Tokens of the prompt's own step, more than one where its drafts were right, count in no speed: no decode time was spent.
    """

    num_questions: int
    num_identical: int
    fast: GenerationStats
    plain: GenerationStats

    @classmethod
    def of(cls, pairs: Sequence[AnswerPair]) -> Totals:
        totals = cls(len(pairs), sum(pair.identical for pair in pairs), GenerationStats(), GenerationStats())
        for pair in pairs:
            totals.fast.add(pair.fast.stats.generation)
            totals.plain.add(pair.plain.stats.generation)
        return totals

    @property
    def speedup(self) -> float:
        plain = _tokens_per_s(self.plain)
        return _tokens_per_s(self.fast) / plain if plain else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Flat keys, for JSON. `acceptance_length` is tokens a step with speculation."""
        return {
            "num_questions": self.num_questions,
            "num_identical": self.num_identical,
            "num_tokens": self.fast.num_output_tokens,
            "num_fast_tokens": _num_decoded(self.fast),
            "num_plain_tokens": _num_decoded(self.plain),
            "fast_decode_s": self.fast.decode_s,
            "plain_decode_s": self.plain.decode_s,
            "acceptance_length": self.fast.acceptance_length,
            "speedup": round(self.speedup, 3),
        }


def _num_decoded(stats: GenerationStats) -> int:
    return stats.num_output_tokens - stats.num_first_tokens


def _tokens_per_s(stats: GenerationStats) -> float:
    return _num_decoded(stats) / stats.decode_s if stats.decode_s else 0.0


class _Comparison:
    """Asks one pipeline every question twice, with speculation and without, and prints the pair."""

    def __init__(self, console: Console, pipeline: Pipeline, params: SamplingParams) -> None:
        self._console, self._pipeline, self._params = console, pipeline, params

    def warm_up(self) -> None:
        for speculation in (True, False):
            self._answer(_WARM_UP, speculation)

    def ask(self, question: str, label: str, *, plain_first: bool) -> AnswerPair:
        _print_section(self._console, label, Text(terminal.safe(question), "bold"))
        plain = self._answer(question, False) if plain_first else None
        with _live_text(self._console) as show:
            fast = self._answer(question, True, show)
        pair = AnswerPair(fast, plain or self._answer(question, False))
        _print_pair(self._console, pair)
        return pair

    def _answer(self, question: str, speculation: bool, show: Callable[[str], object] = lambda _: None) -> Answer:
        tenant = uuid.uuid4().hex  # Why: a new tenant finds no cached prompt, so both runs prefill all of it
        return stream_answer(self._pipeline, question, self._params, show, speculation=speculation, tenant=tenant)


@contextmanager
def _live_text(console: Console) -> Iterator[Callable[[str], object]]:
    """Shows pieces of text as they come. Erases them at the end, so that the marked answer can be printed there."""
    text = Text()
    if not console.is_terminal:
        yield lambda _: None
        return
    with Live(Padding(text, _INDENT, expand=False), console=console, transient=True, refresh_per_second=30):
        yield lambda piece: text.append(terminal.safe(piece))


def _print_pair(console: Console, pair: AnswerPair) -> None:
    fast, stats = pair.fast, pair.fast.stats.generation
    console.print(Padding(answer_text(fast), _INDENT, expand=False))
    if pair.abstained:
        console.print(Text("  the target was not asked", "dim"))
        return
    print_sources(console, fast)
    speeds = f" · {fast.stats.tokens_per_s:.0f} tokens/s, plain {pair.plain.stats.tokens_per_s:.0f} · "
    line = Text.assemble(
        (f"  {stats.num_output_tokens} tokens, ", "dim"),
        (f"{fast.stats.acceptance_length:.1f} a step", "bold"),
        (speeds, "dim"),
        ("identical tokens", "green") if pair.identical else ("DIFFERENT TOKENS", "bold red"),
    )
    console.print(line)
    if held_out := sorted({c.document_id for c in fast.citations if is_held_out(c.document_id)}):
        console.print(Text(f"  kept out of the adapter's training: {', '.join(held_out)}", "dim italic"))
    if fast.dropped_passages:
        terminal.note(console, f"{len(fast.dropped_passages)} retrieved passages did not fit the context")


def _print_totals(console: Console, totals: Totals, facts: dict[str, Any], params: SamplingParams) -> None:
    fast, plain = totals.fast, totals.plain
    all_same = totals.num_identical == totals.num_questions
    outputs = f"{totals.num_identical} of {totals.num_questions} token for token identical"
    speed = f"{_tokens_per_s(fast):.0f} tokens/s, {fast.decode_s:.2f} s, {fast.acceptance_length:.1f} tokens a step"
    rows = {
        "decode speed-up": Text(f"{totals.speedup:.1f}x", "bold green"),
        "speculative": Text(speed),
        "plain": Text(f"{_tokens_per_s(plain):.0f} tokens/s, {plain.decode_s:.2f} s"),
        "outputs": Text(outputs, "green" if all_same else "bold red"),
        "sampling": Text(f"temperature {params.temperature:g}, seed {params.seed}"),
        "numerics": Text(f"bitwise self-test passed, fingerprint {facts['system_fingerprint']}"),
        "index": Text(f"generation {facts['index_generation']}"),
        "this run": Text(f"{facts['seconds']} s, peak memory {facts['peak_memory_mb']:,} MB"),
    }
    _print_section(console, "measured here and now", _grid(rows, "dim"))


def _grid(rows: dict[str, Text], style: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(Text(name, style), value)
    return grid


def _print_section(console: Console, heading: str, content: Text | Table) -> None:
    console.print()
    console.print(Rule(Text(heading, "dim"), align="left", style="dim"))
    console.print(Padding(content, _INDENT, expand=False))
