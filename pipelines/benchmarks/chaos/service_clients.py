"""Clients of a service that fails: streams, a conversation and uploads, and what became of everything that was acknowledged.

Clients repeat what failed, as well-behaved ones do. An answer that failed may have been written or not; one that came may not be
missing, doubled or changed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from pipelines.benchmarks.clients import chat_body
from pipelines.benchmarks.small_service import MODEL

KINDS = ("streams", "turns", "documents")
_NUM_PROMPTS, _MAX_TOKENS = 6, 24
_TURNS = 8
"""Of one conversation; then another begins."""
_DELETED = 4
"""Every so many-th document is deleted again."""
_PAUSE_S, _OP_S, _UNDISTURBED_S, _SETTLED_S = 0.1, 60.0, 600.0, 300.0


class Refused(Exception):
    """The service answered with an error."""


class ServiceClients:
    """`succeeded_s`: for each kind, when the last operation that succeeded had begun. `marks`: lost, doubled, changed.

    `num_cut`: streams that began and were ended by the other side before their end.
    """

    def __init__(self, url: str, key: str, say: Callable[[str], None]) -> None:
        self._url, self._headers, self._say = url, {"Authorization": f"Bearer {key}"}, say
        self._expected: dict[int, str] = {}
        self._turns: dict[str, list[tuple[str, str]]] = {}  # acknowledged, by conversation
        self._unsure = set[str]()  # questions whose answer did not come, and ids whose deletion was not acknowledged
        self._documents: dict[str, tuple[str, str, str]] = {}  # by file id: store, name, text
        self._deleted = set[str]()
        self.succeeded_s = dict.fromkeys(KINDS, 0.0)
        self.counts, self.marks, self._number, self.num_cut = Counter[str](), Counter[str](), 0, 0

    async def learn(self) -> None:
        """The undisturbed text of every stream."""
        async with self._session() as session:
            for number in range(_NUM_PROMPTS):
                self._expected[number] = await self._stream(session, number)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with self._session(_OP_S) as session:
            await asyncio.gather(
                *(self._repeat("streams", lambda n=n: self._checked_stream(session, n)) for n in range(3)),
                self._repeat("turns", lambda: self._turn(session)),
                self._repeat("documents", lambda: self._document(session)),
            )

    def _session(self, timeout_s: float = _UNDISTURBED_S) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return aiohttp.ClientSession(self._url, headers=self._headers, timeout=timeout)

    async def _repeat(self, kind: str, operation: Callable[[], Awaitable[None]]) -> None:
        while True:
            begin_s = time.monotonic()
            try:
                await operation()
                self.succeeded_s[kind] = max(self.succeeded_s[kind], begin_s)
                self.counts[kind] += 1
            except (aiohttp.ClientError, TimeoutError, OSError, Refused):
                self.counts[f"{kind} repeated"] += 1
            await asyncio.sleep(_PAUSE_S)

    def _mark(self, name: str, reason: str) -> None:
        self.marks[name] += 1
        self._say(f"{name}: {reason}")

    async def _call(self, session: aiohttp.ClientSession, method: str, path: str, **body: Any) -> Any:
        """Raises: Refused, aiohttp.ClientError, TimeoutError."""
        async with session.request(method, path, **body) as reply:
            raw = await reply.read()
            if reply.status >= 300:
                raise Refused(f"{method} {path}: {reply.status} {raw[:200]!r}")
            return json.loads(raw) if reply.content_type == "application/json" else raw

    async def _checked_stream(self, session: aiohttp.ClientSession, first: int) -> None:
        self._number += 1
        number = (self._number + first) % _NUM_PROMPTS
        if (text := await self._stream(session, number)) != self._expected[number]:
            self._mark("changed", f"stream {number}: {text!r} is not {self._expected[number]!r}")

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> str:
        """Raises: Refused for one that does not come to its end; that may be cut at any place, but not changed."""
        options: Mapping[str, Any] = {"retrieval": False, "ignore_eos": True, "temperature": float(number % 2)}
        body = chat_body(MODEL, f"Number {number}.", max_tokens=_MAX_TOKENS, seed=number, **options)
        parts, expected, is_cut = list[str](), self._expected.get(number), False
        try:
            async with session.post("/v1/chat/completions", json=body) as reply:
                if reply.status != 200:
                    raise Refused(str(reply.status))
                is_cut = True
                async for line in reply.content:
                    if line.startswith(b"data: [DONE]"):
                        is_cut = False
                        return "".join(parts)
                    event = json.loads(line[6:]) if line.startswith(b"data: {") and line.endswith(b"}\n") else {}
                    parts += [choice["delta"].get("content") or "" for choice in event.get("choices", ())]
        except (TimeoutError, asyncio.CancelledError):
            is_cut = False
            raise
        finally:
            self.num_cut += is_cut
            if expected is not None and not expected.startswith("".join(parts)):
                self._mark("changed", f"stream {number} began otherwise: {''.join(parts)!r}")
        raise Refused("the stream ended early")

    async def _turn(self, session: aiohttp.ClientSession) -> None:
        name = next(reversed(self._turns), "")
        if not name or len(self._turns[name]) >= _TURNS:
            name = (await self._call(session, "POST", "/v1/conversations", json={}))["id"]
            self._turns[name] = []
        self._number += 1
        question = f"Question {self._number}?"
        self._unsure.add(question)
        body = chat_body(MODEL, question, max_tokens=4, conversation=name, ignore_eos=True, retrieval=False)
        answer = await self._call(
            session, "POST", "/v1/chat/completions", json=body | {"stream": False, "stream_options": None}
        )
        if not answer["ragspec"]["kept"]:
            raise Refused("the turn was not kept")
        self._unsure.discard(question)
        self._turns[name].append((question, answer["choices"][0]["message"]["content"]))

    async def _document(self, session: aiohttp.ClientSession) -> None:
        self._number += 1
        name, text = f"{self._number}.txt", f"Lighthouse {self._number} was lit in {1000 + self._number}."
        form = aiohttp.FormData({"purpose": "assistants"})
        form.add_field("file", text.encode(), filename=name)
        file = (await self._call(session, "POST", "/v1/files", data=form))["id"]
        self._documents[file] = "", name, text
        store = (await self._call(session, "POST", "/v1/vector_stores", json={"file_ids": [file]}))["id"]
        self._documents[file] = store, name, text
        if len(self._documents) % _DELETED == 0:
            self._unsure.add(file)
            await self._call(session, "DELETE", f"/v1/files/{file}")
            self._unsure.discard(file)
            self._deleted.add(file)

    async def check(self) -> None:
        """Compares what the service holds with what it acknowledged. Raises: Refused, aiohttp.ClientError."""
        async with self._session() as session:
            for name, turns in self._turns.items():
                await self._check_turns(session, name, turns)
            listed = await self._listed(session, "/v1/files")
            for file, count in Counter(each["id"] for each in listed).items():
                if count > 1:
                    self._mark("doubled", f"file {file}")
            for file, (store, _, text) in self._documents.items():
                await self._check_document(session, file, store, text, file in {each["id"] for each in listed})

    async def _listed(self, session: aiohttp.ClientSession, path: str, **query: Any) -> list[dict[str, Any]]:
        """All items of a list, page by page."""
        items, after = list[dict[str, Any]](), {}
        while True:
            page = await self._call(session, "GET", path, params={"limit": 100, "order": "asc", **query, **after})
            items += page["data"]
            if not page["has_more"]:
                return items
            after = {"after": items[-1]["id"]}

    async def _check_turns(self, session: aiohttp.ClientSession, name: str, turns: list[tuple[str, str]]) -> None:
        items = await self._listed(session, f"/v1/conversations/{name}/items")
        said = [item["content"][0]["text"] for item in items]
        found = list(zip(said[::2], said[1::2], strict=True))
        for question, count in Counter(question for question, _ in found).items():
            if count > 1:
                self._mark("doubled", f"{question} in {name}")
        kept = [turn for turn in found if turn[0] not in self._unsure]
        answers = dict(kept)
        for question, answer in turns:
            if question not in answers:
                self._mark("lost", f"{question} in {name}")
            elif answers[question] != answer:
                self._mark("changed", f"{question} in {name}: {answers[question]!r} is not {answer!r}")
        if sorted(kept) == sorted(turns) and kept != turns:
            self._mark("changed", f"the order of {name}")

    async def _check_document(
        self, session: aiohttp.ClientSession, file: str, store: str, text: str, is_listed: bool
    ) -> None:
        if file in self._deleted or file in self._unsure:
            if is_listed and file in self._deleted:
                self._mark("doubled", f"{file} was deleted, and is there")
            return
        if not is_listed:
            self._mark("lost", f"file {file}")
            return
        if (content := await self._call(session, "GET", f"/v1/files/{file}/content")) != text.encode():
            self._mark("changed", f"file {file}: {content!r}")
        if store and await self._is_read(session, store, file):
            found = await self._call(session, "POST", f"/v1/vector_stores/{store}/search", json={"query": text})
            texts = [part["text"] for each in found["data"] for part in each["content"]]
            if texts != [text]:
                self._mark("lost" if text not in texts else "doubled", f"{file} is found as {texts}")

    async def _is_read(self, session: aiohttp.ClientSession, store: str, file: str) -> bool:
        """Waits until the file is in the index. One that failed, because a disk was full, is attached again, once it is not."""
        deadline = time.monotonic() + _SETTLED_S
        while time.monotonic() < deadline:
            try:
                member = await self._call(session, "GET", f"/v1/vector_stores/{store}/files/{file}")
            except Refused:  # the store was acknowledged before its file was attached
                member = {"status": "failed"}
            if member["status"] == "completed":
                return True
            if member["status"] == "failed":
                self.counts["documents attached again"] += 1
                await self._call(session, "POST", f"/v1/vector_stores/{store}/files", json={"file_id": file})
            await asyncio.sleep(_PAUSE_S)
        self._mark("lost", f"{file} is not read")
        return False
