"""A datastore of KNN-LM: exact neighbours in any company, nothing damaged or foreign ever opened, a cache that only guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec.disk import TEMPORARY, writer_lock
from ragspec.errors import EncoderMismatch, InputError, ModelError, SaveError, StoreCorrupt, StoreMissing
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.index.manifest import MANIFEST, file_checksum
from ragspec.retrieval.knnlm.datastore import Datastore, DatastoreSource, read_datastore_manifest, write_datastore
from ragspec.retrieval.knnlm.neighbours import (
    DatastoreEntries,
    KnnConfig,
    NeighbourCache,
    PrefetchRequest,
    mixed_logits,
    softmax,
    unit_rows,
)

NUM_ENTRIES, WIDTH, VOCAB_SIZE = 700, 24, 50
TARGET = EncoderIdentity("some/target", "a" * 64, WIDTH)
ORIGIN = DatastoreSource(TARGET, VOCAB_SIZE, context_tokens=32)
NONE_KNOWN = np.empty(0, np.int64)


def entries(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values; some keys come several times."""
    rng = np.random.default_rng(seed)
    keys = unit_rows(rng.standard_normal((NUM_ENTRIES, WIDTH)).astype(np.float32))
    keys[5::70] = keys[3]
    return keys, rng.integers(0, VOCAB_SIZE, NUM_ENTRIES).astype(np.int32)


def blocks(seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    keys, values = entries(seed)
    for start in range(0, NUM_ENTRIES, 64):
        yield keys[start : start + 64], values[start : start + 64]


def queries(count: int) -> np.ndarray:
    rng = np.random.default_rng(99)
    found = rng.standard_normal((count, WIDTH)).astype(np.float32)
    found[0] = entries()[0][3]
    return unit_rows(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert write_datastore(tmp_path / "store", blocks(), ORIGIN) == NUM_ENTRIES
    return tmp_path / "store"


@pytest.mark.parametrize("k", [1, 4, 16, 300, NUM_ENTRIES + 5])
def test_neighbours_are_the_nearest_ones_ties_by_number(folder: Path, k: int) -> None:
    """A neighbour missed, or equal keys in the order in which a library happens to sort them."""
    keys, values = entries()
    asked = queries(7)
    found = Datastore.open(folder, TARGET).search(asked, k)
    for i, query in enumerate(asked):
        cosines = [sum(float(a) * float(b) for a, b in zip(key, query, strict=True)) for key in keys]
        nearest = sorted(range(NUM_ENTRIES), key=lambda number: (-cosines[number], number))[:k]
        assert found.numbers[i].tolist() == nearest
        assert found.values[i].tolist() == values[nearest].tolist()
        assert found.distances[i].tolist() == [2.0 - 2.0 * cosines[number] for number in nearest]
    assert found.entries is None


def test_a_query_finds_the_same_alone_and_in_any_batch(folder: Path) -> None:
    """Bits that depend on the company would make a verification differ from the search it stands for."""
    store, asked = Datastore.open(folder), queries(33)
    alone = [store.search(query[None], 9) for query in asked]
    for size in (2, 5, 33):
        for start in range(0, 33, size):
            wanted = PrefetchRequest(3, 9, NONE_KNOWN) if size == 5 else None
            found = store.search(asked[start : start + size], 9, wanted)
            for i, one in enumerate(alone[start : start + size]):
                assert found.numbers[i].tobytes() == one.numbers[0].tobytes()
                assert found.values[i].tobytes() == one.values[0].tobytes()
                assert found.distances[i].tobytes() == one.distances[0].tobytes()


def test_an_answer_carries_the_neighbours_and_what_follows_the_nearest(folder: Path) -> None:
    """The corpus goes on behind a neighbour: that is where the next one will be. Nothing is sent that is known."""
    keys, values = entries()
    store = Datastore.open(folder)
    asked = np.concatenate([queries(3), keys[-2:-1]])
    first = store.search(asked, 6, PrefetchRequest(4, 2, NONE_KNOWN))
    followed = {int(n) + step for n in first.numbers[:, :2].reshape(-1) for step in range(1, 5)}
    expected = sorted({*first.numbers.reshape(-1).tolist(), *(n for n in followed if n < NUM_ENTRIES)})
    assert first.entries is not None and first.entries.numbers.tolist() == expected and NUM_ENTRIES - 1 in expected
    assert np.array_equal(first.entries.keys, keys[expected])
    assert np.array_equal(first.entries.values, values[expected])
    again = store.search(asked, 6, PrefetchRequest(4, 2, np.array(expected[3:][::-1])))
    assert again.entries is not None and again.entries.numbers.tolist() == expected[:3]


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("filler", [b"\xff", b"\x7f", b"\x80"])
def test_files_overwritten_while_in_use_are_an_error(folder: Path, name: str, filler: bytes) -> None:
    """Votes for token 2,139,062,143 took 17 GB, and other bytes ended a request with a ValueError."""
    store = Datastore.open(folder)
    (path,) = folder.glob(f"{name}-*.npy")
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(filler * (path.stat().st_size - 128))
    try:
        found = store.search(queries(3), 9, PrefetchRequest(3, 9, NONE_KNOWN))
    except StoreCorrupt as told:
        assert "changed while" in str(told)
    else:  # these bytes are keys, too
        assert (name, filler) == ("keys", b"\x80") and np.isfinite(found.distances).all()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def damage(kind: str, change: Callable[[Path], Any]) -> Any:
    return pytest.param(kind, change, id=f"{kind}-{change.__name__}")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(damage(kind, change) for kind in ("keys", "values") for change in (flip, cut, remove)),
        *(damage("manifest", change) for change in (cut, empty)),
    ],
)
def test_a_damaged_datastore_is_refused(folder: Path, kind: str, change: Callable[[Path], None]) -> None:
    """A flipped bit in a key would be an answer that nobody can repeat."""
    (path,) = folder.glob(f"{kind}*")
    change(path)
    with pytest.raises(StoreCorrupt, match=path.name):
        Datastore.open(folder)


def rewrite(folder: Path, **changed: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"schema_version": 2},
        {"num_entries": NUM_ENTRIES - 1},
        {"vocab_size": 10},
        {"keys": "../keys-0123456789abcdef.npy"},
        {"target": {"id": "x", "fingerprint": "a", "dimension": WIDTH + 1}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_that_says_something_else_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    """A file outside the folder, or tokens beyond the vocabulary."""
    rewrite(folder, **changed)
    with pytest.raises(StoreCorrupt):
        Datastore.open(folder)


def test_a_pickle_in_place_of_the_keys_is_never_loaded(folder: Path) -> None:
    """A hash that fits proves nothing about who wrote the file."""
    manifest = read_datastore_manifest(folder)
    np.save(folder / manifest.values, np.array([{}], dtype=object), allow_pickle=True)
    rewrite(folder, values_file=file_checksum(folder / manifest.values).model_dump())
    with pytest.raises(StoreCorrupt):
        Datastore.open(folder)


@pytest.mark.parametrize(("fingerprint", "dimension"), [("b" * 64, WIDTH), ("a" * 64, WIDTH + 8)])
def test_another_targets_datastore_is_refused_with_both_names(folder: Path, fingerprint: str, dimension: int) -> None:
    """States of two targets have nothing to do with each other, even of the same width."""
    with pytest.raises(EncoderMismatch, match=r"some/target.*my/target"):
        Datastore.open(folder, EncoderIdentity("my/target", fingerprint, dimension))


def test_no_datastore_is_told_as_such(tmp_path: Path) -> None:
    """A bare FileNotFoundError."""
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(StoreMissing, match=str(place)):
            Datastore.open(place)


def broken_blocks(kind: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    keys, values = entries(1)
    if kind == "none":
        return
    yield keys, values
    if kind == "not finite":
        keys = keys.copy()
        keys[7, 7] = np.nan
        yield keys, values
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("kind", "error"), [("none", InputError), ("not finite", ModelError), ("disk full", SaveError)]
)
def test_a_build_that_fails_leaves_what_was_there(folder: Path, kind: str, error: type[Exception]) -> None:
    """Half a datastore in place of a whole one, or files that nobody removes."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error):
        write_datastore(folder, broken_blocks(kind), ORIGIN)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(Datastore.open(folder, TARGET)) == NUM_ENTRIES


def test_a_new_build_replaces_the_old_one_which_goes_on_answering(folder: Path) -> None:
    """A reader whose file is overwritten under it; old files that fill the disk; a stale temporary file."""
    (folder / f"{TEMPORARY}keys-0.npy").write_text("left by a crash")
    old = Datastore.open(folder)
    expected = old.search(queries(3), 5)
    write_datastore(folder, blocks(seed=1), ORIGIN)
    assert np.array_equal(old.search(queries(3), 5).numbers, expected.numbers)
    assert not np.array_equal(Datastore.open(folder).search(queries(3), 5).numbers, expected.numbers)
    manifest = read_datastore_manifest(folder)
    assert {path.name for path in folder.iterdir()} == {MANIFEST, ".lock", manifest.keys, manifest.values}


def test_two_builds_at_once_are_refused(folder: Path) -> None:
    """The second would remove the files of the first."""
    with writer_lock(folder), pytest.raises(SaveError):
        write_datastore(folder, blocks(), ORIGIN)


def test_a_query_that_is_not_finite_is_refused(folder: Path) -> None:
    """NaN compares with nothing: the neighbours would be arbitrary."""
    asked = queries(2)
    asked[1, 3] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        Datastore.open(folder).search(asked, 3)


def test_rows_are_normalised_on_their_own() -> None:
    """A key that depends on the chunk it was computed with; a state of zeros that becomes NaN."""
    rows = np.random.default_rng(3).standard_normal((40, 321)).astype(np.float32)
    rows[4] = 0.0
    whole = unit_rows(rows)
    assert all(whole[i].tobytes() == unit_rows(rows[i : i + 1])[0].tobytes() for i in range(40))
    assert np.allclose(np.linalg.norm(np.delete(whole, 4, 0), axis=1), 1.0) and not whole[4].any()


def test_neighbours_vote_by_distance_and_are_mixed_with_the_target() -> None:
    """A weight on the wrong side, votes of one token that are not added, a far neighbour that counts as a near one."""
    probs = softmax(np.array([0.0, 1.0, 2.0, -1.0]))
    config = KnnConfig(weight=0.4, temperature=0.5)
    mixed = np.exp(mixed_logits(probs, np.array([2, 0, 2]), np.array([0.0, 0.2, 0.7]), config).astype(np.float64))
    votes = np.exp(-np.array([0.0, 0.2, 0.7]) / 0.5)
    votes /= votes.sum()
    expected = 0.6 * probs + 0.4 * np.array([votes[1], 0.0, votes[0] + votes[2], 0.0])
    assert np.allclose(mixed, expected, rtol=1e-6) and np.isclose(mixed.sum(), 1.0)
    alone = mixed_logits(probs, np.empty(0, np.int32), np.empty(0), config)
    assert np.allclose(alone, np.log(0.6 * probs), rtol=1e-6)
    impossible = softmax(np.array([0.0, -np.inf]))
    assert mixed_logits(impossible, np.array([0]), np.array([0.1]), config)[1] == -np.inf


def some_entries(numbers: list[int]) -> DatastoreEntries:
    keys, values = entries()
    return DatastoreEntries(np.array(numbers), keys[numbers], values[numbers])


def test_a_cache_finds_what_it_holds_and_says_what_it_knows() -> None:
    """A guess from an entry that was never inserted, or entries sent twice."""
    keys, values = entries()
    cache = NeighbourCache(WIDTH, max_entries=1000)
    assert [len(column) for column in cache.nearest(keys[1], 3)] == [0, 0]
    for start in range(0, 600, 50):
        cache.insert(some_entries(list(range(start, start + 50))))
    assert len(cache) == 600 and cache.known.tolist() == list(range(600))
    found, distances = cache.nearest(keys[41], 4)
    nearest = np.argsort(-(keys[:600] @ keys[41]), kind="stable")[:4]
    assert found.tolist() == values[nearest].tolist() and (np.diff(distances) >= 0).all()


def test_a_full_cache_forgets_the_older_half() -> None:
    """A cache that grows with the answer until memory is full, or one that never takes anything new."""
    cache = NeighbourCache(WIDTH, max_entries=100)
    for start in range(0, 600, 30):
        cache.insert(some_entries(list(range(start, start + 30))))
        assert len(cache) <= 100 and cache.known[-1] == start + 29
        assert cache.known.tolist() == list(range(int(cache.known[0]), start + 30))
        assert len(cache) >= min(start + 30, 50)
    cache.insert(some_entries(list(range(300))))
    assert cache.known.tolist() == list(range(200, 300))
