"""Prints an answer's sources: each cited passage with its quoted spans in colour, or between « and » without colours; then the
sentences that are no quotes, each with the passage's sentence that supports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ragspec.cli.terminal import safe
from ragspec.core import Citation, Passage
from ragspec.rag.answer import Answer

QUOTE = "bold green"
UNSUPPORTED = "bold yellow"
_AROUND_CHARS = 140
"""Characters of the passage shown before and after a quote."""


def answer_text(answer: Answer) -> Text:
    """The answer with its quotes in the colour of the quoted spans."""
    text = Text(safe(answer.text))
    for citation in answer.citations:
        text.stylize(QUOTE, citation.start, citation.end)
    return text


def print_sources(console: Console, answer: Answer) -> None:
    """Prints every cited passage once, in the order of the prompt, then what is not quoted."""
    numbers = {passage.id: number for number, passage in enumerate(answer.passages)}
    cited = sorted(answer.citations, key=lambda c: (numbers[c.passage_id], c.passage_start))
    for passage_id, group in groupby(cited, key=lambda c: c.passage_id):
        passage = answer.passages[numbers[passage_id]]
        heading = Text.assemble("  ", (f"[{numbers[passage_id] + 1}] ", "bold"), (safe(_name(passage)), "bold cyan"))
        console.print(heading, overflow="ellipsis", no_wrap=True)
        text = excerpt(passage, list(group), marks=console.no_color or not console.is_terminal)
        for line in text.wrap(console, max(20, console.width - 6)):
            line.rstrip()
            console.print(Text.assemble(("    │ ", "dim"), line), soft_wrap=True)
    for text in support_lines(answer, numbers):
        console.print(Padding(text, (0, 0, 0, 2), expand=False))


def support_lines(answer: Answer, numbers: Mapping[str, int]) -> Iterator[Text]:
    """A line for each sentence that is no quote, and for each invented quotation. `numbers`: indices of passages by id."""
    for start, end in answer.unknown_quotations:
        yield Text.assemble(("in no source, though in quotation marks: ", UNSUPPORTED), _flat(answer.text[start:end]))
    for sentence in answer.sentences:
        text = _flat(answer.text[sentence.start : sentence.end])
        if sentence.label == "unsupported":
            yield Text.assemble(("not found in the passages: ", UNSUPPORTED), text)
        elif sentence.label != "quoted":
            number = numbers[sentence.passage_id]
            source = _flat(answer.passages[number].text[sentence.passage_start : sentence.passage_end])
            verdict = "supported by" if sentence.label == "supported" else "compare with"
            yield Text.assemble((f"{verdict} [{number + 1}]: ", "bold"), text, (f"  ({source})", "dim"))


def excerpt(passage: Passage, citations: Sequence[Citation], *, marks: bool) -> Text:
    """The part of a passage around its quotes, on one line; `marks` puts the quotes between « and »."""
    spans = _merged((c.passage_start, c.passage_end) for c in citations)
    first, last = _window(passage.text, spans[0][0], spans[-1][1])
    text, position = Text("… " if first else "", "dim"), first
    for start, end in spans:
        quote = _flat(passage.text[start:end])
        text.append(_flat(passage.text[position:start]))
        text.append(f"«{quote}»" if marks else quote, f"not dim {QUOTE}")
        position = end
    text.append(_flat(passage.text[position:last]))
    text.append(" …" if last < len(passage.text) else "")
    return text


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted and without overlaps: an answer may quote the same words twice."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _window(text: str, start: int, end: int) -> tuple[int, int]:
    """[start, end) with `_AROUND_CHARS` more on both sides, cut between words if possible."""
    first, last = max(0, start - _AROUND_CHARS), min(len(text), end + _AROUND_CHARS)
    if first:
        first = max(first, text.find(" ", first, start) + 1)
    if last < len(text):
        last = max(text.rfind(" ", end, last), end) if " " in text[end:last] else last
    return first, last


def _name(passage: Passage) -> str:
    name = passage.title or passage.document_id
    return f"{name} ({passage.source})" if passage.source and passage.source != name else name


def _flat(text: str) -> str:
    """Makes each run of white space one space. Strips nothing, so that the parts around a quote join again."""
    return re.sub(r"\s+", " ", safe(text))
