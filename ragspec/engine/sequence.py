"""One choice of one request while the engine works on it: its tokens, its KV slots, its text.

waiting -> running -> finished
   ^----------'  preempted: slots given back, tokens kept; the same key gives the same tokens again
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np

from ragspec.core import Attention, Delta, FinishReason, GenerationStats, Request, TokenLogprob
from ragspec.engine.text import IncrementalDetokenizer
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.batch import ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.tenants import tenant_of
from ragspec.tree import DraftTree, Origin, StepResult
from ragspec.verification.rejection import RejectionSampler
from ragspec.verification.sampling import KeyedSampler, Sampler, log_probs
from ragspec.verification.verify import VerifyResult, verify

log = logging.getLogger(__name__)

Listener = Callable[[Delta], None]
SampledTrees = list[list[int]]
"""The token after each node of each tree; empty where the host samples."""
_COUNTED_DEPTHS = 64
"""Levels of a tree that `positions` counts: services show one metric for each."""


class OutputLimits(NamedTuple):
    """Where an output must end: at any of `eos_ids`, or after `max_tokens` tokens (the request's limit or the context's).

    `pauses`: only a segment ends at `max_tokens`; its text goes on in the next segment.
    """

    eos_ids: tuple[int, ...]
    max_tokens: int
    pauses: bool = False


class Sequence:
    """The state of one choice. `tokens` is prompt + output; positions [0, slots.length) have keys and values."""

    def __init__(
        self,
        request: Request,
        choice: int,
        sampler: Sampler,
        text: IncrementalDetokenizer,
        limits: OutputLimits,
        listener: Listener,
        prepared: Mapping[str, Any],
    ) -> None:
        self.request = request
        self.prepared = prepared
        self.choice = choice
        self.key, self.tenant = (request.id, choice), tenant_of(request.salt)
        self.sampler = sampler
        self.limits = limits
        self.tokens = [*request.prompt_ids, *request.segment.output_ids]
        self.num_prompt = len(request.prompt_ids)
        self.slots: SequenceSlots | None = None
        self.num_restorable = 0  # its first positions that are in the pool or offloaded
        self.last_step = 0  # the last step of the scheduler that it took part in
        self.stats = GenerationStats(num_prompt_tokens=self.num_prompt)
        self.finish_reason: FinishReason | None = None
        self.remembered = True  # whether caches may keep the text; False once the tenant is purged
        self.attention: Attention = ()
        self._text = text
        self._listener = listener
        self._logprobs: list[TokenLogprob] = []
        self._num_given = len(request.segment.output_ids)
        self._num_sent = 0
        self._num_text = self._num_read = self._num_given  # output tokens of the text; those in it already
        self._uncounted: list[tuple[DraftTree, list[int], float, float]] = []  # steps since the last delta
        self._positions: dict[str, list[list[int]]] = {}  # by drafter and depth: [proposed, accepted]
        self._kinds = [source.kind.name.lower() for source in request.sources]
        self._submitted_s = time.perf_counter()
        self._admitted_s = 0.0
        self._first_token_s = 0.0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_written(self) -> int:
        """Output tokens of this segment."""
        return self.num_output - self._num_given

    @property
    def num_pending(self) -> int:
        """Tokens without keys and values; 1 while decoding."""
        return len(self.tokens) - (self.slots.length if self.slots else 0)

    @property
    def shows_attention(self) -> bool:
        """Whether the step that decides its next token reads the attention of its prompt's last token."""
        return bool(self.request.attention_heads) and not self.num_output

    @property
    def most_tokens(self) -> int:
        """Output tokens that may still be decided."""
        return self.limits.max_tokens - self.num_output

    def admit(self, slots: SequenceSlots) -> None:
        self.slots = slots
        self._admitted_s = self._admitted_s or time.perf_counter()

    def verify(self, tree: DraftTree, logits: Callable[[], LogitRows], sampled: SequenceOf[int] = ()) -> VerifyResult:
        """Decide tokens by the request's acceptance rule.

        Shapes: logits float32 [N, V], row n for node n; `sampled` [N]: the token after each node, empty if the sampler is to read
        the logits.
        """
        sampler = self.sampler
        if sampled and isinstance(sampler, KeyedSampler):
            verdict = verify(tree, sampled.__getitem__, self.most_tokens)
            sampler.take(verdict.tokens)
            return verdict
        rows = logits()
        if isinstance(sampler, RejectionSampler):
            return sampler.verify(tree, tree.draws, rows, self.most_tokens)
        return verify(tree, lambda node: sampler(np.asarray(rows[node : node + 1])[0]), self.most_tokens)

    def schedule(self, num_tokens: int, tree: DraftTree | None) -> ScheduledSequence:
        """Its next `num_tokens` pending tokens and a draft tree as rows of a batch. Raises: OutOfSlots."""
        assert self.slots is not None
        start = self.slots.length
        token_ids = self.tokens[start : start + num_tokens]
        if tree is None:
            return ScheduledSequence(self.slots, token_ids, wants_logits=False)
        return ScheduledSequence(self.slots, token_ids + tree.token_ids[1:], tree.parents)

    def commit(
        self, tree: DraftTree, verdict: VerifyResult, logits: Callable[[], LogitRows], draft_s: float, node_s: float
    ) -> StepResult:
        """Append decided tokens until one of them ends the output, and count the step.

        Shapes: logits float32 [N, V], row n for node n. `draft_s`: seconds that drafting took; `node_s`: that a node took in the
        forward.
        """
        params, reason = self.request.params, None
        self._first_token_s = self._first_token_s or time.perf_counter()
        num_kept = 0
        for token in verdict.tokens:
            self.tokens.append(token)
            num_kept += 1
            if token in self.limits.eos_ids and not params.ignore_eos:
                reason = FinishReason.STOP
            elif self._has_stopped():
                reason = FinishReason.STOP
            elif self.num_output >= self.limits.max_tokens:
                reason = FinishReason.LENGTH
            if reason:
                break
        result = StepResult(tree, verdict.path, verdict.tokens[:num_kept])
        if params.logprobs is not None:
            self._logprobs += log_probs(
                logits(), [0, *verdict.path][:num_kept], verdict.tokens[:num_kept], params.logprobs
            )
        self.finish_reason = reason
        self._uncounted.append((tree, result.path, draft_s, node_s))
        return result

    def _has_stopped(self) -> bool:
        """Count the last token as text. Whether it completes a stop string; without stop strings `emit` decodes it later."""
        self._num_text += 1
        return bool(self.request.params.stop) and self._read_text()

    def _read_text(self) -> bool:
        """Decode tokens of the text. Whether one completes a stop string."""
        first, has_stopped = self.num_prompt + self._num_read, False
        for token in self.tokens[first : self.num_prompt + self._num_text]:
            self._num_read += 1
            has_stopped = self._text.push(token, may_stop=self._num_read > self.request.params.min_tokens)
        return has_stopped

    def _count(self, tree: DraftTree, path: list[int], draft_s: float, node_s: float) -> None:
        stats = self.stats
        if not stats.num_steps:
            stats.num_first_tokens = self.num_written
            stats.prompt_draft_s += draft_s + tree.num_drafted * node_s
        stats.num_steps += 1
        stats.draft_s += draft_s
        if not tree.num_drafted:
            return
        stats.num_drafted += tree.num_drafted
        stats.num_accepted += len(path)
        stats.expected_accepted += sum(tree.path_probs[1:])
        origins = tree.origins
        accepted = [origins[node] for node in path]
        for origin in accepted:
            stats.accepted_by_drafter[origin.drafter] = stats.accepted_by_drafter.get(origin.drafter, 0) + 1
        self._count_sources(origins[1:], stats.drafted_by_source)
        self._count_sources(accepted, stats.accepted_by_source)
        depths = {node: depth for depth, node in enumerate([0, *path[: _COUNTED_DEPTHS - 1]])}
        children = zip(tree.parents[1:], origins[1:], strict=True)
        for depth, name in {(depths[parent], origin.drafter) for parent, origin in children if parent in depths}:
            counts = self._positions.setdefault(name, [])
            counts += [[0, 0] for _ in range(depth + 1 - len(counts))]
            counts[depth][0] += 1
            counts[depth][1] += depth < len(path) and name == accepted[depth].drafter

    def _count_sources(self, origins: Iterable[Origin], counts: dict[str, int]) -> None:
        for origin in origins:
            if 0 <= origin.source < len(self._kinds):
                name = self._kinds[origin.source]
                counts[name] = counts.get(name, 0) + 1

    def emit(self, error: str = "") -> bool:
        """Send the new tokens and text to the listener; the last delta carries the statistics. False: the listener failed."""
        done = self.finish_reason is not None
        for step in self._uncounted:
            self._count(*step)
        self._uncounted = []
        try:
            text = self._certain_text()
        except Exception as cause:
            log.exception("the text of request %r cannot be decoded", self.request.id)
            if not done:
                return False
            text, error, self.finish_reason = "", f"{type(cause).__name__}: {cause}", FinishReason.ERROR
        if done:
            self._finish_stats()
        ids = tuple(self.tokens[self.num_prompt + self._num_given + self._num_sent :])
        logprobs = tuple(self._logprobs[self._num_sent :])
        self._num_sent += len(ids)
        if ids or text or done:
            stats = self.stats if done else None
            try:
                shown = self.attention if done else ()
                self._listener(Delta(*self.key, ids, text, logprobs, self.finish_reason, stats, error, shown))
            except Exception:
                log.exception("the listener of request %r failed", self.request.id)
                return False
        return True

    def _certain_text(self) -> str:
        """Text that is certain and not sent yet; at the end of the output all the rest."""
        self._read_text()
        pauses = self.limits.pauses and self.finish_reason is FinishReason.LENGTH
        if self.finish_reason is not None and not pauses:
            self._text.finish()
        return self._text.take()

    def _finish_stats(self) -> None:
        now = time.perf_counter()
        admitted, first = self._admitted_s or now, self._first_token_s or now
        self.stats.num_output_tokens = self.num_written
        self.stats.positions = {
            name: tuple((proposed, accepted) for proposed, accepted in counts)
            for name, counts in self._positions.items()
        }
        self.stats.queue_s = admitted - self._submitted_s
        self.stats.prefill_s = first - admitted
        self.stats.decode_s = now - first


def sample_ahead(
    logits: LogitRows, sequences: SequenceOf[Sequence], trees: SequenceOf[DraftTree | None]
) -> SampledTrees:
    """The token after each node of each tree, all sampled on the device; empty for a sampler that reads logits on the host."""
    if isinstance(logits, np.ndarray):
        return [[]] * len(trees)
    drawn = [
        sequence.sampler.draws(tree) if tree is not None and isinstance(sequence.sampler, KeyedSampler) else []
        for sequence, tree in zip(sequences, trees, strict=True)
    ]
    sizes = [0 if tree is None else len(tree) for tree in trees]
    rows = [draw for draws, size in zip(drawn, sizes, strict=True) for draw in (draws or repeat(None, size))]
    tokens = logits.sample(rows)
    ends = list(accumulate(sizes))
    return [tokens[end - size : end] if draws else [] for draws, size, end in zip(drawn, sizes, ends, strict=True)]
