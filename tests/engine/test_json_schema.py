"""Outputs that follow a JSON schema: valid, and the same with drafts and without."""

import json
from typing import Any
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
import torch
from drafters import add_node
from tiny_target import tiny_engine, tiny_target

from ragspec.core import Completion, CopySource, FinishReason, Request, SamplingParams, Segment, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.rag.openai_fields import sampling_arguments
from ragspec.speculation import Speculation
from ragspec.tree import DraftTree
from ragspec.verification import token_grammar
from ragspec.verification.token_grammar import Grammars, GrammarSampler

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "year": {"type": "integer", "minimum": 0, "maximum": 2100},
            "name": {"type": "string", "maxLength": 8},
            "open": {"type": "boolean"},
        },
        "required": ["year", "name", "open"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["mill", "river", "bridge"]}, "minItems": 1, "maxItems": 4},
    "choice": {
        "anyOf": [{"const": "The old mill"}, {"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 99}]
    },
}
DRAFT = '{"year": 1874, "name": "the mill", "open": true} ["mill", "river", "bridge"] "The old mill"'


@pytest.fixture(scope="module", params=["float32", "torch-float32"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", request.param, tmp_path_factory.mktemp("llama"))


def request(name: str, schema: dict[str, Any], speculation: bool = True, **params: Any) -> Request:
    given = SamplingParams(**{"json_schema": json.dumps(schema), "max_tokens": 120, **params})
    source = CopySource(SourceKind.PREDICTION, DRAFT)
    return Request(name, (5, 6, 7, 8), given, (source,), speculation=Speculation.of(speculation))


def engine_over(target: Target) -> Engine:
    return tiny_engine(target, [CopyDrafter(target.tokenizer)], fixed_nodes=6)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_outputs_are_valid_and_drafts_change_none(target: Target, temperature: float) -> None:
    """A mask of another node's position, or one that drafts were not checked against; text that no parser takes."""
    accepted = 0
    with engine_over(target) as engine:
        for name, schema in SCHEMAS.items():
            for seed in range(2):
                on, off = (
                    engine.generate([request(f"{name}{on}", schema, on, temperature=temperature, seed=seed)])[0]
                    for on in (True, False)
                )
                assert on.token_ids == off.token_ids and on.text == off.text
                assert on.finish_reason is FinishReason.STOP, on.text
                jsonschema.validate(json.loads(on.text), schema)
                assert off.stats.num_drafted == 0
                accepted += on.stats.num_accepted
    assert accepted > 0


def test_a_device_samples_what_the_host_samples(target: Target) -> None:
    """A mask of another node or row, bits in another order; a node that the grammar forbids moved the masks of its neighbours."""
    grammars, rng = Grammars(target.tokenizer, target.vocab_size, target.eos_ids), np.random.default_rng(5)
    schema = json.dumps(SCHEMAS["object"])
    asked = request("r", SCHEMAS["object"], temperature=1.0, top_p=0.9)
    for seed in range(12):
        arguments = asked, seed, 0, target.eos_ids, []
        host, device = (GrammarSampler(grammars.of_schema(schema), *arguments) for _ in range(2))
        tree, node, expected = DraftTree(root_token=5), 0, []
        rows = (rng.normal(size=(30, target.vocab_size)) * 3).astype(np.float32)
        for row in rows:
            expected.append(host(row))
            add_node(tree, node, 2)
            node = add_node(tree, node, expected[-1])
        path, logits = tree.ancestors(node)[:-1], np.zeros((len(tree), target.vocab_size), np.float32)
        logits[path] = rows
        sampled = TorchLogits(torch.from_numpy(logits)).sample(device.draws(tree))
        assert [sampled[n] for n in path] == expected


def test_batches_and_resumed_outputs_follow_the_schema_too(target: Target) -> None:
    """A grammar that two choices share; an output taken up again whose grammar begins anew."""
    asked = request("n", SCHEMAS["object"], temperature=1.0, seed=1, n=3)
    with engine_over(target) as engine:
        choices = engine.generate([asked])
        for choice in choices:
            jsonschema.validate(json.loads(choice.text), SCHEMAS["object"])
        given = choices[1].token_ids[:9]
        later = Request("s", asked.prompt_ids, asked.params, segment=Segment(given, choice=1))
        (rest,) = engine.generate([later])
    assert (*given, *rest.token_ids) == choices[1].token_ids
    assert len({choice.token_ids for choice in choices}) > 1


def test_a_cut_off_output_is_the_beginning_of_a_valid_one(target: Target) -> None:
    """A grammar that lets the end token in, or text outside the value, when few tokens are left."""
    with engine_over(target) as engine:
        (whole,) = engine.generate([request("w", SCHEMAS["object"])])
        (cut,) = engine.generate([request("c", SCHEMAS["object"], max_tokens=6)])
    assert cut.finish_reason is FinishReason.LENGTH and whole.token_ids[:6] == cut.token_ids


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"json_schema": "{"}, "json_schema must be a JSON schema as text"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object"),
        ({"json_schema": "{}", "min_tokens": 3}, "min_tokens and ignore_eos mean nothing beside json_schema"),
    ],
)
def test_what_cannot_be_a_schema_is_refused(params: dict[str, Any], said: str) -> None:
    """A schema that is ignored; an output that must go on behind its value."""
    with pytest.raises(InputError, match=said):
        SamplingParams(**params)


def test_schemas_and_rules_that_cannot_be_followed_are_refused(target: Target) -> None:
    """An unknown keyword's value that stops the engine for everybody; a rule of acceptance that knows no masks."""
    with engine_over(target) as engine:
        with pytest.raises(InputError, match="cannot be followed"):
            engine.generate([request("a", {"type": "objekt"})])
        lossy = Request("b", (5, 6), SamplingParams(json_schema="{}"), speculation=Speculation.of({"rule": "chain"}))
        with pytest.raises(InputError, match="json_schema needs the acceptance rule keyed"):
            engine.generate([lossy])
        completion: Completion = engine.generate([request("c", SCHEMAS["array"])])[0]
    assert json.loads(completion.text)


def test_openai_response_formats_become_schemas() -> None:
    """JSON mode that is accepted and does nothing."""

    def schema_of(response_format: Any) -> str:
        return str(sampling_arguments({"response_format": response_format})["json_schema"])

    assert schema_of({"type": "text"}) == ""
    assert json.loads(schema_of({"type": "json_object"})) == {"type": "object"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS["array"], "strict": True}}
    assert json.loads(schema_of(wrapped)) == SCHEMAS["array"]
    with pytest.raises(InputError, match="needs a json_schema"):
        schema_of({"type": "json_schema"})


def test_the_choices_of_a_request_share_one_compiled_schema(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large schema was compiled for every choice; a copy that shares its state would follow another choice's tokens."""
    grammars = Grammars(target.tokenizer, target.vocab_size, target.eos_ids)
    monkeypatch.setattr(grammars, "_compile", compiling := Mock(wraps=grammars._compile))
    first, second = (grammars.of_schema(json.dumps(SCHEMAS["array"])) for _ in range(2))
    assert compiling.call_count == 1
    before = second.allowed()
    first.take(int(first.allowed().argmax()))
    assert (second.allowed() == before).all() and (first.allowed() != before).any()


def test_kept_schemas_are_bounded_by_their_size(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen schemas of clients, each as large as a request may be, stayed in memory."""
    monkeypatch.setattr(token_grammar, "_KEPT_CHARS", 1000)
    grammars = Grammars(target.tokenizer, target.vocab_size, target.eos_ids)
    for num_chars, num_kept in ((300, 1), (301, 2), (302, 3), (303, 3), (5000, 1), (304, 1)):
        grammars.of_schema(json.dumps({"const": "x" * (num_chars - 13)}))
        assert [len(text) for _, text in grammars._kept][-1] == num_chars and len(grammars._kept) == num_kept
