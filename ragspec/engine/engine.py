"""The engine: plan, one forward, verify, commit. Everything else in ragspec exists so that this stays short.

One thread owns the target, the pool and every sequence; the outside talks to it through a queue and hears one `Delta` a step
and choice. Speculation off is the same step with root-only trees.

    >>> engine = load_engine(TargetConfig(), EngineConfig(), DraftingConfig())
    >>> engine.generate([Request("a", prompt_ids, SamplingParams(max_tokens=20))])[0].text
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

from ragspec.config import EngineConfig
from ragspec.core import FinishReason, Request
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.batch import Batch, Work
from ragspec.engine.client import EngineClient
from ragspec.engine.collect import settle
from ragspec.engine.commands import Commands, each_tried
from ragspec.engine.scheduler import Scheduler
from ragspec.engine.sequence import Listener, Sequence
from ragspec.engine.target import Target
from ragspec.errors import EngineClosed, InputError, RankLost
from ragspec.numerics.ranks import BEAT_S
from ragspec.numerics.threads import ThreadChoice

log = logging.getLogger(__name__)


class Engine(EngineClient):
    """Continuous batching of draft trees over one target. Thread-safe from the outside."""

    def __init__(
        self,
        target: Target,
        planner: Planner,
        admission: Admission,
        config: EngineConfig,
        threads: ThreadChoice | None = None,
    ) -> None:
        self._threads = threads or ThreadChoice(config.num_threads, adaptive=config.adaptive_threads)
        self.fingerprint, self.max_context_tokens = admission.fingerprint, admission.max_context_tokens
        self.lost = ""  # why all of it is dead, set before any sequence hears of it; empty: it is not
        self.target, self._planner, self._admission = target, planner, admission
        self._scheduler = Scheduler(target.pool, config, num_recomputed=1 if planner.taps else 0)
        self.load = self._scheduler.load
        self._commands = Commands(target.beat, BEAT_S if target.ranks.size > 1 else None)
        self._sequences: dict[str, list[Sequence]] = {}
        self._lock, self._ids = threading.Lock(), set[str]()
        self._in_step: list[Sequence] = []
        self._closed = ""  # why nothing more is taken
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> None:
        self.submit_all([request], listener)

    def submit_all(self, requests: SequenceOf[Request], listener: Listener) -> None:
        prepare = self._planner.prepare
        admitted = {request.id: self._admission.sequences(request, listener, prepare) for request in requests}
        with self._lock:
            if self._closed:
                raise EngineClosed(self._closed)
            taken = sorted(self._ids & admitted.keys())
            if taken or len(admitted) < len(requests):
                which = f"in use already: {taken}" if taken else "an id comes twice"
                raise InputError(f"requests that run at once need different ids; {which}")
            self._ids.update(admitted)
            self._commands.put(lambda: self._enqueue(admitted))

    def cancel(self, request_id: str) -> None:
        self._commands.put(lambda: self._cancel(request_id))

    def between_steps(self, call: Callable[[], None]) -> None:
        """Run `call` in the engine's thread when no step is running, and wait for it; the engine does nothing meanwhile.

        Never from a listener, which runs in that thread itself. Raises: EngineClosed, and what `call` raises.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise EngineClosed(self._closed)
            self._commands.put(lambda: settle(done, call))
        done.result()

    def purge(self, salt: str) -> None:
        """Forget every cached prefix and earlier answer of one tenant."""
        self._commands.put(lambda: self._scheduler.purge(salt))
        self._commands.put(lambda: self._planner.purge(salt))

    def close(self) -> None:
        with self._lock:
            self._closed = self._closed or "the engine is closed"
            self._commands.end()
        self._thread.join()
        atexit.unregister(self.close)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._commands.run(lambda: self._scheduler.idle):
                self._step_or_fail()
        except RankLost as cause:
            log.error("the engine is dead: %s", cause)
            self.lost = str(cause)
            with self._lock:
                self._closed = f"the engine is closed: {cause}"
                self._commands.end()
            self._commands.run(lambda: False)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(sequence, FinishReason.ERROR if self.lost else FinishReason.CANCELLED, self.lost)
        self.target.close()

    def _step_or_fail(self) -> None:
        try:
            self.step()
        except RankLost:
            raise
        except Exception as cause:
            log.exception("a step failed; its sequences end with an error")
            failed = self._in_step or [*self._scheduler.running, *self._scheduler.waiting]
            for sequence in [s for s in failed if s in self._sequences.get(s.request.id, ())]:  # not told its end yet
                self._end(sequence, FinishReason.ERROR, f"{type(cause).__name__}: {cause}")

    def step(self) -> None:
        """One decode step for every scheduled sequence."""
        self._in_step = []
        chosen = self._scheduler.schedule()
        self._in_step = [sequence for sequence, _ in chosen]
        if not chosen:
            return
        deciding = [sequence for sequence, num_tokens in chosen if num_tokens == sequence.num_pending]
        num_other_rows = sum(num_tokens for _, num_tokens in chosen) - len(deciding)
        trees = self._planner.plan(deciding, num_other_rows, self._scheduler.spare_rows(chosen))
        tree_of = dict(zip(map(id, deciding), trees, strict=True))
        works = [Work(sequence, num_tokens, tree_of.get(id(sequence))) for sequence, num_tokens in chosen]
        batch = Batch(works)
        self._threads.begin()
        begin = time.perf_counter()
        logits, features = self.target.forward_tapped(batch.token_ids, batch.rows, batch.wanted, self._planner.taps)
        self._threads.end(len(batch.token_ids), forward_s := time.perf_counter() - begin)
        self._planner.note_cost(len(batch.token_ids), batch.longest_context, forward_s)
        for i, (sequence, num_tokens, tree) in enumerate(works):
            if tree is None:
                batch.keep(i, [])
                self._planner.follow(sequence, (), batch.features_of(i, features, []))
                continue
            own_logits = batch.logits_of(i, logits)
            path, tokens = sequence.verify(tree, own_logits)
            num_kept = sequence.commit(tokens, own_logits, [0, *path])
            batch.keep(i, path[:num_kept])
            sequence.count_step(tree, path[:num_kept], self._planner.draft_s)
            kept = batch.features_of(i, features, path[:num_kept])
            self._planner.observe(sequence, tree, path, sequence.tokens[-num_kept:], kept)
            self._report(sequence, num_tokens > 1)

    def _report(self, sequence: Sequence, filled: bool) -> None:
        """What a step means to the outside: a prompt to remember, the message, the end."""
        if filled:
            self._scheduler.remember_prompt(sequence)
        if sequence.finish_reason is not None:
            self._end(sequence, sequence.finish_reason)
        elif not sequence.emit():
            self.cancel(sequence.request.id)

    def _enqueue(self, admitted: dict[str, list[Sequence]]) -> None:
        for request_id, sequences in admitted.items():
            self._sequences[request_id] = list(sequences)
            for sequence in sequences:
                self._planner.start(sequence)
                self._scheduler.waiting.append(sequence)

    def _cancel(self, request_id: str) -> None:
        for sequence in list(self._sequences.get(request_id, ())):
            self._end(sequence, FinishReason.CANCELLED)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        sequence.finish_reason = reason
        remaining = self._sequences[sequence.request.id]
        remaining.remove(sequence)
        each_tried((self._scheduler.retire, self._planner.finish), sequence)  # the end is told, whatever they meet
        if not remaining:
            del self._sequences[sequence.request.id]
            with self._lock:
                self._ids.discard(sequence.request.id)
        sequence.emit(error)
