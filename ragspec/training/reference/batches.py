"""From conversations to tensors: token ids, the weight of each token's loss, padded batches.

Owns the loss weights. An example starts at position 0 and is padded on the right, as it is served; `target_rows` packs more.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ragspec.training.reference.examples import Example
from ragspec.training.reference.text_format import ASSISTANT, END

CHOICE_WEIGHT, EDIT_WEIGHT, ANSWER_WEIGHT, PROMPT_WEIGHT, PROSE_WEIGHT = 4.0, 3.0, 1.0, 0.25, 0.4
"""Choices: whether to answer, where a quote begins, where it could go on otherwise, and short answers. Edits: where a
corrected sentence is not its source; what weighs more than what is kept is also written sooner."""
PROMPT_SAMPLE = 0.15
"""Share of prompt tokens whose loss is computed at all: the output layer is a fifth of a step's operations."""


@dataclass(frozen=True)
class Encoded:
    """Token ids and the loss weight of *predicting* each; same lengths."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True)
class MicroBatch:
    """Shapes: ids [B, T] int64; positions [M] flat indices whose next token is predicted; targets [M]; weights [M]."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor


class ExampleEncoder:
    """Turns examples into weighted token ids through the tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.assistant_id, self.end_id = vocabulary[ASSISTANT], vocabulary[END]

    def encode(self, example: Example, rng: random.Random) -> Encoded:
        if not example.messages:
            ids = self.tokenizer(example.text, add_special_tokens=False)["input_ids"]
            return Encoded(ids, [PROSE_WEIGHT] * len(ids))
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        weights, answering = self.prompt_weights(ids, rng), False
        for at, token in enumerate(ids):
            ends = token == self.end_id
            if answering:
                weights[at] = 0.0 if ends and example.open_ended else ANSWER_WEIGHT
            answering = (answering and not ends) or token == self.assistant_id
        return Encoded(ids, weights)

    def prompt_weights(self, ids: list[int], rng: random.Random) -> list[float]:
        """A few tokens of what is read are predicted, too."""
        return [PROMPT_WEIGHT if rng.random() < PROMPT_SAMPLE and id != self.assistant_id else 0.0 for id in ids]


def collate(examples: list[Encoded]) -> MicroBatch:
    """Pad on the right with id 0 and list the positions that carry loss."""
    length = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    weights = torch.zeros(len(examples), length)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.ids)] = torch.tensor(example.weights)
    next_weights = torch.zeros_like(weights)
    next_weights[:, :-1] = weights[:, 1:]  # position t predicts token t + 1
    positions = next_weights.flatten().nonzero().squeeze(1)
    return MicroBatch(ids, positions, ids.flatten()[positions + 1], next_weights.flatten()[positions])
