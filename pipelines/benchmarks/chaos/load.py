"""The load of the suite `chaos`: streams, lookups and a batch job, which run until they are stopped.

All deltas are recorded with their times. Nothing is retried here: a client's error counts as an error.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipelines.batch.records import recorded_row
from pipelines.benchmarks.chaos.check import StreamLog
from ragspec.core import Delta, Request
from ragspec.engine.sequence import Listener
from ragspec.errors import RagspecError
from ragspec.evaluation.suites.retrieval.identity import Answer, answer
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Question, RetrieverLike, build_request, retrieve_passages
from ragspec.retrieval.retriever import PUBLIC_SCOPE

ROOT = Path(__file__).resolve().parents[3]
_PAUSE_S = 0.2
_END_S = 10.0


class Submits(Protocol):
    """An engine that accepts requests."""

    def submit(self, request: Request, listener: Listener) -> None: ...


class Load(Protocol):
    """A load beside the faults."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Start nothing more, and wait until everything started has ended."""

    def abandon(self) -> None:
        """End at once, whatever is unfinished."""


class StreamLoad:
    """Questions asked round after round, `concurrency` at a time, each through retrieval, prompt and engine.

    Names are `round/id`; at least one whole round runs. A stream without a delta for `patience_s` fails.
    """

    def __init__(
        self,
        retriever: RetrieverLike,
        engine: Submits,
        prompts: PromptBuilder,
        questions: Sequence[Question],
        concurrency: int,
        patience_s: float,
    ) -> None:
        self._retriever, self._engine, self._prompts = retriever, engine, prompts
        self._questions, self._patience_s = questions, patience_s
        self.heard: dict[str, StreamLog] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._stopping, self._abandoned = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name=f"stream-{i}") for i in range(concurrency)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        self._abandoned.set()
        self._stopping.set()

    @property
    def streams(self) -> list[StreamLog]:
        """All so far."""
        with self._lock:
            return list(self.heard.values())

    @property
    def num_open(self) -> int:
        return sum(not stream.ended for stream in self.streams)

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


class LookupLoad:
    """One lookup after the other, so that the end of an outage is known."""

    def __init__(self, retriever: RetrieverLike, texts: Sequence[str], expected: Sequence[Answer], k: int) -> None:
        self._retriever, self._texts, self._expected, self._k = retriever, texts, expected, k
        self.probes: list[Probe] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lookups")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def abandon(self) -> None:
        self._stopping.set()

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


class BatchLoad:
    """`pipelines.batch_rag` as its own process on a deployment, one pass over all rows after the other, at least one.

    A job that fails is counted and submitted again, as an operator would.
    """

    def __init__(self, job: BatchJob, folder: Path, most_failures: int = 5) -> None:
        self._job, self._folder, self._most = job, folder, most_failures
        self.passes: list[Path] = []
        self.failures: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="batch-job")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def abandon(self) -> None:
        self._abandoned.set()
        self._stopping.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._abandoned.is_set() and not (self._stopping.is_set() and self.passes):
            out = self._folder / f"pass-{len(self.passes)}"
            self._one(out)
            self.passes.append(out)

    def _one(self, out: Path) -> None:
        while not self._abandoned.is_set() and len(self.failures) < self._most:
            self._process = self._job.start(out)
            if self._process.wait() == 0 or self._abandoned.is_set():
                return
            self.failures.append(self._job.last_words(out))


class BatchJob(NamedTuple):
    """The command of the batch job and its output."""

    rows: Path
    options: tuple[str, ...]
    environment: Mapping[str, str]

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Start the driver process; its log stands beside `out`."""
        command = [
            sys.executable,
            "-m",
            "pipelines.batch_rag",
            "--input",
            str(self.rows),
            "--out",
            str(out),
            *self.options,
        ]
        with open(self._log(out), "ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=dict(self.environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def last_words(self, out: Path) -> str:
        lines = self._log(out).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")[-400:]

    def _log(self, out: Path) -> Path:
        return out.with_suffix(".log")


def written_rows(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every complete line of a job's answers by id, unfinished parts included."""
    for path in sorted([*out.glob("answers-*.jsonl"), *out.glob("answers-*.jsonl.part")]):
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):  # Why: the last line may be half written
                if line:
                    record = json.loads(line)
                    yield recorded_row(record).id, record
