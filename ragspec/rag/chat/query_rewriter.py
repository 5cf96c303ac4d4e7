"""Rewrites follow-up questions into standalone questions, with the target or with rules.

The rules also replace an unusable output of the target. Time and load play no role in the choice, so the same conversation
always retrieves with the same question.

    >>> QueryRewriter(ChatConfig(), prompts, engine).standalone("Who designed it?", pairs)
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ragspec.config import ChatConfig
from ragspec.core import FinishReason, Message, Request, SamplingParams
from ragspec.errors import InputError
from ragspec.rag.chat.conversations import QaPair
from ragspec.rag.chat.rewrite_rules import rewrite_by_rules
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, copy_sources

_SYSTEM = (
    "Rewrite the user's last question so that it can be understood without the conversation: put names in place of pronouns "
    "and add what it leaves out. Change nothing else. Write the question alone."
)
_EXAMPLES = (
    (
        "User: What was the Apollo Guidance Computer?\nAssistant: A computer built for NASA's Apollo programme.\n"
        "Last question: Who designed it?",
        "Who designed the Apollo Guidance Computer?",
    ),
    (
        "User: How many people lived in Lyon in 1999?\nAssistant: About 445,000.\nLast question: And in Marseille?",
        "How many people lived in Marseille in 1999?",
    ),
    (
        "User: When did the Beatles break up?\nAssistant: In 1970.\nLast question: What is the capital of Peru?",
        "What is the capital of Peru?",
    ),
)
_LATEST_TURNS = 3
MAX_TOKENS = 64
"""Of a rewritten question."""
LEAST_PARAMETERS = 1_000_000_000
"""Of a target that rewrites questions where the configuration says "auto"."""
_MAX_CHARS = 400
"""Characters of each earlier text, and of the rewritten question beyond the original."""


class QueryRewriter:
    """Without an `engine` only the rules rewrite."""

    def __init__(self, config: ChatConfig, prompts: PromptBuilder, engine: EngineLike | None = None) -> None:
        self._config, self._prompts = config, prompts
        self._engine = engine if _uses_target(config, engine) else None

    def standalone(self, question: str, pairs: Sequence[QaPair], salt: str = "") -> str:
        """The question to retrieve with, given the earlier turns. Raises: EngineError if the target fails."""
        if not pairs or self._config.rewriter == "off":
            return question
        written = self._rewrite(question, pairs, salt) if self._engine is not None else ""
        return written or rewrite_by_rules(question, pairs)

    def _rewrite(self, question: str, pairs: Sequence[QaPair], salt: str) -> str:
        """The target's question; empty if the output is unusable, or if its context or template does not take the turns."""
        assert self._engine is not None
        try:
            request = self._request(question, pairs, salt)
        except InputError:
            return ""
        (completion,) = self._engine.generate([request])
        text = completion.text.strip()
        ended = completion.finish_reason is FinishReason.STOP
        is_line = bool(text) and not {"\n", "\0"} & set(text)
        return text if ended and is_line and len(text) <= _MAX_CHARS + len(question) else ""

    def _request(self, question: str, pairs: Sequence[QaPair], salt: str) -> Request:
        turns = [
            f"User: {turn.question[:_MAX_CHARS]}\nAssistant: {turn.answer[:_MAX_CHARS]}"
            for turn in pairs[-_LATEST_TURNS:]
        ]
        task = "\n".join([*turns, f"Last question: {question}"])
        messages = [Message("system", _SYSTEM)]
        for before, after in _EXAMPLES:
            messages += [Message("user", before), Message("assistant", after)]
        max_tokens = MAX_TOKENS
        prompt = self._prompts.build([*messages, Message("user", task)], (), max_tokens)
        params = SamplingParams(max_tokens=max_tokens)
        return Request(uuid.uuid4().hex, prompt.prompt_ids, params, copy_sources(question, (), turns), salt)


def _uses_target(config: ChatConfig, engine: EngineLike | None) -> bool:
    """`auto` uses a target in this process if it is large enough; the size of a remote target is unknown."""
    if config.rewriter == "auto":
        num_parameters: int = getattr(getattr(engine, "target", None), "num_parameters", 0)
        return num_parameters >= LEAST_PARAMETERS
    return config.rewriter == "model" and engine is not None
