"""Every error a user can meet, as one tree.

    RagspecError
    ├── ConfigError            a setting is unknown, missing or contradicts another
    ├── InputError             the request itself is wrong; nothing was generated
    │   ├── PromptTooLong      carries both numbers
    │   └── NotFound           a named conversation, file or store does not exist
    ├── ModelError             weights or tokenizer cannot be used as a target or encoder
    ├── StoreError             an index on disk cannot be used
    │   ├── StoreMissing
    │   ├── StoreCorrupt       a hash, size or schema is not what the manifest says
    │   └── EncoderMismatch    the index was built by another encoder
    ├── SaveError              writing failed (disk full, no permission); earlier content is intact
    │   ├── IndexBusy          another writer is at work
    │   └── NoRoom             a tenant's quota is full
    └── EngineError
        ├── EngineClosed
        ├── Cancelled
        ├── RankLost           a rank of a tensor-parallel target is lost, and the engine with it
        ├── Overloaded         too many requests wait; the request may be sent again later
        ├── ReplicaLost        a replica died, hangs or was closed; another can continue its requests
        └── RetrievalError     a remote index is lost or does not answer in time

Errors of other libraries are mapped once, where they occur, with `raise X from cause`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'temperature'?`, or an empty text if no known name is near."""
    near = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class RagspecError(Exception):
    """Root of the tree. The command line prints the message without a traceback."""


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
    """The named conversation, file or vector store does not exist or belongs to another tenant."""


class ModelError(RagspecError):
    """Weights or tokenizer cannot be used."""


class StoreError(RagspecError):
    """An index on disk cannot be used; nothing was loaded."""


class StoreMissing(StoreError):
    """There is no index at the given path."""


class StoreCorrupt(StoreError):
    """A file's hash, size or schema is not what the manifest says."""

    @classmethod
    def of_schema(cls, path: object, found: object, known: int) -> Self:
        """The file is another version's, which may be newer: the service was set back to a version before."""
        is_newer = isinstance(found, int) and found > known
        which, cure = (
            (", of a newer ragspec", "use that, or a backup from before") if is_newer else ("", "build it again")
        )
        return cls(f"{path} has schema {found!r}{which}; this version reads {known}: {cure}")


class EncoderMismatch(StoreError):
    """The index was built by an encoder other than the one in use."""


class SaveError(RagspecError):
    """Writing failed; earlier content is intact."""


class IndexBusy(SaveError):
    """Another writer holds the index; try again later."""


class NoRoom(SaveError):
    """A tenant's quota is full; the disk is not."""


class EngineError(RagspecError):
    """The engine cannot continue a request."""


class EngineClosed(EngineError):
    """The engine was closed before or while the request ran."""


class Cancelled(EngineError):
    """The request was cancelled by its owner."""


class Overloaded(EngineError):
    """Too many requests wait; nothing was begun, and the request may be sent again later."""


class ReplicaLost(EngineError):
    """A replica died, hangs or was closed; another replica can continue its requests."""


class RankLost(EngineError):
    """A rank of a tensor-parallel group is dead, hung or out of step; the group is closed."""


class RetrievalError(EngineError):
    """A remote index is lost or does not answer in time."""
