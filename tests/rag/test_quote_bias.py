"""The bias on quotes leads to the spans that are likely to answer."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ragspec.core import Block, BlockKind, Passage, SamplingParams
from ragspec.engine.target import Target
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.quotable import lines_above
from ragspec.rag.quote_choice import LatestQuote, is_record, quote_bias, span_features
from ragspec.rag.steps import Question, RetrievedQuestion, build_request
from ragspec.rag.wording import AnswerFit, TextRules

SENTENCES = ("The mill was sold in 1901.", "The mill was built by Anna Weaver.", "Its wheel is of oak.", "Rain falls.")
PASSAGES = tuple(Passage("d", n, text, 0, len(text)) for n, text in enumerate(SENTENCES))
QUESTION = "Who built the mill?"
Encode = Callable[[Sequence[str]], list[list[int]]]
PROMPT = Prompt.of((), PASSAGES, (), "rank")


def by(weight: float = 20.0, **rules: Any) -> TextRules:
    return TextRules(fit=AnswerFit(quote_weight=weight), **rules)


def total(biases: dict[tuple[int, ...], dict[int, float]], ids: Sequence[int]) -> float:
    """Of all tokens of a span, each behind those before it."""
    return sum(biases.get(tuple(ids[:at]), {}).get(token, 0.0) for at, token in enumerate(ids))


@pytest.fixture
def ids(target: Target) -> Encode:
    return PromptBuilder(target.tokenizer, 512).plain_ids


def boosts(ids: Encode, quotes: Sequence[str], question: str, passages: Sequence[Passage], *how: Any) -> list[float]:
    """The biases on these beginnings of quotes."""
    biases = quote_bias(question, passages, ids, *how)
    return [total(biases, own) for own in ids([f'"{quote}' for quote in quotes])]


def test_the_lines_that_a_setting_is_nested_in_are_its_words() -> None:
    """The memory of another service was quoted, because `memory: 9` holds no word of the question."""
    text = "web:\n  limits:\n    memory: 3\n\ndb:\n  limits:\n    memory: 9\n"
    passage = Passage("d", 0, text, 0, len(text), blocks=(Block(0, len(text), BlockKind.CODE),))
    starts = [match.start() for match in re.finditer("memory", text)]
    assert [[*lines_above(text, start)] for start in starts] == [["limits:", "web:"], ["limits:", "db:"]]
    runs = [(passage, [(start, start + 9) for start in starts])]
    asked = "What is the memory limit of db?"
    both = (by(quotes=quotes, symbols=True, places=True) for quotes in ("sentences", "blocks"))
    apart, nested = (span_features(asked, runs, rules)[:, 0] for rules in both)
    assert apart[0] == apart[1] and nested[0] < nested[1]


def test_the_span_that_holds_more_of_the_question_is_boosted_more(ids: Encode) -> None:
    """A bias on the quotation mark, which would stop abstentions; one below zero, which other tokens of a word escape."""
    sold, built, wheel, rain = boosts(ids, SENTENCES, QUESTION, PASSAGES, by())
    assert built > sold > wheel == rain == 0.0
    biases = quote_bias(QUESTION, PASSAGES, ids, by())
    assert () not in biases and all(bias > 0.0 for branch in biases.values() for bias in branch.values())
    assert SamplingParams(prefix_bias=quote_bias(QUESTION, PASSAGES, ids, by(1e6)))
    halved = quote_bias(QUESTION, PASSAGES, ids, by(10.0))
    assert {at: {token: bias / 2 for token, bias in branch.items()} for at, branch in biases.items()} == halved


def test_the_next_sentence_is_quoted_too_where_it_is_likely_to_answer(ids: Encode) -> None:
    """A question for a number was answered by the sentence before the number."""
    text = "The mill keeps old flour. It keeps for 12 days. Rain falls."
    passages = (Passage("d", 0, text, 0, len(text)),)
    biases = quote_bias("How long does the mill keep flour?", passages, ids, by())
    short, long = ids(['"The mill keeps old flour."', '"The mill keeps old flour. It keeps for 12 days."'])
    at = next(n for n, (a, b) in enumerate(zip(short, long, strict=False)) if a != b)
    branch = biases[tuple(short[:at])]
    assert branch[long[at]] > branch[short[at]]


def test_signs_and_letter_case_tell_an_option_from_another(ids: Encode) -> None:
    """A question about `~N` that was answered by the row of `~n`; and a job begun before that, answered otherwise."""
    texts = ("~n: messages with a score.", "~N: new messages.", "N messages have a score.")
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(texts)]
    for symbols, best in ((True, 1), (False, 0)):
        found = boosts(ids, texts, "What does ~N match?", passages, by(symbols=symbols))
        assert found[best] == max(found) and found.count(found[best]) == 1
    option = "-S/--size: sorts files by it."
    cases = {
        "What does -S do?": option,
        "And --size?": option,
        "Who pays $5?": "Anna pays 5.",
        "Who has ../a/b?": "../a/b",
    }
    for asked, text in cases.items():
        passages = [Passage("d", n, each, 0, len(each)) for n, each in enumerate((text, "Size of rain: --Size."))]
        runs = [(each, [(0, len(each.text))]) for each in passages]
        features = span_features(asked, runs, by(symbols=True))
        assert features[0, 0] > max(0.2, features[1, 0])
        assert (features[:, 1] == span_features(asked, runs, by())[:, 1]).all()  # signs are no neighbours of words


def test_words_of_a_heading_are_its_sentences_too(ids: Encode) -> None:
    """The entry's first sentence, which names it, was quoted for its default; and a job begun before that, answered otherwise."""
    texts = ("keep_time: how long flour is kept.", "The default is 600.", "Rain falls.")
    passages = [Passage("d", n, text, 0, len(text), heading="Options > keep_time") for n, text in enumerate(texts[:2])]
    passages.append(Passage("d", 2, texts[2], 0, len(texts[2]), heading="Weather"))
    for places, best in ((True, 1), (False, 0)):
        found = boosts(ids, texts, "What is the default of keep_time?", passages, by(places=places))
        assert found[best] == max(found) > min(found)
    text = "The default is 600.\n\ngrind_time\n\nThe default is 30."
    kinds = (BlockKind.PARAGRAPH, BlockKind.HEADING, BlockKind.PARAGRAPH)
    blocks = tuple(Block(*each.span(), kind) for each, kind in zip(re.finditer("[^\\n]+", text), kinds, strict=True))
    joined = Passage("d", 0, text, 0, len(text), heading="keep_time", headings=("keep_time",), blocks=blocks)
    quotes = [f'{text[slice(*block[:2])]}"' for block in blocks[::2]]
    for asked, is_early in (("keep_time", True), ("grind_time", False)):
        early, late = boosts(ids, quotes, f"What is the default of {asked}?", [joined], by(places=True))
        assert early != late and (early > late) == is_early


def test_a_question_in_a_text_is_no_answer(ids: Encode) -> None:
    """A line of a dialogue that asks the same was quoted in the place of the line that answers."""
    text = "anna: who built the mill?\nbela: Carl did.\nanna: and the bridge?"
    for mark in ("?", "？", '?"'):
        said = text.replace("?", mark)
        passage = Passage("d", 0, said, 0, len(said), blocks=(Block(0, len(said), BlockKind.CODE),))
        quotes = [f'{each}"' for each in (said.split("\n")[0], said.rpartition("\n")[0])]
        asked, answered = boosts(ids, quotes, QUESTION, [passage], by(places=True))
        assert answered > asked


def test_a_quote_is_boosted_until_it_parts_from_unlikely_ones(ids: Encode) -> None:
    """Rows that begin alike: behind the biased tokens a target chose the row of another server. And biases without weight."""
    texts = [f"host name of the server: {name}, in the cellar." for name in ("web1", "web2")]
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(texts)]
    for places in (True, False):
        biases = quote_bias("And of web1?", passages, ids, by(places=places))
        first, second = ids([f'"{text}' for text in texts])
        at = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
        branch = biases.get(tuple(first[:at]), {})
        assert (branch.get(first[at], 0.0) > branch.get(second[at], 0.0)) == places
        assert all(bias >= 0.2 for each in biases.values() for bias in each.values())


def test_a_follow_up_reads_on_behind_the_latest_quote(ids: Encode) -> None:
    """A sentence of equal words before the quote, or in another document; of a row the row itself, of another column."""
    texts = ("It has oak.", "The mill was built in 1874.", "Elm it has.")
    text = " ".join(texts)
    passages = [Passage("other", 0, "Ash it has.", 0, 11), Passage("d", 0, text, 40, 40 + len(text))]
    latest = LatestQuote.of(passages[1], texts[1])
    assert latest[:3] == ("d", 52, 40 + text.index(" Elm"))
    asked = ids, (*texts[::2], "Ash it has."), "What has it?", passages, by(places=True), texts[1:2]
    before, behind, other = boosts(*asked, latest)
    assert behind > max(before, other)
    _, behind, other = boosts(*asked)
    assert other > behind
    row = Passage("d", 0, "| db1 | 64 GB |\n| db2 | 32 GB |", 7, 38)
    latest = LatestQuote.of(row, "| db1 | 64 GB |")
    assert [latest.bonus(*place) > 0.0 for place in (("d", 7), ("d", 23), ("e", 7))] == [True, False, False]
    records = {
        "name: db1\nmemory: 64 GB": True,
        "Note: it is off.": False,
        "cat log | wc -l": False,
        "It is.\nAs: so.": False,
    }
    assert {text: is_record(text) for text in records} == records


def test_a_sentence_of_a_better_passage_is_boosted_more_wherever_the_prompt_shows_it(target: Target) -> None:
    """The places in a prompt of the order "shared" taken for ranks."""
    texts = ("Anna built the mill.", "Carl built the mill. He sold it.")
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(texts)]
    prompts = PromptBuilder(target.tokenizer, 512, rules=by())
    ids = [prompts.plain_ids([f'"{text.partition(".")[0]}."'])[0] for text in texts]
    for order in ("rank", "shared"):
        prompt = Prompt.of((), passages, (), order)
        biases = prompts.biased(SamplingParams(), QUESTION, prompt, None).prefix_bias
        assert total(biases, ids[0]) > total(biases, ids[1])
    assert prompt.ranks == (2, 1)


def test_the_same_quote_is_boosted_however_its_mark_is_tokenised() -> None:
    """A tokenizer with tokens that begin with the mark: a target that writes the mark alone escaped every bias."""
    ids: dict[str, int] = {}

    def encode(texts: Sequence[str]) -> list[list[int]]:
        pieces = (re.findall(r'"The|\w+|.', text) for text in texts)
        return [[ids.setdefault(piece, len(ids)) for piece in own] for own in pieces]

    biases = quote_bias(QUESTION, PASSAGES[:2], encode, by())
    joined, mark, the = (ids[piece] for piece in ('"The', '"', "The"))
    texts = [" mill was sold", " mill was built"]
    places = [[(*begin, *own) for own in encode(texts)] for begin in ((joined,), (mark, the))]
    assert [biases[at[:-1]] for at in places[0]] == [biases[at[:-1]] for at in places[1]]
    assert biases[places[0][1][:-1]][ids["built"]] > 0.0


def test_a_quote_without_a_likely_rival_is_boosted(ids: Encode) -> None:
    """The surest quotes had no bias, since no other quote was in the tree, and the target quoted what it liked."""
    biases = quote_bias(QUESTION, PASSAGES[1:], ids, by())
    assert total(biases, *ids([f'"{SENTENCES[1]}'])) > 15.0 and len({at[:2] for at in biases}) <= 2


def test_texts_that_are_left_out_get_no_bias(ids: Encode) -> None:
    """A boost that the grammar forbids, which leaves the choice among the other spans to chance."""
    sold, built, *_ = ids([f'"{sentence}' for sentence in SENTENCES])
    biases = quote_bias(QUESTION, PASSAGES, ids, by(), [SENTENCES[1]])
    at = next(n for n, (a, b) in enumerate(zip(sold, built, strict=False)) if a != b)
    assert built[at] not in biases.get(tuple(built[:at]), {})


def test_no_passage_makes_no_bias(ids: Encode) -> None:
    """A softmax over nothing."""
    assert quote_bias(QUESTION, (), ids, by()) == {}


def test_passages_without_a_word_make_no_features() -> None:
    """A division by the average length of spans, which was zero."""
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(("***", "..."))]
    features = span_features("Who built the mill?", [(each, [(0, len(each.text))]) for each in passages], by())
    assert features.shape == (2, 8) and not features[:, 0].any()


def test_only_held_quotes_are_biased_and_only_by_a_fit(target: Target) -> None:
    """A model without a fit, or an answer whose quote is free, that is led to the question's words."""
    params = SamplingParams()
    fitted, other = (
        PromptBuilder(target.tokenizer, 512, rules=TextRules(fit=fit))
        for fit in (AnswerFit(0.0, 0.0, 20.0), AnswerFit())
    )
    assert fitted.biased(params, QUESTION, PROMPT, None).prefix_bias
    assert other.biased(params, QUESTION, PROMPT, None) == params
    assert fitted.biased(params, QUESTION, PROMPT, None, holds_quotes=False) == params
    for free in (SamplingParams(verbatim_quotes=False), SamplingParams(ignore_eos=True)):
        question = Question("q", QUESTION, free)
        retrieved = RetrievedQuestion(question, list(PASSAGES), "g", 0.0)
        assert build_request(retrieved, fitted).request.params == free


def test_a_prefix_bias_counts_behind_its_prefix_alone() -> None:
    """A bias that is added anywhere else, or that replaces the others."""
    params = SamplingParams(
        logit_bias={7: 1.0}, first_token_bias={7: 2.0}, prefix_bias={(): {8: 3.0}, (4, 5): {7: 4.0}}
    )
    found = [dict(params.after(output).logit_bias) for output in ((), (4,), (4, 5), (4, 5, 6))]
    assert found == [{7: 2.0, 8: 3.0}, {7: 1.0}, {7: 5.0}, {7: 1.0}]
    lengths = [each.biased_lengths for each in (params, SamplingParams(), SamplingParams(first_token_bias={1: 1.0}))]
    assert lengths == [{0, 2}, set(), {0}]
