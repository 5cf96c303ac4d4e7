"""Format, split and noise of the reference target's training data."""

import json
import random
import re
from pathlib import Path

from real_data import DATA, needs_data

from ragspec.training.grammar_errors import GrammarErrors, misspell, tokenised
from ragspec.training.reference.batches import ExampleEncoder, collate
from ragspec.training.reference.examples import Example, Lengths, first_doc_sentence
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.sources import Sources
from ragspec.training.reference.text_format import (
    ABSTENTION,
    CONTEXT_ROLE_FLAG,
    message,
    parse_answer,
    question_messages,
    quoted_answer,
)
from ragspec.training.reference.tokenizer import load_tokenizer, train_tokenizer
from ragspec.training.sentences import normalise, split_sentences, window_around
from ragspec.training.stdlib_corpus import is_held_out, stdlib_documents


def numbered_passages(content: str) -> list[str]:
    return re.split(r"(?:^|\n)\[\d\] ", content)[1:]


TEXTS = ['The cat sat. "Stop," she said (twice). It was 1977 then.'] * 20


def test_template_equals_the_documented_text() -> None:
    """Serving renders through the template: a stray newline or space there would be unknown to the model."""
    tokenizer = train_tokenizer(TEXTS, 400)
    messages = [*question_messages("Who sat?", ["The cat sat.", "It was."]), message("assistant", '"The cat sat." [1]')]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert (
        rendered == '<|context|>\n[1] The cat sat.\n[2] It was.<|user|>Who sat?<|assistant|>"The cat sat." [1]<|end|>'
    )
    assert rendered.startswith(prompt)


def test_tokenizer_round_trip_keeps_text_template_and_flag(tmp_path: Path) -> None:
    """A saved tokenizer that loses its template, its flag or a byte would break serving, not training."""
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    text = 'Größe 12,345.6 "quoted."  two  spaces\n\ttab ``code`` 日本'
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.init_kwargs[CONTEXT_ROLE_FLAG] is True
    assert loaded.chat_template == tokenizer.chat_template


def test_sentence_has_the_same_tokens_in_a_passage_and_in_a_quote() -> None:
    """With GPT-2's split `The` and ` The` differ, and the first word of every quote could not be copied."""
    tokenizer = train_tokenizer(TEXTS, 400)
    sentence = tokenizer("The cat sat.")["input_ids"]
    for text in ("It was. The cat sat.", "\n[1] The cat sat.", '"The cat sat." [1]', "Note: The cat sat."):
        ids = tokenizer(text)["input_ids"]
        assert any(ids[i : i + len(sentence)] == sentence for i in range(len(ids))), text


def test_answers_parse_back() -> None:
    """Quotes that hold quotation marks or brackets must not confuse the parser."""
    quote = 'He said "no" [2] times.'
    assert parse_answer(quoted_answer(quote, 3, "two")) == (quote, 3, "two")
    assert parse_answer(quoted_answer(quote, 3)) == (quote, 3, "")
    assert parse_answer(ABSTENTION) is None


def test_sentences_are_substrings_and_keep_abbreviations() -> None:
    """A sentence that is no substring could never be quoted exactly."""
    text = 'Dr. Smith met J. R. Hill at St. Paul. He said "No." Then 12 men left (in 1990). It ended!'
    sentences = split_sentences(text)
    assert len(sentences) == 4
    assert all(s in text for s in sentences)
    window = window_around(sentences, 1, 12, random.Random(0))
    assert sentences[1] in window and window in text


def test_loss_covers_answers_and_their_end_only_when_closed() -> None:
    """Loss on user text would teach the model to ask; loss on an open end would teach it to stop early."""
    tokenizer = train_tokenizer(TEXTS, 400)
    encoder = ExampleEncoder(tokenizer)
    messages = [
        message("user", "Who?"),
        message("assistant", "The cat."),
        message("user", "And?"),
        message("assistant", "It."),
    ]
    for open_ended in (False, True):
        encoded = encoder.encode(Example(messages, open_ended=open_ended), random.Random(0))
        learnt = [t for t, w in zip(encoded.ids, encoded.weights, strict=True) if w == 1.0]
        assert tokenizer.decode(learnt).replace("<|end|>", "") == "The cat.It."
        assert learnt.count(tokenizer.eos_token_id) == (0 if open_ended else 2)


def test_collated_targets_are_the_next_tokens() -> None:
    """An off-by-one here trains the model to repeat its input."""
    tokenizer = train_tokenizer(TEXTS, 400)
    encoder = ExampleEncoder(tokenizer)
    pairs = [Example([message("user", "Who?"), message("assistant", a)]) for a in ("The cat.", "It was 1977 then.")]
    batch = collate([encoder.encode(p, random.Random(0)) for p in pairs])
    flat = batch.ids.flatten()
    assert (flat[batch.positions + 1] == batch.targets).all()
    assert tokenizer.eos_token_id in batch.targets.tolist()


def test_standard_library_documents_are_stable_and_clean() -> None:
    """Addresses or aliases would make the corpus, and every score on it, differ between runs."""
    documents = stdlib_documents()
    names = [name for name, _ in documents]
    assert documents == stdlib_documents()
    assert names == sorted(set(names)) and len(names) > 3000
    assert all(text.startswith(name) and " at 0x" not in text for name, text in documents)
    assert not any(part.startswith("_") for name in names for part in name.split("."))
    assert 0.05 < sum(map(is_held_out, names)) / len(names) < 0.15
    assert dict(documents)["json.dumps"].startswith("json.dumps(obj, ")
    assert first_doc_sentence("json.dumps", dict(documents)["json.dumps"]).startswith("Serialize ``obj`` to a JSON")
    for signature in ("", "()", "(a: int = 1) -> dict[str, int]", "(sep=')', end='(')", "(purpose=<Purpose: 'se...)"):
        assert (
            first_doc_sentence("m.f", f"m.f{signature}: Do it: now (or never): yes. Then rest.")
            == "Do it: now (or never): yes."
        )


def test_misspelling_and_spacing() -> None:
    """The first letter stays, so that a misspelt word can still be found; spacing must be undone by joining alone."""
    rng = random.Random(0)
    assert all(misspell("grammar", rng)[0] == "g" for _ in range(50))
    assert tokenised('He said, "No."') == 'He said , " No. "' or tokenised("It was late.") == "It was late ."


@needs_data
def test_evaluation_articles_and_held_out_functions_are_not_trained_on(sources: Sources) -> None:
    """A leaked paragraph would make every reported score worthless."""
    articles = json.loads((DATA / "squad/dev-v1.1.json").read_text())["data"][-10:]
    held_out = {normalise(p["context"])[:100] for a in articles for p in a["paragraphs"]}
    trained = {" ".join(p.sentences)[:100] for p in sources.prose}
    trained |= {" ".join(q.paragraph.sentences)[:100] for q in sources.squad + sources.other_questions}
    trained |= {" ".join(p.sentences)[:100] for _, p in sources.unanswerable}
    assert not held_out & trained
    assert not any(is_held_out(name) for name, _ in sources.stdlib)
    jfleg = {line.strip() for line in (DATA / "jfleg/dev.ref0").read_text().splitlines()}
    assert not jfleg & set(sources.plain_sentences)


@needs_data
def test_every_quote_is_in_its_numbered_passage(sources: Sources) -> None:
    """Examples whose quote is nowhere in the prompt teach the model to invent."""
    stream = PackStream(sources, GrammarErrors(DATA), Lengths(3, (25, 80), 120), seed=1)
    for draw in (stream.question, stream.follow_up, stream.conversation):
        checked = num_abstained = 0
        for example in filter(None, (draw() for _ in range(200))):
            context: list[str] = []
            for role, content in ((m["role"], m["content"]) for m in example.messages):
                context = numbered_passages(content) if role == "context" else context
                assert len(context) <= 3
                answer = parse_answer(content) if role == "assistant" else None
                num_abstained += content == ABSTENTION
                if answer is not None:
                    assert answer[0] in context[answer[1] - 1]
                    checked += 1
        assert checked > 100 and num_abstained < checked / 2


@needs_data
def test_stream_depends_on_its_seed_alone(sources: Sources) -> None:
    """Resume relies on it: step n's data must not depend on the steps before."""
    errors = GrammarErrors(DATA)
    first, second = (PackStream(sources, errors, Lengths(3, (25, 80), 120), seed=7) for _ in range(2))
    assert [first.draw() for _ in range(50)] == [second.draw() for _ in range(50)]
    assert [first.question() for _ in range(20)] == [second.question() for _ in range(20)]
