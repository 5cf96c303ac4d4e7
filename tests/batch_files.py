"""Rows of batch jobs, in files and out of them."""

import json
from pathlib import Path
from typing import Any

SEED = 5
CHAT = "/v1/chat/completions"
ASKED = tuple(f"What does sentence {n} say about the river?" for n in range(80))


def chat_row(custom_id: str, content: str = "Which bridge?", **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [message], **body},
    }


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read_lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def answers_of(out: Path) -> list[dict[str, Any]]:
    return read_lines(*sorted(out.glob("answers-*.jsonl")))


def answers_by_id(out: Path) -> dict[str, dict[str, Any]]:
    """What stands in a folder of results; every id once."""
    answers = answers_of(out)
    found = {answer.get("custom_id", answer["id"]): answer for answer in answers}
    assert len(found) == len(answers)
    return found


def text_of(answer: dict[str, Any], column: str) -> str:
    """The text of an answer in either form; `column`: of the plain form."""
    if "custom_id" in answer:
        return str(answer["response"]["body"]["choices"][0]["message"]["content"])
    return str(answer[column])


def plain_rows(num_rows: int) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"Überfrage {n}?"} for n in range(num_rows)]


def uneven_rows(num_rows: int) -> list[dict[str, Any]]:
    """Answers of many lengths, so that they end one after the other."""
    return [{"id": f"q{n}", "question": ASKED[n], "max_tokens": 8 + 8 * (n * 5 % 12)} for n in range(num_rows)]


def texts_of(out: Path, column: str = "answer") -> dict[str, str]:
    return {name: text_of(answer, column) for name, answer in answers_by_id(out).items()}
