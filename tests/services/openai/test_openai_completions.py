"""Completions, embeddings and models as the official client sees them, against a real server."""

import asyncio
import base64
import threading
import time
from typing import Any

import numpy as np
import openai
import pytest
from letter_encoder import DIMENSION, LetterEncoder
from openai.types import Completion
from service_parts import CONTEXT, Service

from services.openai.routes import Embeddings
from services.openai.types import EmbeddingBody


def complete(api: openai.OpenAI, prompt: Any, **options: Any) -> Completion:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "seed": 4} | options
    got: Completion = api.completions.create(**body)
    return got


def test_choices_are_numbered_prompt_by_prompt(api: openai.OpenAI) -> None:
    """The second prompt's choices came under the first one's numbers, or its usage was left out."""
    prompts = ["The river rises", "A mill needs"]
    both = complete(api, prompts, n=2, temperature=1.0)
    alone = [complete(api, prompt, n=2, temperature=1.0) for prompt in prompts]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [choice.text for got in alone for choice in got.choices]
    assert all(got.usage for got in (both, *alone))
    assert both.usage and both.usage.completion_tokens == 48
    assert both.usage.prompt_tokens == sum(got.usage.prompt_tokens for got in alone if got.usage)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_and_streams_change_no_completion(api: openai.OpenAI, temperature: float) -> None:
    """With drafts, or told piece by piece, a request of the same seed got another text."""
    prompt = "The bridge was built by the people of the valley. The bridge was built by"
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 24, "n": 2}
    drafted = complete(api, prompt, **options)
    plain = complete(api, prompt, **options, extra_body={"speculation": False})
    told = {0: "", 1: ""}
    for chunk in api.completions.create(model="tiny", prompt=prompt, seed=4, stream=True, **options):
        for choice in chunk.choices:
            told[choice.index] += choice.text
    assert [choice.text for choice in drafted.choices] == [choice.text for choice in plain.choices]
    assert [choice.text for choice in drafted.choices] == [told[0], told[1]]


def test_token_ids_are_the_prompt_they_are(api: openai.OpenAI, service: Service) -> None:
    """Token ids were decoded and read again as something else, or text as a control token."""
    tokenizer = service.backend.target.prompts.tokenizer
    ids = tokenizer("A mill needs water")["input_ids"]
    as_text, as_ids = complete(api, "A mill needs water"), complete(api, ids)
    assert as_text.choices[0].text == as_ids.choices[0].text
    assert as_text.usage == as_ids.usage or (as_ids.usage and as_ids.usage.prompt_tokens == len(ids))
    spelt = complete(api, "</s>")
    assert spelt.usage and spelt.usage.prompt_tokens == 4
    assert complete(api, [[1], ids]).choices[1].text == as_ids.choices[0].text


def test_logprobs_have_the_old_shape(api: openai.OpenAI) -> None:
    """Offsets did not fit the text; a list was shorter than the tokens."""
    options: dict[str, Any] = {"logprobs": 2, "max_tokens": 30}
    got = complete(api, "The old mill", **options).choices[0]
    assert got.logprobs is not None and got.logprobs.tokens and got.logprobs.text_offset
    assert len(got.logprobs.tokens) == 30
    pairs = zip(got.logprobs.tokens, got.logprobs.text_offset, strict=True)
    whole = [pair for pair in pairs if "bytes:" not in pair[0]]
    assert len(whole) > 5 and all(got.text[offset:].startswith(token) for token, offset in whole)
    assert got.logprobs.top_logprobs and all(len(top) == 2 for top in got.logprobs.top_logprobs)
    offsets = []
    for chunk in api.completions.create(model="tiny", prompt="The old mill", seed=4, stream=True, **options):
        offsets += [at for choice in chunk.choices if choice.logprobs for at in choice.logprobs.text_offset or []]
    assert offsets == got.logprobs.text_offset


@pytest.mark.parametrize(
    ("path", "options", "code", "param"),
    [
        ("completions", {"max_tokens": 1020, "prompt": "The mill of the old"}, "context_length_exceeded", "prompt"),
        ("completions", {"prompt": [1, 999_999]}, None, None),
        ("completions", {"prompt": ""}, None, None),
        ("completions", {"prompt": "a", "suffix": "end"}, "unsupported_parameter", "suffix"),
        ("completions", {"prompt": "a", "model": "davinci"}, "model_not_found", "model"),
        ("embeddings", {"input": ["x", " "]}, None, None),
        ("embeddings", {"input": ["x", "word " * 300]}, "context_length_exceeded", "input.1"),
        ("embeddings", {"input": "x", "dimensions": DIMENSION - 1}, None, "dimensions"),
    ],
)
def test_what_cannot_be_is_refused_as_openai_does(
    api: openai.OpenAI, path: str, options: dict[str, Any], code: str | None, param: str | None
) -> None:
    """A prompt or a text was cut in silence; a wrong request ended with 500."""
    with pytest.raises(openai.APIStatusError) as refused:
        api.post(f"/{path}", body={"model": "tiny"} | options, cast_to=object)
    assert refused.value.status_code == (404 if code == "model_not_found" else 400)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_embeddings_are_the_encoders(api: openai.OpenAI, service: Service, encoding_format: Any) -> None:
    """Vectors in another order, cut, or of another byte order."""
    texts = ["The river", "Die Mühle 🏭", "x", *(f"the mill of {number}" for number in range(97))]
    got = api.embeddings.create(model="tiny", input=texts, encoding_format=encoding_format)
    wanted = LetterEncoder().encode(texts)
    for entry, vector in zip(got.data, wanted, strict=True):
        told: Any = entry.embedding
        if encoding_format == "base64":
            told = np.frombuffer(base64.b64decode(told), "<f4")
        np.testing.assert_array_equal(np.asarray(told, np.float32), vector)
    assert [entry.index for entry in got.data] == list(range(100))
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(LetterEncoder().count_tokens(texts))
    one = api.embeddings.create(model="letters", input="x", dimensions=DIMENSION)  # by default in base64
    np.testing.assert_array_equal(np.float32(one.data[0].embedding), wanted[2])


async def test_embeddings_that_nobody_waits_for_end_with_their_slice(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent two thousand texts and left kept the encoder busy for minutes, for everybody."""
    encoder, encoded, first = service.backend.encoder, list[int](), threading.Event()
    encode = encoder.encode

    def slowly(texts: Any, kind: Any) -> Any:
        encoded.append(len(texts))
        first.set()
        time.sleep(0.05)
        return encode(texts, kind)

    monkeypatch.setattr(encoder, "encode", slowly)
    embeddings = Embeddings(service.backend)
    body = EmbeddingBody.model_validate({"model": "tiny", "input": ["a mill"] * 2_000})

    waiting = asyncio.create_task(embeddings.encode(body))
    await asyncio.to_thread(first.wait)
    waiting.cancel()
    await asyncio.sleep(0.2)
    assert sum(encoded) < 200


def test_models_are_listed_by_name(api: openai.OpenAI) -> None:
    """The first model of the list, which clients take, was not the one that answers."""
    models = api.models.list().data
    assert [model.id for model in models] == ["tiny", "letters"]
    assert api.models.retrieve("tiny") == models[0]
    assert models[0].model_extra["max_model_len"] == CONTEXT
    with pytest.raises(openai.NotFoundError) as refused:
        api.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"
