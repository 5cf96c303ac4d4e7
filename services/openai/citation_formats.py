"""Citations in the formats of OpenAI, Anthropic and Cohere.

Owns the fields of citations and passages in an answer; finding citations is `ragspec.rag.citations`'. In every format the cited
span of the answer and the span of the passage are the same string. Spans are [start, end) in characters.

    >>> citation_fields(answer, "anthropic")["content_blocks"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ragspec.core import Citation, Passage
from ragspec.rag.answer import Answer

CitationFormat = Literal["openai", "anthropic", "cohere"]


def citation_fields(answer: Answer, citation_format: CitationFormat) -> dict[str, Any]:
    """The fields of a message beside its content."""
    return _FORMATS[citation_format](answer)


def passages_of(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """The passages of the prompt, with their numbers there."""
    return [
        {
            "number": number,
            "id": passage.id,
            "document_id": passage.document_id,
            "title": passage.title,
            "heading": passage.heading,
            "source": passage.source,
            "text": passage.text,
            "start": passage.start,
            "end": passage.end,
            "score": passage.score,
        }
        for number, passage in enumerate(passages, 1)
    ]


def citations_of(answer: Answer) -> list[dict[str, Any]]:
    """Every citation, with its spans in the answer, in the passage and in the document."""
    numbers = _numbers(answer)
    return [
        {
            "start": each.start,
            "end": each.end,
            "passage": numbers[each.passage_id] + 1,
            "passage_start": each.passage_start,
            "passage_end": each.passage_end,
            "document_id": each.document_id,
            "document_start": each.document_start,
            "document_end": each.document_end,
            "source": each.source,
        }
        for each in answer.citations
    ]


def _openai(answer: Answer) -> dict[str, Any]:
    numbers = _numbers(answer)

    def annotation(citation: Citation) -> dict[str, Any]:
        passage = answer.passages[numbers[citation.passage_id]]
        return {
            "type": "url_citation",
            "url_citation": {
                "start_index": citation.start,
                "end_index": citation.end,
                "title": passage.title or passage.document_id,
                "url": passage.source or passage.document_id,
            },
        }

    return {"annotations": [annotation(citation) for citation in answer.citations]}


def _anthropic(answer: Answer) -> dict[str, Any]:
    """Text blocks, cut where citations begin and end. `document_index` is the passage's index in `ragspec.passages`."""
    numbers, at = _numbers(answer), 0
    blocks: list[dict[str, Any]] = []
    for citation in answer.citations:
        if at < citation.start:
            blocks.append({"type": "text", "text": answer.text[at : citation.start], "citations": None})
        number, at = numbers[citation.passage_id], citation.end
        passage, cited = answer.passages[number], answer.text[citation.start : citation.end]
        location = {
            "type": "char_location",
            "cited_text": cited,
            "document_index": number,
            "document_title": passage.title or None,
            "start_char_index": citation.passage_start,
            "end_char_index": citation.passage_end,
            "file_id": passage.document_id,
        }
        blocks.append({"type": "text", "text": cited, "citations": [location]})
    if at < len(answer.text) or not blocks:
        blocks.append({"type": "text", "text": answer.text[at:], "citations": None})
    return {"content_blocks": blocks}


def _cohere(answer: Answer) -> dict[str, Any]:
    numbers = _numbers(answer)

    def source(citation: Citation) -> dict[str, Any]:
        passage = answer.passages[numbers[citation.passage_id]]
        document = {"id": passage.id, "title": passage.title, "text": passage.text, "url": passage.source}
        return {"type": "document", "id": passage.id, "document": document}

    return {
        "citations": [
            {
                "start": each.start,
                "end": each.end,
                "text": answer.text[each.start : each.end],
                "sources": [source(each)],
                "content_index": 0,
                "type": "TEXT_CONTENT",
            }
            for each in answer.citations
        ]
    }


def _numbers(answer: Answer) -> Mapping[str, int]:
    """Passage id -> index in the answer's passages."""
    return {passage.id: number for number, passage in enumerate(answer.passages)}


_FORMATS: Mapping[CitationFormat, Callable[[Answer], dict[str, Any]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "cohere": _cohere,
}
