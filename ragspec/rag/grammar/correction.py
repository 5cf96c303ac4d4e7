"""A text to correct, its correction requests to the target, and the resulting correction.

Owns plain data and the step from the target's outputs to edits; it never calls the engine. A batch job can check a
`CorrectionRequest` before any model is loaded.

    >>> CorrectionRequest("letter-1", "He go to school.", SamplingParams(max_tokens=256))
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import NamedTuple

from ragspec.core import Completion, FinishReason, GenerationStats, Request, SamplingParams
from ragspec.errors import InputError
from ragspec.rag.grammar.edit_filters import (
    DEFAULT_FILTER,
    EditFilter,
    TextContext,
    WithheldEdit,
    WithholdReason,
    filter_edits,
)
from ragspec.rag.grammar.edits import Edit, apply_edits, classify_edits, split_pieces, word_edits
from ragspec.rag.grammar.markup import MarkedText, SentenceSpan, TextPart, one_line
from ragspec.retrieval.chunking import Span
from ragspec.speculation import ON, Speculation

DEFAULT_PARAMS = SamplingParams(max_tokens=256)

_OPENING = re.compile(
    r"(?i)(?:(?:sure|certainly|of course|okay|ok|yes)\b[,.!:]*\s+)?"
    r"(?:here(?:['’]s|\s+is|\s+are)\b[^:\n]{0,80}:"
    r"|(?:(?:the|your)\s+)?(?:grammatically\s+)?(?:correct(?:ed|ion)?|revised|fixed)\b[^:\n\"“]{0,60}(?::|\bis\b(?=\s*[\"“\n])):?)\s*"
)
"""What chat models say before the corrected sentence."""
_AROUND = (("**", "**"), ('"', '"'), ("“", "”"), ("`", "`"))

_FIXED_PARAMS = {"n": 1, "stop": (), "ignore_eos": False, "min_tokens": 0, "logprobs": None, "json_schema": ""}


@dataclass(frozen=True, slots=True)
class CorrectionRequest:
    """A text to correct. `id` prefixes the ids of its engine requests; `params.max_tokens` limits each sentence's correction.

    Each sentence has its own seed, derived from `params.seed` and the sentence's number. `parts`: the text split into plain
    text and markup; None: markup is detected in `text`. `edit_filter` says which edits are withheld.
    Raises: InputError for sampling parameters that would truncate a sentence or generate it several times.
    """

    id: str
    text: str
    params: SamplingParams = DEFAULT_PARAMS
    tenant: str = ""
    speculation: Speculation = ON
    edit_filter: EditFilter = DEFAULT_FILTER
    parts: tuple[TextPart, ...] | None = None

    def __post_init__(self) -> None:
        for name, required in _FIXED_PARAMS.items():
            if (given := getattr(self.params, name)) != required:
                raise InputError(f"{name} {given!r} means nothing for a correction, which ends where its sentence does")
        if self.parts is not None and "".join(part.text for part in self.parts) != self.text:
            raise InputError("the parts of a text must be the text when joined")


@dataclass(frozen=True, slots=True)
class Correction:
    """`apply_edits(text, edits) == corrected`. Units: characters of `text`.

    `unfinished`: spans left unchanged because the target reached no end of the sentence, or not in time. `withheld`: edits
    that were not applied, each with its reason. `sentences`: the spans that were checked. `stats`: sums over all sentences.
    `other_language`: the name of the language that the text seems to be in, if not English; it then stays as it is.
    """

    id: str
    text: str
    corrected: str
    edits: tuple[Edit, ...]
    unfinished: tuple[Span, ...]
    stats: GenerationStats
    prompt_s: float
    withheld: tuple[WithheldEdit, ...] = ()
    sentences: tuple[Span, ...] = ()
    other_language: str = ""

    @property
    def num_rewritten(self) -> int:
        """Sentences that stay as they are because the target's reply changed too many of their words."""
        changed = [each.edit.start for each in self.withheld if each.reason is WithholdReason.RATIO]
        return sum(any(start <= at <= end for at in changed) for start, end in self.sentences)

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.unfinished else FinishReason.STOP


class PreparedCorrection(NamedTuple):
    """A correction request split into sentences, with one engine request per sentence."""

    request: CorrectionRequest
    marked: MarkedText
    sentences: tuple[SentenceSpan, ...]
    requests: tuple[Request, ...]
    prompt_s: float
    other_language: str = ""


def build_correction(prepared: PreparedCorrection, completions: Sequence[Completion | None]) -> Correction:
    """The correction of a text from one completion per sentence; None: the sentence was not corrected in time."""
    request, marked, stats = prepared.request, prepared.marked, GenerationStats()
    edits: list[Edit] = []
    withheld: list[WithheldEdit] = []
    unfinished: list[Span] = []
    context = TextContext.of(marked.plain, marked.protected) if completions else TextContext()
    for sentence, completion in zip(prepared.sentences, completions, strict=True):
        if completion is not None:
            stats.add(completion.stats)
        better = completion.text.strip() if completion and completion.finish_reason is FinishReason.STOP else ""
        if better:
            better = cleaned_reply(better, one_line(marked.plain[sentence.start : sentence.end]))
            applied, rejected = _sentence_edits(marked, sentence, better, request.edit_filter, context)
            edits += applied
            withheld += rejected
        else:
            unfinished.append(marked.span(sentence.start, sentence.end))
    stats.seed = request.params.seed or 0
    return Correction(
        request.id,
        request.text,
        apply_edits(request.text, edits),
        tuple(edits),
        tuple(unfinished),
        stats,
        prepared.prompt_s,
        tuple(withheld),
        tuple(marked.span(sentence.start, sentence.end) for sentence in prepared.sentences),
        prepared.other_language,
    )


def cleaned_reply(reply: str, sentence: str) -> str:
    """The corrected sentence of a chat model's reply: without "The corrected sentence is:", and without quotation marks,
    asterisks and later lines that the sentence has not.

    The sentence comes in one line. Its own words may read like an opening, and a reply may be wrapped, so both are left out only
    where the rest is more like the sentence.
    """
    opening = _OPENING.match(reply)
    rest = reply[opening.end() :].strip() if opening else ""
    texts = [text.strip() for each in (reply, rest) if each for text in (one_line(each), each.splitlines()[0])]
    readings = list(dict.fromkeys(_without_marks(text, sentence) for text in texts))
    return readings[0] if len(readings) == 1 else max(readings, key=lambda each: _likeness(each, sentence))


def _likeness(reply: str, sentence: str) -> tuple[float, int]:
    """The share of equal pieces, then how near the lengths are."""
    matcher = SequenceMatcher(None, split_pieces(reply), split_pieces(sentence), autojunk=False)
    return matcher.ratio(), -abs(len(reply) - len(sentence))


def _without_marks(reply: str, sentence: str) -> str:
    for left, right in _AROUND:
        is_around = len(reply) > len(left + right) and reply.startswith(left) and reply.endswith(right)
        if is_around and not sentence.lstrip().startswith(left):
            reply = reply[len(left) : -len(right)].strip()
    return reply


def _sentence_edits(
    marked: MarkedText, sentence: SentenceSpan, better: str, edit_filter: EditFilter, context: TextContext
) -> tuple[list[Edit], list[WithheldEdit]]:
    """The applied and the withheld edits of one sentence, with offsets into the whole text."""
    start = sentence.start
    before = marked.plain[start : sentence.end]
    classified = classify_edits(before, word_edits(before, better, keep_white=True))
    edits = [replace(edit, start=edit.start + start, end=edit.end + start) for edit in classified]
    kept, rejected = filter_edits(before, edits, edit_filter, context, start, whole=sentence.begins)
    located = [marked.locate(edit) for edit in kept]
    inside_markup = [edit for edit, place in zip(kept, located, strict=True) if place is None]
    rejected += [WithheldEdit(edit, WithholdReason.MARKUP) for edit in inside_markup]
    withheld = [WithheldEdit(_in_marked_text(marked, each.edit), each.reason) for each in rejected]
    withheld.sort(key=lambda each: (each.edit.start, each.edit.end))
    return [place for place in located if place is not None], withheld


def _in_marked_text(marked: MarkedText, edit: Edit) -> Edit:
    """A withheld edit with offsets into the whole text; its original includes the markup inside it."""
    start, end = marked.span(edit.start, edit.end)
    return replace(edit, start=start, end=end, original=marked.whole[start:end])
