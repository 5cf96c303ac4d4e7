"""Fields of one choice: citations in the formats of OpenAI, Anthropic and Cohere, and log-probabilities.

Owns the fields of citations and passages in an answer; finding citations is `ragspec.rag.citations`'. In every format the cited
span of the answer and the span of the passage are the same string. Spans are [start, end) in characters.

    >>> citation_fields(answer, "anthropic")["content_blocks"]

Owns the text and bytes of single tokens, too. A token may be part of a character: its text then spells its bytes, as in
"bytes:\\xe2\\x80". Control tokens are left out, as from the content.
"""

import codecs
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal
from urllib.parse import quote, urlencode

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ragspec.core import Citation, Passage, TokenLogprob, blocks_in
from ragspec.rag.answer import Answer
from ragspec.rag.support import Support

CitationFormat = Literal["openai", "anthropic", "cohere"]

_WEB = re.compile(r"https?://", re.IGNORECASE)
_SPAN_FIELDS = ("passage_start", "passage_end", "document_id", "document_start", "document_end", "source")
_PASSAGE_FIELDS = "id document_id title heading headings anchor source text start end score".split()
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SPACE = bytes_to_unicode()[ord(" ")]
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UTF8 = codecs.getincrementaldecoder("utf-8")


def citation_fields(answer: Answer, citation_format: CitationFormat, base_url: str = "") -> dict[str, Any]:
    """The fields of a message beside its content. `base_url`: of the service, for addresses."""
    return _FORMATS[citation_format](answer, base_url)


def passages_of(passages: Sequence[Passage], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The passages of the prompt, with their numbers there and their ranks in the search."""
    return [
        {"number": number, "rank": rank}
        | {name: getattr(passage, name) for name in _PASSAGE_FIELDS}
        | {"page": passage.page or None, "url": view_url(passage.document_id, passage.start, passage.end)}
        for number, (passage, rank) in enumerate(zip(passages, ranks, strict=True), 1)
    ]


def support_of(answer: Answer | Support) -> dict[str, list[dict[str, Any]]]:
    """The passages' support of the answer, by field of `ragspec`. Unknown quotations are spans that stand in no passage."""
    unknown = [{"start": start, "end": end} for start, end in answer.unknown_quotations]
    return {"citations": citations_of(answer), "sentences": sentences_of(answer), "unknown_quotations": unknown}


def citations_of(answer: Answer | Support) -> list[dict[str, Any]]:
    """Every citation, with its spans in the answer, in the passage and in the document, and where a person can read it."""
    return [
        {"start": each.start, "end": each.end, "passage": index + 1}
        | {name: getattr(each, name) for name in _SPAN_FIELDS}
        | {"page": _page_of(each, passage), "headings": passage.headings, "url": _view_of(each)}
        for each, index, passage in _with_passages(answer)
    ]


def _page_of(citation: Citation, passage: Passage) -> int | None:
    blocks = blocks_in(passage.blocks, citation.passage_start, citation.passage_end)
    return (blocks[0].page or None) if blocks else None


def _view_of(citation: Citation) -> str:
    return view_url(citation.document_id, citation.document_start, citation.document_end)


def sentences_of(answer: Answer | Support) -> list[dict[str, Any]]:
    """Every sentence with its label, and the passage's span that it quotes or that supports it."""
    numbers = {passage.id: number for number, passage in enumerate(answer.passages, 1)}
    fields = ("start", "end", "label", "passage_start", "passage_end")
    return [
        {name: getattr(each, name) for name in fields} | {"passage": numbers.get(each.passage_id)}
        for each in answer.sentences
    ]


def _with_passages(answer: Answer | Support) -> list[tuple[Citation, int, Passage]]:
    """Every citation with its passage and the passage's index."""
    indices = {passage.id: index for index, passage in enumerate(answer.passages)}
    return [(each, index := indices[each.passage_id], answer.passages[index]) for each in answer.citations]


def _openai(answer: Answer, base_url: str) -> dict[str, Any]:
    """Citations as OpenAI writes them. Why no other types: LiteLLM refuses an answer with an annotation that OpenAI has not."""
    annotations = [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": citation.start,
                "end_index": citation.end,
                "title": passage.title or passage.document_id,
                "url": url_of(passage, base_url + _view_of(citation)),
            },
        }
        for citation, _, passage in _with_passages(answer)
    ]
    return {"annotations": annotations}


def _anthropic(answer: Answer, _: str) -> dict[str, Any]:
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


def _cohere(answer: Answer, base_url: str) -> dict[str, Any]:
    citations = []
    for citation, _, passage in _with_passages(answer):
        url = url_of(passage, base_url + _view_of(citation))
        document = {"id": passage.id, "title": passage.title, "text": passage.text, "url": url}
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


_FORMATS = {"openai": _openai, "anthropic": _anthropic, "cohere": _cohere}


def view_url(document_id: str, start: int, end: int) -> str:
    """The service's page of a document, with a span of it marked, in characters."""
    return f"/document?{urlencode({'id': document_id, 'start': start, 'end': end})}"


def url_of(passage: Passage, view: str) -> str:
    """Where a person can read a passage: at its own address on the web, or else on the service's page."""
    if not _WEB.match(passage.source):
        return view
    return (
        passage.source if "#" in passage.source or not passage.anchor else f"{passage.source}#{quote(passage.anchor)}"
    )


class TextOffsets:
    """Where each token begins in a text, in characters. A token inside a character begins where the character does."""

    def __init__(self) -> None:
        self._decoder = _UTF8("replace")
        self._count = 0

    def of_next(self, data: bytes) -> int:
        begun = self._decoder.getstate()[0]
        broken = bool(begun) and not _is_prefix(begun + data[:1])  # the begun character has become one U+FFFD
        offset = self._count + broken
        self._count += len(self._decoder.decode(data))
        return offset


class TokenTexts:
    """The texts of single tokens of one vocabulary. Safe to call from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._control = frozenset(tokenizer.all_special_ids)
        self._by_bytes = tokenizer.convert_tokens_to_ids(_SPACE) not in (None, tokenizer.unk_token_id)
        self.bytes_of = functools.lru_cache(maxsize=65_536)(self._bytes_of)

    def chat(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """`choices[].logprobs.content`."""
        return [
            self._entry(each.token_id, each.logprob) | {"top_logprobs": [self._entry(*other) for other in each.top]}
            for each in self._shown(logprobs)
        ]

    def completion(self, logprobs: Iterable[TokenLogprob], offsets: TextOffsets) -> dict[str, Any]:
        """`choices[].logprobs` of a completion; `offsets` has seen the tokens before these."""
        shown = self._shown(logprobs)
        return {
            "tokens": [self.text_of(each.token_id) for each in shown],
            "token_logprobs": [each.logprob for each in shown],
            "top_logprobs": [{self.text_of(token): logprob for token, logprob in each.top} for each in shown],
            "text_offset": [offsets.of_next(self.bytes_of(each.token_id)) for each in shown],
        }

    def text_of(self, token_id: int) -> str:
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _shown(self, logprobs: Iterable[TokenLogprob]) -> Sequence[TokenLogprob]:
        return [each for each in logprobs if each.token_id not in self._control]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text_of(token_id), "logprob": logprob, "bytes": list(self.bytes_of(token_id))}

    def _bytes_of(self, token_id: int) -> bytes:
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if token_id not in self._control:
            if self._by_bytes and all(letter in _BYTE_OF for letter in piece):
                return bytes(_BYTE_OF[letter] for letter in piece)
            if one := _ONE_BYTE.fullmatch(piece):
                return bytes([int(one[1], 16)])
            if "\u2581" in piece:  # sentencepiece's space
                return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()


def _is_prefix(data: bytes) -> bool:
    """Whether these bytes are valid UTF-8 or the beginning of it."""
    try:
        _UTF8("strict").decode(data)
    except UnicodeDecodeError:
        return False
    return True
