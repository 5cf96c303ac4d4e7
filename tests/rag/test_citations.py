"""Citations: two spans that are the same string, or none."""

import itertools
import logging
import re
import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_examples import EXAMPLES
from small_parts import QUESTION, Recording
from tiny_target import tiny_engine, tiny_target

from ragspec.core import CopySource, FinishReason, Passage, Request, SamplingParams, Segment, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.rag.citations import answer_grammar, find_citations, quote_grammar
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import TextRules
from ragspec.retrieval.retriever import Retriever
from ragspec.speculation import OFF, ON
from ragspec.verification.token_grammar import Grammars

STORM = Passage(
    "storm", 0, "The storm came in at dawn. It was a dark and stormy night; the rain fell.", 100, 172, source="s.txt"
)
AGAIN = Passage("again", 2, "Nothing else. The storm came in at dawn. Ships were lost.", 7, 64)
PASSAGES = [STORM, AGAIN]


def cited(answer: str, passages: list[Passage] = PASSAGES) -> list[tuple[str, str]]:
    return [(answer[c.start : c.end], c.passage_id) for c in find_citations(answer, passages)]


def test_a_quotation_is_cited_whole_with_its_place_in_the_document() -> None:
    """An offset inside the passage, used for the document, highlights the wrong sentence."""
    answer = 'It says: "The storm came in at dawn." and no more.'
    (citation,) = find_citations(answer, PASSAGES)
    assert answer[citation.start : citation.end] == "The storm came in at dawn."
    assert (citation.passage_id, citation.document_id, citation.source) == ("storm#0", "storm", "s.txt")
    assert (citation.passage_start, citation.passage_end) == (0, 26)
    assert (citation.document_start, citation.document_end) == (100, 126)


@pytest.mark.parametrize(("answer", "expected", "why"), EXAMPLES["what counts as a citation"])
def test_what_counts_as_a_citation(answer: str, expected: list[list[str]], why: str) -> None:
    """A match of half a word, of another case or of other spaces is not what the document says."""
    assert [list(each) for each in cited(answer)] == expected, why


def test_the_keys_of_a_json_answer_are_no_quotations() -> None:
    """A key that some passage holds was shown as the answer's source."""
    answer = '{"mill": "storm", "bridge" : 5}'
    passages = [replace(PASSAGES[0], text="The mill stood in a storm beside the bridge.")]
    assert [text for text, _ in cited(answer, passages)] == ["storm"]
    assert [text for text, _ in cited(f"So: {answer}", passages)] == ["mill", "storm", "bridge"]


def test_the_longest_match_wins_and_the_rest_is_still_used() -> None:
    """Taking the first match of four words cut a quotation of a whole paragraph into pieces."""
    one = Passage("one", 0, "alpha beta gamma delta epsilon zeta", 0, 35)
    two = Passage("two", 0, "delta epsilon zeta eta theta iota kappa lambda", 0, 46)
    answer = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda"
    assert cited(answer, [one, two]) == [(two.text, "two#0")]
    assert next(iter(find_citations(answer, [one, two], min_words=3))).passage_id == "one#0"


def test_no_match_goes_from_one_passage_into_the_next() -> None:
    """Passages searched as one long text give citations that no passage holds."""
    halves = [Passage("a", 0, "one two three", 0, 13), Passage("b", 0, "four five six", 0, 13)]
    assert cited("one two three four five six", halves) == []
    assert cited("one two threefour five six", halves) == []


def test_writing_without_spaces_and_combining_marks() -> None:
    """`\\w+` takes a Japanese sentence for one word and cuts an accent off its letter."""
    rain = Passage(
        "rain", 0, "昨日は雨が降りましたので、傘を持っていきました。 Le cafe\u0301 est ouvert ce matin.", 0, 60
    )
    assert cited("はい、昨日は雨が降りましたので、です", [rain]) == [("昨日は雨が降りましたので", "rain#0")]
    assert cited("Le cafe est ouvert ce matin", [rain]) == [("est ouvert ce matin", "rain#0")]


WORDS = st.lists(
    st.sampled_from(["a", "b", "bb", "A", "é", "e\u0301", ".", '"', "“", "”", " ", "\n", "[1]", "[2]", "雨", "🚀"]),
    max_size=60,
)
TEXT = WORDS.map("".join) | WORDS.map(" ".join)


@settings(deadline=None, max_examples=150)
@given(TEXT, st.lists(TEXT, max_size=4), st.integers(1, 4), st.data())
def test_every_citation_is_the_same_string_twice(
    answer: str, texts: list[str], min_words: int, data: st.DataObject
) -> None:
    """The promise itself: a citation whose spans differ by one character is a false quotation."""
    if texts and texts[0]:
        start = data.draw(st.integers(0, len(texts[0]) - 1))
        answer += texts[0][start : start + data.draw(st.integers(0, 40))]
    passages = [Passage(f"d{n}", n, text, 10 * n, 10 * n + len(text)) for n, text in enumerate(texts)]
    citations = find_citations(answer, passages, min_words=min_words, min_chars=1)
    by_id = {passage.id: passage for passage in passages}
    for citation in citations:
        passage = by_id[citation.passage_id]
        quoted = answer[citation.start : citation.end]
        assert quoted and quoted == passage.text[citation.passage_start : citation.passage_end]
        assert citation.document_start == passage.start + citation.passage_start
        assert citation.document_end == passage.start + citation.passage_end
    assert all(a.end <= b.start for a, b in itertools.pairwise(citations))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from("abc"), max_size=30), st.lists(st.sampled_from("abc"), max_size=30))
def test_nothing_long_enough_is_missed(answer: list[str], passage: list[str]) -> None:
    """A wrong automaton misses matches and still returns correct ones; the quadratic search is the judge."""
    text = " ".join(passage)
    citations = find_citations(" ".join(answer), [Passage("d", 0, text, 0, len(text))], min_words=3, min_chars=1)
    runs = {tuple(passage[i : i + n]) for i in range(len(passage)) for n in range(1, len(passage) - i + 1)}
    spans = ((i, j) for i in range(len(answer)) for j in range(i + 1, len(answer) + 1))
    longest = max((j - i for i, j in spans if tuple(answer[i:j]) in runs), default=0)
    found = max(((c.end - c.start + 1) // 2 for c in citations), default=0)
    assert found == (longest if longest >= 3 else 0)


@pytest.mark.parametrize("size", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("piece", ["a b ", "a ", '"a"', '"', "x", STORM.text])
def test_a_long_answer_takes_no_long_time(piece: str, size: int) -> None:
    """Comparing every position of the answer with every position of the passages hung on 100 kB of repetition."""
    passages = [*PASSAGES, Passage("ab", 0, "a b " * 150, 0, 600), Passage("a", 0, "a " * 20_000, 0, 40_000)]
    find_citations(piece * (size // len(piece)), passages)


@pytest.mark.parametrize(("answer", "text"), EXAMPLES["answers that end inside a word or sign of the text"])
def test_no_citation_begins_or_ends_inside_a_word_or_a_sign(answer: str, text: str) -> None:
    """A lone variation selector cited, half of a Hindi word called verbatim, half of an emoji."""
    whole_passage = Passage("d", 0, text, 0, len(text))
    for citation in find_citations(answer, [whole_passage]):
        for whole, start, end in (
            (answer, citation.start, citation.end),
            (text, citation.passage_start, citation.passage_end),
        ):
            for at in (start, end):
                after = whole[at : at + 1]
                assert not after or unicodedata.category(after)[0] != "M", (whole, at)
                assert not (whole[at - 1 : at].isalnum() and after.isalnum()), (whole, at)
            assert whole[start:end][0] not in "\u200d\ufe0f"
    if answer[0] in "वi":
        assert not find_citations(answer, [whole_passage])


QUOTED_TEXTS = (
    'The mill (built in 1874) says "no".\nIt grinds no corn; x = 3.5 % of it.',
    'The mill says "no" twice. 日本語のテキスト。 The river rises.',
    "A seat costs 8 euros, or 8.5 at -5 degrees. Nothing \x7f more.",
)
QUOTED_PASSAGES = [Passage(f"d{n}", 0, text, 0, len(text)) for n, text in enumerate(QUOTED_TEXTS)]
QUOTED = re.compile(r'"(?P<quote>.+)" \[(?P<number>\d)\]', re.DOTALL)


@pytest.fixture(scope="module", params=["float32", pytest.param("torch-float32", marks=pytest.mark.slow)])
def quoted_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", request.param, tmp_path_factory.mktemp("llama"))


def quoting(quoted_target: Target, name: str, **params: Any) -> Request:
    """The output given is a quotation mark, and the rest is the random model's."""
    given = SamplingParams(**{"max_tokens": 100, **params})
    mark = tuple(quoted_target.tokenizer('"', add_special_tokens=False)["input_ids"])
    sources = tuple(CopySource(SourceKind.PASSAGE, text) for text in QUOTED_TEXTS)
    grammar = answer_grammar(given, ON, QUOTED_PASSAGES)
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
            assert found["quote"] in QUOTED_TEXTS[int(found["number"]) - 1]
        else:
            assert each.finish_reason is FinishReason.LENGTH
    assert whole and sum(each.stats.num_accepted for each in drafted)


@pytest.mark.parametrize(("answer", "is_allowed"), EXAMPLES["answers that the grammar allows"])
def test_answers_that_the_grammar_allows(quoted_target: Target, answer: str, is_allowed: bool) -> None:
    """A free answer that is refused; a quote with blanks, marks, lines or ideographs that no token sequence can write; a short
    answer that its quote does not hold, or a part of a number."""
    assert accepts(quoted_target, quote_grammar(QUOTED_PASSAGES), answer) == is_allowed


def test_jobs_of_earlier_versions_go_on_with_free_short_answers(quoted_target: Target) -> None:
    """A job that goes on after an update, with other texts for the rows that are left."""
    grammar = answer_grammar(SamplingParams(), ON, QUOTED_PASSAGES, short_answers=TextRules().short_answers)
    assert accepts(quoted_target, grammar, '"The mill says "no" twice." [2] – three times.')


def accepts(target: Target, lark: str, answer: str) -> bool:
    """Whether an output may be this text."""
    grammar = Grammars(target.tokenizer, target.vocab_size, target.eos_ids).of_lark(lark)
    for token in [*target.tokenizer(answer, add_special_tokens=False)["input_ids"], target.eos_ids[0]]:
        assert grammar.allows(token) or not grammar.allowed()[token]
        if not grammar.allows(token):
            return False
        grammar.take(token)
    return True


def test_passages_of_a_long_context_compile(quoted_target: Target) -> None:
    """llguidance's own limit, at which a long prompt would be refused."""
    texts = [" ".join(f"T{i} w{(i * 7919 + n) % 1013}." for i in range(4000)) for n in range(3)]
    grammar = Grammars(quoted_target.tokenizer, quoted_target.vocab_size, quoted_target.eos_ids).of_lark(
        quote_grammar([Passage("", 0, text, 0, len(text)) for text in texts])
    )
    for token in quoted_target.tokenizer('"T17 ', add_special_tokens=False)["input_ids"]:
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
