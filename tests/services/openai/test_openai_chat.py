"""Chat completions as the official client sees them, against a real server."""

import asyncio
import json
from collections import defaultdict
from typing import Any

import openai
import pytest
import raw_http
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from service_parts import Service, Serving

from ragspec.rag.wording import NOTHING_CLOSE

QUESTIONS = ("Who built the bridge?", "What does a mill need?", "Where is the café 🏭 ?")


def ask(api: openai.OpenAI, question: str = QUESTIONS[0], **options: Any) -> ChatCompletion:
    return api.chat.completions.create(**asked(question, **options))


def stream(api: openai.OpenAI, question: str = QUESTIONS[0], **options: Any) -> list[ChatCompletionChunk]:
    return list(api.chat.completions.create(**asked(question, **options), stream=True))


def asked(question: str, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 16, "seed": 5}
    return body | options


def texts(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    told: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
    return dict(told)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_and_streams_change_no_text(api: openai.OpenAI, temperature: float) -> None:
    """With drafts, or told piece by piece, a request of the same seed got another text."""
    for question in QUESTIONS:
        options: dict[str, Any] = {"temperature": temperature, "n": 2, "max_tokens": 20, "stop": ["valley"]}
        plain = ask(api, question, **options, extra_body={"speculation": False})
        drafted = ask(api, question, **options, extra_body={"speculation": {"drafters": ["copy"]}})
        told = texts(stream(api, question, **options))
        contents = [choice.message.content for choice in plain.choices]
        assert contents == [choice.message.content for choice in drafted.choices] == [told[0], told[1]]
        assert (contents[0] == contents[1]) == (temperature == 0.0)
        assert plain.system_fingerprint == drafted.system_fingerprint == "tiny"


def test_an_answer_has_openais_shape(api: openai.OpenAI, service: Service) -> None:
    """A field that clients rely on was missing, or of another type: the client's own models check it."""
    got = ask(api, logprobs=True, top_logprobs=2)
    (choice,) = got.choices
    ChatCompletion.model_validate(got.model_dump(), strict=True)
    assert (got.object, got.model, choice.finish_reason, choice.index) == ("chat.completion", "tiny", "length", 0)
    assert choice.message.role == "assistant" and choice.message.annotations == []
    assert got.usage is not None and got.usage.completion_tokens == 16
    assert got.usage.total_tokens == got.usage.prompt_tokens + 16
    told = got.model_extra["ragspec"]
    assert [passage["number"] for passage in told["passages"]] == [1, 2, 3]
    assert told["question"] == QUESTIONS[0] and told["seed"] == 5 and told["citations"] == []
    assert (told["dropped_passages"], told["dropped_turns"], told["missing_segments"]) == (0, 0, [])
    assert told["index_generation"]
    assert "metrics" not in got.model_extra


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schemas_are_followed_with_drafts_and_without(api: openai.OpenAI, temperature: float) -> None:
    """JSON mode that is accepted and does nothing; a draft that leads around the schema."""
    schema = {"type": "object", "properties": {"year": {"enum": [1874, 1921]}}, "required": ["year"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "built", "schema": schema, "strict": True}}
    for question in QUESTIONS:
        options: dict[str, Any] = {"temperature": temperature, "response_format": form, "max_tokens": 40}
        on = ask(api, question, **options).choices[0]
        off = ask(api, question, **options, extra_body={"speculation": False}).choices[0]
        assert on.message.content == off.message.content and on.finish_reason == "stop"
        assert json.loads(on.message.content or "")["year"] in (1874, 1921)
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be followed"):
        bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "objekt"}}}
        ask(api, response_format=bad)


def test_a_question_that_nothing_is_close_to_is_answered_without_the_engine(serving: Serving) -> None:
    """An answer from whatever was nearest, or a stream that waits for an engine that was never asked."""
    with serving(**{"retriever.abstain_below": 0.9999}) as careful, careful.openai() as client:
        whole = ask(client, n=2)
        assert [choice.message.content for choice in whole.choices] == [whole.choices[0].message.content] * 2
        assert (whole.choices[0].message.content or "").startswith(NOTHING_CLOSE)
        assert whole.model_extra["ragspec"]["abstained"] and whole.model_extra["ragspec"]["sentences"] == []
        assert whole.usage.completion_tokens == 0 and whole.choices[0].finish_reason == "stop"
        assert texts(stream(client)) == {0: whole.choices[0].message.content}
        free = ask(client, extra_body={"retrieval": False})
        assert free.usage.completion_tokens > 0 and not free.model_extra["ragspec"]["abstained"]
        assert whole.system_fingerprint == free.system_fingerprint  # also where no engine said it


def test_logprobs_are_of_the_texts_own_bytes(api: openai.OpenAI) -> None:
    """Bytes of tokens did not add up to the content, or a token was not among its own alternatives at temperature 0."""
    ascii_only = {str(byte): -100 for byte in range(130, 260)}
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "logit_bias": ascii_only}
    got = ask(api, **options).choices[0]
    assert got.logprobs is not None and got.logprobs.content is not None
    said = b"".join(bytes(each.bytes or []) for each in got.logprobs.content)
    assert said.decode("utf-8", "ignore") == (got.message.content or "").replace("\ufffd", "")
    for each in got.logprobs.content:
        logprobs = [top.logprob for top in each.top_logprobs]
        assert len(logprobs) == 3 and logprobs == sorted(logprobs, reverse=True)
    chunks = stream(api, **options)
    told = [each for c in chunks for choice in c.choices if choice.logprobs for each in choice.logprobs.content or []]
    assert told == got.logprobs.content


def test_a_stream_has_openais_chunks(api: openai.OpenAI) -> None:
    """No role first, two ends, usage where none was asked for, or none where it was."""
    chunks = stream(api, n=2, stream_options={"include_usage": True}, extra_body={"metrics": True})
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunks[i].choices[0].delta.role for i in (0, 1)] == ["assistant", "assistant"]
    assert len(chunks[0].model_extra["ragspec"]["passages"]) == 3
    ends = [(choice.index, choice.finish_reason) for c in chunks for choice in c.choices if choice.finish_reason]
    assert sorted(ends) == [(0, "length"), (1, "length")]
    assert [chunk.usage is not None for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32
    assert chunks[-1].model_extra["metrics"] is None
    assert all(chunk.model_extra["obfuscation"] for chunk in chunks if chunk.choices)
    bare = stream(api, stream_options={"include_obfuscation": False})
    assert all(chunk.usage is None and "obfuscation" not in chunk.model_extra for chunk in bare)
    assert bare[-1].choices[0].delta.model_extra["annotations"] == []
    told = bare[-1].model_extra["ragspec"]
    assert told["citations"] == told["unknown_quotations"] == [] and len(told["sentences"]) == 1


def test_metrics_are_for_trusted_keys(api: openai.OpenAI, service: Service) -> None:
    """Anyone could read off the counters whose text was drafted from."""
    chunks = stream(api, max_tokens=24, extra_body={"metrics": True})
    metrics = chunks[-1].model_extra["metrics"]
    counted = metrics["speculative_decoding"]
    steps = counted["acceptance_histogram"]
    assert sum(steps) == counted["num_spec_steps"]
    assert sum(count * (accepted + 1) for accepted, count in enumerate(steps)) == 24
    assert sum(metrics["drafters"].values()) == counted["num_accepted_draft_tokens"]
    assert metrics["time_to_first_token_ms"] > 0 and metrics["generation_time_ms"] > 0
    assert metrics["prefill_time_ms"] + metrics["queue_time_ms"] == pytest.approx(metrics["time_to_first_token_ms"])
    assert metrics["retrieval_time_ms"] >= metrics["encode_time_ms"] + metrics["search_time_ms"] >= 0
    progress = [chunk.model_extra["metrics"] for chunk in chunks[1:-1]]
    assert progress[-1] == {"num_output_tokens": 24, "num_steps": counted["num_spec_steps"]}
    whole = ask(api, max_tokens=24, extra_body={"metrics": True})
    assert whole.model_extra["metrics"].keys() == metrics.keys()
    with service.openai(service.keys.ann) as ann:
        assert "metrics" not in ask(ann, extra_body={"metrics": True}).model_extra
        assert not any("metrics" in chunk.model_extra for chunk in stream(ann, extra_body={"metrics": True}))
        completion = ann.completions.create(model="tiny", prompt="The mill", extra_body={"metrics": True})
        assert "metrics" not in completion.model_extra


def test_predicted_output_is_drafted_from_and_counted(api: openai.OpenAI) -> None:
    """`prediction` was accepted and did nothing, or changed the text."""
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "logit_bias": {"1": -100}}
    plain = ask(api, **params)
    content = plain.choices[0].message.content or ""
    parts = [{"type": "text", "text": content[:9]}, {"type": "text", "text": content[9:]}]
    predicted = ask(api, **params, prediction={"type": "content", "content": parts})
    wrong = ask(api, **params, prediction={"type": "content", "content": "Nothing of the kind will be said here."})
    assert plain.choices[0].message.content == predicted.choices[0].message.content == wrong.choices[0].message.content
    details = [got.usage and got.usage.completion_tokens_details for got in (plain, predicted, wrong)]
    counts = [(d.accepted_prediction_tokens, d.rejected_prediction_tokens) for d in details if d]
    assert counts[0] == (0, 0)
    assert counts[1][0] is not None and counts[1][0] > 0
    assert {got.usage.completion_tokens for got in (plain, predicted, wrong) if got.usage} == {40}


def test_what_was_read_before_is_cached_and_said_so(api: openai.OpenAI) -> None:
    """A client could not see what of its prompt was known, or another salt's prompt was."""
    first, second, salted = (ask(api, "Say it again.", extra_body=extra) for extra in ({}, {}, {"cache_salt": "x"}))
    cached = [got.usage.prompt_tokens_details.cached_tokens for got in (first, second, salted)]  # type: ignore[union-attr]
    assert cached[1] == second.usage.prompt_tokens - 1  # type: ignore[union-attr]
    other = ask(api, "What is it?", extra_body={"cache_salt": "y"}).usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
    assert other == cached[2] < cached[0] < cached[1], "the instruction alone is everybody's"


def test_documents_may_be_chosen_or_left_out(api: openai.OpenAI) -> None:
    """A filter was not heeded, or an answer without retrieval had passages."""

    def passages(retrieval: Any) -> list[str]:
        got = ask(api, extra_body={"retrieval": retrieval})
        return [passage["document_id"] for passage in got.model_extra["ragspec"]["passages"]]

    assert passages(False) == []
    assert len(passages({"num_passages": 1})) == 1 and len(passages(True)) == 3
    only = {"type": "eq", "key": "document.id", "value": "all-2"}
    assert passages({"filter": only}) == ["all-2"]
    with pytest.raises(openai.NotFoundError):
        passages({"vector_store_ids": ["vs_unknown"]})


def test_a_vector_store_answers_with_its_own_files(service: Service) -> None:
    """A store was accepted and the whole index searched; another tenant's store could be named."""

    def passages(api: openai.OpenAI, retrieval: Any) -> list[str]:
        got = ask(api, "What is the fare?", extra_body={"retrieval": retrieval})
        return [passage["text"] for passage in got.model_extra["ragspec"]["passages"]]

    with service.openai(service.keys.ann) as ann, service.openai(service.keys.bob) as bob:
        told = ann.files.create(file=("fares.txt", b"The fare over the bridge is two shillings."), purpose="assistants")
        store = ann.vector_stores.create(name="fares", file_ids=[told.id])
        file = ann.vector_stores.files.poll(told.id, vector_store_id=store.id, poll_interval_ms=50)
        assert file.status == "completed"
        only = {"vector_store_ids": [store.id]}
        assert passages(ann, only) == ["The fare over the bridge is two shillings."]
        assert passages(ann, only | {"filter": {"type": "eq", "key": "document.id", "value": "all-2"}}) == []
        seen = {tenant: passages(api, {"num_passages": 64}) for tenant, api in (("ann", ann), ("bob", bob))}
        for tenant, own, other in (("ann", "swordfish", "Mondays"), ("bob", "Mondays", "swordfish")):
            assert any(own in text for text in seen[tenant]) and not any(other in text for text in seen[tenant])
        assert not any("fare" in text for text in seen["bob"])
        with pytest.raises(openai.NotFoundError):
            passages(bob, only)


@pytest.mark.parametrize(("dialect", "field"), [("anthropic", "content_blocks"), ("cohere", "citations")])
def test_citations_come_in_the_dialect_asked_for(api: openai.OpenAI, dialect: str, field: str) -> None:
    """A dialect was accepted and OpenAI's annotations came."""
    message = ask(api, extra_body={"citations": dialect}).choices[0].message
    assert field in message.model_extra and message.annotations is None
    last = stream(api, extra_body={"citations": dialect})[-1].choices[0]
    assert field in last.delta.model_extra and last.finish_reason == "length"


def test_a_prompt_that_cannot_fit_is_refused_with_numbers(api: openai.OpenAI) -> None:
    """A long message was cut in silence, or the context overflowed in the engine."""
    with pytest.raises(openai.BadRequestError, match="at most 1008 fit the context") as refused:
        ask(api, "mill " * 2000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("options", "status", "code", "param"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions"),
        ({"extra_body": {"speculation": {"drafters": ["magic"]}}}, 400, None, None),
        ({"extra_body": {"retrieval": {"filter": {"type": "near"}}}}, 400, None, None),
        ({"logit_bias": {"999999": 1}}, 400, None, None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, None, None),
    ],
)
def test_refusals_are_openais_errors(
    api: openai.OpenAI, options: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    """A wrong request was answered 500, or began a stream before it was refused."""
    for way in (ask, stream):
        with pytest.raises(openai.APIStatusError) as refused:
            way(api, **options)
        assert (refused.value.status_code, refused.value.code, refused.value.param) == (status, code, param)
        assert refused.value.type == "invalid_request_error"


async def test_the_asynchronous_client_streams_many_at_once(service: Service) -> None:
    """Streams that run at once got each other's pieces."""

    async def one(api: openai.AsyncOpenAI, question: str) -> str:
        pieces = []
        async for chunk in await api.chat.completions.create(**asked(question), stream=True):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(pieces)

    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.keys.trusted) as api:
        together = await asyncio.gather(*(one(api, question) for question in QUESTIONS * 3))
        together, alone = list(together), [await one(api, question) for question in QUESTIONS]
    assert together == alone * 3 and len(set(alone)) == 3


def test_short_chunks_share_messages(service: Service) -> None:
    """The role, the end, the usage and the last line each took a message of their own to the socket, six for one token."""
    body = asked("When?", stream=True, max_tokens=1)
    content = json.dumps(body | {"retrieval": False, "stream_options": {"include_usage": True}}).encode()
    reply = raw_http.ask(service.url, service.json_head(f"Content-Length: {len(content)}") + content)
    sizes, rest = list[int](), reply.body
    while rest:  # HTTP's own chunks, each a message
        size, _, rest = rest.partition(b"\r\n")
        sizes.append(int(size, 16))
        rest = rest[sizes[-1] + 2 :]
    assert reply.body.count(b"data: ") >= 4 and sizes[-1] == 0 and len(sizes) <= 3
