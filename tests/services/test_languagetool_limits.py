"""What LanguageTool's clients are told where there is no key, no room or no time."""

import re
import threading
from pathlib import Path

import pytest
from correcting_service import Correcting, corrected_by

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.engine.loading import load_engine
from ragspec.errors import EngineClosed
from ragspec.rag.grammar.grammar import Grammar

FIELDS = {"language": "en-US", "text": "He go home."}
PATIENT = {
    "service.grammar.max_text_chars": 2_000_000,
    "service.grammar.timeout_s": 1700.0,
    "service.timeouts.request_s": 1800.0,
}


def _goes(sentence: str) -> str:
    return sentence.replace("go ", "goes ")


def test_a_text_of_which_nothing_is_corrected_in_time_is_an_error(correcting: Correcting) -> None:
    """A text that nobody looked at came back as correct."""
    with correcting(str, **{"service.grammar.timeout_s": 1e-6}) as service, service.client("") as client:
        late = client.post("/v2/check", data=FIELDS)
        assert late.status_code == 500 and "Checking took longer than 1e-06 seconds" in late.text
        blank = client.post("/v2/check", data={**FIELDS, "text": " "})
        assert blank.status_code == 200, "nothing to do is done in time"


@pytest.mark.parametrize(("failure", "num_tests"), [(EngineClosed("closed"), 2), (KeyError("a fault"), 1)])
def test_a_failed_test_of_the_target_fails_no_text(
    correcting: Correcting, monkeypatch: pytest.MonkeyPatch, failure: Exception, num_tests: int
) -> None:
    """A fault in the first text's test made every later text an error, for as long as the service ran."""
    begun = []

    async def fails(grammar: Grammar) -> bool:
        begun.append(grammar)
        raise failure

    monkeypatch.setattr(Grammar, "corrects", fails)
    with correcting(_goes) as service, service.client("") as client:
        for _ in range(2):
            assert len(client.post("/v2/check", data=FIELDS).json()["matches"]) == 1
    assert len(begun) == num_tests


def test_what_is_not_done_in_time_is_named(correcting: Correcting) -> None:
    """A long text whose first half was corrected and that comes back as an error, or as if it were correct."""
    text = "He go home. " + "A slow one is here. " * 3
    for timeout_s in (1.0, 10.0, 100.0):  # until a machine corrects the first sentence in time
        stop = threading.Event()

        def slow(sentence: str, stop: threading.Event = stop, timeout_s: float = timeout_s) -> str:
            if "slow" in sentence:
                stop.wait(2.0 * timeout_s)
            return sentence.replace("go", "goes")

        settings = {"service.grammar.timeout_s": timeout_s, "engine.max_num_seqs": 1}
        with correcting(slow, **settings) as service, service.client("") as client:
            response = client.post("/v2/check", data={**FIELDS, "text": text})
            stop.set()
        if response.status_code == 200:
            break
    reply = response.json()
    assert [match["replacements"][0]["value"] for match in reply["matches"]] == ["goes"]
    assert reply["warnings"]["incompleteResults"] and "time" in reply["warnings"]["incompleteResultsReason"]


def test_silence_of_a_model_that_corrects_nothing_is_named(correcting: Correcting) -> None:
    """A chat model that repeats the sentence: "no mistakes"."""
    with correcting(str) as service, service.client("") as client:
        for text, is_named in (("He go home.", True), ("42 + 17", False)):
            reply = client.post("/v2/check", data={**FIELDS, "text": text}).json()
            assert reply["matches"] == [] and reply["warnings"]["incompleteResults"] == is_named
            assert ("may be wrong too" in reply["warnings"].get("incompleteResultsReason", "")) == is_named


MISTAKES = Path(__file__).with_name("mistakes.txt").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "auto"])
def test_an_ordinary_chat_model_is_never_silent_about_a_mistake(
    tmp_path: Path, letter_index: Path, adapter: str
) -> None:
    """SmolLM2 as published repeats every fifth of these sentences, and the client was told that there are no mistakes. With the
    adapter, which corrects most of them, a warning about every text would be noise."""
    engine = load_engine(TargetConfig(adapter=adapter), EngineConfig(), DraftingConfig())
    with corrected_by(engine, tmp_path, letter_index) as service, service.client("") as client:
        replies = [client.post("/v2/check", data={**FIELDS, "text": text}).json() for text in MISTAKES]
    named = [reply["warnings"].get("incompleteResultsReason", "") for reply in replies]
    assert any("may be wrong too" in each for each in named) == (adapter == "none")
    if adapter == "none":
        assert all(reply["matches"] or said for reply, said in zip(replies, named, strict=True))
    else:
        assert sum(bool(reply["matches"]) for reply in replies) > len(MISTAKES) / 2


@pytest.mark.parametrize("num_sentences", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_long_text_is_corrected_to_its_end(correcting: Correcting, num_sentences: int) -> None:
    """A book whose middle is lost; a long text that costs more for each sentence than a short one."""
    ends = [" " if number % 7 else "\r\n\r\n" for number in range(num_sentences)]
    text = "".join(f"He go to mill {number}.{end}" for number, end in enumerate(ends))
    with correcting(_goes, **PATIENT) as service, service.client() as client:
        reply = client.post("/v1/grammar", json={"text": text}, timeout=1800.0).json()
        assert reply["corrected"] == text.replace("go ", "goes ")
        assert len(reply["edits"]) == reply["statistics"]["num_sentences"] == num_sentences
        matches = client.post("/v2/check", data={**FIELDS, "text": text}, timeout=1800.0).json()["matches"]
    assert [match["offset"] for match in matches] == [match.start() for match in re.finditer(r"\bgo\b", text)]


@pytest.mark.parametrize(
    ("pieces", "size"),
    [
        (("x", " \r\n", "\U0001f600 ", "a@", "7 "), 3_000),
        pytest.param(("x", "\U0001f600 ", "a@", "x y ", "He go home. ", "<b "), 10_000, marks=pytest.mark.slow),
        pytest.param((" \r\n", "7 "), 1_000_000, marks=pytest.mark.slow),
    ],
)
def test_a_text_of_any_size_is_answered_or_refused(correcting: Correcting, pieces: tuple[str, ...], size: int) -> None:
    """A megabyte of anything that ends in an error 500, or holds everybody up."""
    settings = PATIENT | {"service.grammar.max_text_chars": size}
    with correcting(str, **settings) as service, service.client() as client:
        for piece in pieces:
            text = piece * (size // len(piece))
            reply = client.post("/v1/grammar", json={"text": text}, timeout=1800.0)
            assert reply.status_code == 200 and reply.json()["corrected"] == text
            assert client.get("/v2/healthcheck").text == "OK"
            checked = client.post("/v2/check", data={**FIELDS, "text": 2 * text})
            assert checked.status_code == 413 and checked.text.startswith("Error: "), checked.text
