"""A draft model with another vocabulary than the target's: texts pass between the two, not token ids.

The model reads the text in its own tokens and drafts a chain; the chain's text, behind the text so far, becomes the target's
tokens. Text near the end of what is known may be divided into tokens anew at every step: the keys of tokens that changed are
dropped. Nothing is coupled, for noise belongs to the ids of one vocabulary.

Source: universal assisted decoding (Timor et al. 2025, arXiv 2502.05202); here exact at every temperature, as any draft is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ragspec.core import Request, SamplingParams
from ragspec.drafting.draft_model.drafter import ModelDrafter
from ragspec.drafting.draft_model.memory import ModelMemory
from ragspec.drafting.drafter import Budget, Features, SequenceView
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.speculation import ON
from ragspec.tree import Proposal

_UNSETTLED, _MOST_UNSETTLED = 8, 40
"""The target's last tokens whose text may be divided anew: at least, and at most before the beginning of a word settles some."""


class SettledText(NamedTuple):
    """The model's tokens of the text of the target's first tokens."""

    own_ids: list[int]
    num_targets: int


class Vocabularies:
    """Two tokenizers, and texts between them."""

    def __init__(self, own: PreTrainedTokenizerBase, targets: PreTrainedTokenizerBase) -> None:
        self.own, self.targets = own, targets

    def text_of(self, token_ids: SequenceOf[int]) -> str:
        """The text of the target's tokens. A character that is cut off is left out."""
        text = self.targets.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\ufffd")

    def extended(self, settled: SettledText, token_ids: SequenceOf[int]) -> SettledText:
        """Settled text and the text of further tokens of the target."""
        begins, eos_id = not settled.num_targets, self.own.eos_token_id
        ids: list[int] = self.own(self.text_of(token_ids), add_special_tokens=begins, verbose=False)["input_ids"]
        if begins and ids and ids[-1] == eos_id:
            ids = ids[:-1]
        return SettledText([*settled.own_ids, *ids], settled.num_targets + len(token_ids))

    def starts_word(self, token_id: int) -> bool:
        return self.text_of([token_id])[:1].isspace()

    def targets_ids(self, known: SequenceOf[int], pieces: SequenceOf[str]) -> list[tuple[int, int]]:
        """The target's tokens of the pieces behind known tokens, each with the number of the piece that completes it."""
        before, ends = self.text_of(known), list(accumulate(map(len, pieces)))
        ids, offsets = self._encoded(before + "".join(pieces))
        begin = len(before)
        if ids[: len(known)] != list(known):  # the last known token would go on: the pieces stand alone
            (ids, offsets), begin, known = self._encoded("".join(pieces)), 0, ()
        new = zip(ids[len(known) :], offsets[len(known) :], strict=True)
        return [(token, min(bisect_left(ends, end - begin), len(ends) - 1)) for token, (_, end) in new]

    def _encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.targets(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]


class TranslatedSequence:
    """A sequence as the model reads it. `tokens`: the text in the model's vocabulary."""

    def __init__(self, sequence: SequenceView, vocabularies: Vocabularies, prompt: SettledText | None) -> None:
        """`prompt`: its beginning, divided before."""
        self.of, self._vocabularies = sequence, vocabularies
        self.request: Request = replace(sequence.request, params=SamplingParams(), speculation=ON)
        self.prepared: Mapping[str, Any] = {}
        self.slots: SequenceSlots | None = None
        self._settled = prompt or SettledText([], 0)
        self.tokens = self.translated()
        self.num_prompt = len(self.tokens)

    @property
    def key(self) -> tuple[str, int]:
        return self.of.key

    @property
    def num_output(self) -> int:
        return self.of.num_output

    @property
    def most_tokens(self) -> int:
        return self.of.most_tokens

    @property
    def unsettled(self) -> list[int]:
        """The target's tokens whose text may be divided anew."""
        return self.of.tokens[self._settled.num_targets :]

    def translated(self) -> list[int]:
        """All text now."""
        unsettled = self.unsettled
        if len(unsettled) > _MOST_UNSETTLED:
            last = len(unsettled) - _UNSETTLED
            words = (n for n in range(last, 0, -1) if self._vocabularies.starts_word(unsettled[n]))
            self._settled = self._vocabularies.extended(self._settled, unsettled[: next(words, last)])
        return self._vocabularies.extended(self._settled, self.unsettled).own_ids


class TranslatedDrafter(ModelDrafter):
    """See the module. Caches no prefixes: the last tokens of one may be others in the next text."""

    def __init__(self, vocabularies: Vocabularies, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._vocabularies = vocabularies
        self._translated: dict[tuple[str, int], TranslatedSequence] = {}

    def prepare(self, request: Request) -> SettledText:
        known = request.prompt_ids[: max(0, len(request.prompt_ids) - _UNSETTLED)]
        return self._vocabularies.extended(SettledText([], 0), known)

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        return super().cost_s([self._own(sequence) for sequence in sequences])

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        own = [self._own(sequence) for sequence in sequences]
        lists = super().propose(own, budget)
        return [
            self._in_targets_tokens(each, chain, depth)
            for each, chain, depth in zip(own, lists, budget.depths, strict=True)
        ]

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        if tokens and (own := self._translated.get(sequence.key)) is not None:
            self._follow(own, self.cache.memory(own))

    def finish(self, sequence: SequenceView) -> None:
        own = self._translated.pop(sequence.key, None)
        if own is not None:
            super().finish(own)

    def _own(self, sequence: SequenceView) -> TranslatedSequence:
        own = self._translated.get(sequence.key)
        if own is None:
            prompt = sequence.prepared.get(self.name)
            own = self._translated[sequence.key] = TranslatedSequence(sequence, self._vocabularies, prompt)
        return own

    def _ready(self, sequence: SequenceView) -> ModelMemory | None:
        memory = super()._ready(sequence) if sequence.tokens else None
        if memory is not None:
            memory.remembered = False
        return memory

    def _follow(self, own: TranslatedSequence, memory: ModelMemory) -> None:
        """Read the decided tokens as text, and keep the keys of the model's tokens that are still the same."""
        tokens = own.translated()
        pairs = zip(own.tokens, tokens, strict=False)
        same = next((n for n, (old, new) in enumerate(pairs) if old != new), min(len(own.tokens), len(tokens)))
        if memory.draft is None or same < memory.draft.end:
            memory.settle()  # by the old tokens: no node of the draft is among them
        else:
            same = len(tokens)  # the draft's nodes are compared with the new tokens
        own.tokens = tokens
        memory.settle()
        memory.slots.truncate(max(0, min(memory.slots.length, same, len(tokens) - 1)))

    def _in_targets_tokens(self, own: TranslatedSequence, chain: list[Proposal], depth: int) -> list[Proposal]:
        if not chain:
            return []
        ids = [proposal.token_id for proposal in chain]
        texts = [self._vocabularies.own.decode(own.tokens[-1:] + ids[:n]) for n in range(len(ids) + 1)]
        pieces = [str(long)[len(str(short)) :] for short, long in pairwise(texts)]
        found = self._vocabularies.targets_ids(own.unsettled, pieces)
        return [
            Proposal(token, n - 1, chain[piece].path_prob, chain[piece].origin)
            for n, (token, piece) in enumerate(found[:depth])
        ]
