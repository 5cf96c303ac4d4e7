"""The texts that a head is trained and probed on: the target's kinds of text, half prose and chat, with loss on answers only.

Owns the mixture, the draft vocabulary and the probes' texts. Evaluation data are held out as for the target: evaluation articles,
JFLEG, standard-library names, and all dialogues but the file `train`. Probes read SQuAD articles and dialogues that neither
training nor evaluation reads.

    >>> sample_text = dataset_sampler(sources, errors, AnswerEncoder(tokenizer))
    >>> batches = draw_batches(sample_text, random.Random(0), max_tokens=320, step_tokens=3072, micro_tokens=1536)
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec import core
from ragspec.errors import InputError
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.reference.batches import Encoded, MicroBatch, collate
from ragspec.training.reference.examples import Example, Lengths
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.sources import (
    NUM_PROBE_ARTICLES,
    NUM_TRAIN_ARTICLES,
    Sources,
    best_sentence,
    common_answer,
    load_sources,
)
from ragspec.training.reference.text_format import Message, message, question_messages, quoted_answer
from ragspec.training.sentences import normalise, split_sentences

LENGTHS = Lengths(3, (25, 80), 220)
PROBE_DIALOGUE_EVERY = 50
"""Probes read the second of every fifty dialogues of the file. The target's training reads every sixth, so none of them."""
MIN_TOKENS = 8
_ANY_LENGTH = 2**20
TextSampler = Callable[[random.Random], Encoded]
"""Samples one training text: its tokens, with weight 1 for tokens whose prediction is learnt."""


class DrafterStream(PackStream):
    """The mixture of single examples; half of it is prose and dialogues."""

    def __init__(self, sources: Sources, errors: GrammarErrors, seed: int) -> None:
        super().__init__(sources, errors, LENGTHS, seed)
        self.tasks = [
            (self.question, 0.42), (self.prose, 0.30), (self.dialogue, 0.22), (self.grammar, 0.05), (self.follow_up, 0.01),
        ]  # fmt: skip


class AnswerEncoder:
    """Encodes texts with a target's own chat template: weight 1 for the tokens of answers and of plain text, 0 for all others.

    `eos_ids`: the tokens that end a text; None: the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer, _ANY_LENGTH)
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._eos_ids, self._own_end = frozenset(own if eos_ids is None else eos_ids), own

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to the next answer. Raises: InputError unless the last message is the user's, or passages for it."""
        return list(self._prompts.tokens(_core_messages(messages)))

    def encode(self, example: Example) -> Encoded:
        """Why tokens are dropped: some templates rewrite earlier answers, so that a later prompt does not begin with the tokens
        before it. Only the part behind the rewritten answers is kept then.
        """
        if not example.messages:
            (ids,) = self._prompts.plain_ids([example.text], begins=True)
            return Encoded(ids, [1.0] * len(ids))
        ids, weights, num_ended = list[int](), list[float](), 0
        for position in answer_positions(example):
            prompt = self.prompt(example.messages[:position])
            if prompt[: len(ids)] != ids:  # the template may write the end of a text only once
                ids, weights = ids[:num_ended], weights[:num_ended]
            if prompt[: len(ids)] != ids:
                ids, weights = [], []
            answer, end = self._answer(example.messages[: position + 1], prompt)
            weights += (
                [0.0] * (len(prompt) - len(ids)) + [1.0] * len(answer) + [float(not example.open_ended)] * len(end)
            )
            ids, num_ended = [*prompt, *answer, *end], len(prompt) + len(answer)
        return Encoded(ids, weights)

    def _answer(self, messages: Sequence[Message], prompt: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of the last message and of its end, as the template writes them if it does."""
        if self.tokenizer.chat_template is not None:
            whole = list(self._prompts.answered(_core_messages(messages)))
            rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
            for at, token in enumerate(rest):
                if token in self._eos_ids:
                    return rest[:at], [token]
        lead = " " if self.tokenizer.chat_template is None else ""  # the plain layout has a space here
        (answer,) = self._prompts.plain_ids([lead + messages[-1]["content"]])
        return answer, self._own_end


def _core_messages(messages: Sequence[Message]) -> list[core.Message]:
    return [core.Message(each["role"], each["content"]) for each in messages]


def answer_positions(example: Example) -> list[int]:
    """Indices of the messages that answer a message of the user."""
    roles = [message["role"] for message in example.messages]
    return [n for n in range(1, len(roles)) if roles[n] == "assistant" and roles[n - 1] in ("user", "context")]


def drafter_sources(data_dir: Path) -> Sources:
    """The target's sources, with many more dialogues. Raises: InputError if a file is not there."""
    try:
        return replace(load_sources(data_dir), dialogues=_dialogues(data_dir, held_back=False))
    except OSError as cause:
        raise InputError(f"the training data lacks {cause.filename}: {cause.strerror}") from cause


def _dialogues(data_dir: Path, held_back: bool) -> list[list[tuple[str, str]]]:
    """The dialogues for probes if `held_back`, else those for training."""
    with (data_dir / "sgd" / "train.jsonl").open() as lines:
        rows = [
            json.loads(line)["turns"] for i, line in enumerate(lines) if (i % PROBE_DIALOGUE_EVERY == 1) == held_back
        ]
    return [[(speaker, normalise(text)) for speaker, text in turns] for turns in rows]


def dataset_sampler(sources: Sources, errors: GrammarErrors, encoder: AnswerEncoder) -> TextSampler:
    """Examples with the answers of the data sets."""

    return lambda rng: encoder.encode(DrafterStream(sources, errors, rng.getrandbits(32)).draw())


def draw_batches(
    sample_text: TextSampler, rng: random.Random, max_tokens: int, step_tokens: int, micro_tokens: int
) -> list[MicroBatch]:
    """One optimizer step's texts, about `step_tokens` tokens.

    Why texts with much and with little loss are batched apart: a head computes only rows that carry loss, so a short answer
    beside a page of prose would be mostly padding.
    """
    texts: list[Encoded] = []
    while sum(len(text.ids) for text in texts) < step_tokens:
        text = sample_text(rng)
        cut = Encoded(text.ids[:max_tokens], text.weights[:max_tokens])
        if len(cut.ids) >= MIN_TOKENS and any(cut.weights[2:]):
            texts.append(cut)
    texts.sort(key=lambda text: (sum(text.weights) > len(text.ids) / 2, len(text.ids)))
    groups: list[list[Encoded]] = [[]]
    for text in texts:
        if groups[-1] and (len(groups[-1]) + 1) * max(len(t.ids) for t in [*groups[-1], text]) > micro_tokens:
            groups.append([])
        groups[-1].append(text)
    return [collate(group) for group in groups]


def draft_vocabulary(sample_text: TextSampler, seed: int, size: int, vocab_size: int, num_texts: int) -> Tensor:
    """The `size` most frequent learnt tokens of the training texts, as ascending token ids. Shape: int64 [Vd]."""
    counts: Counter[int] = Counter()
    rng = random.Random(seed)
    for _ in range(num_texts):
        text = sample_text(rng)
        counts.update(token for token, weight in zip(text.ids, text.weights, strict=True) if weight)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def probe_examples(data_dir: Path, per_kind: int, seed: int) -> dict[str, list[Example]]:
    """Prose, chat and questions with passages, from texts that neither training nor evaluation reads."""
    rng = random.Random(seed)
    articles = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"]
    articles = articles[NUM_TRAIN_ARTICLES : NUM_TRAIN_ARTICLES + NUM_PROBE_ARTICLES]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    prose = [Example([], text=normalise(p["context"])) for p in paragraphs]
    dialogues = [turns[:6] for turns in _dialogues(data_dir, held_back=True)]
    roles = {"USER": "user", "SYSTEM": "assistant"}
    chat = [Example([message(roles[speaker], text) for speaker, text in turns]) for turns in dialogues]
    kinds = {"prose": prose, "chat": chat, "rag": list(_probe_questions(paragraphs))}
    return {kind: rng.sample(examples, min(per_kind, len(examples))) for kind, examples in kinds.items()}


def probe_batches(
    data_dir: Path, encoder: AnswerEncoder, per_kind: int, max_tokens: int, seed: int
) -> dict[str, list[MicroBatch]]:
    """The probes' texts by kind, in batches of eight; kinds whose texts are all too long are left out."""
    batches: dict[str, list[MicroBatch]] = {}
    for kind, examples in probe_examples(data_dir, per_kind, seed).items():
        encoded = sorted((encoder.encode(example) for example in examples), key=lambda text: len(text.ids))
        cut = [Encoded(text.ids[:max_tokens], text.weights[:max_tokens]) for text in encoded]
        kept = [text for text in cut if any(text.weights[2:])]
        batches[kind] = [collate(kept[start : start + 8]) for start in range(0, len(kept), 8)]
    return {kind: kept for kind, kept in batches.items() if kept}


def _probe_questions(paragraphs: list[dict[str, list[dict[str, list[dict[str, str]]]]]]) -> Iterator[Example]:
    """The paragraph's own first question, over its own passage."""
    for raw in paragraphs:
        passage, asked = normalise(str(raw["context"])), raw["qas"][0]
        question, answers = normalise(str(asked["question"])), [a["text"] for a in asked["answers"]]
        sentences, answer = split_sentences(passage), normalise(common_answer(answers))
        index = best_sentence(question, answer, sentences)
        if index is not None:
            reply = message("assistant", quoted_answer(sentences[index], 1, answer))
            yield Example([*question_messages(question, [passage]), reply])
