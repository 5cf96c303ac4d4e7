"""Citations in the words of three APIs. Whatever the words, both spans are the same string, character by character.

OpenAI's annotations name a document's address; Anthropic's blocks say which characters of which passage a piece of the text is;
Cohere's citations hold the passage. Spans end before their second number. All count characters, as Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ragspec.core import Citation, Passage
from ragspec.rag.answer import Answer

Dialect = Literal["openai", "anthropic", "cohere"]


def said_with(answer: Answer, dialect: Dialect) -> dict[str, Any]:
    """The fields that stand beside a message's content."""
    return _DIALECTS[dialect](answer)


def passages_of(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """The passages that were given to the model, numbered as it reads them."""
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
    """Every citation, with its place in the answer, in the passage and in the document."""
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
    """The text in blocks, cut where citations begin and end. A document is a passage, by its place in `ragspec.passages`."""
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
    """By a passage's id, its place among those of the answer."""
    return {passage.id: number for number, passage in enumerate(answer.passages)}


_DIALECTS: Mapping[Dialect, Callable[[Answer], dict[str, Any]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "cohere": _cohere,
}
