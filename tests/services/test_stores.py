"""Files, vector stores and conversations through the official client: what is put in is found, by its owner, until deleted."""

import io
import shutil
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from service_parts import Service, Serving

from ragspec.config import RetrieverConfig
from ragspec.core import Message, Passage, SamplingParams
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.steps import build_answer, parse_scope
from ragspec.retrieval.search.segment_search import SearchScope
from services.stores.schemas import merged, unit_score

FAQ = b"# Zebras\n\nA zebra has stripes that no other zebra has.\n\n# Camels\n\nA camel keeps its water in the blood.\n"


@pytest.fixture(scope="module")
def library_service(
    serving: Serving, letter_index: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    index = tmp_path_factory.mktemp("own") / "index"
    shutil.copytree(letter_index, index)
    with serving(index=index) as running:
        yield running


@pytest.fixture
def ann(library_service: Service) -> Iterator[openai.OpenAI]:
    with library_service.openai(library_service.keys.ann) as client:
        yield client


@pytest.fixture
def bob(library_service: Service) -> Iterator[openai.OpenAI]:
    with library_service.openai(library_service.keys.bob) as client:
        yield client


def put(client: openai.OpenAI, name: str, content: bytes, **options: Any) -> tuple[str, Any]:
    """A new store with one file."""
    store = client.vector_stores.create(name="notes")
    member = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=(name, content), poll_interval_ms=50, **options
    )
    return store.id, member


def texts(client: openai.OpenAI, store: str, query: str = "zebra stripes", **options: Any) -> list[str]:
    found = client.vector_stores.search(store, query=query, **options)
    return [part.text for result in found for part in result.content]


def test_an_uploaded_file_is_found_with_the_official_client(ann: openai.OpenAI) -> None:
    """The client polls for a status and reads fields that must be there."""
    store, member = put(ann, "faq.md", FAQ, attributes={"year": 2020, "draft": False, "team": "zoo"})
    assert (member.status, member.last_error, member.vector_store_id) == ("completed", None, store)
    assert member.attributes == {"year": 2020, "draft": False, "team": "zoo"} and member.usage_bytes > 0
    (best, *_) = ann.vector_stores.search(store, query="zebra stripes").data
    assert best.filename == "faq.md" and best.file_id == member.id and "stripes" in best.content[0].text
    assert 0 < best.score <= 1 and best.attributes == member.attributes
    shown = ann.vector_stores.retrieve(store)
    assert (shown.status, shown.file_counts.completed, shown.file_counts.total) == ("completed", 1, 1)
    assert shown.usage_bytes == member.usage_bytes
    file = ann.files.retrieve(member.id)
    assert (file.filename, file.bytes, file.purpose) == ("faq.md", len(FAQ), "assistants")
    assert ann.files.content(member.id).read() == FAQ
    assert [part.text for part in ann.vector_stores.files.content(member.id, vector_store_id=store)] == [FAQ.decode()]
    ann.vector_stores.files.update(member.id, vector_store_id=store, attributes={"team": "farm"})  # no other upload
    ann.vector_stores.files.poll(member.id, vector_store_id=store, poll_interval_ms=50)
    assert texts(ann, store, filters={"type": "eq", "key": "team", "value": "farm"})
    assert not texts(ann, store, filters={"type": "eq", "key": "team", "value": "zoo"})


def test_a_file_that_was_read_in_part_says_so(ann: openai.OpenAI) -> None:
    """Rows that are missing from every answer, of a file that is "completed"."""
    store, member = put(ann, "rows.csv", b"text,x\n" + b"".join(b"Row %d.,\n" % n for n in range(12)) + b"Bad.,y,z\n")
    assert (member.status, member.last_error.message) == ("completed", "read in part: line 14: 3 cells below 2 columns")
    rows = [part.text for part in ann.vector_stores.files.content(member.id, vector_store_id=store)]
    assert rows == [f"Row {n}." for n in range(12)]


LATE = {"type": "gte", "key": "year", "value": 2000}


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"type": "eq", "key": "year", "value": 2020}, True),
        ({"type": "gt", "key": "year", "value": 2020}, False),
        ({"type": "in", "key": "team", "value": ["zoo", "bar"]}, True),
        ({"type": "and", "filters": [LATE, {"type": "ne", "key": "team", "value": "zoo"}]}, False),
    ],
)
def test_filters_decide_what_is_searched(
    ann: openai.OpenAI, shared_store: tuple[str, str], filters: Any, found: bool
) -> None:
    """A filter applied after the search leaves fewer results than there are, or none."""
    store, _ = shared_store
    assert bool(texts(ann, store, filters=filters)) == found
    assert len(texts(ann, store, max_num_results=1)) == 1
    both = ann.vector_stores.search(store, query="zebra stripes").data
    best = ann.vector_stores.search(store, query="zebra stripes", ranking_options={"score_threshold": both[0].score})
    assert len(both) == 2 and best.data == both[:1]


def test_files_are_attached_in_batches(ann: openai.OpenAI, bob: openai.OpenAI) -> None:
    """Two batches of a store taken for one; a batch with an unknown file that is attached in part."""
    batches, files = ann.vector_stores.file_batches, [("a.md", FAQ), ("b.md", b"A llama hums.")]
    store = ann.vector_stores.create().id
    first = batches.upload_and_poll(store, files=files, poll_interval_ms=50)
    ids = {each.id for each in batches.list_files(first.id, vector_store_id=store)}
    assert (first.status, first.file_counts.completed, first.file_counts.total) == ("completed", 2, 2)
    assert ids == {each.id for each in ann.vector_stores.files.list(store)} and texts(ann, store, "llama hums")
    own = [{"file_id": name, "attributes": {"name": name}} for name in ids]
    other = ann.vector_stores.create(file_ids=[*ids]).id
    second = batches.create_and_poll(other, files=own, poll_interval_ms=50)
    assert {each.attributes["name"] for each in batches.list_files(second.id, vector_store_id=other)} == ids
    for wrong in ({"file_ids": []}, {"file_ids": [*ids], "files": own}):
        with pytest.raises(openai.BadRequestError, match="either"):
            batches.create(store, **wrong)
    with pytest.raises(openai.NotFoundError):
        ann.vector_stores.create(name="half", file_ids=[*ids, "file-x"])
    assert "half" not in [each.name for each in ann.vector_stores.list()]
    ann.vector_stores.files.update(ids.pop(), vector_store_id=store, attributes={})
    assert batches.retrieve(first.id, vector_store_id=store).file_counts.total == 1, "it was attached again"
    empty = ann.vector_stores.create().id
    for refused in (
        lambda: bob.vector_stores.file_batches.retrieve(first.id, vector_store_id=store),
        lambda: batches.retrieve(first.id, vector_store_id=empty),
        lambda: batches.retrieve(first.id.removeprefix("vsfb_"), vector_store_id=store),
        lambda: batches.create(empty, file_ids=[*ids, "file-x"]),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    assert not ann.vector_stores.files.list(empty).data


def test_two_tenants_never_see_each_other(ann: openai.OpenAI, bob: openai.OpenAI, library_service: Service) -> None:
    """A file, a store or a passage of another tenant was found by its name, or in the whole index."""
    store, member = put(ann, "secret.txt", b"The vault opens with the word xylophone.")
    for refused in (
        lambda: bob.files.retrieve(member.id),
        lambda: bob.files.content(member.id),
        lambda: bob.files.delete(member.id),
        lambda: bob.vector_stores.retrieve(store),
        lambda: bob.vector_stores.search(store, query="xylophone"),
        lambda: bob.vector_stores.delete(store),
        lambda: bob.vector_stores.files.list(store),
        lambda: bob.vector_stores.files.retrieve(member.id, vector_store_id=store),
        lambda: bob.vector_stores.files.create(store, file_id=member.id),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    own = bob.vector_stores.create()
    with pytest.raises(openai.NotFoundError):
        bob.vector_stores.files.create(own.id, file_id=member.id)
    assert store not in [each.id for each in bob.vector_stores.list()]
    assert member.id not in [each.id for each in bob.files.list()]
    retriever = library_service.backend.retriever
    for tenant, sees in (("ann", True), ("bob", False), ("", False)):
        found = retriever.retrieve(["xylophone vault"], 50, SearchScope(tenant)).passages[0]
        assert any("xylophone" in passage.text for passage in found) == sees
    assert texts(ann, store, "xylophone")


def test_what_a_file_says_of_itself_gives_it_to_nobody_else(ann: openai.OpenAI, bob: openai.OpenAI) -> None:
    """A row that names another owner or store was put into it."""
    own, _ = put(bob, "faq.md", FAQ)
    row = b'{"text": "zebra stripes are painted", "owner": "bob", "metadata": {"vector_store_id": "%s"}}' % own.encode()
    store, member = put(ann, "rows.jsonl", row)
    assert member.status == "completed"
    assert not any("painted" in text for text in texts(bob, own))
    assert any("painted" in text for text in texts(ann, store))


def test_deletion_holds_for_the_next_query(ann: openai.OpenAI, library_service: Service) -> None:
    """What was deleted was found until the next restart, or lived on in caches and conversations."""
    engine, chat = library_service.backend.target.engine, library_service.backend.target.chat
    store, member = put(ann, "faq.md", FAQ)
    turn = ChatTurn(
        "t1", (Message("user", "zebra stripes?"),), SamplingParams(max_tokens=8), _of(store), cache_salt="s"
    )
    ready = chat.prepare(turn)
    (completion,) = engine.generate([ready.request])
    assert ready.prompt.passages and chat.remember(ready, build_answer(ready, completion))
    ann.vector_stores.files.delete(member.id, vector_store_id=store)
    assert not texts(ann, store)
    with pytest.raises(openai.NotFoundError):
        ann.vector_stores.files.retrieve(member.id, vector_store_id=store)
    again = chat.prepare(ChatTurn("t2", turn.messages, turn.params, turn.scope, cache_salt="s"))
    (completion,) = engine.generate([again.request])
    assert not again.prompt.passages
    assert completion.stats.num_cached_tokens < min(16, len(again.request.prompt_ids))
    later = (*turn.messages, Message("assistant", "Yes."), Message("user", "Why?"))
    assert not chat.prepare(ChatTurn("t3", later, turn.params, turn.scope, cache_salt="s")).history.turns[0].passages
    assert ann.files.retrieve(member.id).id == member.id
    assert ann.files.delete(member.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(member.id)


def _of(store: str) -> SearchScope:
    return parse_scope("ann", {"type": "eq", "key": "vector_store_id", "value": store})


def test_a_deleted_file_leaves_every_store_and_a_deleted_store_no_passage(ann: openai.OpenAI) -> None:
    """One of two stores kept answering from a file that was deleted."""
    first, member = put(ann, "faq.md", FAQ)
    second = ann.vector_stores.create(file_ids=[member.id]).id
    ann.vector_stores.files.poll(member.id, vector_store_id=second, poll_interval_ms=50)
    assert texts(ann, first) and texts(ann, second)
    ann.vector_stores.delete(first)
    assert texts(ann, second)
    ann.files.delete(member.id)
    assert not texts(ann, second)


def test_queries_go_on_while_files_come_in(ann: openai.OpenAI, library_service: Service) -> None:
    """A query that met a commit saw half of it, or failed."""
    store, _ = put(ann, "faq.md", FAQ)
    ended, members = threading.Event(), ann.vector_stores.files

    def ask() -> None:
        with library_service.openai(library_service.keys.ann) as client:
            while not ended.is_set():
                assert any("stripes" in text for text in texts(client, store))

    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        stack.callback(ended.set)
        asking = [threads.submit(ask) for _ in range(2)]
        files = [
            ann.files.create(file=(f"n{n}.txt", b"Number %d is even." % n), purpose="assistants") for n in range(8)
        ]
        for file in files:
            members.create(store, file_id=file.id)
        for file in files:
            assert members.poll(file.id, vector_store_id=store, poll_interval_ms=50).status == "completed"
    assert [each.result() for each in asking] == [None] * 2
    assert ann.vector_stores.retrieve(store).file_counts.completed == 9


def _bomb() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", b"<Types/>")
        archive.writestr("word/document.xml", b"\0" * 2**24)
    return held.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("photo.png", b"\x89PNG", "unsupported_file"),
        ("broken.pdf", b"%PDF-1.7\nnothing", "invalid_file"),
        ("bomb.docx", _bomb(), "invalid_file"),
        ("empty.txt", b" \n", "invalid_file"),
    ],
)
def test_a_file_that_cannot_be_read_says_why_and_harms_no_other(
    ann: openai.OpenAI, name: str, content: bytes, code: str
) -> None:
    """One broken file failed the batch, the worker, or the service; or told where files lie on the server."""
    store, good = put(ann, "faq.md", FAQ)
    bad = ann.vector_stores.files.upload_and_poll(vector_store_id=store, file=(name, content), poll_interval_ms=50)
    assert bad.status == "failed" and bad.last_error is not None and bad.last_error.code == code
    assert "/tmp" not in bad.last_error.message and "ragspec" not in bad.last_error.message
    assert good.status == "completed" and texts(ann, store)
    counts = ann.vector_stores.retrieve(store).file_counts
    assert (counts.completed, counts.failed) == (1, 1)


def test_lists_come_in_pages(ann: openai.OpenAI) -> None:
    """The client asks for the next page until there is none; a wrong cursor went on for ever."""
    store = ann.vector_stores.create()
    files = [ann.files.create(file=(f"n{n}.txt", b"Number."), purpose="user_data") for n in range(5)]
    for file in files:
        ann.vector_stores.files.create(store.id, file_id=file.id)
    wanted = [file.id for file in files]
    assert [each.id for each in ann.vector_stores.files.list(store.id, order="asc", limit=2)] == wanted
    assert [each.id for each in ann.vector_stores.files.list(store.id, limit=2)] == wanted[::-1]
    page = ann.vector_stores.files.list(store.id, order="asc", limit=2, before=wanted[4])
    assert [each.id for each in page.data] == wanted[2:4]
    assert {file.id for file in ann.files.list(purpose="user_data")} >= set(wanted)
    with pytest.raises(openai.BadRequestError):
        ann.vector_stores.files.list(store.id, after="file-x")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/vector_stores", {"name": "x", "colour": "red"}),
        ("/vector_stores", {"expires_after": {"anchor": "last_active_at", "days": 1}}),
        ("/vector_stores", {"metadata": {f"k{n}": "v" for n in range(17)}}),
        ("/vector_stores", {"metadata": {"k" * 65: "v"}}),
        ("/vector_stores", {"metadata": {"k": "v" * 513}}),
        ("/vector_stores", {"metadata": {"": "v"}}),
        ("/vector_stores", {"metadata": {"file_id": "v"}}),
        ("/vector_stores/{store}/files", {"file_id": "{file}", "attributes": {f"k{n}": 1 for n in range(17)}}),
        ("/vector_stores/{store}/files", {"file_id": "{file}", "attributes": {"vector_store_id": "vs_1"}}),
        ("/vector_stores/{store}/files", {"file_id": "{file}", "attributes": {"k": [1]}}),
        ("/vector_stores/{store}/files", {"file_id": "{file}", "chunking_strategy": {"type": "static"}}),
        ("/vector_stores/{store}/search", {"query": "x", "max_num_results": 51}),
        ("/vector_stores/{store}/search", {"query": ""}),
        ("/vector_stores/{store}/search", {"query": "x", "filters": {"type": "like", "key": "a", "value": "b"}}),
    ],
)
def test_wrong_requests_are_refused_as_openai_does(
    ann: openai.OpenAI, shared_store: tuple[str, str], path: str, body: Any
) -> None:
    """A misspelt or unsupported field was taken and did nothing."""
    store, file = shared_store
    body = {key: value.replace("{file}", file) if isinstance(value, str) else value for key, value in body.items()}
    with pytest.raises(openai.BadRequestError) as refused:
        ann.post(path.format(store=store), body=body, cast_to=object)
    assert refused.value.type == "invalid_request_error"


@pytest.fixture(scope="module")
def shared_store(library_service: Service) -> tuple[str, str]:
    with library_service.openai(library_service.keys.ann) as client:
        store, member = put(client, "faq.md", FAQ, attributes={"year": 2020, "team": "zoo"})
    return store, member.id


@pytest.mark.parametrize("name", ["../../../etc/passwd.txt", "..\\x.md", "a\nb.txt", "é" * 200 + ".txt"])
def test_a_files_name_is_never_a_path(ann: openai.OpenAI, library_service: Service, name: str) -> None:
    """A name with dots and slashes wrote outside of the tenant's folder."""
    file = ann.files.create(file=(name, b"Hello there."), purpose="assistants")
    assert not set(file.filename) & set("/\\\n")
    path = library_service.backend.library.blobs.path(library_service.backend.library.records.file("ann", file.id))
    assert path.stem == file.id and path.read_bytes() == b"Hello there."


def test_conversations_are_made_continued_read_and_deleted(ann: openai.OpenAI, bob: openai.OpenAI) -> None:
    """A conversation could not be taken up on another machine, or could be by another tenant."""
    said: Any = (("user", "When was the bridge built?"), ("assistant", "In 1874."))
    items: Any = [{"type": "message", "role": role, "content": content} for role, content in said]
    made = ann.conversations.create(metadata={"topic": "mills"}, items=items)
    assert ann.conversations.retrieve(made.id).metadata == {"topic": "mills"}
    turn: Any = {"model": "tiny", "messages": [{"role": "user", "content": "By whom?"}], "max_tokens": 4}
    turn |= {"extra_body": {"conversation": made.id}}
    told: Any = ann.chat.completions.create(**turn)
    assert told.ragspec["conversation"] == made.id and told.ragspec["kept"] is True
    items = list(ann.conversations.items.list(made.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant"]
    assert items[2].content[0].text == "By whom?"
    again = ann.conversations.create(items=[item.to_dict() for item in items])  # type: ignore[misc]
    assert [item.to_dict()["content"] for item in ann.conversations.items.list(again.id, order="asc")] == [
        item.to_dict()["content"] for item in items
    ]
    for refused in (bob.conversations.retrieve, bob.conversations.items.list, bob.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            refused(made.id)
    assert ann.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.conversations.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        ann.chat.completions.create(**turn)


def test_scores_are_from_nothing_to_one_and_keep_their_order() -> None:
    """A reranker's logits were cut at both ends: half of the passages had the score 0, the others 1."""
    logits = [-800.0, -3.0, -0.1, 0.02, 8.0, 800.0]
    scores = [unit_score(each, RetrieverConfig(reranker="some")) for each in logits]
    assert scores == sorted(scores) and len(set(scores)) == len(scores) and (scores[0], scores[-1]) == (0.0, 1.0)
    for score, mode, wanted in ((-0.5, "dense", 0.0), (3.0, "sparse", 0.75)):
        assert unit_score(score, RetrieverConfig(mode=mode)) == wanted  # type: ignore[arg-type]
    assert unit_score(2 / 61, RetrieverConfig(fusion="rank")) == 1.0
    # Learned fusion gives 2 to 20, which was read as a sum of reciprocal ranks: every score was 1
    scores = [unit_score(each, RetrieverConfig()) for each in (-2.5, 2.0, 10.0, 20.0, 28.7)]
    assert scores == sorted(scores) and scores[0] < 0.05 < 0.4 < scores[2] < 0.6 < 0.95 < scores[4] < 1.0


def test_passages_of_several_queries_are_merged_by_rank() -> None:
    """A query of many rare words had all its passages before the best one of another query."""
    first = [Passage("a", n, "", 0, 0, score=20.0 - n) for n in range(3)]
    second = [Passage("b", 0, "", 0, 0, score=4.0), Passage("a", 2, "", 0, 0, score=3.0)]
    found = merged([first, second], RetrieverConfig())
    assert [passage.id for passage, _ in found] == ["a#2", "a#0", "b#0", "a#1"]
    assert found[0][1] == unit_score(18.0, RetrieverConfig())
