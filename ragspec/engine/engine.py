"""The engine: draft, one forward, verify, commit.

One thread owns the target, the KV pool and every sequence. Other threads talk to it through a queue of calls; listeners get
one `Delta` a step and choice. Speculation off is the same step with trees of the root alone.

    >>> engine = load_engine(TargetConfig(), EngineConfig(), DraftingConfig())
    >>> engine.generate([Request("a", prompt_ids, SamplingParams(max_tokens=20))])[0].text
"""

import atexit
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor
from functools import partial

from ragspec.config import EngineConfig
from ragspec.core import FinishReason, Request, SamplingParams
from ragspec.drafting.drafter import Features
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.client import CommandQueue, EngineClient, logged_errors
from ragspec.engine.scheduler import Scheduler
from ragspec.engine.sequence import Listener, SampledTrees, Sequence, sample_ahead
from ragspec.engine.target import Target
from ragspec.errors import EngineClosed, InputError, RankLost
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.batch import Batch
from ragspec.numerics.ranks import HEARTBEAT_S
from ragspec.numerics.threads import AdaptiveThreads
from ragspec.tree import UNDECIDED, DraftTree, StepResult

log = logging.getLogger(__name__)


class Engine(EngineClient):
    """Continuous batching of draft trees over one target. Any thread may call; the engine's thread runs steps and listeners."""

    def __init__(
        self,
        target: Target,
        planner: Planner,
        admission: Admission,
        config: EngineConfig,
        threads: AdaptiveThreads | None = None,
        step_thread: Executor | None = None,
    ) -> None:
        """`step_thread`: its only thread runs the steps of several engines in turn; None: steps run in the engine's thread."""
        self._step_thread = step_thread
        self._threads = threads or AdaptiveThreads(config.num_threads)
        self.fingerprint, self.max_context_tokens = admission.fingerprint, admission.max_context_tokens
        self.lost = self._closed = ""  # why it is dead, set before any sequence ends with it; why requests are refused
        self.target, self._planner, self._admission = target, planner, admission
        self._scheduler = Scheduler(target.pool, config, int(bool(planner.taps)), planner.costs.cost_s, target.ranks)
        self._taps, self._costs, self.load = planner.taps, planner.costs, self._scheduler.load
        self._commands = CommandQueue(target.heartbeat, HEARTBEAT_S if target.ranks.size > 1 else None)
        self._sequences, self._in_step, self._size = dict[str, list[Sequence]](), list[Sequence](), (1, 1)
        self._undelivered = list[Sequence]()  # of the last step
        self._lock, self._ids = threading.Lock(), set[str]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self.close)

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
        """Run `call` in the engine's thread between two steps, and wait for its end. Never call this from a listener, which runs
        in that thread too. Raises: EngineClosed, and any error of `call`."""
        with self._lock:
            if self._closed:
                raise EngineClosed(self._closed)
            done = self._commands.submit(call)
        done.result()

    def purge(self, salt: str) -> None:
        """Forget all cached prefixes and earlier answers of one tenant."""
        self._commands.put(lambda: self._scheduler.purge(salt))
        self._commands.put(lambda: self._planner.purge(salt))

    def pin(self, prompt_ids: SequenceOf[int]) -> None:
        """Read the beginning that prompts of all tenants share, and keep it cached. Waits for it. Raises: as `generate`."""
        salt, params = f"pinned {uuid.uuid4().hex}", SamplingParams(max_tokens=1, seed=0)
        self.generate([Request(salt, tuple(prompt_ids), params, salt=salt)])
        self.between_steps(lambda: self._scheduler.pin(salt, list(prompt_ids)))
        self.purge(salt)

    def idle(self) -> bool:
        """Whether no request is queued, waiting or running. Callable from any thread."""
        with self._lock:
            return not self._ids

    def check_integrity(self) -> None:
        """Check, between two steps, that every KV slot in use belongs to a running sequence or to a cached prefix.

        For tests and health checks. Raises: EngineError that names the first difference, EngineClosed.
        """
        self.between_steps(self._scheduler.check_integrity)

    @property
    def num_drafter_failures(self) -> int:
        """Exceptions and malformed drafts of drafters since the start."""
        return self._planner.num_failures

    def close(self) -> None:
        with self._lock:
            self._closed = self._closed or "the engine is closed"
            self._commands.end()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while self._commands.run(lambda: self._scheduler.idle):
                if self._step_thread is None:
                    self._step_or_fail()
                else:
                    self._step_thread.submit(self._step_or_fail).result()
        except RankLost as cause:
            log.error("the engine is dead: %s", cause)
            with self._lock:
                self.lost, self._closed = str(cause), f"the engine is closed: {cause}"
                self._commands.end()
            self._commands.run(lambda: False)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(sequence, FinishReason.ERROR if self.lost else FinishReason.CANCELLED, self.lost)
        self._planner.close()
        self.target.close()

    def _step_or_fail(self) -> None:
        try:
            self.step()
        except RankLost:
            raise
        except Exception as cause:
            log.exception("a step failed; its sequences end with an error")
            self.target.check_health(*self._size)
            failed = self._in_step or [*self._scheduler.running, *self._scheduler.waiting]
            for sequence in [s for s in failed if s in self._sequences.get(s.request.id, ())]:  # not ended yet
                self._end(sequence, FinishReason.ERROR, f"{type(cause).__name__}: {cause}")

    def step(self) -> None:
        """One decode step for every scheduled sequence."""
        self._in_step = []
        if not (scheduled := self._scheduler.schedule()):
            self._deliver()
            return
        self._in_step = [sequence for sequence, _ in scheduled]
        trees, draft_s = self._draft(scheduled)
        batch = Batch([s.schedule(num_tokens, tree) for (s, num_tokens), tree in zip(scheduled, trees, strict=True)])
        shown = [
            (sequence, part.first_row + part.num_known - 1)
            for sequence, part, tree in zip(self._in_step, batch.sequences, trees, strict=True)
            if tree is not None and sequence.shows_attention
        ]
        layers = {layer for sequence, _ in shown for layer, _ in sequence.request.attention_heads}
        (logits, features, sampled, node_s), results = self._forward(batch, trees, layers), list[StepResult]()
        for sequence, tree, part, tokens in zip(self._in_step, trees, batch.sequences, sampled, strict=True):
            result = UNDECIDED
            if tree is not None:
                rows = partial(part.logits, logits)
                result = sequence.commit(tree, sequence.verify(tree, rows, tokens), rows, draft_s, node_s)
            results.append(result)
        batch.keep(*(result.path for result in results))
        for sequence, row in shown:
            assert sequence.slots is not None
            heads, slots = sequence.request.attention_heads, sequence.slots.slots[: sequence.num_prompt]
            sequence.attention = self.target.attention_of(
                heads, {layer: features[layer][row] for layer in layers}, slots
            )
        for_drafters = {tap: features[tap] for tap in self._taps}
        kept = batch.features(for_drafters, [result.path for result in results])
        self._planner.observe(self._in_step, results, kept)
        for sequence, part, result in zip(self._in_step, batch.sequences, results, strict=True):
            if result.tree is None:
                continue
            if part.num_known > 1:
                self._scheduler.remember_prompt(sequence)
            if sequence.finish_reason is not None:
                self._end(sequence, sequence.finish_reason)
            else:
                self._undelivered.append(sequence)
        if not self.target.backend.runs_ahead or any(not each.stats.num_steps for each in self._undelivered):
            self._deliver()  # a first token does not wait

    def _deliver(self) -> None:
        """Hand the last step's tokens to the listeners: on a device that runs ahead, while it computes the next step."""
        sequences, self._undelivered = self._undelivered, []
        for sequence in sequences:
            if sequence.finish_reason is None and not sequence.emit():
                self.cancel(sequence.request.id)

    def _draft(self, scheduled: list[tuple[Sequence, int]]) -> tuple[list[DraftTree | None], float]:
        """A tree for each sequence, None for a chunk of a prompt that goes on; seconds that a tree took."""
        deciding = [sequence for sequence, num_tokens in scheduled if num_tokens == sequence.num_pending]
        num_other_rows = sum(num_tokens for _, num_tokens in scheduled) - len(deciding)
        begin = time.perf_counter()
        trees = iter(self._planner.plan(deciding, num_other_rows, partial(self._scheduler.spare_rows, scheduled)))
        draft_s = (time.perf_counter() - begin) / max(1, len(deciding))
        return [next(trees) if num_tokens == s.num_pending else None for s, num_tokens in scheduled], draft_s

    def _forward(
        self, batch: Batch, trees: list[DraftTree | None], layers: Collection[int]
    ) -> tuple[LogitRows, Features, SampledTrees, float]:
        """Logits, hidden states that drafters tap or that enter `layers`, tokens sampled on a device, seconds of a drafted node;
        time teaches threads and costs."""
        self._size = num_rows, _ = len(batch.token_ids), len(batch.logit_rows)
        begin, num_nodes = time.perf_counter(), sum(tree.num_drafted for tree in trees if tree is not None)
        taps = list(dict.fromkeys([*self._taps, *layers]))
        self._threads.begin(num_rows)
        logits, features = self.target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows, taps)
        self._deliver()
        sampled = sample_ahead(logits, self._in_step, trees)
        self.target.backend.wait()
        seconds = time.perf_counter() - begin
        self._threads.end(num_rows, seconds)
        self._costs.refine(num_rows, batch.longest_context, seconds)
        return logits, features, sampled, self._costs.node_s(num_rows, num_nodes, batch.longest_context, seconds)

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
        finished = sequence.finish_reason  # where its step failed after its last token
        sequence.finish_reason, error = (finished, "") if finished else (reason, error)
        remaining = self._sequences[sequence.request.id]
        remaining.remove(sequence)
        for retire in (self._scheduler.retire, self._planner.finish):
            with logged_errors("cleaning up after a sequence failed"):
                retire(sequence)
        if not remaining:
            del self._sequences[sequence.request.id]
            with self._lock:
                self._ids.discard(sequence.request.id)
        sequence.emit(error)
