"""A datastore of KNN-LM on disk: the hidden state before each token of a corpus, and the token.

    folder/
      manifest.json            this record; names the two files in use and their hashes
      keys-<id>.npy            [N, H] float32, L2-normalised
      values-<id>.npy          [N] int32

Every hash is compared before a file is read. A new build replaces the manifest last; readers keep the old files open.

    >>> Datastore.open("datastore", identity).search(queries, k=8).values
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from ragspec.disk import TEMPORARY, fsync, make_folder, saving, write_atomically, writer_lock
from ragspec.errors import EncoderMismatch, InputError, ModelError, StoreCorrupt, StoreMissing
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray
from ragspec.retrieval.index.manifest import (
    MANIFEST,
    Count,
    FileChecksum,
    ManifestRecord,
    created_by,
    file_checksum,
    parse_manifest,
    verify_checksums,
)
from ragspec.retrieval.index.segment_files import mapped_array, npy_bytes, npy_header
from ragspec.retrieval.knnlm.neighbours import (
    DatastoreEntries,
    EntryNumbers,
    Neighbours,
    PrefetchRequest,
    Values,
    squared_distances,
)
from ragspec.retrieval.search.dense import ExactIndex

SCHEMA: Literal[1] = 1

_ID = "[0-9a-f]{16}"


class DatastoreManifest(ManifestRecord):
    """Describes a datastore. `context_tokens`: the most tokens before an entry's value."""

    schema_version: Literal[1] = SCHEMA
    created_by: str
    target: EncoderIdentity
    vocab_size: Count
    context_tokens: Count
    num_entries: Count
    keys: Annotated[str, Field(pattern=rf"^keys-{_ID}\.npy$")]
    values: Annotated[str, Field(pattern=rf"^values-{_ID}\.npy$")]
    keys_file: FileChecksum
    values_file: FileChecksum


class DatastoreSource(NamedTuple):
    """The target and settings that a datastore is built with."""

    target: EncoderIdentity
    vocab_size: int
    context_tokens: int


def write_datastore(folder: str | Path, blocks: Iterable[tuple[FloatArray, Values]], origin: DatastoreSource) -> int:
    """Write keys ([n, H], unit rows) and values ([n]) in place of the old datastore. Returns the number of entries.

    Raises: SaveError, InputError if there are no entries, ModelError if a key is not finite. The old datastore then stays.
    """
    folder = Path(folder)
    with saving(folder):
        make_folder(folder)
        with writer_lock(folder), contextlib.ExitStack() as cleaned:
            _remove_others(folder)
            cleaned.callback(_remove_others, folder)
            manifest = _staged(folder, blocks, origin)
            for name in (manifest.keys, manifest.values):
                os.rename(folder / f"{TEMPORARY}{name}", folder / name)
            fsync(folder)
            write_atomically(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1))
    return manifest.num_entries


def read_datastore_manifest(folder: str | Path) -> DatastoreManifest:
    """Raises: StoreMissing, StoreCorrupt."""
    return _parsed(_manifest_text(Path(folder)), Path(folder) / MANIFEST)


def check_target(built: EncoderIdentity, target: EncoderIdentity) -> None:
    """Raises: EncoderMismatch if the keys are states of another target."""
    if (built.fingerprint, built.dimension) != (target.fingerprint, target.dimension):
        raise EncoderMismatch(
            f"the datastore was built with the target {built.id} (fingerprint {built.fingerprint[:12]}, states of "
            f"{built.dimension}); the target in use is {target.id} (fingerprint {target.fingerprint[:12]}, states of "
            f"{target.dimension})"
        )


class Datastore:
    """A datastore opened for reading: mapped files, and a copy of the keys in 8 bits that searches begin with."""

    def __init__(self, manifest: DatastoreManifest, keys: FloatArray, values: Values) -> None:
        self.manifest = manifest
        self.target = manifest.target
        self._keys = keys  # [N, H]
        self._values = values  # [N]
        self._index = ExactIndex(keys)

    @classmethod
    def open(cls, folder: str | Path, target: EncoderIdentity | None = None) -> Datastore:
        """`target`: the keys must be states of this target.

        Raises: StoreMissing, StoreCorrupt or EncoderMismatch, each with the reason; then nothing is loaded.
        """
        folder = Path(folder)
        while True:
            text = _manifest_text(folder)
            try:
                return cls._opened(folder, _parsed(text, folder / MANIFEST), target)
            except StoreCorrupt:
                if _manifest_text(folder) == text:  # otherwise a writer replaced the manifest meanwhile
                    raise

    @classmethod
    def _opened(cls, folder: Path, manifest: DatastoreManifest, target: EncoderIdentity | None) -> Datastore:
        if target is not None:
            check_target(manifest.target, target)
        files = ((folder / manifest.keys, manifest.keys_file), (folder / manifest.values, manifest.values_file))
        verify_checksums(files)
        keys, values = (mapped_array(path) for path, _ in files)
        if keys.dtype != np.float32 or keys.shape != (manifest.num_entries, manifest.target.dimension):
            raise StoreCorrupt(f"{files[0][0]} is not {manifest.num_entries} keys of {manifest.target.dimension}")
        fits = values.dtype == np.int32 and values.shape == (manifest.num_entries,)
        if not fits or not len(values) or not 0 <= values.min() <= values.max() < manifest.vocab_size:
            raise StoreCorrupt(f"{files[1][0]} is not {manifest.num_entries} tokens below {manifest.vocab_size}")
        return cls(manifest, keys, values)

    def __len__(self) -> int:
        return self.manifest.num_entries

    def search(self, queries: FloatArray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        """As `DatastoreLike.search`. Raises: ModelError if a query is not finite; StoreCorrupt if a file was overwritten."""
        if not np.isfinite(queries).all():
            raise ModelError("the target's state is not finite: it has no neighbours")
        k = min(k, len(self))
        numbers = np.empty((len(queries), k), np.int64)
        distances = np.empty((len(queries), k), np.float64)
        for i, (rows, scores) in enumerate(self._index.search(queries, k)):
            order = np.lexsort((rows, -scores))[:k]
            if len(order) < k or not np.isfinite(scores[order]).all():
                raise StoreCorrupt("the keys of the datastore were changed while they were in use")
            numbers[i], distances[i] = rows[order], squared_distances(scores[order])
        entries = None if wanted is None else self._entries(numbers, wanted)
        return Neighbours(numbers, self._values_of(numbers), distances, entries)

    def _values_of(self, numbers: EntryNumbers) -> Values:
        """Raises: StoreCorrupt."""
        values: Values = self._values[numbers]
        if values.size and not 0 <= values.min() <= values.max() < self.manifest.vocab_size:
            raise StoreCorrupt("the values of the datastore were changed while they were in use")
        return values

    def _entries(self, numbers: EntryNumbers, wanted: PrefetchRequest) -> DatastoreEntries:
        """The requested entries for a cache. Shapes: numbers [B, k]."""
        steps = np.arange(1, wanted.num_following + 1)
        following = (numbers[:, : wanted.num_followed, None] + steps).reshape(-1)
        chosen = np.union1d(numbers, following[following < len(self)])
        chosen = np.setdiff1d(chosen, wanted.known, assume_unique=True)
        return DatastoreEntries(chosen, self._keys[chosen], self._values_of(chosen))


def _staged(folder: Path, blocks: Iterable[tuple[FloatArray, Values]], origin: DatastoreSource) -> DatastoreManifest:
    """Write both files under temporary names and flush them. Returns the manifest."""
    target, name = origin.target, secrets.token_hex(8)
    keys_path, values_path = (folder / f"{TEMPORARY}{kind}-{name}.npy" for kind in ("keys", "values"))
    values: list[Values] = []
    with open(keys_path, "wb") as file:
        file.write(npy_header(0, target.dimension))
        for some_keys, some_values in blocks:
            _check_block(some_keys, some_values, origin)
            file.write(np.ascontiguousarray(some_keys).data)
            values.append(some_values)
        num_entries = sum(map(len, values))
        if not num_entries:
            raise InputError("the texts give no entry: each needs two tokens at least")
        file.seek(0)
        file.write(npy_header(num_entries, target.dimension))
    values_path.write_bytes(npy_bytes(np.concatenate(values)))
    for path in (keys_path, values_path):
        fsync(path)
    return DatastoreManifest(
        created_by=created_by(),
        target=target,
        vocab_size=origin.vocab_size,
        context_tokens=origin.context_tokens,
        num_entries=num_entries,
        keys=f"keys-{name}.npy",
        values=f"values-{name}.npy",
        keys_file=file_checksum(keys_path),
        values_file=file_checksum(values_path),
    )


def _check_block(keys: FloatArray, values: Values, origin: DatastoreSource) -> None:
    assert keys.dtype == np.float32 and values.dtype == np.int32
    assert keys.shape == (len(values), origin.target.dimension)
    if not np.isfinite(keys).all():
        raise ModelError(f"a hidden state of {origin.target.id} is not finite; no datastore can be built with it")


def _remove_others(folder: Path) -> None:
    """Remove files that the manifest does not name; in a damaged datastore only unfinished files."""
    try:
        manifest = read_datastore_manifest(folder)
        patterns = [f"{TEMPORARY}*", "keys-*.npy", "values-*.npy"]
        kept = {manifest.keys, manifest.values}
    except (StoreMissing, StoreCorrupt):
        patterns, kept = [f"{TEMPORARY}*"], set()
    for pattern in patterns:
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _manifest_text(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as cause:
        raise StoreMissing(f"there is no datastore at {folder}: it has no file {MANIFEST}") from cause
    except OSError as cause:
        raise StoreMissing(f"the datastore at {folder} cannot be read: {cause.strerror}") from cause


def _parsed(raw: bytes, path: Path) -> DatastoreManifest:
    return parse_manifest(raw, path, DatastoreManifest, SCHEMA, "a datastore's manifest")
