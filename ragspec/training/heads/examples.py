"""What a head is trained and probed on: texts of the target's kinds, half of them prose and chat, loss on answers only.

Owns the mixture, the draft vocabulary and the probes' texts. Held out as for the target: evaluation articles, JFLEG,
standard-library names, and of the dialogues every file but `train`; probes read SQuAD articles and dialogues that neither
training nor evaluation sees.
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
"""Of the file's dialogues, the second of each fifty; the target was trained on every sixth, which are none of them."""
MIN_TOKENS = 8
_ANY_LENGTH = 2**20
Draw = Callable[[random.Random], Encoded]
"""One training text: its tokens, and weight 1 for those whose prediction is learnt."""


class DrafterStream(PackStream):
    """The mixture of single examples, half of it prose and dialogues."""

    def __init__(self, sources: Sources, errors: GrammarErrors, seed: int) -> None:
        super().__init__(sources, errors, LENGTHS, seed)
        self.tasks = [
            (self.question, 0.42), (self.prose, 0.30), (self.dialogue, 0.22), (self.grammar, 0.05), (self.follow_up, 0.01),
        ]  # fmt: skip


class AnswerEncoder:
    """Texts as a target reads and writes them, laid out by its own chat template: weight 1 for the tokens of answers and of plain
    text, 0 for all others. `eos_ids`: what ends a text; None: the tokenizer's own."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer, _ANY_LENGTH)
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._eos_ids, self._own_end = frozenset(own if eos_ids is None else eos_ids), own

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Up to where the next answer begins. Raises: InputError unless the user's message, or passages for it, come last."""
        return list(self._prompts.tokens(_said(messages)))

    def encode(self, example: Example) -> Encoded:
        """Where a template lays an earlier answer out in another way than it asked for it, only what follows is kept."""
        if not example.messages:
            (ids,) = self._prompts.plain_ids([example.text], begins=True)
            return Encoded(ids, [1.0] * len(ids))
        ids, weights, num_ended = list[int](), list[float](), 0
        for place in answers_of(example):
            prompt = self.prompt(example.messages[:place])
            if prompt[: len(ids)] != ids:  # what ends a text may stand nowhere else
                ids, weights = ids[:num_ended], weights[:num_ended]
            if prompt[: len(ids)] != ids:
                ids, weights = [], []
            answer, end = self._answer(example.messages[: place + 1], prompt)
            weights += (
                [0.0] * (len(prompt) - len(ids)) + [1.0] * len(answer) + [float(not example.open_ended)] * len(end)
            )
            ids, num_ended = [*prompt, *answer, *end], len(prompt) + len(answer)
        return Encoded(ids, weights)

    def _answer(self, messages: Sequence[Message], prompt: list[int]) -> tuple[list[int], list[int]]:
        """The last message behind its prompt, and what ends it: as the template writes both, if it does."""
        if self.tokenizer.chat_template is not None:
            whole = list(self._prompts.answered(_said(messages)))
            rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
            for at, token in enumerate(rest):
                if token in self._eos_ids:
                    return rest[:at], [token]
        lead = " " if self.tokenizer.chat_template is None else ""  # as the plain layout has it
        (answer,) = self._prompts.plain_ids([lead + messages[-1]["content"]])
        return answer, self._own_end


def _said(messages: Sequence[Message]) -> list[core.Message]:
    return [core.Message(each["role"], each["content"]) for each in messages]


def answers_of(example: Example) -> list[int]:
    """Places of the messages that answer one of the user's."""
    roles = [message["role"] for message in example.messages]
    return [n for n in range(1, len(roles)) if roles[n] == "assistant" and roles[n - 1] in ("user", "context")]


def drafter_sources(data_dir: Path) -> Sources:
    """The target's sources, with many more dialogues. Raises: InputError if a file is not there."""
    try:
        return replace(load_sources(data_dir), dialogues=_dialogues(data_dir, held_back=False))
    except OSError as cause:
        raise InputError(f"the training data lacks {cause.filename}: {cause.strerror}") from cause


def _dialogues(data_dir: Path, held_back: bool) -> list[list[tuple[str, str]]]:
    """Those to train on, or the few for probes; the target's own training has none of the latter."""
    with (data_dir / "sgd" / "train.jsonl").open() as lines:
        rows = [
            json.loads(line)["turns"] for i, line in enumerate(lines) if (i % PROBE_DIALOGUE_EVERY == 1) == held_back
        ]
    return [[(speaker, normalise(text)) for speaker, text in turns] for turns in rows]


def dataset_draw(sources: Sources, errors: GrammarErrors, encoder: AnswerEncoder) -> Draw:
    """Examples with the answers of the data sets."""

    def draw(rng: random.Random) -> Encoded:
        stream = DrafterStream(sources, errors, rng.getrandbits(32))
        return encoder.encode(stream.draw())

    return draw


def draw_batches(
    draw: Draw, rng: random.Random, max_tokens: int, step_tokens: int, micro_tokens: int
) -> list[MicroBatch]:
    """One optimizer step's texts, about `step_tokens` tokens; those that teach much are kept from those that teach little.

    Why: a head computes only the rows that carry loss, so a short answer beside a page of prose would be mostly padding.
    """
    texts: list[Encoded] = []
    while sum(len(text.ids) for text in texts) < step_tokens:
        text = draw(rng)
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


def draft_vocabulary(draw: Draw, seed: int, size: int, vocab_size: int, num_texts: int) -> Tensor:
    """The `size` most frequent learnt tokens of the training texts, as rising token ids. Shape: int64 [Vd]."""
    counts: Counter[int] = Counter()
    rng = random.Random(seed)
    for _ in range(num_texts):
        text = draw(rng)
        counts.update(token for token, weight in zip(text.ids, text.weights, strict=True) if weight)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def probe_examples(data_dir: Path, per_kind: int, seed: int) -> dict[str, list[Example]]:
    """Prose, chat and questions with passages, of texts that are neither trained nor evaluated on."""
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
    """The probes' texts by kind, in batches of eight; no kind of which nothing fits."""
    batches: dict[str, list[MicroBatch]] = {}
    for kind, examples in probe_examples(data_dir, per_kind, seed).items():
        encoded = sorted((encoder.encode(example) for example in examples), key=lambda text: len(text.ids))
        cut = [Encoded(text.ids[:max_tokens], text.weights[:max_tokens]) for text in encoded]
        kept = [text for text in cut if any(text.weights[2:])]
        batches[kind] = [collate(kept[start : start + 8]) for start in range(0, len(kept), 8)]
    return {kind: found for kind, found in batches.items() if found}


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
