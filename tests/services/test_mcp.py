"""Tools for agents, called by the client of the official SDK: in process, over HTTP with keys, and over stdio."""

import base64
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from service_parts import MODEL, Service

pytest.importorskip("mcp", reason="the package mcp is not installed")

from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from services.keys import Caller
from services.mcp import DocumentTools

QUESTION = "Who crosses the bridge?"


@asynccontextmanager
async def over_http(service: Service, key: str, mode: str = "auto") -> AsyncIterator[Client]:
    async with (
        httpx.AsyncClient(headers=service.headers(key), timeout=120.0) as http,
        Client(streamable_http_client(f"{service.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@asynccontextmanager
async def in_process(service: Service, tenant: str, **options: Any) -> AsyncIterator[Client]:
    async with Client(DocumentTools(service.backend, Caller("mcp", tenant), **options).server) as client:
        yield client


async def called(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    (part,) = result.content
    return str(part.text)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_sdks_client_calls_every_tool_over_http(service: Service, mode: str) -> None:
    """A tool that is listed and cannot be called; a client of the older protocol that is refused; a quote that was changed."""
    async with over_http(service, service.keys.ann, mode) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"search", "ask", "get_passage", "list_documents", "add_document"}
        found = await called(client, "search", query="the password of the mill", num_passages=2)
        assert len(found["passages"]) == 2
        for passage in found["passages"]:
            where = {name: passage[name] for name in ("document_id", "start", "end")}
            assert (await called(client, "get_passage", **where, around=0))["text"] == passage["text"]
        answer = await called(client, "ask", question=QUESTION, max_tokens=24, seed=7)
        again = await called(client, "ask", question=QUESTION, max_tokens=24, seed=7)
        assert answer["answer"] == again["answer"] and answer["passages"] and answer["seed"] == 7
        for citation in answer["citations"]:
            where = {"start": citation["document_start"], "end": citation["document_end"], "around": 0}
            source = await called(client, "get_passage", document_id=citation["document_id"], **where)
            assert source["text"] == citation["text"]
        content = base64.b64encode(b"The ferry to Oster leaves at nine.").decode()
        added = await called(client, "add_document", name=f"ferry-{mode}.md", content=content, encoding="base64")
        assert added["status"] == "completed"
        listed = await called(client, "list_documents", limit=1000)
        assert any(added["id"] in document["id"] for document in listed["documents"])
        found = await called(client, "search", query="When does the ferry to Oster leave?", num_passages=3)
        assert any("ferry" in passage["text"] for passage in found["passages"])


async def test_the_answer_is_that_of_the_api(service: Service) -> None:
    """A second path to answers, with a prompt of its own."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "seed": 3}
    with service.client(service.keys.ann) as client:
        told = client.post("/v1/chat/completions", json=body).json()
    async with over_http(service, service.keys.ann) as agent:
        answer = await called(agent, "ask", question=QUESTION, max_tokens=24, seed=3)
    assert answer["answer"] == told["choices"][0]["message"]["content"]
    assert answer["passages"] == told["ragspec"]["passages"]


async def test_a_tenant_sees_its_own_documents_and_those_of_everybody(service: Service) -> None:
    """Another tenant's note in a search, a list or a span, by a key or at the end of a pipe."""
    connected: Callable[..., AbstractAsyncContextManager[Client]]
    for connected, who in ((over_http, service.keys.bob), (in_process, "bob")):
        async with connected(service, who) as client:
            found = await called(client, "search", query="the password of the old mill", num_passages=64)
            ids = {passage["document_id"] for passage in found["passages"]}
            listed = {row["id"] for row in (await called(client, "list_documents", limit=1000))["documents"]}
            assert "bob-1" in ids & listed and "ann-1" not in ids | listed
            assert "no document 'ann-1'" in await refused(client, "get_passage", document_id="ann-1", start=0, end=4)


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [
        ("search", {}, "query"),
        ("search", {"query": "mill", "top": 3}, "top"),
        ("search", {"query": "mill", "filter": {"type": "like"}}, "filter"),
        ("ask", {"question": "x", "num_passages": 10**9}, "num_passages"),
        ("ask", {"question": "x", "max_tokens": 10**6}, "context"),
        ("ask", {"question": "why " * 1000}, "context"),
        ("get_passage", {"document_id": "all-0", "start": 5, "end": 4}, "characters"),
        ("get_passage", {"document_id": "all-0", "start": 0, "end": 10**9}, "characters"),
        ("add_document", {"name": "../../etc/passwd", "content": "x"}, "path"),
        ("add_document", {"path": "/etc/passwd"}, "name"),
        ("add_document", {"name": "a.md", "content": "%", "encoding": "base64"}, "base64"),
        ("add_document", {"name": "a.exe", "content": "MZ"}, "not indexed"),
        ("remove_everything", {}, "no tool"),
    ],
)
async def test_a_wrong_call_is_an_error_that_says_why(
    service: Service, tool: str, arguments: dict[str, Any], reason: str
) -> None:
    """A crash of the server, an empty result, a file of the server's disk."""
    async with over_http(service, service.keys.ann) as client:
        assert reason in await refused(client, tool, **arguments)


async def test_a_result_too_large_to_read_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten megabytes in the context of an agent's model."""
    text = "The tide at Oster is high. " * 400_000
    async with in_process(service, "large") as client:
        content = base64.b64encode(text.encode()).decode()
        assert "at most" in await refused(client, "add_document", name="x.txt", content=content, encoding="base64")
        monkeypatch.setattr("services.mcp._MAX_RESULT_CHARS", 10_000)
        added = await called(client, "add_document", name="tide.txt", content=text[:21_000])
        listed = (await called(client, "list_documents", limit=1000))["documents"]
        (row,) = [row for row in listed if added["id"] in row["id"]]
        told = await refused(client, "get_passage", document_id=row["id"], start=0, end=20_000)
        assert "at most 10000" in told


async def test_without_a_valid_key_nothing_is_listed(service: Service) -> None:
    """Tools behind the gateway's back; an error that the client cannot read."""
    async with httpx.AsyncClient(base_url=service.url) as client:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        reply = await client.post("/mcp", json=call, headers=service.headers("rs-wrong"))
        assert reply.status_code == 401 and "valid key" in reply.json()["error"]["message"]
        assert reply.json()["jsonrpc"] == "2.0"
        assert (await client.get("/mcp", headers=service.headers())).status_code == 405
    with pytest.raises((MCPError, ExceptionGroup, httpx.HTTPStatusError)):
        async with over_http(service, "rs-wrong") as agent:
            await agent.list_tools()


async def test_over_stdio_an_agent_reads_and_adds_only_where_that_is_allowed(service: Service) -> None:
    """An agent that changes the index of its user unasked."""
    async with in_process(service, "ann", may_add=False) as client:
        assert "add_document" not in {tool.name for tool in (await client.list_tools()).tools}
        assert "no tool" in await refused(client, "add_document", name="a.md", content="x")


@pytest.mark.slow
async def test_the_command_speaks_over_stdio_alone(parts: Path, tmp_path: Path) -> None:
    """A line of progress on stdout, which ends the session."""
    (config := tmp_path / "tiny.yaml").write_text("engine: {max_kv_tokens: 4096, num_threads: 1}")
    paths = {"config": config, "target": parts / "model", "index": parts / "index", "data": tmp_path / "data"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    command = ["-m", "ragspec.cli", "mcp", *options, "--tenant", "ann"]
    server = StdioServerParameters(command=sys.executable, args=command, env={**os.environ})
    async with Client(server, read_timeout_seconds=120.0) as client:
        assert len((await client.list_tools()).tools) == 4
        found = await called(client, "search", query="the password of the old mill")
        assert "ann-1" in {passage["document_id"] for passage in found["passages"]}
        assert (await called(client, "ask", question=QUESTION, max_tokens=8))["answer"]
