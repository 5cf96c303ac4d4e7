"""Training texts as token ids, in a target's own layout: conversations whose answers are learnt, and plain text.

Prompts are the tokens that serving makes of them (`PromptBuilder`), so that no target learns a layout it is never given.

    >>> AnswerEncoder(tokenizer).encode(Conversation([Message("user", "Who?"), Message("assistant", "I.")])).weights
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragspec.core import Message
from ragspec.rag.prompt import PromptBuilder

_ANY_LENGTH = 2**20


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn, or plain `text`. `open_ended`: the last answer may go on, so its end is not learnt."""

    messages: list[Message]
    text: str = ""
    open_ended: bool = False


class Encoded(NamedTuple):
    """Token ids, and the weight of *predicting* each: 1 for tokens that are learnt, else 0. Same lengths."""

    ids: list[int]
    weights: list[float]


class AnswerEncoder:
    """Encodes texts with a target's own chat template: weight 1 for the tokens of answers and of plain text, 0 for all others.

    `eos_ids`: the tokens that end a text; None: the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer, _ANY_LENGTH)
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._eos_ids, self._own_end = frozenset(own if eos_ids is None else eos_ids), own

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to the next answer. Raises: InputError unless the last message is the user's."""
        return list(self._prompts.tokens(messages))

    def encode(self, conversation: Conversation) -> Encoded:
        """Why tokens are dropped: some templates rewrite earlier answers, so that a later prompt does not begin with the tokens
        before it. Only the part behind the rewritten answers is kept then.
        """
        if not conversation.messages:
            (ids,) = self._prompts.plain_ids([conversation.text], begins=True)
            return Encoded(ids, [1.0] * len(ids))
        ids, weights, num_ended = list[int](), list[float](), 0
        for position in answer_positions(conversation):
            prompt = self.prompt(conversation.messages[:position])
            if prompt[: len(ids)] != ids:  # the template may write the end of a text only once
                ids, weights = ids[:num_ended], weights[:num_ended]
            if prompt[: len(ids)] != ids:
                ids, weights = [], []
            answer, end = self._answer(conversation.messages[: position + 1], prompt)
            weights += [0.0] * (len(prompt) - len(ids)) + [1.0] * len(answer)
            weights += [float(not conversation.open_ended)] * len(end)
            ids, num_ended = [*prompt, *answer, *end], len(prompt) + len(answer)
        return Encoded(ids, weights)

    def _answer(self, messages: Sequence[Message], prompt: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of the last message and of its end, as the template writes them if it does."""
        if self.tokenizer.chat_template is not None:
            whole = list(self._prompts.answered(messages))
            rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
            for at, token in enumerate(rest):
                if token in self._eos_ids:
                    return rest[:at], [token]
        lead = " " if self.tokenizer.chat_template is None else ""  # the plain layout has a space here
        (answer,) = self._prompts.plain_ids([lead + messages[-1].content])
        return answer, self._own_end


def answer_positions(conversation: Conversation) -> list[int]:
    """Indices of the messages that answer a message of the user."""
    roles = [message.role for message in conversation.messages]
    return [n for n in range(1, len(roles)) if roles[n] == "assistant" and roles[n - 1] == "user"]
