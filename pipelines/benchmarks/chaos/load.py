"""The load of the suite `chaos`: streams and lookups, which run until they are stopped.

All deltas are recorded with their times. Nothing is retried here: a client's error counts as an error.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from pipelines.benchmarks.chaos.check import StreamLog
from ragspec.core import Delta
from ragspec.engine.client import EngineClient
from ragspec.errors import RagspecError
from ragspec.evaluation.suites.retrieval.identity import Answer, answer
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Question, RetrieverLike, build_request, retrieve_passages
from ragspec.retrieval.retriever import PUBLIC_SCOPE

_PAUSE_S = 0.2


class Load(ABC):
    """A load beside the faults: threads that run as long as the context lasts."""

    def __init__(self, num_threads: int = 1) -> None:
        self._stopping, self._abandoned = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Start nothing more, and wait until everything started has ended; after an error, end at once."""
        self._stopping.set()
        try:
            for thread in self._threads if failure is None else ():
                thread.join()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """End at once, whatever is unfinished."""
        self._abandoned.set()

    @abstractmethod
    def _run(self) -> None:
        """One thread's work, until `_stopping` or `_abandoned` is set."""


class StreamLoad(Load):
    """Questions asked round after round, `concurrency` at a time, each through retrieval, prompt and engine.

    Names are `round/id`; at least one whole round runs. A stream without a delta for `patience_s` fails.
    """

    def __init__(
        self,
        retriever: RetrieverLike,
        engine: EngineClient,
        prompts: PromptBuilder,
        questions: Sequence[Question],
        concurrency: int,
        patience_s: float,
    ) -> None:
        super().__init__(concurrency)
        self._retriever, self._engine, self._prompts = retriever, engine, prompts
        self._questions, self._patience_s = questions, patience_s
        self.heard: dict[str, StreamLog] = {}
        self._next = 0
        self._lock = threading.Lock()

    @property
    def streams(self) -> list[StreamLog]:
        """All so far."""
        with self._lock:
            return list(self.heard.values())

    def _run(self) -> None:
        while (asked := self._take()) is not None:
            self._ask(*asked)

    def _take(self) -> tuple[Question, StreamLog] | None:
        with self._lock:
            number, index = divmod(self._next, len(self._questions))
            if self._abandoned.is_set() or (self._stopping.is_set() and number > 0):
                return None
            self._next += 1
            question = self._questions[index]
            name = f"{number}/{question.id}"
            heard = self.heard[name] = StreamLog(begin_s=time.monotonic())
        return replace(question, id=name), heard

    def _ask(self, question: Question, heard: StreamLog) -> None:
        news = threading.Event()

        def listen(delta: Delta) -> None:
            heard.times_s.append(time.monotonic())
            heard.deltas.append(delta)
            news.set()

        try:
            (found,) = retrieve_passages(self._retriever, [question])
            ready = build_request(found, self._prompts)
            heard.prompt_ids = ready.request.prompt_ids
            self._engine.submit(ready.request, listen)
        except RagspecError as error:
            heard.error = f"{type(error).__name__}: {error}"
        while not heard.ended and not self._abandoned.is_set():
            if not news.wait(self._patience_s):
                heard.error = f"nothing came for {self._patience_s:g} s"
            news.clear()


class Probe(NamedTuple):
    """One lookup. `right`: its result equals the undisturbed index's; None: the lookup failed."""

    begin_s: float
    end_s: float
    right: bool | None
    error: str = ""


class LookupLoad(Load):
    """One lookup after the other, so that the end of an outage is known."""

    def __init__(self, retriever: RetrieverLike, texts: Sequence[str], expected: Sequence[Answer], k: int) -> None:
        super().__init__()
        self._retriever, self._texts, self._expected, self._k = retriever, texts, expected, k
        self.probes: list[Probe] = []

    def _run(self) -> None:
        while not self._stopping.wait(_PAUSE_S):
            self.probes.append(self._probe(len(self.probes) % len(self._texts)))

    def _probe(self, number: int) -> Probe:
        begin = time.monotonic()
        try:
            (passages,) = self._retriever.retrieve([self._texts[number]], self._k, PUBLIC_SCOPE).passages
        except RagspecError as error:
            return Probe(begin, time.monotonic(), None, f"{type(error).__name__}: {error}")
        return Probe(begin, time.monotonic(), answer(passages) == self._expected[number])
