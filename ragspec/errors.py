"""Every error a user can meet, as one tree.

    RagspecError
    ├── ConfigError            a setting is unknown, missing or contradicts another
    ├── InputError             the request itself is wrong; nothing was generated
    │   ├── PromptTooLong      carries both numbers
    │   └── NotFound           what the request names is not there
    ├── ModelError             weights or tokenizer cannot be used as a target or encoder
    ├── StoreError             an index on disk cannot be used
    │   ├── StoreMissing
    │   ├── StoreCorrupt       a hash, size or schema is not what the manifest says
    │   └── EncoderMismatch    the index was built by another encoder
    ├── SaveError              writing failed (disk full, no permission); what was there before still is
    │   ├── IndexBusy          another writer is at work
    │   └── NoRoom             more than may be kept for somebody
    └── EngineError
        ├── EngineClosed
        ├── Cancelled
        ├── RankLost           a part of a tensor-parallel target is gone; the engine with it
        ├── Overloaded         too many requests wait already; later it may be taken
        ├── ReplicaLost        an engine elsewhere died, hangs or was closed; its requests can go on on another
        └── RetrievalError     an index elsewhere is lost or does not answer in time

Errors of other libraries are mapped once, where they enter, with `raise X from cause`.
"""

from __future__ import annotations


class RagspecError(Exception):
    """Root of the tree; the command line prints its message and no traceback."""


class ConfigError(RagspecError):
    """A setting is unknown, missing or contradicts another."""


class InputError(RagspecError):
    """The request is wrong; nothing was generated."""


class PromptTooLong(InputError):
    """The prompt does not fit the target's context even without passages."""

    def __init__(self, num_prompt_tokens: int, max_prompt_tokens: int, max_tokens: int = 0) -> None:
        super().__init__(num_prompt_tokens, max_prompt_tokens, max_tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens

    def __str__(self) -> str:
        beside = f" beside an output of {self.max_tokens} (max_tokens)" if self.max_tokens else ""
        fitting = max(0, self.max_prompt_tokens)
        return f"the prompt has {self.num_prompt_tokens} tokens, but at most {fitting} fit the context{beside}"


class NotFound(InputError):
    """What the request names (a conversation, a file, a vector store) is not there, or is another tenant's."""


class ModelError(RagspecError):
    """Weights or tokenizer cannot be used."""


class StoreError(RagspecError):
    """An index on disk cannot be used; nothing of it was loaded."""


class StoreMissing(StoreError):
    """There is no index at the given place."""


class StoreCorrupt(StoreError):
    """A file's hash, size or schema is not what the manifest says."""


class EncoderMismatch(StoreError):
    """The index was built by an encoder other than the one in use."""


class SaveError(RagspecError):
    """Writing failed; what was there before is untouched."""


class IndexBusy(SaveError):
    """Another writer is at work; later there may be none."""


class NoRoom(SaveError):
    """More than may be kept for somebody; the disk is not full."""


class EngineError(RagspecError):
    """The engine cannot go on with a request."""


class EngineClosed(EngineError):
    """The engine was closed before or while the request ran."""


class Cancelled(EngineError):
    """The request was cancelled by its owner."""


class Overloaded(EngineError):
    """Too many requests wait already; nothing was begun, and the same request may be taken later."""


class ReplicaLost(EngineError):
    """An engine elsewhere died, hangs or was closed; another can go on with its requests."""


class RankLost(EngineError):
    """A process that holds a part of the target is dead, hung or out of step; its group cannot go on."""


class RetrievalError(EngineError):
    """An index that is searched elsewhere is lost or does not answer in time."""
