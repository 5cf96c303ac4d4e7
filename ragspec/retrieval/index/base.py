"""What a writer starts from: the index that is there, if it fits what is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ragspec.config import IndexConfig
from ragspec.errors import ConfigError, StoreError, StoreMissing
from ragspec.retrieval.encoder import EncoderIdentity, TextEncoder
from ragspec.retrieval.index.manifest import read_current
from ragspec.retrieval.index.store import Store, check_encoder
from ragspec.retrieval.search.analysis import Analyzer


class BaseIndex(NamedTuple):
    """`store` None: there is nothing to build on."""

    store: Store | None
    encoder: EncoderIdentity
    config: IndexConfig


def open_base_index(
    index_dir: Path, encoder: TextEncoder | None, wanted: IndexConfig | None, replace: bool
) -> BaseIndex:
    """The index there, with its own settings if none are `wanted`; to `replace`, its settings alone if it cannot be built upon.

    Raises: StoreMissing without an index and an encoder, StoreCorrupt, EncoderMismatch, ConfigError.
    """
    store = _fitting(index_dir, encoder, wanted) if replace else _required(index_dir, encoder, wanted)
    if store is not None:
        identity = EncoderIdentity(**store.manifest.encoder.model_dump())
        return BaseIndex(store, identity if encoder is None else encoder.identity, wanted or store.manifest.config)
    if encoder is None:
        raise StoreMissing(f"there is no index at {index_dir}")
    return BaseIndex(
        None, encoder.identity, wanted or (_settings_there(index_dir) if replace else None) or IndexConfig()
    )


def _fitting(index_dir: Path, encoder: TextEncoder | None, wanted: IndexConfig | None) -> Store | None:
    try:
        return _required(index_dir, encoder, wanted)
    except (StoreError, ConfigError):
        return None


def _settings_there(index_dir: Path) -> IndexConfig | None:
    """Also those of an index of another encoder or analyser; none of one that cannot be read."""
    try:
        return read_current(index_dir)[1].config
    except StoreError:
        return None


def _required(index_dir: Path, encoder: TextEncoder | None, wanted: IndexConfig | None) -> Store | None:
    try:
        store = Store.open(index_dir)
    except StoreMissing:
        return None
    if encoder is not None:
        check_encoder(store.manifest, encoder.identity)
    built = store.manifest.config
    if built != (wanted or built) or store.manifest.analyzer != Analyzer(built.words).id:
        raise ConfigError(
            f"the index at {index_dir} was built in another way ({built!r}): "
            "add to it with its own settings, or build another one"
        )
    return store
