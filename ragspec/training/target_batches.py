"""From conversations to tensors: token ids, the weight of each token's loss, micro-batches of similar length.

Owns the loss weights. Every example starts at position 0 and is padded on the right, as it is served.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ragspec.training.target_examples import Example, ExampleStream
from ragspec.training.target_format import ASSISTANT, END

ANSWER_WEIGHT, PROMPT_WEIGHT, PROSE_WEIGHT = 1.0, 0.25, 0.4
PROMPT_SAMPLE = 0.25
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
        self.assistant_id = tokenizer.convert_tokens_to_ids(ASSISTANT)
        self.end_id = tokenizer.convert_tokens_to_ids(END)

    def encode(self, example: Example, rng: random.Random) -> Encoded:
        if not example.messages:
            ids = self.tokenizer(example.text, add_special_tokens=False)["input_ids"]
            return Encoded(ids, [PROSE_WEIGHT] * len(ids))
        text = self.tokenizer.apply_chat_template(example.messages, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        weights, answering = [], False
        for token in ids:
            ends = token == self.end_id
            if answering:
                weights.append(0.0 if ends and example.open_ended else ANSWER_WEIGHT)
            else:
                weights.append(PROMPT_WEIGHT if rng.random() < PROMPT_SAMPLE and token != self.assistant_id else 0.0)
            answering = (answering and not ends) or token == self.assistant_id
        return Encoded(ids, weights)


def draw_step(
    stream: ExampleStream, encoder: ExampleEncoder, max_tokens: int, step_tokens: int, micro_tokens: int
) -> list[MicroBatch]:
    """The micro-batches of one optimizer step: about `step_tokens` tokens in examples of at most `max_tokens`."""
    examples: list[Encoded] = []
    num_tokens = 0
    while num_tokens < step_tokens:
        encoded = encoder.encode(stream.draw(), stream.rng)
        if 8 < len(encoded.ids) <= max_tokens:
            examples.append(encoded)
            num_tokens += len(encoded.ids)
    examples.sort(key=lambda e: len(e.ids))
    groups: list[list[Encoded]] = [[]]
    for example in examples:
        if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > micro_tokens:
            groups.append([])
        groups[-1].append(example)
    return [collate(group) for group in groups]


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
