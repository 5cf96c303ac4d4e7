"""Conversations over HTTP as their readers need them: found again, with their sources, rated, and exported for evaluation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from service_parts import Service, Serving

from ragspec.cli import main
from ragspec.evaluation.questions import AskedQuestion, Dialogue, Line, read_lines
from ragspec.rag.chat.conversations import ConversationStore, Feedback, QaPair
from services.stores.rated import rated_questions


@pytest.fixture(scope="module")
def kept(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(**{"service.data_dir": str(tmp_path_factory.mktemp("data"))}) as running:
        yield running


def test_conversations_are_listed_renamed_rated_and_exported(kept: Service, tmp_path: Path) -> None:
    """Whoever lost an id lost the conversation, stored answers had no sources, and what readers said of answers went nowhere."""
    with kept.client(kept.keys.ann) as ann, kept.client(kept.keys.bob) as bob:
        first, second = (ann.post("/v1/conversations", json={}).json() for _ in range(2))
        path = f"/v1/conversations/{first['id']}"
        ann.post(path, json={"metadata": {"title": "Bridges"}}).raise_for_status()
        asked = {"model": "tiny", "conversation": first["id"], "max_tokens": 4, "seed": 3}
        said = ask(ann, **asked, question="When was the bridge built?")
        assert ask(ann, **asked, question="When was the bridge built?", store=False)["ragspec"]["kept"] is False
        ask(ann, **asked, question="By whom?")
        listed = ann.get("/v1/conversations").json()
        latest, earlier = listed["data"]
        assert (latest["id"], earlier["id"]) == (first["id"], second["id"])
        assert latest["metadata"] == {"title": "Bridges"}
        assert latest["expires_at"] == pytest.approx(latest["last_active_at"] + listed["ttl_s"], abs=1)
        items = ann.get(f"{path}/items", params={"order": "asc", "include": "ragspec"}).json()["data"]
        assert len(items) == 4 and items[1]["ragspec"]["passages"] == said["ragspec"]["passages"] != []
        assert items[1]["ragspec"]["sentences"] == said["ragspec"]["sentences"]
        verdicts = ({"rating": "up", "note": "ü"}, {"rating": "down", "note": "Who?"})
        for item, feedback in zip(items[1::2], verdicts, strict=True):
            assert ann.post(f"{path}/items/{item['id']}/feedback", json=feedback).json() == feedback
        assert "ragspec" not in ann.get(f"{path}/items").text
        assert ann.get(f"{path}/items", params={"include": "ragspec"}).json()["data"][0]["feedback"]["note"] == "Who?"
        for number in ("000000", "000009"):
            wrong = f"{path}/items/{items[1]['id'][:-6]}{number}/feedback"
            assert ann.post(wrong, json={"rating": "up"}).status_code == 404
        assert bob.get("/v1/conversations").json()["data"] == []
        assert bob.post(path, json={"metadata": {}}).status_code == 404
        assert bob.post(f"{path}/items/{items[1]['id']}/feedback", json={"rating": "up"}).status_code == 404
        data = Path(kept.backend.config.service.data_dir)

        def exported(*options: str) -> list[Line]:
            with pytest.raises(SystemExit, match=r"^0$"):
                main(("feedback", "export", "--data", str(data), "--out", str(tmp_path / "rated.jsonl"), *options))
            return read_lines([tmp_path / "rated.jsonl"])

        rated, dialogue = exported()
        assert isinstance(rated, AskedQuestion) and rated.question == "When was the bridge built?"
        assert rated.evidence["note"] == "ü" and rated.evidence["answer"] == items[1]["content"][0]["text"]
        assert isinstance(dialogue, Dialogue)
        assert [turn.question for turn in dialogue.turns] == [rated.question, "By whom?"]
        assert exported("--tenant", "bob") == []
        assert ann.delete(path).status_code == 200
        assert exported() == []
        with pytest.raises(SystemExit, match=r"^1$"):
            main(("feedback", "export", "--data", str(data / "none")))
        documents = ann.get("/v1/documents", params={"limit": 1}).json()
        assert len(documents["data"]) == 1 < documents["total"] and documents["changed_at"] > 0
        titles = {each["title"] for each in bob.get("/v1/documents").json()["data"]}
        assert "Bob's note" in titles and "Ann's note" not in titles


@pytest.mark.parametrize(
    ("answer", "rating", "judgement"),
    [
        ('"The mill was built in 1874." [1] – In 1874.', "up", {"answer": "The mill was built in 1874."}),
        ("The passages do not say.", "up", {"answerable": False}),
        ('"The mill was built in 1874." [1]', "down", {}),
    ],
)
def test_a_rated_answer_becomes_a_question_that_is_judged(
    tmp_path: Path, answer: str, rating: Any, judgement: dict[str, Any]
) -> None:
    """A wrong answer taken for a fact, or a right one for nothing."""
    store = ConversationStore(tmp_path / "conversations.sqlite")
    made = store.create("", turns=[QaPair("When?", answer)])
    store.rate("", made.id, 0, Feedback(rating))
    store.close()
    (line,) = rated_questions(tmp_path / "conversations.sqlite")
    assert {name: line[name] for name in line.keys() - {"id", "question", "evidence"}} == judgement


def ask(client: httpx.Client, question: str, **body: Any) -> dict[str, Any]:
    body |= {"messages": [{"role": "user", "content": question}]}
    return dict(client.post("/v1/chat/completions", json=body).raise_for_status().json())
