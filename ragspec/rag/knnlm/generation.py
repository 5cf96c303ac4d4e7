"""KNN-LM generation with speculated retrieval: a cache guesses the neighbours of each token, one search verifies many tokens.

A round: the target advances `stride` steps, each token guessed with neighbours from the request's cache. One search finds the
true neighbours of all these states. Tokens are kept up to the first that the true neighbours decide differently; it replaces the
guess, and the KV cache is rolled back to it. Every emitted token was decided by true neighbours, so the output equals that of
one search per token.

    >>> generator = KnnGenerator(target, Datastore.open("datastore"))
    >>> completion, stats = generator.generate(Request("a", prompt_ids, SamplingParams(max_tokens=64)))
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from ragspec.core import Completion, Delta, Request
from ragspec.engine.admission import Admission
from ragspec.engine.client import completion_of
from ragspec.engine.sequence import Sequence
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.threads import AdaptiveThreads, run_in_thread
from ragspec.rag.knnlm.build import target_identity
from ragspec.rag.knnlm.target_reader import TargetOutput, TargetReader
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.knnlm.datastore import check_target
from ragspec.retrieval.knnlm.neighbours import (
    DatastoreLike,
    KnnConfig,
    NeighbourCache,
    Neighbours,
    PrefetchRequest,
    mixed_logits,
)
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.tree import DraftTree, Origin
from ragspec.verification.sampling import KeyedSampler, compile_samplers
from ragspec.verification.verify import VerifyResult

_LONGEST_PAUSE = 64
_ALONE_EVERY = 48
_GUESSED = Origin("neighbours")


@dataclass(slots=True)
class KnnStats:
    """Counters of one generation. Seconds, wall clock.

    `num_queries`: states searched in `num_verifications` calls. Guesses after a wrong one count as neither right nor wrong.
    `total_s`: prompt, steps and verifications.
    """

    num_verifications: int = 0
    num_queries: int = 0
    num_right: int = 0
    num_wrong: int = 0
    prefill_s: float = 0.0
    step_s: float = 0.0
    verification_s: float = 0.0
    total_s: float = 0.0

    @property
    def gamma(self) -> float:
        """The share of right guesses among the verified ones."""
        judged = self.num_right + self.num_wrong
        return self.num_right / judged if judged else 0.0


class KnnGenerator:
    """Runs one request at a time and needs the target for itself. Measured times and hit rates carry over to later requests."""

    def __init__(
        self,
        target: Target,
        store: DatastoreLike,
        config: KnnConfig | None = None,
        *,
        fingerprint: str = "",
        scheduler: StrideScheduler | None = None,
        threads: AdaptiveThreads | None = None,
    ) -> None:
        """`fingerprint`: the numerics id in completions. Raises: EncoderMismatch if the datastore belongs to another target."""
        check_target(store.target, target_identity(target))
        self.config = config or KnnConfig()
        self.scheduler = scheduler or StrideScheduler(self.config.stride, asynchronous=False)
        self._target, self._store = target, store
        self._admission = Admission(target, fingerprint)
        self._threads = threads or AdaptiveThreads(None)
        self._rhythm, self._lock = _LearningSchedule(), threading.Lock()
        compile_samplers()

    def generate(self, request: Request, speculation: bool = True) -> tuple[Completion, KnnStats]:
        """Run a request to its end. Without `speculation` every token waits for its own search.

        Raises: InputError, PromptTooLong, and what the datastore raises.
        """
        if request.params.n != 1:
            raise InputError("KNN-LM generates one choice a request: n must be 1")
        if request.params.json_schema:
            raise InputError("KNN-LM follows no JSON schema")
        deltas: list[Delta] = []
        (sequence,) = self._admission.sequences(request, deltas.append, lambda _: {})
        with self._lock:
            stats = run_in_thread(lambda: self._run(sequence, speculation and bool(request.speculation)), 1)
        return completion_of(deltas), stats

    def _run(self, sequence: Sequence, speculation: bool) -> KnnStats:
        slots = SequenceSlots(self._target.pool)
        sequence.admit(slots)
        begin = time.perf_counter()
        try:
            reader = TargetReader(self._target, slots, self._threads)
            # Why a new one: the shared scheduler learns only from rounds that it planned
            scheduler = self.scheduler if speculation else StrideScheduler()
            cache = NeighbourCache(self._store.target.dimension, self.config.max_cached_entries)
            generation = _KnnSequence(sequence, reader, self._store, self.config, scheduler, cache)
            while sequence.finish_reason is None:
                stride, learning = self._rhythm.next(self.scheduler.choose().stride) if speculation else (1, False)
                generation.round(stride, learning)
        finally:
            slots.release()
        generation.stats.total_s = time.perf_counter() - begin
        return generation.stats


@dataclass(slots=True, eq=False)
class _KnnSequence:
    """Generates one request round by round. Owns its neighbour cache and counters."""

    sequence: Sequence
    reader: TargetReader
    store: DatastoreLike
    config: KnnConfig
    scheduler: StrideScheduler
    cache: NeighbourCache
    stats: KnnStats = field(default_factory=KnnStats)

    def round(self, stride: int, learning: bool) -> None:
        """Up to `stride` tokens with one search. Without `learning` the cache is not filled and no guess is counted."""
        guessed = stride - 1 or int(learning)
        positions, guesses = self._speculate(min(stride, self.sequence.most_tokens), guessed)
        begin = time.perf_counter()
        found = self._search(positions, learning)
        tokens, logits = self._verify(positions, guesses, found)
        num_right = sum(guess == token for guess, token in zip(guesses, tokens, strict=False))
        tree = DraftTree(self.sequence.tokens[-1])
        for i, guess in enumerate(guesses if stride > 1 else ()):
            tree.add(i, guess, 1.0, _GUESSED)
        accepted = list(range(1, 1 + min(tree.num_drafted, num_right)))
        self.sequence.commit(tree, VerifyResult(accepted, tokens), logits)
        self.reader.roll_back(len(self.sequence.tokens) - 1)
        self.sequence.emit()
        self._count(len(positions), num_right, len(guesses), time.perf_counter() - begin, learning)

    def _speculate(self, stride: int, num_guesses: int) -> tuple[list[TargetOutput], list[int]]:
        """The target's outputs for up to `stride` tokens, and the guessed tokens after them."""
        guesses: list[int] = []
        positions: list[TargetOutput] = []
        while len(positions) < stride and not (guesses and self._ends(guesses[-1])):
            pending = guesses[-1:] or self.sequence.tokens[self.reader.length :]
            is_prompt = not positions and self.sequence.num_pending > 1
            begin = time.perf_counter()
            positions.append(self.reader.read(pending))
            if len(guesses) < num_guesses:
                guesses.append(self._guess(positions[-1], guesses))
            seconds = time.perf_counter() - begin
            if is_prompt:
                self.stats.prefill_s += seconds
            else:
                self.stats.step_s += seconds
                self.scheduler.note_step(seconds)
        return positions, guesses

    def _guess(self, position: TargetOutput, guesses: list[int]) -> int:
        values, distances = self.cache.nearest(position.query, self.config.num_neighbours)
        return self._sample(mixed_logits(position.target_probs, values, distances, self.config), guesses)

    def _search(self, positions: list[TargetOutput], learning: bool) -> Neighbours:
        config, wanted = self.config, None
        if learning:
            wanted = PrefetchRequest(config.num_following, config.num_followed, self.cache.known)
        found = self.store.search(np.stack([p.query for p in positions]), config.num_neighbours, wanted)
        if found.entries is not None:
            self.cache.insert(found.entries)
        return found

    def _verify(
        self, positions: list[TargetOutput], guesses: list[int], found: Neighbours
    ) -> tuple[list[int], FloatArray]:
        """The tokens by the true neighbours, up to the first wrong guess. Shapes: logits [tokens, V]."""
        tokens: list[int] = []
        rows: list[FloatArray] = []
        for i, position in enumerate(positions):
            rows.append(mixed_logits(position.target_probs, found.values[i], found.distances[i], self.config))
            tokens.append(self._sample(rows[-1], tokens))
            if i < len(guesses) and guesses[i] != tokens[-1]:
                break
        return tokens, np.stack(rows)

    def _sample(self, logits: FloatArray, tokens: list[int]) -> int:
        """Sample the token after the committed output and `tokens`; the noise depends only on the position."""
        sequence = self.sequence
        request, seed = sequence.request, sequence.stats.seed
        output_ids = [*sequence.tokens[sequence.num_prompt :], *tokens]
        return KeyedSampler(request, seed, sequence.choice, sequence.limits.eos_ids, output_ids)(logits)

    def _ends(self, token: int) -> bool:
        return token in self.sequence.limits.eos_ids and not self.sequence.request.params.ignore_eos

    def _count(self, num_queries: int, num_right: int, num_guesses: int, seconds: float, learning: bool) -> None:
        num_wrong, stats = int(num_right < num_guesses), self.stats
        stats.num_verifications += 1
        stats.num_queries += num_queries
        stats.num_right += num_right
        stats.num_wrong += num_wrong
        stats.verification_s += seconds
        self.scheduler.note_verification(num_queries, seconds)
        if learning:
            self.scheduler.note_guesses(num_right, num_wrong)


class _LearningSchedule:
    """Which rounds measure costs and hit rates, so that the scheduler can revise its plan.

    Without speculation two rounds in a row learn (the first fills the cache), then none during ever longer pauses. With
    speculation every `_ALONE_EVERY`th round searches for one state, to keep the cost without speculation up to date.
    """

    def __init__(self) -> None:
        self._pause, self._round = 1, 0

    def next(self, stride: int) -> tuple[int, bool]:
        """The next round's stride, given the planned one, and whether the round learns."""
        self._round += 1
        if stride > 1:
            self._pause = 1
            return (1 if self._round % _ALONE_EVERY == 0 else stride), True
        if self._round <= 2:
            return 1, True
        if self._round >= 2 + self._pause:
            self._pause, self._round = min(2 * self._pause, _LONGEST_PAUSE), 0
        return 1, False
