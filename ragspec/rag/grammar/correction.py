"""What became of a text: its edits, those that were not made, and the text with them.

Pure: made of sentences and of what the target wrote for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ragspec.core import Completion, FinishReason, GenerationStats, Request
from ragspec.rag.grammar.correction_request import Manuscript
from ragspec.rag.grammar.edit_filters import Guard, Surroundings, Why, Withheld, sift
from ragspec.rag.grammar.edit_kinds import Classify, classified
from ragspec.rag.grammar.edits import Edit, applied, word_edits
from ragspec.rag.grammar.markup import MarkedText, Span
from ragspec.rag.grammar.sentence_split import Sentence


@dataclass(frozen=True, slots=True)
class Correction:
    """`applied(text, edits) == corrected`. `unfinished`: spans of `text` left as they are because their correction had no end, or
    did not come in time. `withheld`: edits not made, with the reason; `sentences`: the spans that were looked at.

    `stats` add up those of all sentences. Units: characters of `text`.
    """

    id: str
    text: str
    corrected: str
    edits: tuple[Edit, ...]
    unfinished: tuple[Span, ...]
    stats: GenerationStats
    prompt_s: float
    withheld: tuple[Withheld, ...] = ()
    sentences: tuple[Span, ...] = ()

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.unfinished else FinishReason.STOP


class Prepared(NamedTuple):
    """A manuscript as the engine is asked about it: one request for each sentence."""

    manuscript: Manuscript
    marked: MarkedText
    sentences: tuple[Sentence, ...]
    requests: tuple[Request, ...]
    prompt_s: float


def correction_of(ready: Prepared, written: Sequence[Completion | None], classify: Classify = classified) -> Correction:
    """`written`: what the target wrote for each sentence; None: nothing in time."""
    text, marked, made = ready.manuscript.text, ready.marked, _Made(classify)
    around = Surroundings.of(marked.plain, marked.protected) if written else Surroundings()
    for sentence, completion in zip(ready.sentences, written, strict=True):
        if completion is not None:
            made.stats.add(completion.stats)
        better = completion.text.strip() if completion and completion.finish_reason is FinishReason.STOP else ""
        if better:
            made.add(marked, sentence, better, ready.manuscript.guard, around)
        else:
            made.unfinished.append(marked.span(sentence.start, sentence.end))
    made.stats.seed = ready.manuscript.params.seed or 0
    return Correction(
        ready.manuscript.id,
        text,
        applied(text, made.edits),
        tuple(made.edits),
        tuple(made.unfinished),
        made.stats,
        ready.prompt_s,
        tuple(made.withheld),
        tuple(marked.span(sentence.start, sentence.end) for sentence in ready.sentences),
    )


@dataclass(slots=True)
class _Made:
    """Of the sentences so far."""

    classify: Classify
    edits: list[Edit] = field(default_factory=list)
    withheld: list[Withheld] = field(default_factory=list)
    unfinished: list[Span] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    def add(self, marked: MarkedText, sentence: Sentence, better: str, guard: Guard, around: Surroundings) -> None:
        """The edits of one sentence, as edits of the whole text."""
        start = sentence.start
        before = marked.plain[start : sentence.end]
        found = self.classify(before, word_edits(before, better, keep_white=True))
        edits = [replace(edit, start=edit.start + start, end=edit.end + start) for edit in found]
        sifted = sift(before, edits, guard, around, start, whole=sentence.begins)
        withheld = [Withheld(_in_whole(marked, each.edit), each.reason) for each in sifted.withheld]
        for edit in sifted.made:
            placed = marked.placed(edit)
            if placed is None:
                withheld.append(Withheld(_in_whole(marked, edit), Why.MARKUP))
            else:
                self.edits.append(placed)
        self.withheld += sorted(withheld, key=lambda each: (each.edit.start, each.edit.end))


def _in_whole(marked: MarkedText, edit: Edit) -> Edit:
    """Where an edit that is not made would be: what it would replace, markup included."""
    start, end = marked.span(edit.start, edit.end)
    return replace(edit, start=start, end=end, original=marked.whole[start:end])
