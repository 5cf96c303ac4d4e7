"""Answers whose quotes are held to the passages: a random model writes them, token by token."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from small_parts import QUESTION, Recording
from tiny_target import tiny_engine, tiny_target

from ragspec.core import CopySource, FinishReason, Passage, Request, SamplingParams, Segment, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.rag.citations import answer_grammar, quote_grammar
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.retriever import Retriever
from ragspec.speculation import OFF, ON
from ragspec.verification.token_grammar import Grammars

TEXTS = (
    'The mill (built in 1874) says "no".\nIt grinds no corn; x = 3.5 % of it.',
    'The mill says "no" twice. 日本語のテキスト。 The river rises.',
)
PASSAGES = [Passage(f"d{n}", 0, text, 0, len(text)) for n, text in enumerate(TEXTS)]
QUOTED = re.compile(r'"(?P<quote>.+)" \[(?P<number>\d)\]', re.DOTALL)


@pytest.fixture(scope="module", params=["float32", pytest.param("torch-float32", marks=pytest.mark.slow)])
def quoted_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", request.param, tmp_path_factory.mktemp("llama"))


def quoting(quoted_target: Target, name: str, **params: Any) -> Request:
    """The output given is a quotation mark, and the rest is the random model's."""
    given = SamplingParams(**{"max_tokens": 100, **params})
    mark = tuple(quoted_target.tokenizer('"', add_special_tokens=False)["input_ids"])
    sources = tuple(CopySource(SourceKind.PASSAGE, text) for text in TEXTS)
    grammar = answer_grammar(given, ON, PASSAGES)
    return Request(name, (5, 6, 7, 8), given, sources, segment=Segment(mark), grammar=grammar)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_quotes_are_verbatim_and_drafts_change_none(quoted_target: Target, params: dict[str, Any]) -> None:
    """A quote that ends inside a word, or has another passage's number; a drafted token that no mask was applied to."""
    whole = 0
    asked = [quoting(quoted_target, f"{seed}", seed=seed, **params) for seed in range(6)]
    with tiny_engine(quoted_target, [CopyDrafter(quoted_target.tokenizer)], fixed_nodes=6) as engine:
        drafted = engine.generate(asked)
        plain = engine.generate([replace(each, id=f"{each.id} again", speculation=OFF) for each in asked])
    assert [(each.token_ids, each.text) for each in drafted] == [(each.token_ids, each.text) for each in plain]
    for each in drafted:
        if found := QUOTED.match(f'"{each.text}'):
            whole += 1
            assert found["quote"] in TEXTS[int(found["number"]) - 1]
        else:
            assert each.finish_reason is FinishReason.LENGTH
    assert whole and sum(each.stats.num_accepted for each in drafted)


@pytest.mark.parametrize(
    ("answer", "is_allowed"),
    [
        ("The passages do not say.", True),
        ("", True),
        ('A "free" answer.', True),
        ('"The mill (built in 1874) says "no"." [1] – no.', True),
        ('"The mill says "no"" [2] and "whatever" follows', True),
        ('"The mill says "no"" [1]', False),
        ('"The mills', False),
        ('"mill built', False),
        (' "mill" [1]', True),
        (' "mile" [1]', False),
        ('"日本" [2]', True),
        ('"x = 3.5 %" [1]', True),
        ('"no".\nIt grinds" [1]', True),
    ],
)
def test_answers_that_the_grammar_allows(quoted_target: Target, answer: str, is_allowed: bool) -> None:
    """A free answer that is refused; a quote with blanks, marks, lines or ideographs that no token sequence can write."""
    grammar = Grammars(quoted_target.tokenizer, quoted_target.vocab_size, quoted_target.eos_ids).of_lark(
        quote_grammar(TEXTS)
    )
    for token in [*quoted_target.tokenizer(answer, add_special_tokens=False)["input_ids"], quoted_target.eos_ids[0]]:
        assert grammar.allows(token) or not grammar.allowed()[token]
        if not grammar.allows(token):
            break
        grammar.take(token)
    else:
        assert is_allowed
        return
    assert not is_allowed


def test_passages_of_a_long_context_compile(quoted_target: Target) -> None:
    """llguidance's own limit, at which a long prompt would be refused."""
    texts = [" ".join(f"w{(i * 7919 + n) % 1013} t{i}" for i in range(4000)) for n in range(3)]
    grammar = Grammars(quoted_target.tokenizer, quoted_target.vocab_size, quoted_target.eos_ids).of_lark(
        quote_grammar(texts)
    )
    for token in quoted_target.tokenizer('"t17 ', add_special_tokens=False)["input_ids"]:
        assert grammar.allowed()[token]
        grammar.take(token)


def test_requests_of_the_pipeline_carry_the_grammar(retriever: Retriever, engine: Engine) -> None:
    """A pipeline that forgets it, or holds answers to it whose caller asked for free quotes, a schema or a published rule."""
    recording = Recording(engine)
    pipeline = Pipeline(retriever, recording, PromptBuilder(engine.target.tokenizer, engine.max_context_tokens))
    free: list[dict[str, Any]] = [
        {"verbatim_quotes": False},
        {"json_schema": '{"type": "object"}'},
        {"ignore_eos": True},
        {"speculation": {"rule": "iid"}},
    ]
    for options in ({}, *free):
        pipeline.ask(QUESTION, **{"max_tokens": 2, **options})
        request = recording.requests[-1]
        assert bool(request.grammar) == (not options)
    with pytest.raises(InputError, match="verbatim_quotes must be true or false"):
        pipeline.ask(QUESTION, verbatim_quotes="yes")  # type: ignore[arg-type]


def test_tokenizers_that_cannot_be_followed(quoted_target: Target, caplog: pytest.LogCaptureFixture) -> None:
    """Every question refused because llguidance cannot read a tokenizer; a promise dropped silently, or at every question."""
    with tiny_engine(quoted_target) as engine:
        engine._admission.grammars = Grammars(object(), quoted_target.vocab_size, quoted_target.eos_ids)
        with caplog.at_level(logging.WARNING):
            for name in ("first", "second"):
                assert engine.generate([quoting(quoted_target, name)])[0].token_ids
        assert sum("quotes are not held" in record.message for record in caplog.records) == 1
        with pytest.raises(InputError, match="cannot follow a JSON schema"):
            engine.generate([quoting(quoted_target, "schema", json_schema='{"type": "object"}')])
