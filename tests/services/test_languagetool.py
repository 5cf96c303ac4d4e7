"""LanguageTool's interface, asked by its own Python client and as the other clients ask.

The target writes what a function makes of each sentence; everything else is real.
"""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import language_tool_python
import pytest
from correcting_service import LATEX, Correcting, annotation, applied
from random_texts import random_parts, random_rewrite, random_text
from rewriting import rewriting
from service_parts import Service

from ragspec.rag.citations import Utf16Offsets
from ragspec.rag.grammar.correction import CorrectionRequest, build_correction
from ragspec.rag.grammar.edit_filters import EditFilter
from services.languagetool.check import matches_of
from services.languagetool.corrector import LANGUAGES, detect_language

EXAMPLES = json.loads(Path(__file__).with_name("languagetool.json").read_text(encoding="utf-8"))
TEXT = "He go to a old mill \U0001f600 every day.  It rain, he come home."
CORRECTED = "He goes to an old mill \U0001f600 every day.  It rains, he comes home."


def better(sentence: str) -> str:
    words = {"go": "goes", "a old": "an old", "rain,": "rains,", "come": "comes", "Teh": "The"}
    words |= {"We has": "We have", "many corn": "much corn"}  # of the test of the target
    if sentence.startswith("Rewrite"):
        return "All of this is now said in another way, with words that nobody wrote."
    for old, new in words.items():
        sentence = sentence.replace(f"{old} ", f"{new} ")
    return sentence


@pytest.fixture(scope="module")
def service(correcting: Correcting) -> Iterator[Service]:
    with correcting(better, **{"service.grammar.max_text_chars": 20_000}) as running:
        yield running


def test_a_sentence_that_the_model_rewrote_is_named(client: httpx.Client) -> None:
    """An ordinary chat model corrected nothing, and the client was told that there are no mistakes."""
    reply = check(client, text="Rewrite of me an sentence.  He go home.").json()
    assert [match["replacements"][0]["value"] for match in reply["matches"]] == ["goes"]
    assert "rewrote 1 of the sentences" in reply["warnings"]["incompleteResultsReason"]


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    """Without a key."""
    with service.client("") as open_client:
        yield open_client


def check(client: httpx.Client, **fields: str) -> httpx.Response:
    return client.post("/v2/check", data={"language": "en-US", **fields})


def test_its_own_python_client_works(service: Service) -> None:
    """A field that a strict client misses; offsets that count otherwise than it does."""
    with language_tool_python.LanguageTool("en-US", remote_server=service.url) as tool:
        assert tool.correct(TEXT) == CORRECTED
        matches = tool.check(TEXT)
        assert [match.rule_issue_type for match in matches] == ["grammar"] * 4
        assert [TEXT[m.offset : m.offset + m.error_length] for m in matches] == ["go", "a", "rain", "come"]
        # Behind an emoji the client reads its own context wrongly
        assert [match.matched_text for match in matches][:2] == ["go", "a"]
        tool.disabled_rules = {"RAGSPEC_AGREEMENT"}
        assert [match.replacements for match in tool.check(TEXT)] == [["an"]]
        tool.disabled_rules, tool.enabled_rules, tool.enabled_rules_only = set(), {"RAGSPEC_AGREEMENT"}, True
        assert len(tool.check(TEXT)) == 3
        tool.enabled_rules, tool.enabled_rules_only, tool.picky = set(), False, True
        tool.mother_tongue = "de-DE" if "de-DE" in tool._get_languages() else None
        assert len(tool.check(TEXT)) == 4
        assert tool.check("") == [] == tool.check(" \n ")
    with language_tool_python.LanguageTool("auto", remote_server=service.url) as tool:
        tool.preferred_variants = {"en-GB"}
        assert tool.correct(TEXT) == CORRECTED


def test_every_field_that_clients_look_for_is_there(client: httpx.Client) -> None:
    """`shortMessage`, left out where it is optional in the original: a strict client throws the whole reply away."""
    reply = check(client, text=TEXT).json()
    names = {"software", "warnings", "language", "matches", "sentenceRanges", "extendedSentenceRanges"}
    assert set(reply) == names and reply["software"]["apiVersion"] == 1
    assert reply["warnings"] == {"incompleteResults": False} and reply["language"]["code"] == "en-US"
    assert set(reply["language"]["detectedLanguage"]) == {"name", "code", "confidence", "source"}
    kinds = dict.fromkeys(("message", "shortMessage", "sentence"), str) | dict.fromkeys(
        ("context", "type", "rule"), dict
    )
    kinds |= dict.fromkeys(("offset", "length", "contextForSureMatch"), int)
    kinds |= {"replacements": list, "ignoreForIncompleteSentence": bool}
    for match in reply["matches"]:
        assert {name: type(match[name]) for name in match} == kinds
        assert set(match["rule"]) >= {"id", "description", "issueType", "category"}
        assert match["sentence"] in TEXT
    first = TEXT.index(".") + 2  # one emoji before it
    assert reply["sentenceRanges"] == [[0, first], [first + 2, len(TEXT) + 1]]
    assert [part["from"] for part in reply["extendedSentenceRanges"]] == [0, first + 2]


def test_the_other_addresses(client: httpx.Client) -> None:
    """A plug-in that asks for languages or limits first and gives up."""
    assert {"name": "English (US)", "code": "en", "longCode": "en-US"} in client.get("/v2/languages").json()
    longest = client.get("/v2/maxtextlength")
    assert (longest.text, longest.headers["content-type"].split(";")[0]) == ("20000", "text/plain")
    config = client.get("/v2/configinfo", params={"language": "en-US"}).json()
    assert config["parameter"] == {"maxTextLength": 20_000}
    assert {"ruleId", "description", "categoryId", "categoryName", "locQualityIssueType"} <= set(config["rules"][0])
    assert set(client.get("/v2/info").json()["software"]) == {"name", "version", "buildDate", "commit", "premium"}
    assert client.get("/v2/healthcheck").text == "OK"
    by_address = client.get("/v2/check", params={"text": "He go home.", "language": "en-US"}).json()
    assert [match["replacements"][0]["value"] for match in by_address["matches"]] == ["goes"]


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        *EXAMPLES["refused checks"],
        ({"data": "[" * 100_000}, 400, "Could not parse 'data'"),
        ({"data": annotation({"markup": "b", "interpretAs": "a" * 20_001})}, 413, "exceeds the limit"),
        ({"text": "a" * 20_001}, 413, "exceeds the limit of 20000 characters (it's 20001 characters)"),
        ({f"x{n}": "" for n in range(70)}, 400, "fields"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_its_words(
    client: httpx.Client, fields: dict[str, str], status: int, says: str
) -> None:
    """A JSON error that the client shows as "unknown error"; a wrong field that is passed over in silence."""
    response = check(client, **fields)
    assert response.status_code == status and says in response.text and response.text.startswith("Error: ")
    assert response.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    "body",
    [b"language=en-US&text=%FF%FE", b"language=en-US&text=\xff", b"language=en-US&text=%ED%A0%80", b"\xff=1", b"&&=&"],
)
def test_what_is_no_utf8_is_the_client_s_error(client: httpx.Client, body: bytes) -> None:
    """Half a character that ends the server, or comes back as a question mark that was never there."""
    response = client.post("/v2/check", content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert response.status_code == 400 and response.text.startswith("Error: ")


def test_raw_utf8_and_percent_signs_are_read(client: httpx.Client) -> None:
    """curl's --data sends characters as they are."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    for body in (f"language=en-US&text={TEXT}", f"language=en-US&text={quote(TEXT)}"):
        reply = client.post("/v2/check", content=body.replace(" ", "+").encode(), headers=headers).json()
        assert applied(TEXT, reply["matches"]) == CORRECTED
    multipart = client.post("/v2/check", files={"text": (None, TEXT), "language": (None, "en-US")}).json()
    assert applied(TEXT, multipart["matches"]) == CORRECTED


@pytest.mark.parametrize("size", [900, pytest.param(20_000, marks=pytest.mark.slow)])
def test_odd_texts_are_answered(client: httpx.Client, size: int) -> None:
    """An error 500 for what somebody pastes."""
    repeated = [piece * (size // len(piece)) for piece in ("x", "Teh ", "<b", "He go home. ")]
    for text in ("", " ", "\n\t \r\n", "a", ".", "\U0001f600", *repeated):
        response = check(client, text=text)
        assert response.status_code == 200, response.text
    matches = response.json()["matches"]
    assert applied(text, matches) == text.replace("go", "goes") and len(matches) == size // 12


@pytest.mark.parametrize(("text", "code", "name"), EXAMPLES["texts in other languages"])
def test_a_text_in_another_language_is_not_corrected(client: httpx.Client, text: str, code: str, name: str) -> None:
    """German that comes back full of suggestions, or without any and without a word why; Swedish taken for English."""
    reply = check(client, text=text, language="auto").json()
    assert reply["matches"] == [] and reply["language"]["detectedLanguage"]["code"] == code
    assert reply["warnings"]["incompleteResults"] and name in reply["warnings"]["incompleteResultsReason"]


def test_editors_that_ask_twice_get_each_match_once(client: httpx.Client) -> None:
    """The browser add-on asks for rules of sentences and of texts in two requests."""
    assert check(client, text=TEXT, mode="textLevelOnly").json()["matches"] == []
    assert len(check(client, text=TEXT, mode="allButTextLevelOnly").json()["matches"]) == 4


def test_words_of_a_tenant_are_left_alone(service: Service, client: httpx.Client) -> None:
    """One tenant's words that are everybody's; a word that is gone after a restart."""

    def suggestions(key: str) -> int:
        with service.client(key) as own:
            return len(check(own, text="Teh mill grinds. He go home.").json()["matches"])

    with service.client(service.keys.ann) as ann:
        assert ann.post("/v2/words/add", data={"word": "Teh"}).json() == {"added": True}
        assert ann.post("/v2/words/add", data={"word": "Teh"}).json() == {"added": False}
        assert ann.post("/v2/words/add", data={"word": "Zzz", "dict": "other"}).json() == {"added": True}
        assert ann.get("/v2/words").json() == {"words": ["Teh", "Zzz"]}
        assert ann.get("/v2/words", params={"dicts": "other"}).json() == {"words": ["Zzz"]}
        assert ann.get("/v2/words", params={"offset": "1", "limit": "1"}).json() == {"words": ["Zzz"]}
        assert (suggestions(service.keys.ann), suggestions(service.keys.bob), suggestions("")) == (1, 2, 2)
        for wrong in ({}, {"word": ""}, {"word": "two words"}, {"word": "x" * 200}, {"word": "a\0b"}):
            assert ann.post("/v2/words/add", data=wrong).status_code == 400
        for limit in ("-1", "x", "9" * 20):
            assert ann.get("/v2/words", params={"limit": limit}).status_code == 400
        assert ann.post("/v2/words/delete", data={"word": "Teh"}).json() == {"deleted": True}
        assert ann.post("/v2/words/delete", data={"word": "Teh"}).json() == {"deleted": False}
    assert suggestions(service.keys.ann) == 2


def test_v1_grammar_gives_the_whole_text(service: Service) -> None:
    """Edits that a page cannot place; a text that only the one who knows the rules can put together; a drawn seed that
    JavaScript rounds."""
    with service.client(service.keys.ann) as ann:
        reply = ann.post("/v1/grammar", json={"text": TEXT, "seed": 7, "speculation": False}).json()
        marked = ann.post("/v1/grammar", json={"annotation": LATEX, "ignore": ["old"], "disabled_kinds": ["article"]})
    assert (reply["text"], reply["corrected"], reply["seed"]) == (TEXT, CORRECTED, 7)
    assert [edit["kind"] for edit in reply["edits"]] == ["agreement", "article", "agreement", "agreement"]
    edit = reply["edits"][-1]
    assert TEXT[edit["start"] : edit["end"]] == "come" and edit["start_utf16"] == edit["start"] + 1 and edit["reason"]
    assert reply["statistics"]["num_sentences"] == 2 and "num_steps" not in reply["statistics"]
    assert marked.json()["corrected"].startswith("\\section{He \\emph{goes} to a old")
    assert [each["withheld"] for each in marked.json()["withheld"]] == ["kind"]
    assert 0 < marked.json()["seed"] < 2**53
    with service.client() as trusted:
        fast = trusted.post("/v1/grammar", json={"text": TEXT, "seed": 7}).json()
    assert (
        fast["corrected"] == CORRECTED and 0 < fast["statistics"]["num_steps"] < fast["statistics"]["num_output_tokens"]
    )


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, None),
        ({"text": "a", "annotation": []}, 400, None),
        ({"text": "a", "other": 1}, 400, "other"),
        ({"text": "a", "max_edit_ratio": 2}, 400, "max_edit_ratio"),
        ({"text": "a", "disabled_kinds": ["x"]}, 400, "disabled_kinds.0"),
        ({"text": "a", "model": "gpt"}, 404, "model"),
        ({"text": "a", "seed": -2}, 400, "seed"),
        ({"text": "a" * 20_001}, 413, "text"),
        ({"text": "Die Mühle ist alt und das Wasser fließt nicht.", "language": "auto"}, 400, "language"),
    ],
)
def test_v1_grammar_refuses_in_openai_s_words(
    service: Service, body: dict[str, Any], status: int, param: str | None
) -> None:
    """A typing error in an option that is passed over in silence."""
    with service.client() as client:
        response = client.post("/v1/grammar", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))])
def test_matches_lead_to_the_corrected_text(seed: int) -> None:
    """A match that is off by one behind an emoji, covers a tag, or overlaps the next; a word put in that nobody sees."""
    rng, num_matches, num_empty = random.Random(1000 + seed), 0, 0
    for number in range(100):
        grammar, engine = rewriting(random_rewrite(rng))
        parts = tuple(random_parts(rng)) if number % 2 else None
        text = "".join(part.text for part in parts) if parts else random_text(rng)
        ready = grammar.prepare(
            CorrectionRequest("m", text, edit_filter=rng.choice([EditFilter(), EditFilter(1.0)]), parts=parts)
        )
        correction = build_correction(ready, engine.generate(ready.requests))
        matches = matches_of(correction, ready.marked, Utf16Offsets(text))
        assert applied(text, matches) == correction.corrected
        assert all(a["offset"] + a["length"] <= b["offset"] for a, b in pairwise(matches))
        units = text.encode("utf-16-le")
        for match in matches:
            covered = units[2 * match["offset"] : 2 * (match["offset"] + match["length"])].decode("utf-16-le")
            context = match["context"]
            shown = context["text"].encode("utf-16-le")[2 * context["offset"] :][: 2 * context["length"]]
            assert shown.decode("utf-16-le") == covered.translate({9: " ", 10: " ", 13: " "})
            num_matches, num_empty = num_matches + 1, num_empty + (not covered)
        position = 0
        for part in parts or ():
            start, position = position, position + len(part.text)
            low, high = Utf16Offsets(text).units(start), Utf16Offsets(text).units(position)
            touching = [m for m in matches if m["length"] and m["offset"] < high and m["offset"] + m["length"] > low]
            assert not (part.is_markup and touching), "a match covers markup"
    assert num_matches > 50 and num_empty <= num_matches / 10


@pytest.mark.parametrize(("text", "code"), EXAMPLES["languages"])
def test_other_languages_are_told_from_english(text: str, code: str) -> None:
    """German that is corrected as if it were bad English; a learner's English that is taken for no English."""
    found = detect_language(text)
    assert found.code == code and 0.0 <= found.confidence <= 1.0
    assert (found.code in LANGUAGES) == code.startswith("en")
