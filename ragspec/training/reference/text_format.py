"""The text format of the reference target: roles, chat template, answers.

Owns every string that training and serving must agree on; never tokenises. One prompt is the numbered passages, then the
user's question, then the assistant's turn; a conversation names the question first, the template turns the two around:

    <|context|>
    [1] first passage
    [2] second passage<|user|>Who wrote it?<|assistant|>"The sentence." [1] – short answer.<|end|>

Why: the words of a question can look for themselves in all passages, and many questions share one reading of them.
"""

import re

PAD, SYSTEM, USER, CONTEXT, ASSISTANT, END = (
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|context|>",
    "<|assistant|>",
    "<|end|>",
)
SPECIAL_TOKENS = (PAD, SYSTEM, USER, CONTEXT, ASSISTANT, END)
CONTEXT_ROLE_FLAG = "ragspec_context_role"
"""Set to true in the tokenizer's configuration: the template takes messages whose role is `context`."""

ABSTENTION = "The passages do not say."
GRAMMAR_REQUEST = "Correct the grammar: "

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set text = message['content'] | trim -%}"
    "{%- set next = loop.nextitem -%}"
    "{%- set previous = loop.previtem -%}"
    "{%- if message['role'] == 'system' -%}<|system|>{{ text }}"
    "{%- elif message['role'] == 'user' -%}"
    "{%- if next and next['role'] == 'context' -%}{{ '<|context|>\\n' + next['content'] | trim }}{%- endif -%}<|user|>{{ text }}"
    "{%- elif message['role'] == 'context' -%}"
    "{%- if not previous or previous['role'] != 'user' -%}{{ '<|context|>\\n' + text }}{%- endif -%}"
    "{%- elif message['role'] == 'assistant' -%}<|assistant|>{{ text }}<|end|>"
    "{%- else -%}{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)

Message = dict[str, str]

DASH = "–"
"""Before a short answer, so that it begins with a space and has the same tokens as in the middle of its sentence."""

_ANSWER = re.compile(rf'^"(?P<quote>.*)" \[(?P<passage>\d+)\](?:\s*{DASH})?\s*(?P<short>.*)$', re.DOTALL)


def message(role: str, content: str) -> Message:
    """One chat message."""
    return {"role": role, "content": content}


def numbered(passages: list[str]) -> str:
    """The passages as the content of a context message: `[1] text`, one after another."""
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(passages, start=1))


def question_messages(question: str, passages: list[str]) -> list[Message]:
    """The prompt of one question over passages, without the answer."""
    return [message("user", question), message("context", numbered(passages))]


def grammar_messages(sentence: str) -> list[Message]:
    """The prompt of one sentence to correct."""
    return [message("user", GRAMMAR_REQUEST + sentence)]


def quoted_answer(quote: str, passage_number: int, short_answer: str = "") -> str:
    """Evidence first: the quoted sentence, its passage number, then the short answer, if there is one."""
    answer = f'"{quote}" [{passage_number}]'
    return f"{answer} {DASH} {short_answer.rstrip('.')}." if short_answer else answer


def parse_answer(text: str) -> tuple[str, int, str] | None:
    """(quote, passage number, short answer) of an answer in the format above, or None."""
    match = _ANSWER.match(text.strip())
    if match is None:
        return None
    return match["quote"], int(match["passage"]), match["short"].strip().rstrip(".")
