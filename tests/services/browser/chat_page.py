"""The chat page as its tests see it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ChatPage:
    """`complaints`: errors of scripts, and what the content policy refused; failed requests are the tests' own matter."""

    def __init__(self, page: Any, url: str, shots: Path) -> None:
        self.page, self.url, self._shots = page, url, shots
        self.complaints: list[str] = []
        self.asked: list[dict[str, Any]] = []  # the bodies of chat requests
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)
        self.dialog_answers: list[bool] = []
        """To the questions that the page will ask, in order."""
        page.on("dialog", self._alert)
        page.on("request", self._note)

    def visit(self, key: str, path: str = "/") -> None:
        self.page.goto(self.url + path + (f"#key={key}" if key else ""))

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def enter(self, key: str) -> None:
        self.page.fill("#key", key)
        self.page.press("#key", "Enter")

    def answered(self, question: str) -> Any:
        """Ask, wait for the end; the turn's element."""
        self.ask(question)
        turn = self.page.locator(".turn").last
        turn.locator(".verdict").first.wait_for()
        return turn

    def show_telemetry(self) -> None:
        self.page.locator("#more summary").click()
        self.page.locator("#telemetry").check()
        self.page.locator("#more summary").click()

    def shot(self, name: str) -> None:
        self.page.screenshot(path=self._shots / f"{name}.png")

    def _hear(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def _alert(self, dialog: Any) -> None:
        is_asked = bool(self.dialog_answers)
        if not is_asked:
            self.complaints.append(f"a dialog: {dialog.message}")
        (dialog.accept if is_asked and self.dialog_answers.pop(0) else dialog.dismiss)()

    def _note(self, request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.asked.append(json.loads(request.post_data))


Opening = Callable[..., ChatPage]
