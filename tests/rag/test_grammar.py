"""Correcting texts; see conftest.py for the engine. Where a sentence must be corrected, the correction's tokens are forced."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from language_examples import EXAMPLES
from random_texts import WORDS, random_parts, random_rewrite, random_text
from rewriting import TOKENIZER, Rewrite, rewriting
from small_parts import CONTEXT, Counting, Recording

from ragspec.core import FinishReason, Request, SamplingParams, SourceKind
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import EngineError, InputError
from ragspec.rag.citations import Utf16Offsets
from ragspec.rag.grammar.correction import Correction, CorrectionRequest, cleaned_reply
from ragspec.rag.grammar.edit_filters import EditFilter
from ragspec.rag.grammar.edits import Edit, apply_edits
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.grammar.markup import MarkedText, TextPart, one_line
from ragspec.rag.prompt import PromptBuilder

TEXT = "The mill grind corn.  It are old.\n\n - Was it build in 1874?\n\t42 + 17\n"
SHORT = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=5)


@pytest.fixture
def corrector(engine: Engine, target: Target) -> Grammar:
    return Grammar(engine, PromptBuilder(target.tokenizer, CONTEXT), max_in_flight=4)


def test_a_sentence_is_its_own_prompt_and_draft() -> None:
    """A whole page as one prompt, which no target was trained on; a draft that is another sentence."""
    corrector, engine = rewriting(str)
    corrector.correct(TEXT, SAMPLED, tenant="ann")
    drafts = [request.sources[0].text for request in engine.requests]
    assert drafts == ["The mill grind corn.", "It are old.", "- Was it build in 1874?"]
    builder = PromptBuilder(TOKENIZER, 1024)
    for request in engine.requests:
        (source,) = request.sources
        assert request.prompt_ids == builder.grammar_prompt(source.text).prompt_ids
        assert (source.kind, request.salt) == (SourceKind.INPUT, "ann")
    assert len({request.params.seed for request in engine.requests}) == len({r.id for r in engine.requests}) == 3
    seeds = [request.params.seed for request in engine.requests]
    corrector.correct(TEXT, SAMPLED)
    assert [request.params.seed for request in engine.requests[3:]] == seeds


def test_long_sentences_are_corrected_in_parts_that_fit() -> None:
    """A sentence without a full stop that ends in an error of the context, or loses its end."""
    corrector, engine = rewriting(str, max_context_tokens=128)
    text = f"{'one two three ' * 60}and {'z' * 400} end. Short."
    assert corrector.correct(text).corrected == text
    assert len(engine.requests) > 10
    for request in engine.requests:
        most = request.params.max_tokens
        assert len(request.prompt_ids) + most <= 128
        assert len(TOKENIZER(request.sources[0].text, add_special_tokens=False)["input_ids"]) <= 0.75 * most
    assert all(" " not in r.sources[0].text[:1] + r.sources[0].text[-1:] for r in engine.requests)
    halves = [request.sources[0].text for request in engine.requests if "one" in request.sources[0].text]
    assert all(set(half.split()) <= {"one", "two", "three", "and"} for half in halves), "a word was cut"


def test_a_forced_correction_comes_with_its_edits(corrector: Grammar, switch: Any) -> None:
    """Edits that count from their sentence's beginning instead of the text's."""
    switch.answer = "It is old."
    text = "  It are old.\n"
    correction = corrector.correct(text)
    assert correction.corrected == "  It is old.\n"
    (edit,) = correction.edits
    assert (edit.start, edit.end, edit.original, edit.replacement) == (5, 8, "are", "is")
    assert correction.finish_reason is FinishReason.STOP and correction.stats.num_output_tokens > 3
    assert correction.stats.system_fingerprint == "tiny"


@pytest.mark.parametrize(("params", "answer"), [(SAMPLED, ""), (SHORT, "It is old.")])
async def test_every_way_to_correct_gives_the_same(
    corrector: Grammar, switch: Any, params: SamplingParams, answer: str
) -> None:
    """A service that corrects otherwise than a job; a text that depends on those beside it."""
    switch.answer = answer
    texts = [TEXT, "One more.", TEXT + TEXT]
    requests = [CorrectionRequest(f"{n}", text, params) for n, text in enumerate(texts)]
    together = corrector.correct_many(texts, params)
    alone = [await corrector.complete(corrector.prepare(request)) for request in requests]
    async with aclosing(corrector.stages().run(requests)) as batches:
        flowed = {each.id: each.result() async for batch in batches for each in batch}
    assert bool(together[0].edits) == bool(answer)
    for n, correction in enumerate(together):
        for other in (alone[n], flowed[f"{n}"], corrector.correct(texts[n], params)):
            assert (other.text, other.corrected, other.edits) == (texts[n], correction.corrected, correction.edits)
            assert other.unfinished == correction.unfinished
            assert other.stats.num_output_tokens == correction.stats.num_output_tokens


async def test_no_more_sentences_than_allowed_are_in_the_engine(engine: Engine, target: Target) -> None:
    """A book's ten thousand sentences at once in an engine that others use, too."""
    counting = Counting(engine)
    corrector = Grammar(counting, PromptBuilder(target.tokenizer, CONTEXT), max_in_flight=3)
    asked = [CorrectionRequest(str(n), TEXT * 3, replace(SHORT, max_tokens=4)) for n in range(4)]
    async with aclosing(corrector.stages().run(asked)) as batches:
        assert sum([len(batch) async for batch in batches]) == 4
    assert counting.most == 3


async def test_a_text_that_cannot_be_corrected_is_its_own_result(corrector: Grammar) -> None:
    """One bad text that ends the others, or comes back half corrected."""

    texts = ["wide \udfff", "nul \0", "half \ud800", "Good."]
    asked = [CorrectionRequest(str(n), text, SHORT) for n, text in enumerate(texts)]
    async with aclosing(corrector.stages().run(asked)) as batches:
        finished = {each.id: each async for batch in batches for each in batch}
    assert [type(finished[str(n)].error) for n in range(4)] == [InputError] * 3 + [type(None)]


def test_a_failed_sentence_fails_its_text_and_stops_the_rest(engine: Engine, target: Target) -> None:
    """A text with a sentence left out in silence; or the rest of it that goes on for nobody."""

    class Failing(Recording):
        async def stream(self, request: Request) -> Any:
            if request.id.endswith("/1"):
                raise EngineError("failed")
            async with aclosing(engine.stream(request)) as deltas:
                async for delta in deltas:
                    yield delta

    corrector = Grammar(Failing(engine), PromptBuilder(target.tokenizer, CONTEXT))
    endless = SamplingParams(max_tokens=400)
    with pytest.raises(EngineError, match="failed"):
        asyncio.run(corrector.complete(corrector.prepare(CorrectionRequest("m", TEXT, endless))))
    engine.between_steps(lambda: None)  # the engine's queue is in order: the cancels are done before
    assert engine.idle()


@pytest.mark.parametrize(
    "wrong", [{"n": 2}, {"stop": ("x",)}, {"ignore_eos": True}, {"min_tokens": 3}, {"logprobs": 1}]
)
def test_parameters_that_would_cut_a_text_are_refused(wrong: dict[str, Any]) -> None:
    """A stop string that takes the end of a sentence away."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        CorrectionRequest("m", TEXT, replace(SHORT, **wrong))


@pytest.mark.parametrize("reply", EXAMPLES["what a chat model says around a correction"])
def test_what_a_chat_model_says_around_a_correction_is_no_part_of_it(reply: str) -> None:
    """Every correction of an ordinary chat model was withheld as a rewriting, and nobody was told."""
    assert cleaned_reply(reply, "He go to school.") == "He goes to school."


@pytest.mark.parametrize("sentence", EXAMPLES["sentences that read like a reply"])
def test_a_sentence_that_reads_like_a_reply_stays_whole(sentence: str) -> None:
    """A sentence about corrections lost its beginning."""
    assert cleaned_reply(sentence, sentence) == sentence


@pytest.mark.parametrize(("sentence", "reply"), EXAMPLES["words of a sentence that are no frame of its correction"])
def test_words_of_a_sentence_are_no_frame_of_its_correction(sentence: str, reply: str) -> None:
    """A mistake in the opening, or a line break, and the words before the colon or behind the break were deleted."""
    grammar, _ = rewriting(lambda _: reply)
    corrected = grammar.correct(sentence).corrected
    assert corrected.split() == reply.split() and corrected.count("\n") == sentence.count("\n")


NO_FILTER = EditFilter(1.0, numbers=False, names=False, structure=False)


def check(correction: Correction, whole: str, parts: Sequence[TextPart] | None) -> None:
    assert correction.text == whole
    assert apply_edits(whole, correction.edits) == correction.corrected
    for edit in correction.edits:
        assert whole[edit.start : edit.end] == edit.original != edit.replacement
    assert all(a.end <= b.start for a, b in pairwise(correction.edits)), "edits overlap or are out of order"
    for withheld in correction.withheld:
        assert whole[withheld.edit.start : withheld.edit.end] == withheld.edit.original
    assert applied_in_utf16(whole, correction.edits) == correction.corrected
    at = 0
    for part in parts or ():
        end = at + len(part.text)
        assert not part.is_markup or not any(e.start < end and e.end > at for e in correction.edits if e.original)
        assert not part.is_markup or not any(at < e.start < end for e in correction.edits), "inside markup"
        at = end


def editable(text: str) -> str:
    """All that an edit may touch, pieces apart."""
    marked = MarkedText.read(text)
    places = [marked.locate(Edit(at, at + 1, marked.plain[at], "#")) for at in range(len(marked.plain))]
    fixed = {at for start, end in marked.protected for at in range(start, end)}
    free = {place.start for at, place in enumerate(places) if place is not None and at not in fixed}
    return "".join(char if at in free else "|" for at, char in enumerate(text))


@pytest.mark.parametrize(("text", "fixed"), EXAMPLES["code and markup cannot be edited"])
def test_code_and_markup_cannot_be_edited(text: str, fixed: str) -> None:
    """Attributes, labels, fences in quotes and what templates fill in were corrected as if they were prose."""
    free = editable(text)
    start = text.index(fixed)
    assert set(free[start : start + len(fixed)]) == {"|"}, free
    assert "Go." in free or "this." in free or "Choose." in free


@pytest.mark.parametrize(("text", "free"), EXAMPLES["prose that looks like markup"])
def test_prose_that_looks_like_markup_is_corrected(text: str, free: str) -> None:
    """A sign that opens nothing hid everything behind it."""
    assert free in editable(text)


@pytest.mark.parametrize("entity", ["&#" + "1" * 5000 + ";", "&#x" + "f" * 5000 + ";", "&#1114112;", "&#xd800;"])
def test_an_entity_of_any_length_is_read(entity: str) -> None:
    """Thousands of digits ended the whole request, and with it the files beside this one, in an unexpected ValueError."""
    grammar, _ = rewriting(lambda sentence: sentence)
    assert grammar.correct(f"He go {entity} home.").corrected == f"He go {entity} home."


def applied_in_utf16(whole: str, edits: Sequence[Edit]) -> str:
    """As Java and JavaScript do it: by code units."""
    units, at = Utf16Offsets(whole), whole.encode("utf-16-le")
    for edit in reversed(edits):
        start, end = 2 * units.units(edit.start), 2 * units.units(edit.end)
        at = at[:start] + edit.replacement.encode("utf-16-le") + at[end:]
    return at.decode("utf-16-le")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))])
def test_edits_lead_to_the_corrected_text(seed: int) -> None:
    """An offset that is off behind an emoji, an accent, a CRLF or a tag: a client applies the edits and gets another text. 5,000
    texts in all, half of them with markup."""
    rng = random.Random(seed)
    num_edits = num_withheld = 0
    for number in range(100):
        grammar, _ = rewriting(random_rewrite(rng), rng.choice([64, 1024]))
        parts = random_parts(rng) if number % 2 else None
        whole = "".join(part.text for part in parts) if parts else random_text(rng)
        correction = grammar.correct(parts or whole, edit_filter=rng.choice([EditFilter(), NO_FILTER]))
        check(correction, whole, parts)
        num_edits += len(correction.edits)
        num_withheld += len(correction.withheld)
    assert num_edits > 50 and num_withheld > 20, "hardly anything was tried"


def test_without_markup_and_guards_the_text_becomes_what_the_target_wrote() -> None:
    """Edits that are lost on the way: a correction that is made in part, where nothing speaks against it. The target writes one
    line, as it is asked to: what follows a line that is more like the sentence is no correction."""
    rng = random.Random(1)
    plain = [word for word in WORDS if word.isalpha() or "\u0301" in word or "\U0001f600" in word]
    for _ in range(100):
        text = "".join(rng.choice(plain) + rng.choice(" \t\n\u00a0") for _ in range(rng.randint(2, 20)))
        rewrite = one_line_of(random_rewrite(rng))
        written = list[str | None]()
        grammar, _ = rewriting(lambda sentence, r=rewrite, w=written: w.append(r(sentence)) or w[-1])  # type: ignore
        correction = grammar.correct(text, edit_filter=NO_FILTER)
        ways = zip(correction.sentences, written, strict=True)
        wanted = [new if new and new.strip() else text[slice(*span)] for span, new in ways]
        assert "".join(correction.corrected.split()) == "".join("".join(wanted).split()) or not wanted


def one_line_of(rewrite: Rewrite) -> Rewrite:
    def rewritten(sentence: str) -> str | None:
        new = rewrite(sentence)
        return new and one_line(new)

    return rewritten


def test_quotation_marks_capitals_and_other_languages_stay() -> None:
    """A quotation lost its opening mark, NASA its capitals, and correct German came back with mistakes."""
    grammar, engine = rewriting(lambda sentence: sentence.replace('"', "").replace("A", "a").replace("go", "goes"))
    assert grammar.correct('Usage\n\n"I go," said NASA.').corrected == 'Usage\n\n"I goes," said NASA.'
    german = "Das ist ein kleines Haus, und wir sind ins Kino gegangen. Es go."
    correction = grammar.correct(german)
    assert (correction.corrected, correction.sentences, correction.other_language) == (german, (), "German")
    assert [request.sources[0].text for request in engine.requests] == ['"I go," said NASA.']
    mixed = f"The children go home because it is the end of the day.\n\n{german}\n\nThen they go to bed."
    assert grammar.correct(mixed).corrected == mixed.replace("en go", "en goes").replace("ey go", "ey goes")
    assert grammar.correct("Bitte starten Sie den Server neu, er ist alt. go").other_language == "German"
    begun = grammar.correct(f'{german}\n\n"', edit_filter=EditFilter(structure=False))
    assert "Es goes." in begun.corrected and not begun.other_language


def test_white_space_inside_a_sentence_stays() -> None:
    """A paragraph of eighty columns that becomes one line."""
    grammar, engine = rewriting(lambda sentence: sentence.replace("grind", "grinds"))
    assert grammar.correct("The mill\r\n\tgrind  corn.").corrected == "The mill\r\n\tgrinds  corn."
    assert engine.requests[0].sources[0].text == "The mill grind corn."


@pytest.mark.parametrize("text", ["", " ", "\n\t \u00a0", "7", ".", "\U0001f600", "`code`", "http://a.org/b"])
def test_what_holds_nothing_to_correct_is_not_asked_about(text: str) -> None:
    """An empty text or a line of figures that is an error, or costs a generation."""
    grammar, engine = rewriting(lambda sentence: "Other.")
    correction = grammar.correct(text)
    assert (correction.corrected, correction.edits, engine.requests) == (text, (), [])
    assert correction.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("size", [10_000, pytest.param(300_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("piece", ["a", "x y ", "<b ", "`", "\\a[", "He go. ", "<pre>", "a@"])
def test_long_texts_are_cut_in_time_that_grows_with_their_length(piece: str, size: int) -> None:
    """A text without a full stop or full of opening tags that keeps a service busy for hours."""
    text = piece * (size // len(piece))
    grammar, _ = rewriting(str)
    assert grammar.correct(text).corrected == text


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.slow)])
def test_markup_that_is_read_takes_time_that_grows_with_its_length(count: int) -> None:
    """A form of nothing but markup that keeps a service busy for hours."""
    parts = [TextPart("x"), *[TextPart("<b>", True, "He go. ")] * count, TextPart("y")]
    marked = MarkedText(parts)
    spans = {marked.span(1 + 7 * number, 1 + 7 * number + 6) for number in range(count)}
    assert spans == {(1, 1)} and marked.span(0, len(marked.plain)) == (0, len(marked.whole))
