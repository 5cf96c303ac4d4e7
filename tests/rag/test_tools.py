"""How a target writes calls, read off its chat template; the grammar of an answer with calls; and parsing its text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_target import chat_tokenizer

from ragspec.errors import InputError
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.tools import CallForm, ToolCall, call_form, call_grammar, parse_calls
from ragspec.verification.token_grammar import Grammars

BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}ONE{% endfor %}"
STYLES = {
    "marked": (
        '{% if not loop.first %}\n{% endif %}<tool_call>\n{"name": "{{ f.name }}", '
        '"arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    ),
    "bare": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "tagged": "<function={{ f.name }}>{{ f.arguments | tojson }}</function>",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
}
SCHEMAS: Any = {"weather": SCHEMA, "time": {}}


def prompts_of(style: str, *, tokens: bool = True) -> PromptBuilder:
    tokenizer = chat_tokenizer()
    if tokens:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = BODY.replace("CALLS", EACH.replace("ONE", style)) + HEAD
    return PromptBuilder(tokenizer, 1024)


@pytest.fixture(params=[*STYLES, "marked, as text"])
def prompts(request: pytest.FixtureRequest) -> PromptBuilder:
    return prompts_of(STYLES[request.param.split(",")[0]], tokens="text" not in request.param)


def accepts(prompts: PromptBuilder, grammar: str, text: str) -> bool:
    tokenizer = prompts.tokenizer
    state = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).of_lark(grammar)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if not state.allows(token):
            return False
        state.take(token)
    return state.allows(tokenizer.eos_token_id)


def test_an_answer_is_text_or_valid_calls(prompts: PromptBuilder) -> None:
    """A call that its schema forbids, text in place of a call that was required, a second call where there may be one."""
    form = call_form(prompts)

    def call(name: str, arguments: str) -> str:
        return f"{form.head(name)}{arguments}{form.closing}"

    rome, now = call("weather", '{"city": "Rome", "unit": "c"}'), call("time", "{}")
    both = rome + (form.between or "") + now
    wrong = (
        call("weather", '{"city": "Rome", "unit": "k"}'),
        call("weather", '{"unit": "c"}'),
        call("other", "{}"),
        rome[:-3],
    )
    free, must = call_grammar(form, SCHEMAS), call_grammar(form, SCHEMAS, required=True)
    one, none = call_grammar(form, SCHEMAS, required=True, parallel=False), call_grammar(form, {})
    for text, allowed in {"Hello.": (1, 0, 0, 1), rome: (1, 1, 1, 0), f"Sure. {rome}": (1, 0, 0, 0)}.items():
        assert [accepts(prompts, grammar, text) for grammar in (free, must, one, none)] == list(map(bool, allowed)), (
            text
        )
    assert [accepts(prompts, grammar, both) for grammar in (free, must, one)] == [True, True, False]
    assert not any(accepts(prompts, grammar, text) for text in wrong for grammar in (free, must, one))
    assert parse_calls(form, list(SCHEMAS), f"Sure. {both}") == (
        "Sure. ",
        (ToolCall("weather", '{"city": "Rome", "unit": "c"}'), ToolCall("time", "{}")),
    )


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ raise_exception('no tools') }}", "special"])
def test_templates_that_write_no_calls_are_told(template: str) -> None:
    """Tools that vanish; calls behind control tokens, which an answer's text does not show."""
    prompts = prompts_of(STYLES["tagged"])
    special = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<|im_start|>{{ c.function.name }}"
    special += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    prompts.tokenizer.chat_template = special if template == "special" else template
    with pytest.raises(InputError, match="does not write calls"):
        call_form(prompts)


@given(
    st.text('ab <{"}\n', max_size=8),
    st.lists(
        st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(st.text(max_size=3), st.text(max_size=4)))
    ),
)
def test_the_parse_of_a_beginning_is_the_beginning_of_the_parse(
    content: str, calls: list[tuple[str, dict[str, str]]]
) -> None:
    """A stream that takes text back: a piece of a call's head shown as text, or arguments that change."""
    form = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = content + "\n".join(f"{form.head(name)}{arguments}{form.closing}" for name, arguments in written)
    before = parse_calls(form, list(SCHEMAS), "", is_whole=False)
    for end in range(len(text) + 1):
        now = parse_calls(form, list(SCHEMAS), text[:end], is_whole=False)
        assert now.content.startswith(before.content) and len(now.calls) >= len(before.calls)
        for old, new in zip(before.calls, now.calls, strict=False):
            assert old.name == new.name and new.arguments.startswith(old.arguments)
        before = now
    whole = parse_calls(form, list(SCHEMAS), text)
    assert whole.calls == tuple(map(ToolCall._make, written)) and whole.content.startswith(before.content)
