"""Backups of a service that runs: what they hold is one state, and a service that begins with it goes on."""

import json
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from service_parts import DOCUMENTS, MODEL, serve_process, soon
from typer.testing import CliRunner

from ragspec.cli.app import app
from ragspec.errors import InputError, StoreCorrupt, StoreMissing
from ragspec.retrieval.index.store import Store
from services.settings import ServiceSettings
from services.stores.backup import back_up, restore


def service_of(folder: Path) -> ServiceSettings:
    return ServiceSettings(data_dir=str(folder / "data"))


def uploaded(client: httpx.Client, name: str, text: str) -> str:
    """The id of a vector store with one file."""
    file = client.post("/v1/files", data={"purpose": "assistants"}, files={"file": (name, text.encode())}).json()["id"]
    return str(client.post("/v1/vector_stores", json={"file_ids": [file]}).raise_for_status().json()["id"])


def is_searchable(client: httpx.Client, store: str) -> bool:
    counts = client.get(f"/v1/vector_stores/{store}").json()["file_counts"]
    return bool(counts["completed"] == 1)


def found(client: httpx.Client, store: str, query: str) -> str:
    reply = client.post(f"/v1/vector_stores/{store}/search", json={"query": query}).raise_for_status().json()
    return json.dumps(reply["data"])


def items(client: httpx.Client, conversation: str) -> list[Any]:
    """What was said, the first first."""
    query = {"order": "asc", "limit": 100}
    reply = client.get(f"/v1/conversations/{conversation}/items", params=query).raise_for_status().json()
    return [(item["role"], item["content"]) for item in reply["data"]]


@pytest.mark.slow
def test_a_backup_made_while_serving_is_restored_with_documents_and_conversations(parts: Path, tmp_path: Path) -> None:
    """Bug guarded: a backup that needs the service stopped, or that comes back without a file, a turn, or with a deleted one."""
    with serve_process(parts) as started, started.client() as client:
        kept = uploaded(client, "zebra.txt", "The zebra of Kirby sleeps at noon.")
        assert soon(lambda: is_searchable(client, kept), 120.0)
        conversation = client.post("/v1/conversations", json={"metadata": {"a": "b"}}).raise_for_status().json()["id"]
        body: dict[str, Any] = {"model": MODEL, "conversation": conversation, "max_tokens": 8, "seed": 1}
        body["messages"] = [{"role": "user", "content": "Where does the river rise?"}]
        client.post("/v1/chat/completions", json=body).raise_for_status()
        turns = items(client, conversation)
        busy = str(client.post("/v1/conversations", json={}).json()["id"])
        written, ended = Counter[str](), threading.Event()

        def upload() -> None:
            while not ended.is_set():
                uploaded(client, "other.txt", "A lion.")
                written["uploads"] += 1

        def chat() -> None:
            while not ended.is_set():
                client.post("/v1/chat/completions", json=body | {"conversation": busy}).raise_for_status()
                written["turns"] += 1

        with started.client() as client:
            with ThreadPoolExecutor(2) as threads:
                writing = [threads.submit(write) for write in (upload, chat)]
                assert soon(lambda: min(written["uploads"], written["turns"]) > 0, 120.0)
                command = ["index", "backup", str(tmp_path / "copy"), "--index", str(parts / "index")]
                made = CliRunner().invoke(app, [*command, "--data", str(parts / "data")])
                ended.set()
            assert not [each for each in map(Future.exception, writing) if each]
            all_turns = items(client, busy)
    assert made.exit_code == 0, made.output
    other = tmp_path / "other"
    other.mkdir()
    (other / "model").symlink_to(parts / "model")
    options = ["--index", str(other / "index"), "--data", str(other / "data")]
    done = CliRunner().invoke(app, ["index", "restore", str(tmp_path / "copy"), *options])
    assert done.exit_code == 0, done.output
    assert all(path.stat().st_mode & 0o077 == 0 for path in (other / "data").rglob("*"))
    with serve_process(other) as started, started.client() as client:
        assert "sleeps at noon" in found(client, kept, "the zebra of Kirby")
        assert items(client, conversation) == turns
        copied = items(client, busy)
        assert copied and len(copied) % 2 == 0 and copied == all_turns[: len(copied)]
        again = uploaded(client, "owl.txt", "The owl of Kirby wakes at dusk.")
        assert soon(lambda: is_searchable(client, again), 120.0)


def test_a_backup_of_an_index_alone_is_that_index(letter_index: Path, tmp_path: Path) -> None:
    """Bug guarded: a backup that only works with a service's folder."""
    record = back_up(letter_index, service_of(tmp_path), tmp_path / "copy")
    assert record["documents"] == len(DOCUMENTS)
    restore(tmp_path / "copy", tmp_path / "index", service_of(tmp_path))
    assert list(Store.open(tmp_path / "index").documents()) == list(Store.open(letter_index).documents())
    assert not list(letter_index.glob(".lease-*"))


def test_a_damaged_backup_is_refused_before_anything_is_written(letter_index: Path, tmp_path: Path) -> None:
    """Bug guarded: the copy that was to save the service is found broken when it has replaced everything."""
    back_up(letter_index, service_of(tmp_path), tmp_path / "copy")
    damaged = max((tmp_path / "copy/index").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=damaged.name):
        restore(tmp_path / "copy", tmp_path / "index", service_of(tmp_path))
    assert not (tmp_path / "index").exists() and not (tmp_path / "data").exists()


def test_nothing_that_exists_is_replaced(letter_index: Path, tmp_path: Path) -> None:
    """Bug guarded: a mistyped folder costs the index that is served, or yesterday's backup."""
    back_up(letter_index, service_of(tmp_path), tmp_path / "copy")
    with pytest.raises(InputError, match="exists"):
        back_up(letter_index, service_of(tmp_path), tmp_path / "copy")
    with pytest.raises(InputError, match="replaces nothing"):
        restore(tmp_path / "copy", letter_index, service_of(tmp_path))
    with pytest.raises(InputError, match="no backup"):
        restore(letter_index, tmp_path / "index", service_of(tmp_path))
    with pytest.raises(StoreMissing):
        back_up(tmp_path / "nowhere", service_of(tmp_path), tmp_path / "second")
    assert not (tmp_path / "second").exists() and not (tmp_path / "nowhere").exists()
