"""What LanguageTool's clients are told where there is no key, no room or no time."""

from __future__ import annotations

import threading
from pathlib import Path

from correcting_service import correcting

from ragspec.engine.target import Target

FIELDS = {"language": "en-US", "text": "He go home."}


def test_a_closed_service_takes_the_key_from_the_form(
    tmp_path: Path, letter_index: Path, service_target: Target
) -> None:
    """A service on the net that corrects for anybody; a plug-in that can send its key as a field only."""
    closed = {"service.languagetool_open": False, "service.grammar.timeout_s": 1e-6}
    with (
        correcting(tmp_path, letter_index, service_target, str, **closed) as service,
        service.client("") as client,
    ):
        refused = client.post("/v2/check", data=FIELDS)
        assert refused.status_code in (401, 403) and refused.text.startswith("Error: ")
        assert client.get("/v2/words").status_code in (401, 403)
        assert client.get("/v2/healthcheck").text == "OK"
        late = client.post("/v2/check", data={**FIELDS, "apiKey": service.keys.ann, "username": "ann"})
        assert late.status_code == 500 and "Checking took longer than 1e-06 seconds" in late.text
        assert client.post("/v2/check", data={**FIELDS, "apiKey": "no"}).status_code in (401, 403)
        blank = client.post("/v2/check", data={**FIELDS, "text": " ", "apiKey": service.keys.ann})
        assert blank.status_code == 200, "nothing to do is done in time"


def test_what_is_not_done_in_time_is_named(tmp_path: Path, letter_index: Path, service_target: Target) -> None:
    """A long text whose first half was corrected and that comes back as an error, or as if it were correct."""
    stop = threading.Event()

    def slow(sentence: str) -> str:
        if "slow" in sentence:
            stop.wait(5.0)
        return sentence.replace("go", "goes")

    settings = {"service.grammar.timeout_s": 1.5, "engine.max_running": 1}
    with (
        correcting(tmp_path, letter_index, service_target, slow, **settings) as service,
        service.client("") as client,
    ):
        text = "He go home. " + "A slow one is here. " * 3
        response = client.post("/v2/check", data={**FIELDS, "text": text})
        stop.set()
        assert response.status_code == 200
        reply = response.json()
        assert [match["replacements"][0]["value"] for match in reply["matches"]] == ["goes"]
        assert reply["warnings"]["incompleteResults"] and "time" in reply["warnings"]["incompleteResultsReason"]
