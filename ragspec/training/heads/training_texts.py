"""The texts that a head is trained and probed on: the adapter's mixture, half of it prose and chat.

A head learns the target's predictions of all tokens, the prompts' too: the target has computed their states anyway, and from as
many texts a head is right more often, also in answers (`infra/results/heads.md`). Probes and draft vocabularies count answers
alone, which is where heads draft.

Owns the mixture, the micro-batches, the draft vocabulary and the probes' texts. Evaluation data are held out as for the
adapter: its articles, JFLEG, standard-library names, documentation files, and all dialogues but the file `train`. Probes read
SQuAD articles and dialogues that neither training nor evaluation reads.

    >>> sample_text = dataset_sampler(TextSource(data_dir), AnswerEncoder(tokenizer))
    >>> batches = micro_batches([whole_text(sample_text, 576, random.Random(0))], micro_tokens=1536)
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.heads.learning import MicroBatch, collate
from ragspec.rag.wording import question_messages, quoted_answer
from ragspec.training.conversations import AnswerEncoder, Conversation, Encoded, message
from ragspec.training.reference.mixture import Mixture
from ragspec.training.reference.sources import NUM_PROBE_ARTICLES, NUM_TRAIN_ARTICLES, json_lines, squad_articles
from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences

SHARES = {
    "questions": 0.36, "documentation": 0.04, "stdlib": 0.02, "prose": 0.30, "dialogue": 0.22, "grammar": 0.05,
    "follow_ups": 0.01,
}  # fmt: skip
MAX_PROSE_WORDS = 220
PROBE_DIALOGUE_EVERY = 50
"""Probes read the second of every fifty dialogues of the file."""
MIN_TOKENS = 8
TextSampler = Callable[[random.Random], Encoded]
"""Samples one training text: its tokens, with weight 1 for those of answers."""


class TextSource:
    """Draws conversations and prose. Raises: InputError if a data file is not there."""

    def __init__(self, data_dir: Path) -> None:
        self._mixture = Mixture(data_dir, [])
        self._dialogues = list(_dialogues(data_dir, held_back=False))
        self._books = list(json_lines(data_dir / "books/classic_books.jsonl"))

    def draw(self, rng: random.Random) -> Conversation:
        """One text; a function of the data and the generator."""
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "dialogue":
            turns = rng.choice(self._dialogues)
            start = rng.randrange(0, max(1, len(turns) - 4), 2)
            return _dialogue(turns[start : start + 2 * rng.randint(1, 2)])
        if kind == "prose":
            return Conversation([], text=self._prose(rng))
        return rng.choice(self._mixture.draw(kind, rng))

    def _prose(self, rng: random.Random) -> str:
        """The first words of a paragraph of a question, or of a book."""
        if rng.random() < 0.5:
            return " ".join(rng.choice(self._mixture.paragraphs).text.split()[:MAX_PROSE_WORDS])
        text = rng.choice(self._books)["text"]
        start = rng.randrange(max(1, len(text) - 10 * MAX_PROSE_WORDS))
        words = text[start : start + 10 * MAX_PROSE_WORDS].split()
        return " ".join(words[1 : MAX_PROSE_WORDS + 1])  # the first word may be cut


def _dialogues(data_dir: Path, held_back: bool) -> Iterator[list[tuple[str, str]]]:
    """The dialogues for probes if `held_back`, else those for training."""
    for number, row in enumerate(json_lines(data_dir / "sgd/train.jsonl")):
        if (number % PROBE_DIALOGUE_EVERY == 1) == held_back:
            yield [(speaker, normalise(text)) for speaker, text in row["turns"]]


def _dialogue(turns: list[tuple[str, str]]) -> Conversation:
    roles = {"USER": "user", "SYSTEM": "assistant"}
    return Conversation([message(roles[speaker], text) for speaker, text in turns])


def dataset_sampler(source: TextSource, encoder: AnswerEncoder) -> TextSampler:
    """Texts with the answers of the data sets."""
    return lambda rng: encoder.encode(source.draw(rng))


def whole_text(sample_text: TextSampler, max_tokens: int, rng: random.Random) -> Encoded:
    """A text that is cut to `max_tokens`. All of its tokens are learnt; very short texts are drawn again."""
    while True:
        ids = sample_text(rng).ids[:max_tokens]
        if len(ids) >= MIN_TOKENS:
            return Encoded(ids, [1.0] * len(ids))


def num_tokens(text: Encoded) -> int:
    return len(text.ids)


def micro_batches(texts: Sequence[Encoded], micro_tokens: int) -> list[MicroBatch]:
    """Texts in rising order of their lengths, in batches of at most `micro_tokens` tokens with their padding, or of one text."""
    groups: list[list[Encoded]] = [[]]
    for text in texts:
        if groups[-1] and (len(groups[-1]) + 1) * len(text.ids) > micro_tokens:
            groups.append([])
        groups[-1].append(text)
    return [collate(group) for group in groups]


def draft_vocabulary(sample_text: TextSampler, seed: int, size: int, vocab_size: int, num_texts: int) -> Tensor:
    """The `size` most frequent tokens of the training texts' answers, as ascending token ids. Shape: int64 [Vd]."""
    counts: Counter[int] = Counter()
    rng = random.Random(seed)
    for _ in range(num_texts):
        text = sample_text(rng)
        counts.update(token for token, weight in zip(text.ids, text.weights, strict=True) if weight)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def probe_texts(data_dir: Path, per_kind: int, seed: int) -> dict[str, list[Conversation]]:
    """Prose, chat and questions with passages, from texts that neither training nor evaluation reads."""
    rng = random.Random(seed)
    articles = squad_articles(data_dir)[NUM_TRAIN_ARTICLES : NUM_TRAIN_ARTICLES + NUM_PROBE_ARTICLES]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    kinds = {
        "prose": [Conversation([], text=normalise(p["context"])) for p in paragraphs],
        "chat": [_dialogue(turns[:6]) for turns in _dialogues(data_dir, held_back=True)],
        "rag": list(_probe_questions(paragraphs)),
    }
    return {kind: rng.sample(texts, min(per_kind, len(texts))) for kind, texts in kinds.items()}


def probe_batches(
    data_dir: Path, encoder: AnswerEncoder, per_kind: int, max_tokens: int, seed: int
) -> dict[str, list[MicroBatch]]:
    """The probes' texts by kind, in batches of eight; kinds whose texts are all too long are left out."""
    batches: dict[str, list[MicroBatch]] = {}
    for kind, texts in probe_texts(data_dir, per_kind, seed).items():
        encoded = sorted((encoder.encode(text) for text in texts), key=lambda text: len(text.ids))
        cut = [Encoded(text.ids[:max_tokens], text.weights[:max_tokens]) for text in encoded]
        kept = [text for text in cut if any(text.weights[2:])]
        batches[kind] = [collate(kept[start : start + 8]) for start in range(0, len(kept), 8)]
    return {kind: kept for kind, kept in batches.items() if kept}


def _probe_questions(paragraphs: list[dict[str, Any]]) -> Iterator[Conversation]:
    """The paragraph's own first question, over its own passage."""
    for raw in paragraphs:
        passage, asked = normalise(raw["context"]), raw["qas"][0]
        answer = normalise(common_answer([each["text"] for each in asked["answers"]]))
        sentences = split_sentences(passage)
        index = best_sentence(asked["question"], answer, sentences)
        if index is not None:
            reply = message("assistant", quoted_answer(sentences[index], 1, answer))
            yield Conversation([*question_messages(normalise(asked["question"]), [passage]), reply])
