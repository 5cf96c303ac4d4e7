"""Citations in three dialects: every span is the same string as its source."""

from urllib.parse import urlencode

import pytest
from openai.types.chat.chat_completion_message import Annotation
from starlette.requests import Request

from ragspec.core import FinishReason, GenerationStats, Passage
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.support import find_support
from services.openai.answer_fields import citation_fields, citations_of, passages_of, support_of
from services.openai.generation import address_of

DOCUMENTS = {
    "mill": "Ça commence. Die Mühle 🏭 am Fluß steht seit 1874. E\u0301te\u0301 dernier.",
    "rain": "東京では雨が降っていた。 \U0001f1eb\U0001f1f7 The rain fell on the old town for nine days.",
}


def passage(name: str, skip: int, source: str) -> Passage:
    text = DOCUMENTS[name][skip:]
    return Passage(name, 0, text, skip, skip + len(text), title=f"About {name}", source=source)


PASSAGES = (passage("mill", 13, "https://example.org/mill"), passage("rain", 0, ""))
TEXTS = (
    '🎉 Es heißt: "Die Mühle 🏭 am Fluß steht seit 1874." [1] Und “東京では雨が降っていた。” [2]',
    "The rain fell on the old town for nine days",
    "Nothing of this is quoted 🏭.",
    "",
)


def answer(text: str) -> Answer:
    stats = AnswerStats(0.0, 0.0, "1-x", GenerationStats())
    support = find_support(text, PASSAGES)
    told = (text, support.citations, PASSAGES, (), FinishReason.STOP, (), (), stats)
    return Answer("?", *told, support.sentences, support.unknown_quotations)


@pytest.mark.parametrize("text", TEXTS)
def test_openai_annotations_span_what_is_cited(text: str) -> None:
    """Offsets counted bytes or UTF-16 units, so that a citation was shifted behind an emoji."""
    told = answer(text)
    annotations = citation_fields(told, "openai", "http://service")["annotations"]
    assert len(annotations) == len(told.citations)
    for annotation, citation in zip(annotations, told.citations, strict=True):
        url = Annotation.model_validate(annotation).url_citation
        assert DOCUMENTS[citation.document_id].count(text[url.start_index : url.end_index]) >= 1
        span = {"id": "rain", "start": str(citation.document_start), "end": str(citation.document_end)}
        page = f"http://service/document?{urlencode(span)}"
        assert url.url == (citation.source or page)
        assert url.title == f"About {citation.document_id}"


def test_each_sentence_names_the_text_that_supports_it() -> None:
    """A label without the passage's sentence; an invented quotation that passes for a quote."""
    text = 'Die Mühle am Fluß steht seit 1874 [1]. It stood still. It says "nothing at all".'
    told = support_of(answer(text))
    sentences, (unknown,) = told["sentences"], told["unknown_quotations"]
    labels = [(each["label"], each["passage"]) for each in sentences]
    assert labels == [("supported", 1), ("unsupported", None), ("unsupported", None)]
    supporting = PASSAGES[0].text[sentences[0]["passage_start"] : sentences[0]["passage_end"]]
    assert supporting == "Die Mühle 🏭 am Fluß steht seit 1874."
    assert text[sentences[1]["start"] : sentences[1]["end"]] == "It stood still."
    assert text[unknown["start"] : unknown["end"]] == "nothing at all"


@pytest.mark.parametrize("text", TEXTS)
def test_anthropic_blocks_are_the_text_and_its_sources(text: str) -> None:
    """A piece of the text was lost between two blocks, or a location named other characters than it cites."""
    blocks = citation_fields(answer(text), "anthropic")["content_blocks"]
    assert "".join(block["text"] for block in blocks) == text
    assert all(block["text"] for block in blocks) or not text
    locations = [(block["text"], location) for block in blocks for location in block["citations"] or ()]
    assert len(locations) == len(answer(text).citations)
    for cited, location in locations:
        source = PASSAGES[location["document_index"]]
        assert location["type"] == "char_location"
        assert location["cited_text"] == cited
        assert source.text[location["start_char_index"] : location["end_char_index"]] == cited
        assert (location["document_title"], location["file_id"]) == (source.title, source.document_id)


@pytest.mark.parametrize("text", TEXTS)
def test_cohere_citations_hold_text_and_source(text: str) -> None:
    """A citation's text was not what stands at its place, or is not in its source."""
    citations = citation_fields(answer(text), "cohere")["citations"]
    assert len(citations) == len(answer(text).citations)
    for citation in citations:
        assert text[citation["start"] : citation["end"]] == citation["text"]
        (source,) = citation["sources"]
        assert citation["text"] in source["document"]["text"]
        assert source["id"] == source["document"]["id"]


@pytest.mark.parametrize(("text", "num_cited"), list(zip(TEXTS, (2, 1, 0, 0), strict=True)))
def test_every_span_is_string_identical(text: str, num_cited: int) -> None:
    """A span of answer, passage or document named other characters than the two others."""
    told = answer(text)
    assert len(told.citations) == num_cited
    shown = passages_of(told.passages, (2, 1))
    assert [(each["number"], each["rank"]) for each in shown] == [(1, 2), (2, 1)]
    for citation in citations_of(told):
        cited = text[citation["start"] : citation["end"]]
        source = shown[citation["passage"] - 1]
        assert source["text"][citation["passage_start"] : citation["passage_end"]] == cited
        assert DOCUMENTS[citation["document_id"]][citation["document_start"] : citation["document_end"]] == cited
        assert source["document_id"] == citation["document_id"]


@pytest.mark.parametrize(
    ("said", "scheme"), [("", "http"), ("https", "https"), ("https, http", "https"), ("data", "http")]
)
def test_addresses_have_the_scheme_that_the_client_used(said: str, scheme: str) -> None:
    """Behind a proxy with TLS the link to a source was plain http, which a page with https refuses to open."""
    headers = [(b"host", b"mill.example"), (b"x-forwarded-proto", said.encode())]
    request = Request({"type": "http", "scheme": "http", "path": "/v1/chat/completions", "headers": headers})
    assert address_of(request) == f"{scheme}://mill.example"
