"""A question and its passages become the target's prompt, in token ids.

Owns the wording and the order; the target's own chat template owns the control tokens. Text of users and documents is never read
as a control token: `<|end|>` inside a passage stays six plain characters.

    >>> PromptBuilder(tokenizer, max_context_tokens=2048).build("When did it rain?", passages, max_tokens=96).prompt_ids
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ragspec.core import Message, Passage, check_text
from ragspec.errors import InputError, PromptTooLong

_ROLES = frozenset({"system", "user", "assistant", "context"})
_MAX_CHARS_PER_TOKEN = 64
"""A text longer than this times the context cannot fit, and is refused before it is tokenised."""

_INSTRUCTION = (
    "Answer the question from the passages {where}. Quote the sentence that answers it word for word, "
    'in quotation marks, followed by the number of its passage, like this: "..." [1]\n'
    "If no passage answers it, write: The passages do not say."
)

_PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}Answer: {% endif %}{{ message.content }}\n\n"
    "{% endfor %}Answer:"
)
"""For models without a chat template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target reads. `passages[i]` is numbered i + 1 in the prompt; `dropped` did not fit."""

    prompt_ids: tuple[int, ...]
    passages: tuple[Passage, ...] = ()
    dropped: tuple[Passage, ...] = ()


class PromptBuilder:
    """Lays out prompts for one tokenizer. `max_context_tokens` is prompt and output together. Safe to call from several threads.

    `tokenizer` is for decoding. Why what encodes are copies: whether text may hold control tokens is a state of the tokenizer,
    which one thread would change while another encodes. Of one copy it never changes, the other is behind a lock.
    """

    def __init__(self, tokenizer: Any, max_context_tokens: int) -> None:
        self.tokenizer = tokenizer
        self._encoder, self._encoding = copy.deepcopy(tokenizer), threading.Lock()
        self._plain = copy.deepcopy(tokenizer)
        self.plain_ids(["a"])  # from now on it reads texts in this way
        self.max_context_tokens = max_context_tokens
        self.max_chars = max_context_tokens * _MAX_CHARS_PER_TOKEN
        self.has_context_role = bool(tokenizer.init_kwargs.get("ragspec_context_role"))
        self._layout = _plain_layout(tokenizer) if tokenizer.chat_template is None else {}

    def build(
        self,
        question: str | Sequence[Message],
        passages: Sequence[Passage],
        max_tokens: int,
        *,
        question_first: bool = False,
    ) -> Prompt:
        """The prompt with as many of the best passages as leave room for `max_tokens` of output.

        `question` is a text or a conversation that ends with the user's message; `passages` are ranked, the last are dropped
        first. `question_first`: before the passages, unless the template knows a role `context`; for answers in whose course
        passages are replaced.
        Raises: InputError for a text no tokenizer should see, PromptTooLong if it does not fit even without passages.
        """
        messages = [Message("user", question)] if isinstance(question, str) else list(question)
        self._check(messages)
        room = self.max_context_tokens - max_tokens
        prompt_ids = self._encode(self._laid_out(messages, question_first))
        if len(prompt_ids) > room:
            raise PromptTooLong(len(prompt_ids), max(room, 0), max_tokens)
        fitting, high, tried = 0, len(passages), len(passages)  # all of them fit, most of the time
        while fitting < high:
            longer_ids = self._encode(self._laid_out([*messages, self.context(passages[:tried])], question_first))
            if len(longer_ids) <= room:
                fitting, prompt_ids = tried, longer_ids
            else:
                high = tried - 1
            tried = (fitting + high + 1) // 2
        return Prompt(prompt_ids, tuple(passages[:fitting]), tuple(passages[fitting:]))

    def context(self, passages: Sequence[Passage]) -> Message:
        """The message of numbered passages that follows the question they were found for."""
        gap = "\n" if self.has_context_role else "\n\n"
        return Message("context", gap.join(f"[{number}] {p.text}" for number, p in enumerate(passages, 1)))

    def tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a conversation whose last message is the user's, or the passages found for it; of any length.

        Each earlier turn is laid out as it was when it was the last, so what was computed for it then holds still.
        Raises: InputError.
        """
        self._check(messages[:-1] if messages and messages[-1].role == "context" else messages)
        return self._encode(self._laid_out(messages))

    def plain_ids(self, texts: Sequence[str], *, begins: bool = False) -> list[list[int]]:
        """Token ids of each text, in which nothing is a control token. `begins`: with what the tokenizer puts around texts."""
        encoded = self._plain(list(texts), add_special_tokens=begins, split_special_tokens=True, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def answered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation that ends with an answer, as the template writes it.

        Raises: InputError.
        """
        self._check(messages[:-2] if messages[-2].role == "context" else messages[:-1])
        return self._encode(self._laid_out(messages), add_generation_prompt=False)

    def check(self, question: str) -> None:
        """Raises: InputError for what `build` would refuse before it tokenises anything."""
        self._check([Message("user", question)])

    def grammar_prompt(self, sentence: str, max_tokens: int = 0) -> Prompt:
        """The prompt that asks for the corrected sentence and nothing else. Raises: as `build`."""
        check_text(sentence, "the sentence")
        return self.build([Message("user", f"Correct the grammar: {sentence}")], (), max_tokens)

    def _check(self, messages: Sequence[Message]) -> None:
        if not messages or messages[-1].role != "user":
            raise InputError("a conversation must end with a message of the user")
        for message in messages:
            if message.role not in _ROLES:
                raise InputError(f"unknown role {message.role!r}; known are {', '.join(sorted(_ROLES))}")
            what = "the question" if message is messages[-1] else f"the message of the {message.role}"
            check_text(message.content, what)
            if len(message.content) > self.max_chars:
                raise InputError(
                    f"{what} has {len(message.content)} characters, which cannot fit a context of "
                    f"{self.max_context_tokens} tokens"
                )

    def _laid_out(self, messages: Sequence[Message], question_first: bool = False) -> list[Message]:
        """For templates that know no role `context`, passages move into the user's message they follow."""
        if self.has_context_role:
            return list(messages)
        merged: list[Message] = []
        for message in messages:
            if message.role != "context":
                merged.append(message)
            elif merged and merged[-1].role == "user":
                merged[-1] = Message("user", _asked_of(message.content, merged[-1].content, question_first))
            else:
                raise InputError("a message of the role context must follow a message of the user")
        return merged

    def _encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Why `sanitize_control_tokens`: only the template may write control tokens; the same spelling in a text is text."""
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            with self._encoding:
                token_ids = self._encoder.apply_chat_template(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    sanitize_control_tokens=True,
                    return_dict=False,
                    **self._layout,
                )
        except TemplateError as cause:
            raise InputError(f"the target's chat template refuses this conversation: {cause}") from cause
        return tuple(token_ids)


def _asked_of(numbered: str, question: str, question_first: bool) -> str:
    instruction = _INSTRUCTION.format(where="below" if question_first else "above")
    parts = [f"Passages:\n<<<\n{numbered}\n>>>", f"{instruction}\n\nQuestion: {question}"]
    return "\n\n".join(reversed(parts) if question_first else parts)


def _plain_layout(tokenizer: Any) -> dict[str, str]:
    """The plain template, with the tokenizer's own beginning-of-text token where it writes one itself."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return {"chat_template": _PLAIN_TEMPLATE} | ({} if begins else {"bos_token": ""})
