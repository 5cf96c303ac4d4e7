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


def plain_rows(num_rows: int) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"Überfrage {n}?"} for n in range(num_rows)]


def uneven_rows(num_rows: int) -> list[dict[str, Any]]:
    """Answers of many lengths, so that they end one after the other."""
    return [{"id": f"q{n}", "question": ASKED[n], "max_tokens": 8 + 8 * (n * 5 % 12)} for n in range(num_rows)]


def texts_of(out: Path, column: str = "answer") -> dict[str, str]:
    """What stands in a folder of results; every id once."""
    answers = answers_of(out)
    assert len({answer["id"] for answer in answers}) == len(answers)
    return {answer["id"]: answer[column] for answer in answers}
