"""A service that is replaced by another version's on the same data, while clients ask: nothing is lost, doubled or changed."""

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from service_parts import MODEL, Service, Serving, soon

from ragspec.errors import StoreCorrupt
from ragspec.rag.chat.conversations import ConversationStore

WRITTEN = Path(__file__).parents[1] / "written_before"
CONVERSATION = "conv_f8770f60fb917f646129803b"


class Talker:
    """Ann's turns in one conversation, one after the other, with whichever service runs. A question that failed is left out."""

    def __init__(self) -> None:
        self.service: Service | None = None
        self.acknowledged: list[tuple[str, str]] = []
        self.unknown: list[str] = []
        self.refused = ""
        self._ended = threading.Event()

    @contextmanager
    def talking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._talk)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def says(self, count: int) -> None:
        """Waits for so many turns more."""
        wanted = len(self.acknowledged) + count
        assert soon(lambda: bool(self.refused) or len(self.acknowledged) >= wanted, 120.0)
        assert not self.refused

    def _talk(self) -> None:
        number = 0
        while not self._ended.is_set():
            if (service := self.service) is None:
                self._ended.wait(0.01)
                continue
            number += 1
            self._ask(service, f"Question {number}?")

    def _ask(self, service: Service, question: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "conversation": CONVERSATION}
        try:
            with service.client(service.keys.ann) as client:
                reply = client.post("/v1/chat/completions", json=body | {"max_tokens": 4, "ignore_eos": True})
        except httpx.TransportError:
            self.unknown.append(question)
            return
        if reply.status_code >= 500:  # it is shutting down
            self.unknown.append(question)
        elif reply.status_code != 200:
            self.refused = reply.text
        else:
            assert reply.json()["ragspec"]["kept"]
            self.acknowledged.append((question, reply.json()["choices"][0]["message"]["content"]))


def test_turns_files_and_documents_go_on_when_the_service_is_replaced_under_load(
    serving: Serving, tmp_path: Path
) -> None:
    """A restart on data of commit d5d7a05 that loses a turn which was acknowledged, doubles one, or forgets a file."""
    written = Path(shutil.copytree(WRITTEN, tmp_path / "written"))
    settings = {"service.data_dir": str(written), "retriever.mode": "sparse", "service.conversations.ttl_s": 1e12}
    talker = Talker()
    with talker.talking():
        with serving(written / "index", **settings) as service, service.client(service.keys.ann) as client:
            talker.service = service
            talker.says(2)
            file = client.post(
                "/v1/files", files={"file": ("a.txt", b"A zebra.")}, data={"purpose": "assistants"}
            ).json()
            store = client.post("/v1/vector_stores", json={"file_ids": [file["id"]]}).json()
            talker.says(1)
            talker.service = None  # whoever asks now meets a service that ends
        with serving(written / "index", **settings) as service, service.client(service.keys.ann) as client:
            talker.service = service
            talker.says(2)
            items = client.get(f"/v1/conversations/{CONVERSATION}/items", params={"limit": 100, "order": "asc"}).json()
            assert client.get(f"/v1/files/{file['id']}/content").content == b"A zebra."
            assert [each["id"] for each in client.get("/v1/files").json()["data"]] == [file["id"]]
            search = f"/v1/vector_stores/{store['id']}/search"
            assert soon(lambda: len(client.post(search, json={"query": "zebra"}).json()["data"]) == 1)
            found = service.backend.retriever.retrieve(["Where does the river flow past the mill?"], 3)
            assert [passage.document_id for passage in found.passages[0]] == ["mill", "bridge"]
    said = [item["content"][0]["text"] for item in items["data"]]
    assert said[:3] == ["When?", "In 1874.", "Why?"]
    turns = list(zip(said[4::2], said[5::2], strict=False))
    assert len(set(turns)) == len(turns)
    assert [turn for turn in turns if turn[0] not in talker.unknown] == talker.acknowledged[: len(turns)]


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Turns written by an older version into tables that it does not know."""
    path = Path(shutil.copy(WRITTEN / "conversations.sqlite", tmp_path))
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=2")
    rows = everything(path)
    with pytest.raises(StoreCorrupt, match="schema 2, of a newer ragspec"):
        ConversationStore(path)
    assert everything(path) == rows


def everything(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return list(database.iterdump())
