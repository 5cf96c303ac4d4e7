"""Guided attention: which key some heads should look at is known from the text, so their attention is trained directly.

Owns the list of guided heads and their loss, the negative logarithm of the attention a head gives to the right keys. Why: the
loss of the written tokens alone finds the choice of the sentence late and unlearns it early, because copying is most of it
(both measured; see the model card). The heads, and for which tokens they are guided to which:

- role: every token to the latest token that opens a role
- start, label: a token of a passage to the first token of its sentence, and to the number of its passage
- match: a word of the question to the same word in the sentence that answers it
- ask: a token of the short answer, and what opens it, to what the question asks for: "who", "how many", "which river"
- word: a token of a sentence to correct to the first token of its word
- gather: a token of the answer to the words of the question that have such a match
- locate: a token of the quote to itself in the passage, and what follows the quote to the quote's end there
- spell: what precedes each token of a word in a corrected sentence, to all tokens of the word that it stands for, evenly,
  where as many words stand for as many; in quotes to what opens the answer, which spells nothing
- copy: whatever is to be copied next, to where it stands
- choose: the same head where a quote begins; averaged apart, for one choice stands beside forty copies
- fork: the same head where the last two tokens (behind the first of a quote, the last one) go on otherwise elsewhere, and in
  short answers; averaged apart as well
- edit: the same head where a corrected sentence departs from its source, to what opens the answer; averaged apart
- point: what opens a short answer, to where the answer begins, in the quote or in the passage
"""

from dataclasses import dataclass, field
from enum import Enum, unique

import torch
from torch import Tensor


@unique
class Guide(Enum):
    """Layer, head and weight of each guided head."""

    ROLE = (0, 3, 0.1)
    START = (1, 0, 0.2)
    LABEL = (1, 1, 0.2)
    WORD = (1, 2, 0.4)
    MATCH = (2, 0, 0.3)
    ASK = (2, 1, 0.1)
    GATHER = (3, 0, 0.2)
    LOCATE = (3, 1, 0.3)
    SPELL = (3, 2, 1.0)
    COPY = (4, 0, 1.0)
    CHOOSE = (4, 0, 0.3)
    FORK = (4, 0, 0.5)
    EDIT = (4, 0, 0.25)
    POINT = (4, 2, 0.5)

    @property
    def layer(self) -> int:
        return int(self.value[0])

    @property
    def head(self) -> int:
        return int(self.value[1])

    @property
    def weight(self) -> float:
        return float(self.value[2])

    @property
    def is_even(self) -> bool:
        """Whether all right keys should get the same attention; otherwise any of them will do."""
        return self is Guide.SPELL


@dataclass(frozen=True)
class Guided:
    """For one head and one text of a batch: query rows [R] and which keys are right [R, T]."""

    guide: Guide
    text: int
    rows: Tensor
    keys: Tensor


@dataclass
class Guidance:
    """What the guided heads of one forward pass should do; `losses` collects a sum for each of them."""

    bias: Tensor
    """Large negative where a query may not look. Shape: [B, T, T]."""
    guided: list[Guided] = field(default_factory=list)
    losses: dict[Guide, Tensor] = field(default_factory=dict)

    def to(self, device: str) -> "Guidance":
        """The same on another device."""
        guided = [Guided(g.guide, g.text, g.rows.to(device), g.keys.to(device)) for g in self.guided]
        return Guidance(self.bias.to(device), guided)

    def observe(self, layer: int, scaled_query: Tensor, key: Tensor) -> None:
        """Add the losses of a layer. Shapes: scaled_query [B, heads, T, D], key [B, kv_heads, T, D]."""
        share = scaled_query.shape[1] // key.shape[1]
        for guide in Guide:
            guided = [each for each in self.guided if each.guide is guide]
            if guide.layer == layer and guided:
                queries, keys = scaled_query[:, guide.head].unbind(0), key[:, guide.head // share].unbind(0)
                found = [self._loss(each, queries[each.text], keys[each.text]) for each in guided]
                self.losses[guide] = torch.stack(found).sum()

    def _loss(self, each: Guided, queries: Tensor, keys: Tensor) -> Tensor:
        """Shapes: queries, keys [T, D]."""
        with torch.autocast(keys.device.type, enabled=False):
            scores = queries[each.rows].float() @ keys.float().T + self.bias[each.text, each.rows].float()
            if each.guide.is_even:
                count = each.keys.sum(-1)
                right = (scores * each.keys).sum(-1) / count + count.log()
            else:
                right = torch.logsumexp(scores.masked_fill(~each.keys, -1e4), dim=-1)
        return (torch.logsumexp(scores, dim=-1) - right).sum()
