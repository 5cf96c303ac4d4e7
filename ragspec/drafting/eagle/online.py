"""An EAGLE drafter whose head learns while it serves, for each tenant apart.

    a request runs: states are recorded -> it ends: its text waits -> none is open: a thread learns -> other weights draft

A draft is grown with one set of weights from beginning to end. Tenants with heads of their own take a forward each. Nothing is
written: a restart begins with the head as it is on disk. If learning fails, the loaded head drafts for everybody.

    >>> drafter = OnlineEagleDrafter(network, shape, costs, head=trainable_head(checkpoint, "cpu"), online=config.online)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from ragspec.config import OnlineConfig
from ragspec.core import salt_belongs_to
from ragspec.drafting.drafter import Budget, SequenceView
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.learner import HeadLearner, Recording
from ragspec.drafting.eagle.network import EagleHead, EagleNetwork
from ragspec.errors import ConfigError
from ragspec.numerics.threads import set_num_threads
from ragspec.tenants import TenantStates
from ragspec.tree import Proposal

log = logging.getLogger(__name__)

_LEARNING_RATE = 1e-4
_MAX_BYTES = 2**29
"""Of all learned heads with their texts."""


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
            trees, depths = [budget.trees[i] for i in own], [budget.depths[i] for i in own]
            part = super().propose([sequences[i] for i in own], budget._replace(trees=trees, depths=depths))
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
