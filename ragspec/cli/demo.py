"""`ragspec demo`: questions about the user's own Python, each decoded with speculation and plainly, in turn.

The two outputs must be the same tokens; the speed-up is the ratio of the two decode times, measured here and now. Which of the
two goes first alternates, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import asyncio
import json
import resource
import uuid
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from rich.console import Console
from rich.text import Text

from ragspec.cli.ask import stream_answer
from ragspec.cli.demo_index import count_passages, demo_documents, demo_retriever
from ragspec.cli.demo_pairs import Pair, Totals
from ragspec.cli.demo_view import DemoView
from ragspec.cli.terminal import (
    cache_folder,
    one_line,
    print_error,
    stage,
    stay_offline,
    stderr_console,
    stdout_console,
)
from ragspec.config import REFERENCE_TARGET, DraftingConfig, EncoderConfig, EngineConfig, TargetConfig
from ragspec.core import Document, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever

QUESTIONS = (
    "What does json.dumps do?",
    "What does itertools.pairwise do?",
    "How do I use textwrap.shorten?",
    "Which function finds the n smallest elements in a dataset?",
    "Explain collections.ChainMap.",
    "What is contextlib.suppress for?",
    "What does the function re.sub do?",
    "How can I tell whether a year is a leap year?",
)
"""Some in the words the reference target was trained on, some not; pairwise, ChainMap and re.sub were kept out of training."""

_WARM_UP = "What is the zen of Python?"
_KV_TOKENS = 8192


def run_demo(
    corpus: Sequence[tuple[str, str]],
    target: str | None,
    num_questions: int,
    params: SamplingParams,
    *,
    interactive: bool,
    as_json: bool,
) -> int:
    """Over `corpus`, names and texts. 0 when every pair of outputs was identical, else 1. Raises: RagspecError."""
    begin = perf_counter()
    target_config = TargetConfig(model=target or REFERENCE_TARGET)
    stay_offline(target_config.model)
    console = stderr_console() if as_json else stdout_console()
    view = DemoView(console)
    view.title()
    retriever = _load_retriever(console, demo_documents(corpus))
    engine = _load_engine(console, target_config)
    prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
    with Pipeline(retriever, engine, prompts) as pipeline:
        demo = _Demo(pipeline, view, params)
        with stage(console, "ready", "Warming up") as ready:
            demo.warm_up()
            ready.detail = "both decoders warmed up"
        pairs = [
            demo.ask(question, f"{n} of {num_questions}", plain_first=n % 2 == 0)
            for n, question in enumerate(QUESTIONS[:num_questions], 1)
        ]
        totals = Totals.of(pairs)
        facts = {
            "index_generation": retriever.generation,
            "system_fingerprint": engine.fingerprint,
            "target": target_config.model if target else "reference target",
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


class _Demo:
    """Asks through one pipeline, twice each time."""

    def __init__(self, pipeline: Pipeline, view: DemoView, params: SamplingParams) -> None:
        self._pipeline, self._view, self._params = pipeline, view, params

    def warm_up(self) -> None:
        for speculation in (True, False):
            self._answer(_WARM_UP, speculation)

    def ask(self, question: str, label: str, *, plain_first: bool) -> Pair:
        self._view.question(question, label)
        plain = self._answer(question, False) if plain_first else None
        fast = self._answer(question, True, live=True)
        pair = Pair(fast, plain or self._answer(question, False))
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
                print_error(one_line(error))

    def _answer(self, question: str, speculation: bool, live: bool = False) -> Answer:
        tenant = uuid.uuid4().hex  # Why: a tenant of its own finds no cached prompt, so both prefill the same
        answer = partial(stream_answer, self._pipeline, question, self._params, speculation=speculation, tenant=tenant)
        if not live:
            return asyncio.run(answer(show=lambda _: None))
        with self._view.live_answer() as show:
            return asyncio.run(answer(show=show))


def _load_retriever(console: Console, documents: list[Document]) -> Retriever:
    with stage(console, "encoder", "Loading the encoder") as loaded:
        encoder = Encoder.load(EncoderConfig())
        loaded.detail = f"{encoder.identity.id}, {encoder.dimension} dimensions"
    with stage(console, "index") as opened:
        retriever = demo_retriever(console, encoder, documents, cache_folder())
        opened.detail = f"{len(documents):,} docstrings of this Python, {count_passages(documents):,} passages"
    return retriever


def _load_engine(console: Console, config: TargetConfig) -> Engine:
    with stage(console, "target", "Loading the target, testing its numerics, measuring its costs") as loaded:
        engine = load_engine(config, EngineConfig(max_kv_tokens=_KV_TOKENS), DraftingConfig())
        millions = engine.target.num_parameters / 1e6
        loaded.detail = f"{millions:.1f}M parameters, {config.dtype}; bitwise self-test passed"
    return engine
