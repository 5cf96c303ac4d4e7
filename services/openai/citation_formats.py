"""Citations in the formats of OpenAI, Anthropic and Cohere.

Owns the fields of citations and passages in an answer; finding citations is `ragspec.rag.citations`'. In every format the cited
span of the answer and the span of the passage are the same string. Spans are [start, end) in characters.

    >>> citation_fields(answer, "anthropic")["content_blocks"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from ragspec.core import Citation, Passage
from ragspec.rag.answer import Answer

CitationFormat = Literal["openai", "anthropic", "cohere"]

_SCHEME = re.compile(r"[\x00-\x20]*([A-Za-z][A-Za-z0-9+.\-\x00-\x20]*):")
_SPAN_FIELDS = ("passage_start", "passage_end", "document_id", "document_start", "document_end", "source")
_PASSAGE_FIELDS = ("id", "document_id", "title", "heading", "source", "text", "start", "end", "score")


def citation_fields(answer: Answer, citation_format: CitationFormat) -> dict[str, Any]:
    """The fields of a message beside its content."""
    return _FORMATS[citation_format](answer)


def passages_of(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """The passages of the prompt, with their numbers there."""
    return [
        {"number": number} | {name: getattr(passage, name) for name in _PASSAGE_FIELDS}
        for number, passage in enumerate(passages, 1)
    ]


def citations_of(answer: Answer) -> list[dict[str, Any]]:
    """Every citation, with its spans in the answer, in the passage and in the document."""
    return [
        {"start": each.start, "end": each.end, "passage": index + 1}
        | {name: getattr(each, name) for name in _SPAN_FIELDS}
        for each, index, _ in _with_passages(answer)
    ]


def sentences_of(answer: Answer) -> list[dict[str, Any]]:
    """Every sentence with its label, and the passage's span that it quotes or that supports it."""
    numbers = {passage.id: number for number, passage in enumerate(answer.passages, 1)}
    fields = ("start", "end", "label", "passage_start", "passage_end")
    return [
        {name: getattr(each, name) for name in fields} | {"passage": numbers.get(each.passage_id)}
        for each in answer.sentences
    ]


def unknown_quotations_of(answer: Answer) -> list[dict[str, int]]:
    """Spans of the answer inside quotation marks that stand in no passage."""
    return [{"start": start, "end": end} for start, end in answer.unknown_quotations]


def _with_passages(answer: Answer) -> list[tuple[Citation, int, Passage]]:
    """Every citation with its passage and the passage's index."""
    indices = {passage.id: index for index, passage in enumerate(answer.passages)}
    return [(each, index := indices[each.passage_id], answer.passages[index]) for each in answer.citations]


def _openai(answer: Answer) -> dict[str, Any]:
    """Citations as OpenAI writes them, then annotations of types that OpenAI does not have."""
    annotations: list[dict[str, Any]] = [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": citation.start,
                "end_index": citation.end,
                "title": passage.title or passage.document_id,
                "url": _url(passage.source or passage.document_id),
            },
        }
        for citation, _, passage in _with_passages(answer)
    ]
    for each in sentences_of(answer):
        passage = answer.passages[each["passage"] - 1] if each["passage"] else None
        text = passage and passage.text[each["passage_start"] : each["passage_end"]]
        place = {"start_index": each["start"], "end_index": each["end"]}
        support = place | {"label": each["label"], "passage": each["passage"], "passage_text": text}
        annotations.append({"type": "sentence_support", "sentence_support": support})
    for start, end in answer.unknown_quotations:
        place = {"start_index": start, "end_index": end}
        annotations.append({"type": "unknown_quotation", "unknown_quotation": place})
    return {"annotations": annotations}


def _anthropic(answer: Answer) -> dict[str, Any]:
    """Text blocks, cut where citations begin and end. `document_index` is the passage's index in `ragspec.passages`."""
    blocks: list[dict[str, Any]] = []
    position = 0
    for citation, index, passage in _with_passages(answer):
        if position < citation.start:
            blocks.append({"type": "text", "text": answer.text[position : citation.start], "citations": None})
        position, cited = citation.end, answer.text[citation.start : citation.end]
        location = {
            "type": "char_location",
            "cited_text": cited,
            "document_index": index,
            "document_title": passage.title or None,
            "start_char_index": citation.passage_start,
            "end_char_index": citation.passage_end,
            "file_id": passage.document_id,
        }
        blocks.append({"type": "text", "text": cited, "citations": [location]})
    if position < len(answer.text) or not blocks:
        blocks.append({"type": "text", "text": answer.text[position:], "citations": None})
    return {"content_blocks": blocks}


def _cohere(answer: Answer) -> dict[str, Any]:
    citations = []
    for citation, _, passage in _with_passages(answer):
        document = {"id": passage.id, "title": passage.title, "text": passage.text, "url": _url(passage.source)}
        citations.append(
            {
                "start": citation.start,
                "end": citation.end,
                "text": answer.text[citation.start : citation.end],
                "sources": [{"type": "document", "id": passage.id, "document": document}],
                "content_index": 0,
                "type": "TEXT_CONTENT",
            }
        )
    return {"citations": citations}


_FORMATS: Mapping[CitationFormat, Callable[[Answer], dict[str, Any]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "cohere": _cohere,
}


def _url(source: str) -> str:
    """A source as the address of a link. Sources with another scheme than the web's, as `javascript:`, become relative ones.

    Why without blanks: browsers leave out tabs and line ends within a scheme.
    """
    scheme = _SCHEME.match("".join(source.split()))
    return source if scheme is None or scheme[1].lower() in ("http", "https") else quote(source, safe="")
