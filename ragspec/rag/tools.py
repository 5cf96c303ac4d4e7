"""Calls of tools: how a target's chat template writes them, the grammar that holds an answer to the tools' schemas, and parsing.

Owns no tool and calls none. The form of a call is read off the template: a rendered call shows which text stands before the name,
between name and arguments, and behind them.

    >>> form = call_form(prompts)
    >>> grammar = call_grammar(form, {"weather": schema}, required=True)
    >>> parse_calls(form, ["weather"], completion.text)
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ragspec.errors import InputError
from ragspec.rag.prompt import PromptBuilder

_PROBE = {
    "type": "function",
    "function": {"name": "fn_a", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_ARGUMENTS = {"key_k": "value_v"}
_DECODER = json.JSONDecoder()
_LAYOUT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""As templates write JSON, which models have learned."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is `opening`, name, `middle`, arguments as JSON, `closing`. `between`: stands between two calls; None: a template
    that writes one call only. `tokens`: the ids of tokens that a grammar names, because their spelling is no text to it."""

    opening: str
    middle: str
    closing: str
    between: str | None
    tokens: Mapping[str, int] = field(default_factory=dict)

    def head(self, name: str) -> str:
        """The text of a call before its arguments."""
        return f"{self.opening}{name}{self.middle}"

    def literal(self, text: str) -> str:
        """A text in a grammar."""
        pieces = re.split(f"({'|'.join(map(re.escape, self.tokens)) or '(?!)'})", text)
        terms = (f"<[{self.tokens[each]}]>" if each in self.tokens else json.dumps(each) for each in pieces if each)
        return " ".join(terms)


class ToolCall(NamedTuple):
    """`arguments`: JSON; the beginning of it while the call is being written."""

    name: str
    arguments: str


class ParsedAnswer(NamedTuple):
    """The text before the calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


def call_form(prompts: PromptBuilder) -> CallForm:
    """Raises: InputError for a target whose chat template writes no calls, or marks them by control tokens."""
    one, two = (_written_calls(prompts, count) for count in (1, 2))
    special = re.compile("|".join(map(re.escape, prompts.tokenizer.all_special_tokens)) or r"(?!)")
    name = one.find("fn_a")
    start = next((m.start() for m in re.finditer("{", one) if m.start() > name >= 0 and _starts(one[m.start() :])), -1)
    if start <= 0 or special.search(one[:start]):
        raise InputError("tools cannot be called: this model's chat template does not write calls")
    opening, middle = one[:name], one[name + len("fn_a") : start]
    end = start + _DECODER.raw_decode(one[start:])[1]
    closing, joint = special.split(one[end:])[0].rstrip(), two[end : two.find("fn_b")]
    is_repeated = joint.startswith(closing) and joint.endswith(opening)
    between = joint[len(closing) : len(joint) - len(opening)] if is_repeated else None
    written = prompts.tokenizer.get_added_vocab()
    tokens = {token: number for token, number in written.items() if token in opening + middle + closing}
    return CallForm(opening, middle, closing, between, tokens)


def _written_calls(prompts: PromptBuilder, count: int) -> str:
    """Calls of fn_a and fn_b, or of the first alone, behind a question; empty if the template does not write them there."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    calls = [
        {"type": "function", "id": f"call{name}", "function": {"name": name, "arguments": _ARGUMENTS}}
        for name in ("fn_a", "fn_b")[:count]
    ]
    try:
        before = prompts.laid_out(asked, tools=[_PROBE], add_generation_prompt=True)
        answered = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        shown = prompts.laid_out(answered, tools=[_PROBE])
    except TemplateError:
        return ""
    return shown.removeprefix(before) if shown.startswith(before) else ""


def _starts(text: str) -> bool:
    try:
        return bool(_DECODER.raw_decode(text)[0] == _ARGUMENTS)
    except ValueError:
        return False


def call_grammar(
    form: CallForm, schemas: Mapping[str, Mapping[str, Any]], *, required: bool = False, parallel: bool = True
) -> str:
    """A grammar in llguidance's dialect of Lark: text, or calls behind text; without schemas text alone.

    `schemas`: of the arguments, by the tool's name. `required`: at least one call and no text. `parallel`: any number of calls.
    """
    mark = re.escape(form.opening.strip().split("\n")[0]).replace("/", "\\/")
    text = f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/"
    if not schemas:
        return f"start: TEXT\n{text}"
    calls = [
        f"call_{number}: {form.literal(name + form.middle)} {_arguments_rule(schema)} {form.literal(form.closing)}"
        for number, (name, schema) in enumerate(schemas.items())
    ]
    call = f"({' | '.join(f'call_{number}' for number in range(len(calls)))})"
    more = f" ({form.literal(form.between + form.opening)} {call})*" if parallel and form.between is not None else ""
    if required:
        return "\n".join([f"start: {form.literal(form.opening)} {call}{more}", *calls])
    # Why two forms: a token that the grammar names ends a text by itself, other openings end it as its suffix
    ends = any(map(form.opening.startswith, form.tokens))
    suffix = f"before[suffix={json.dumps(form.opening)}]: /(.|\\n)*/"
    before = f"before: TEXT? {form.literal(form.opening)}" if ends else suffix
    return "\n".join([f"start: TEXT | before {call}{more}", before, text, *calls])


def _arguments_rule(schema: Mapping[str, Any]) -> str:
    """Why no further properties: a model may write them until `max_tokens`, and the tool reads none of them."""
    whole = {"type": "object", "properties": {}, "additionalProperties": False, **schema, **_LAYOUT}
    return f"%json {json.dumps(whole)}"


def parse_calls(form: CallForm, names: Sequence[str], text: str, *, is_whole: bool = True) -> ParsedAnswer:
    """Content and calls of an answer, or of its beginning. As the text grows, so do content, calls and the last arguments."""
    head = re.compile(f"{re.escape(form.opening)}({'|'.join(map(re.escape, names)) or '(?!)'}){re.escape(form.middle)}")
    found, calls = head.search(text), []
    content = text[: found.start()] if found else text if is_whole else _surely_content(form, text)
    while found:
        try:
            end = found.end() + _DECODER.raw_decode(text[found.end() :])[1]
        except ValueError:
            end = len(text)
        calls.append(ToolCall(found[1], text[found.end() : end]))
        found = head.search(text, end)
    return ParsedAnswer(content if content.strip() else "", tuple(calls))


def _surely_content(form: CallForm, text: str) -> str:
    """The text before anything that may become a call."""
    if form.opening in text:
        return text[: text.index(form.opening)]
    num_held = next((n for n in range(len(form.opening), 0, -1) if text.endswith(form.opening[:n])), 0)
    return text[: len(text) - num_held]
