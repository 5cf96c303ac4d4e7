"""Quotes of the default target, through HTTP: the cited span is the source's own string."""

from collections.abc import Iterator
from typing import Any

import pytest
from letter_encoder import LetterEncoder
from service_parts import Service, served

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import Document
from ragspec.engine.loading import load_engine
from ragspec.retrieval.retriever import build_index

pytestmark = pytest.mark.slow

TEXTS = {
    "bridge": "🏗 The bridge of Ålesund was built in 1874 by the people of the valley. It was rebuilt in 1921.",
    "mill": "The café by the mill — “Zum Rad” — was opened by Zoë Brontë in 1903. It closed in 1950.",
    "rain": "In the spring of 1846 the rain fell on the town for nine days. The river rose by four metres.",
}
QUESTIONS = (
    "When was the bridge of Ålesund built?",
    "Who opened the café by the mill?",
    "For how many days did the rain fall on the town?",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, encoder = tmp_path_factory.mktemp("quotes"), LetterEncoder()
    documents = [
        Document(name, text, title=name.title(), source=f"https://example.org/{name}") for name, text in TEXTS.items()
    ]
    build_index(documents, folder / "index", encoder)
    engine = load_engine(TargetConfig(), EngineConfig(), DraftingConfig())
    with served(engine, folder, folder / "index", **{"service.model": "reference"}) as running:
        yield running


def ask(service: Service, question: str, **options: Any) -> dict[str, Any]:
    body = {"model": "reference", "messages": [{"role": "user", "content": question}], "max_tokens": 64, "seed": 1}
    with service.client() as client:
        reply = client.post("/v1/chat/completions", json=body | options)
    told: dict[str, Any] = reply.json()
    assert reply.status_code == 200, told
    return told


@pytest.mark.parametrize("question", QUESTIONS)
def test_quotes_are_cited_word_for_word(service: Service, question: str) -> None:
    """A citation's span was shifted against the text on its way through tokens, threads and JSON."""
    told = ask(service, question)
    message, passages = told["choices"][0]["message"], told["ragspec"]["passages"]
    content, citations = message["content"], told["ragspec"]["citations"]
    assert citations and told["ragspec"]["sentences"][0]["label"] == "quoted"
    assert not told["ragspec"]["unknown_quotations"]
    for citation, annotation in zip(citations, message["annotations"], strict=True):
        url = annotation["url_citation"]
        cited = content[citation["start"] : citation["end"]]
        assert content[url["start_index"] : url["end_index"]] == cited
        assert url["url"] == f"https://example.org/{citation['document_id']}"
        assert TEXTS[citation["document_id"]][citation["document_start"] : citation["document_end"]] == cited
        shown = passages[citation["passage"] - 1]["text"]
        assert shown[citation["passage_start"] : citation["passage_end"]] == cited


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_quotes_change_no_text(service: Service, temperature: float) -> None:
    """Quotes are where drafts are long: there speculation changed what is said, or nothing was accepted at all."""
    for question in QUESTIONS:
        drafted = ask(service, question, temperature=temperature, metrics=True)
        plain = ask(service, question, temperature=temperature, speculation=False)
        assert drafted["choices"] == plain["choices"]
        for name in ("citations", "sentences", "unknown_quotations"):
            assert drafted["ragspec"][name] == plain["ragspec"][name]
        assert temperature or drafted["metrics"]["speculative_decoding"]["accepted_by_source"]["passage"] > 0
