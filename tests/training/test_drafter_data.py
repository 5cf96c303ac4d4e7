"""What a head is trained on: which tokens count, which are drafted, and the cache of the target's own answers."""

import itertools
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from real_data import DATA, needs_data
from tiny_target import chat_tokenizer, tiny_tokenizer

from ragspec.core import Message, Request
from ragspec.errors import InputError
from ragspec.evaluation.datasets import held_out_articles
from ragspec.rag.wording import question_messages
from ragspec.training.conversations import AnswerEncoder, Conversation, Encoded
from ragspec.training.heads.training_texts import (
    ANSWER_TOKENS,
    PROSE_TOKENS,
    AnswerOrigin,
    AnswerPrompt,
    PromptSource,
    TextSource,
    answer_sampler,
    draft_vocabulary,
    micro_batches,
    num_tokens,
    probe_batches,
    probe_texts,
    prompt_of,
    read_answers,
    whole_text,
    write_answers,
)
from ragspec.training.sentences import normalise
from ragspec.training.trainer import POOL_STEPS, StepData, split_evenly

ORIGIN = AnswerOrigin("one target", 0, 320, "these texts")


def encoder() -> AnswerEncoder:
    return AnswerEncoder(chat_tokenizer())


def test_only_tokens_of_answers_and_prose_have_weight() -> None:
    """Draft vocabularies and probes would count questions, which are never generated."""
    turns = [Message("user", "The cat?"), Message("assistant", "at noon"), Message("user", "mat?")]
    encoded = encoder().encode(Conversation([*turns, Message("assistant", "on the mat")]))
    tokenizer = encoder().tokenizer
    learnt = [token for token, weight in zip(encoded.ids, encoded.weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(learnt) == "at noon<|im_end|>on the mat<|im_end|>"
    assert set(encoded.weights) == {0.0, 1.0}
    prose = encoder().encode(Conversation([], text="The cat sat"))
    assert prose.weights == [1.0] * len(prose.ids)


def draw(rng: random.Random) -> Encoded:
    return _text(rng.randint(4, 60), is_prose=rng.random() < 0.5)


def data_of(seed: str = "0/0", num_processes: int = 0) -> StepData[Encoded]:
    return StepData(partial(whole_text, draw, 40), num_tokens, num_tokens, 100, seed, num_processes)


def test_all_tokens_of_whole_texts_are_learnt_in_small_batches() -> None:
    """Answers alone, very short texts, or a batch that does not fit into memory."""
    texts = next(data_of().steps(0))
    batches = micro_batches(texts, micro_tokens=80)
    lengths = [int((row > 0).sum()) + 1 for batch in batches for row in batch.ids]
    assert len(batches) > 1 and lengths == [len(text.ids) for text in texts] == sorted(lengths)
    assert min(lengths) >= 8 and max(lengths) <= 40
    assert sum(batch.num_learnt for batch in batches) == sum(lengths) - len(lengths)
    assert all(batch.ids.numel() <= 80 for batch in batches)


def test_steps_are_the_same_however_they_are_drawn_and_of_one_length_each() -> None:
    """A resumed run, or a run with more processes, learned other texts; workers learned the same texts; or short texts stood
    beside long ones, and half of the products were of padding."""
    steps = list(itertools.islice(data_of().steps(0), 20))
    assert list(itertools.islice(data_of(num_processes=2).steps(13), 7)) == steps[13:]
    assert steps != list(itertools.islice(data_of("0/1").steps(0), 20))
    sizes = [sum(map(num_tokens, texts)) for texts in steps[:POOL_STEPS]]
    shortest = [num_tokens(texts[0]) for texts in steps[:POOL_STEPS]]
    assert min(sizes) > 80 and max(sizes) < 160 and shortest != sorted(shortest)
    assert sum(num_tokens(texts[-1]) - num_tokens(texts[0]) for texts in steps[:POOL_STEPS]) < 3 * 40


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 12))
def test_parts_are_neighbours_and_never_empty(sizes: list[int], count: int) -> None:
    """A step without a text, or a text lost."""
    assume(len(sizes) >= count)
    parts = split_evenly(sizes, count, lambda size: size)
    assert len(parts) == count and all(parts)
    assert [size for part in reversed(parts) for size in part] == sizes


def _text(length: int, is_prose: bool) -> Encoded:
    return Encoded(list(range(length)), [1.0] * length if is_prose else [0.0] * 10 + [1.0] * 4 + [0.0] * (length - 14))


def test_draft_vocabulary_is_what_is_learnt_most() -> None:
    """Counting prompts, or ids that do not rise, gives a table that no loader takes."""
    texts = [Encoded([9, 9, 9, 9, 3, 5], [0.0] * 4 + [1.0] * 2), Encoded([5, 8], [1.0, 1.0])]
    found = draft_vocabulary(lambda rng: rng.choice(texts), 0, 3, 20, num_texts=50)
    assert found.tolist() == [3, 5, 8]


class EchoEngine:
    """Answers with the request's number; counts what it was asked."""

    def __init__(self, fails_at: int = -1) -> None:
        self.asked: list[Request] = []
        self.fails_at = fails_at

    def generate(self, requests: Sequence[Request]) -> list[SimpleNamespace]:
        self.asked += requests
        if len(self.asked) > self.fails_at > 0:
            raise KeyboardInterrupt
        return [SimpleNamespace(token_ids=(int(r.id.split("-")[1]), 5)) for r in requests]


def prompt_for(number: int) -> AnswerPrompt:
    return AnswerPrompt([number % 7, 2, 3], number % 3 == 0)


def answers_after(path: Path, engine: EchoEngine, count: int = 150, origin: AnswerOrigin = ORIGIN) -> list[int]:
    return list(write_answers(path, origin, count, prompt_for, engine))  # type: ignore[arg-type]


def test_answers_go_on_behind_a_kill(tmp_path: Path) -> None:
    """Regenerating hours of answers, or a torn line that makes all of them unreadable."""
    path, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answers_after(path, EchoEngine(fails_at=100))
    path.write_bytes(path.read_bytes() + b'{"ids": [1, 2')
    engine = EchoEngine()
    assert answers_after(path, engine)[-1] == 150
    assert len(engine.asked) == 150 - 64
    answers_after(whole, EchoEngine())
    assert path.read_bytes() == whole.read_bytes()
    assert read_answers(path)[65] == ([65 % 7, 2, 3, 65, 5], [0.0, 0.0, 0.0, 1.0, 1.0])
    assert not answers_after(path, EchoEngine())


def test_answers_of_another_origin_or_file_are_refused(tmp_path: Path) -> None:
    """A head would learn to imitate a model that it will not serve, or half of it from prompts of another run; or a traceback."""
    path = tmp_path / "answers.jsonl"
    answers_after(path, EchoEngine())
    for name, value in {"target": "other", "seed": 1, "max_tokens": 640, "data": "other texts"}.items():
        with pytest.raises(InputError, match=f"another {name}"):
            answers_after(path, EchoEngine(), origin=ORIGIN._replace(**{name: value}))  # type: ignore[arg-type]
    for content in ("no answers\n", '{"target": "one target", "seed": 0}\n', ""):
        path.write_text(content)
        with pytest.raises(InputError, match="holds no answers"):
            read_answers(path)
    with pytest.raises(InputError, match=r"dev-v1\.1\.json"):
        TextSource(tmp_path)


def test_half_of_the_answers_are_greedy_and_only_what_the_target_wrote_is_learnt(tmp_path: Path) -> None:
    """A head that never saw sampled text is measured at T=1 too; prose stopped; the prompt of an answer is not the target's own
    text; or a run that is resumed beside a longer cache drew other texts than the unbroken one."""
    path, engine = tmp_path / "answers.jsonl", EchoEngine()
    answers_after(path, engine, count=70)
    before = [answer_sampler(read_answers(path, 70))(random.Random(seed)) for seed in range(20)]
    answers_after(path, engine)
    assert before == [answer_sampler(read_answers(path, 70))(random.Random(seed)) for seed in range(20)]
    assert all(text.weights == [0.0, 0.0, 0.0, 1.0, 1.0] and len(text.ids) == 5 for text in before)
    params = [request.params for request in engine.asked]
    assert [p.temperature for p in params[:4]] == [0.0, 1.0, 0.0, 1.0]
    assert [p.ignore_eos for p in params[:4]] == [True, False, False, True]
    assert [p.max_tokens for p in params[:2]] == [PROSE_TOKENS, ANSWER_TOKENS]
    assert len({p.seed for p in params}) == len(params)


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"]
)
def test_any_target_reads_them_in_its_own_layout(template: str | None) -> None:
    """Only targets with the reference's control tokens could have heads trained; for others there was a KeyError."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    turns = [*question_messages("Who sat?", ["The cat sat."]), Message("assistant", '"The cat sat." [1]')]
    encoded = AnswerEncoder(tokenizer).encode(
        Conversation([*turns, Message("user", "mat?"), Message("assistant", "on")])
    )
    learnt = [token for token, weight in zip(encoded.ids, encoded.weights, strict=True) if weight]
    text = str(tokenizer.decode(encoded.ids))
    assert str(tokenizer.decode(learnt)).endswith("on</s>")
    assert "The cat sat." in text and text.index("Who sat?") < text.index("mat?")
    prompt = prompt_of(Conversation(turns), AnswerEncoder(tokenizer), random.Random(0))
    assert prompt is not None and '" [1]' not in str(tokenizer.decode(prompt.ids)).split("Who sat?")[1]


def test_an_answer_ends_as_the_template_ends_it() -> None:
    """Where that is not the tokenizer's own end, heads learnt another, and of all answers of a conversation the last alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}><s>{{ m.content }}<s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant><s>{% endif %}"
    )
    turns = [Message("user", "mat?"), Message("assistant", "on"), Message("user", "noon?"), Message("assistant", "at")]
    (end,) = tokenizer.convert_tokens_to_ids(["<s>"])
    encoded = AnswerEncoder(tokenizer, (end, tokenizer.eos_token_id)).encode(Conversation(turns))
    learnt = [token for token, weight in zip(encoded.ids, encoded.weights, strict=True) if weight]
    assert tokenizer.decode(learnt) == "on<s>at<s>"


def test_a_prompt_ends_where_the_last_answer_begins() -> None:
    """With the answer in the prompt there is nothing left to say."""
    turns = [Message("user", "cat"), Message("assistant", "mat"), Message("user", "noon"), Message("assistant", "sat")]
    prompt = prompt_of(Conversation(turns), encoder(), random.Random(0))
    assert prompt is not None
    assert str(encoder().tokenizer.decode(prompt.ids)).endswith(
        "mat<|im_end|>\n<|im_start|>user\nnoon<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of(Conversation([], text="The cat"), encoder(), random.Random(0)) is None


class OneText(TextSource):
    """Draws one made-up conversation, its question numbered by the generator."""

    def __init__(self, word: str) -> None:
        self.word = word

    def draw(self, rng: random.Random) -> Conversation:
        return Conversation([Message("user", f"{self.word} {rng.randrange(99)}?"), Message("assistant", "Yes.")])


def test_prompts_and_origin_depend_on_data_and_seed_alone() -> None:
    """A longer run would answer other prompts, or old answers would pass for answers to new data."""
    first, again = (PromptSource(OneText("cat"), encoder(), 320, 0) for _ in range(2))
    other = PromptSource(OneText("dog"), encoder(), 320, 0)
    assert [first(n) for n in range(9)] == [again(n) for n in range(9)]
    assert first.origin("target") == again.origin("target")
    assert first.origin("target").data != other.origin("target").data


@pytest.mark.slow  # reads all of the data
@needs_data
def test_training_and_probes_are_apart_and_evaluation_is_in_neither() -> None:
    """A head measured on what it was trained on."""
    source, rng = TextSource(DATA), random.Random(0)
    drawn = [source.draw(rng) for _ in range(1500)]
    assert 0.25 < sum(not text.messages for text in drawn) / len(drawn) < 0.35
    shown = json.dumps([[text.text, *(m.content for m in text.messages)] for text in drawn], ensure_ascii=False)
    probes = probe_texts(DATA, 30, seed=0)
    assert {kind: len(texts) for kind, texts in probes.items()} == {"prose": 30, "chat": 30, "rag": 30}
    assert not any(text.text[:60] in shown for text in probes["prose"])
    for article in held_out_articles(DATA):
        assert not any(normalise(paragraph["context"])[:60] in shown for paragraph in article["paragraphs"])


@needs_data
def test_probes_have_rows_of_every_kind() -> None:
    """A kind whose answers are all cut off would report zero for ever."""
    batches = probe_batches(DATA, encoder(), per_kind=4, max_tokens=2_000, seed=0)
    assert all(sum(len(batch.positions) for batch in kind) > 20 for kind in batches.values())
