"""Every error in the words of the protocol that is spoken, with the status that makes a client do the right thing."""

import inspect

import httpx2 as httpx
import pytest

from ragspec import errors
from services.errors import ApiError, api_error, validation_error

ERRORS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.RagspecError)]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.PromptTooLong(900, 800, 100), 400, "context_length_exceeded"),
        (errors.InputError("n must be a number"), 400, None),
        (errors.NotFound("no such file"), 404, "not_found"),
        (errors.Overloaded("too many wait"), 429, "server_overloaded"),
        (errors.EngineClosed("closed"), 503, "unavailable"),
        (errors.ReplicaLost("node 7 at 10.0.0.7"), 503, "unavailable"),
        (errors.RankLost("rank 3"), 503, "unavailable"),
        (errors.RetrievalError("shard 2 at 10.0.0.7"), 503, "unavailable"),
        (errors.StoreCorrupt("/data/index/segment-3"), 503, "unavailable"),
        (errors.SaveError("/data/index: no space"), 507, "insufficient_storage"),
        (errors.NoRoom("there is room for 7 bytes more"), 507, "insufficient_storage"),
        (errors.IndexBusy("/data/index is being written"), 503, "unavailable"),
        (errors.EngineError("KeyError: 'what a user wrote'"), 500, "generation_failed"),
        (errors.ConfigError("/etc/ragspec.yaml"), 500, "internal_error"),
        (KeyError("what a user wrote"), 500, "internal_error"),
    ],
)
def test_an_error_has_the_status_that_its_cause_calls_for(error: Exception, status: int, code: str | None) -> None:
    """A client repeats what can never work, or gives up what would have; or learns paths, addresses and others' texts."""
    told = api_error(error)
    assert (told.status, told.code) == (status, code)
    if status in (429, 503):
        assert told.retry_after_s
    if isinstance(error, errors.NoRoom):
        assert told.message == "there is room for 7 bytes more", "nobody learns that a file has to go"
    elif status >= 500:
        assert not any(word in told.message for word in ("/data", "10.0.0.7", "wrote", "/etc", "KeyError"))
    else:
        assert told.message == str(error)
        assert told.param == {"n must be a number": "n"}.get(
            told.message, "messages" if code == "context_length_exceeded" else None
        )


@pytest.mark.parametrize("kind", ERRORS)
def test_no_error_of_the_library_is_unknown(kind: type[errors.RagspecError]) -> None:
    """A new error of the tree is told as a defect of the server although it is the client's."""
    error = kind(1, 2) if kind is errors.PromptTooLong else kind("why")
    status = api_error(error).status
    assert (status < 500) is isinstance(error, errors.InputError | errors.Overloaded)


def test_bodies_are_openai_s_and_under_v2_languagetool_s() -> None:
    """A client of one protocol reads the other's error, and shows nothing."""
    error = ApiError(429, "later", retry_after_s=0.2, param="x")
    response = error.response("/v1/models")
    assert (
        response.body
        == b'{"error": {"message": "later", "type": "requests", "param": "x", "code": "rate_limit_exceeded"}}'
    )
    assert response.headers["retry-after"] == "1" and response.headers["content-type"] == "application/json"
    for path in ("/v2", "/v2/check"):
        response = error.response(path)
        assert response.body == b"Error: later" and response.headers["content-type"] == "text/plain; charset=utf-8"
    assert bytes(error.response("/v2x").body).startswith(b"{")


def test_a_message_with_any_character_can_be_sent() -> None:
    """An error about half a surrogate pair breaks on the half that it quotes."""
    for path in ("/v1/x", "/v2/x"):
        response = ApiError(400, "not \ud800 \0 é").response(path)
        assert int(response.headers["content-length"]) == len(response.body)


def test_a_fault_in_a_field_names_the_field() -> None:
    """A client that builds bodies by program cannot tell which part is wrong."""
    told = validation_error([{"loc": ("body", "messages", 0, "role"), "msg": "Field required", "type": "missing"}])
    assert (told.status, told.param, told.message) == (400, "messages.0.role", "messages.0.role: Field required")
    assert validation_error([]).status == 400


def test_what_is_not_served_is_said_in_the_same_words(client: httpx.Client) -> None:
    """The framework's own errors have another shape, which clients do not read."""
    missing, wrong = client.get("/v1/nothing"), client.delete("/v1/models")
    invalid = client.post("/v1/embeddings", json={"input": "x"})
    plain = client.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"]
    assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "model")
    assert plain.status_code == 404 and plain.text.startswith("Error: ")
