"""What a replica says of itself, for processes that pass it on and know nothing of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ragspec.engine.admission import ModelLimits


class HostFacts(NamedTuple):
    """What a client must know of a replica; `fingerprint` is its numerics id, `pid` that of its process."""

    fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]
    pid: int
    node_id: str
    num_running: int

    @property
    def bounds(self) -> ModelLimits:
        """Why the import is in here: a supervisor passes facts on, and needs no engine for it, nor the seconds to import one."""
        from ragspec.engine.admission import ModelLimits

        return ModelLimits(self.vocab_size, self.max_context_tokens, self.eos_ids)
