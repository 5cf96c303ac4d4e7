"""An EAGLE head that learns while it serves (online distillation), for each tenant apart.

    a request runs: states are recorded -> it ends: its text waits -> the engine is idle: a thread learns -> other weights draft
    learning: both heads are scored on a new text, the loaded and the learned -> then the learned one is trained on the text

A token that the target sampled is a sample of its distribution, so in expectation the cross-entropy with the token is that with
the distribution, and the target is not run again. Weights draft only after they were better than the loaded ones on texts that
they had not learned; once they are worse, the loaded ones draft, and where they are much worse learning starts anew.

A draft is grown with one set of weights from beginning to end. Tenants with heads of their own take a forward each. Nothing is
written: a restart begins with the head as it is on disk. If learning fails, the loaded head drafts for everybody.

    >>> drafter = OnlineEagleDrafter(network, shape, costs, head=trainable_head(checkpoint, "cpu"), online=config.online)

Source: online speculative decoding (Liu et al. 2023, arXiv 2310.07177); here a head learns only where drafts were wrong.
"""

import copy
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ragspec.config import OnlineConfig
from ragspec.core import salt_belongs_to
from ragspec.drafting.acceptance import ChildAcceptance
from ragspec.drafting.drafter import Budget, SequenceView
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint
from ragspec.drafting.eagle.network import EagleHead, EagleNetwork, check_trainable
from ragspec.drafting.heads import learning
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.threads import set_num_threads
from ragspec.tenants import TenantStates
from ragspec.tree import Proposal

MAX_TEXT_TOKENS = 128
"""The last positions of a request that are kept."""
_LEAST_LEARNT = 8
"""Output tokens of a text that is worth learning."""
_MAX_WAITING = 32
"""Texts that wait to be learned; further texts push out the oldest."""
_MAX_KEPT = 32
"""Learned texts that are kept, to be learned again beside a new text."""
_STEPS = learning.Objective(num_steps=3)
_TOKENS = learning.LossWeights(token=1.0)
_CLIP = 0.5
_EARLIER_TEXTS = 2
_LEAST_SCORED, _MEMORY, _PUBLISH_EVERY = 8, 0.8, 4
_BETTER, _MUCH_WORSE = 1.02, 0.9
_DONE = object()
_COPIES = 5
"""Learned weights, gradient, the optimiser's two moments, and the weights that draft."""
log = logging.getLogger(__name__)
_LEARNING_RATE = 1e-4
_MAX_BYTES = 2**29
"""Of all learned heads with their texts."""


class RecordedText(NamedTuple):
    """`weights`: 1 for the output's tokens. Shape: features bfloat16 [T - 1, F], of all tokens but the last."""

    ids: list[int]
    weights: list[float]
    features: Tensor


class Recording:
    """The target's states at the last positions of a sequence that runs, under its request's salt."""

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self._pieces: list[Tensor] = []
        self._start = self._end = 0  # positions [start, end)

    def append(self, start: int, states: Tensor) -> None:
        """Add states of the positions from `start`. Shape: float32 [T, F]."""
        if start != self._end:  # computed anew, or behind a shared prefix
            self._pieces, self._start = [], start
        self._end = start + len(states)
        self._pieces.append(states.to(torch.bfloat16))
        while self._end - self._start - len(self._pieces[0]) >= MAX_TEXT_TOKENS:
            self._start += len(self._pieces.pop(0))

    def text(self, sequence: SequenceView) -> RecordedText | None:
        """The end of a sequence's text; None if its output is too short."""
        end = min(self._end, len(sequence.tokens) - 1)
        start = max(self._start, end - MAX_TEXT_TOKENS)
        first = max(2, sequence.num_prompt - start)
        num_learnt = end + 1 - start - first
        if num_learnt < _LEAST_LEARNT:
            return None
        states = torch.cat(self._pieces)[start - self._start : end - self._start].clone()
        return RecordedText(sequence.tokens[start : end + 1], [0.0] * first + [1.0] * num_learnt, states)


class Score:
    """The share of tokens that a head drafts; older texts fade."""

    def __init__(self) -> None:
        self.hits = self.rows = 0.0

    def add(self, steps: SequenceOf[learning.StepScores]) -> None:
        self.hits = _MEMORY * self.hits + sum(step.top1 for step in steps)
        self.rows = _MEMORY * self.rows + sum(step.num_rows for step in steps)

    @property
    def rate(self) -> float:
        return self.hits / max(1.0, self.rows)


class HeadLearner:
    """One tenant's head. `network`: what drafts for the tenant now; None: the head as it was loaded.

    Weights are copied when the first text is learned. `acceptance`: of the tenant's drafts, which learning changes.
    """

    def __init__(self, base: EagleHead, loaded: EagleNetwork, learning_rate: float) -> None:
        self._base, self._loaded, self._learning_rate = base, loaded, learning_rate
        self._waiting, self._kept = deque[RecordedText](maxlen=_MAX_WAITING), deque[RecordedText](maxlen=_MAX_KEPT)
        self._random = random.Random(0)
        self.acceptance = ChildAcceptance()
        self.network: EagleNetwork | None = None
        self.num_learned = self.num_restarts = 0
        self._head: EagleHead | None = None
        self._work: Iterator[None] | None = None  # the passes over one text

    @staticmethod
    def num_bytes(base: EagleHead) -> int:
        """The most that a learner takes."""
        weights = sum(parameter.numel() * parameter.element_size() for parameter in _trained(base))
        num_tokens = (_MAX_WAITING + _MAX_KEPT) * MAX_TEXT_TOKENS
        return _COPIES * weights + num_tokens * 2 * base.fc.in_features

    @property
    def waits(self) -> bool:
        """Whether texts wait to be learned."""
        return bool(self._waiting or self._work)

    def add(self, text: RecordedText) -> None:
        """Keep a text until it is learned; too many push out the oldest."""
        self._waiting.append(text)

    def advance(self) -> None:
        """One pass over one text: a request that comes meanwhile shares the processor with no more."""
        self._work = self._work or self._passes()
        if next(self._work, _DONE) is _DONE:
            self._work = None

    def _passes(self) -> Iterator[None]:
        """Score both heads on the oldest text that waits, choose the one that drafts, and train."""
        text = self._waiting.popleft()
        if self._head is None:
            self._restart()
        with torch.no_grad():
            self._base_score.add(self._scores(self._base, text))
        yield
        with torch.no_grad():
            self._score.add(self._scores(self._own_head, text))
        self._choose()
        for each in [text, *self._random.sample(list(self._kept), min(_EARLIER_TEXTS, len(self._kept)))]:
            yield
            steps = self._scores(self._own_head, each)
            torch.autograd.backward(learning.total_loss(steps, _STEPS, max(1, steps[0].num_rows)))
        nn.utils.clip_grad_norm_(_trained(self._own_head), _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_learned += 1
        self._kept.append(text)

    @property
    def _own_head(self) -> EagleHead:
        assert self._head is not None
        return self._head

    def _restart(self) -> None:
        """Begin with the loaded weights."""
        self._head = copy.deepcopy(self._base, {id(self._base.lm_head): self._base.lm_head})
        self._optimizer = torch.optim.AdamW(_trained(self._head), lr=self._learning_rate, weight_decay=0.0)
        self._score, self._base_score = Score(), Score()
        self.network, self.num_learned = None, 0

    def _choose(self) -> None:
        """By texts that were new to both heads."""
        if self.num_learned < _LEAST_SCORED:
            return
        own, loaded = self._score.rate, self._base_score.rate
        if own < _MUCH_WORSE * loaded:
            self._restart()
            self.num_restarts += 1
        elif own < loaded:
            self.network = None
        elif own > _BETTER * loaded and self.num_learned % _PUBLISH_EVERY == 0:
            named = self._own_head.named_parameters()
            weights = {name: p.detach().clone() for name, p in named if p.requires_grad}
            self.network = self._loaded.relearned(weights)

    def _scores(self, head: EagleHead, text: RecordedText) -> list[learning.StepScores]:
        """Of every draft step."""
        batch, embedding = learning.collate([text]), self._loaded.embedding
        expected = learning.TokenPredictions(batch, head.draft_token_ids(), embedding.device)
        embedded = nn.functional.embedding(batch.ids.to(embedding.device), embedding).float()
        features = nn.functional.pad(text.features.float(), (0, 0, 0, 1))[None]  # [1, T, F]; the last row is not read
        states = head.unroll(embedded, features, expected.pairs, _STEPS)
        return [learning.step_scores(head, _no_projection, expected, i, own, _TOKENS) for i, own in enumerate(states)]


def trainable_head(checkpoint: HeadCheckpoint, device: torch.device | str) -> EagleHead:
    """A loaded head in float32. Raises: ModelError for a head that cannot learn online."""
    config, tensors = checkpoint
    try:
        check_trainable(config)
    except ModelError as cause:
        raise ModelError(f"drafting.eagle.online: {cause}") from cause
    if config.family is not EagleFamily.EAGLE3:
        raise ModelError("drafting.eagle.online: only EAGLE-3 heads learn online, and this one is another")
    head = EagleHead(config, len(tensors.get("fc_norm.weight", [0])))
    head.load_state_dict({name: tensors[name] for name in head.state_dict()})
    head.lm_head.requires_grad_(False)
    return head.to(device)


def _trained(head: EagleHead) -> list[nn.Parameter]:
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


def _no_projection(states: Tensor) -> Tensor:
    raise AssertionError("an EAGLE-3 head has an output layer of its own")


class OnlineEagleDrafter(EagleDrafter):
    """See the module. `head`: the network's weights. Raises: ConfigError if not even one learned head fits."""

    def __init__(
        self,
        network: EagleNetwork,
        *args: Any,
        head: EagleHead,
        online: OnlineConfig,
        learning_rate: float = _LEARNING_RATE,
        max_bytes: int = _MAX_BYTES,
        **options: Any,
    ) -> None:
        super().__init__(network, *args, **options)
        needed = HeadLearner.num_bytes(head)
        if max_bytes < needed:
            raise ConfigError(f"learned heads may take {max_bytes} bytes, and one of this size takes {needed}")
        self._loaded, self._online = network, online
        self.learners = TenantStates(max_bytes // needed, lambda: HeadLearner(head, network, learning_rate))
        self._recordings: dict[tuple[str, int], Recording] = {}
        self._thread: threading.Thread | None = None
        self._is_idle, self._is_closed, self._has_failed = True, False, False
        self._next_busy_s = 0.0 if online.busy_share else math.inf

    def start(self, sequence: SequenceView) -> None:
        super().start(sequence)
        self._recordings[sequence.key] = Recording(sequence.request.salt)

    def _note_states(self, sequence: SequenceView, start: int, states: tuple[Tensor, ...]) -> None:
        if (recording := self._recordings.get(sequence.key)) is not None:
            recording.append(start, torch.cat(states, 1))

    def finish(self, sequence: SequenceView) -> None:
        super().finish(sequence)
        recording = self._recordings.pop(sequence.key, None)
        text = recording.text(sequence) if recording is not None and not self._has_failed else None
        if text is not None:
            self.learners.used(self._owner(sequence)).add(text)
            self._wake()

    def purge(self, salt: str) -> None:
        """Forget what was learned under a salt, and learn nothing from its running sequences."""
        super().purge(salt)
        self.learners.purge("" if self._online.shared else salt)
        others = {k: each for k, each in self._recordings.items() if not salt_belongs_to(each.salt, salt)}
        self._recordings = others

    def note_idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle
        self._wake()

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        parts = [[sequences[i] for i in own] for own in self._by_owner(sequences).values()]
        costs = [cost for part in parts if (cost := super(OnlineEagleDrafter, self).cost_s(part)) < math.inf]
        return sum(costs) if costs else math.inf

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        lists: list[list[Proposal]] = [[] for _ in sequences]
        for owner, own in self._by_owner(sequences).items():
            self._use(self.learners.used(owner))
            part = super().propose([sequences[i] for i in own], budget._replace(depths=[budget.depths[i] for i in own]))
            for i, proposals in zip(own, part, strict=True):
                lists[i] = proposals
        return lists

    def _use(self, learner: HeadLearner) -> None:
        """Draft with a tenant's head and by its record."""
        self.network, self.acceptance = learner.network or self._loaded, learner.acceptance
        self._settings = self._settings._replace(acceptance=learner.acceptance)

    def _owner(self, sequence: SequenceView) -> str:
        """The salt that a sequence's head learns under."""
        return "" if self._online.shared else sequence.request.salt

    def _by_owner(self, sequences: SequenceOf[SequenceView]) -> dict[str, list[int]]:
        """The numbers of each owner's sequences."""
        found: dict[str, list[int]] = {}
        for number, sequence in enumerate(sequences):
            found.setdefault(self._owner(sequence), []).append(number)
        return found

    def _wake(self) -> None:
        """Learn in a thread of its own, which ends when nothing waits or no time is left."""
        if (self._thread is None or not self._thread.is_alive()) and self._next_learner() is not None:
            self._thread = threading.Thread(target=self._learn, name="ragspec-online")
            self._thread.start()

    def _next_learner(self) -> HeadLearner | None:
        """A head with a text to learn, if there is time for it. Why no daemon: a thread inside torch would abort the exit."""
        has_time = self._is_idle or time.monotonic() >= self._next_busy_s
        if self._is_closed or self._has_failed or not has_time or not threading.main_thread().is_alive():
            return None
        return next((learner for learner in list(self.learners.values()) if learner.waits), None)

    def close(self) -> None:
        """End learning after the pass that runs."""
        self._is_closed = True
        self.wait()

    def wait(self) -> None:
        """Until no text waits, or no time is left for learning."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _learn(self) -> None:
        set_num_threads(1)
        try:
            while (learner := self._next_learner()) is not None:
                begin = time.monotonic()
                learner.advance()
                if self._online.busy_share:
                    self._next_busy_s = begin + (time.monotonic() - begin) / self._online.busy_share
        except Exception:
            log.exception("online distillation failed; the head drafts as it was loaded")
            self._has_failed = True
            for learner in list(self.learners.values()):
                learner.network = None
