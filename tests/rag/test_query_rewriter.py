"""Follow-up questions are made standalone: what they leave out is added, and nothing else is touched."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_examples import EXAMPLES
from small_parts import CONTEXT, Switch

from ragspec.config import ChatConfig
from ragspec.core import Completion, Request
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import EngineClosed
from ragspec.rag.chat.query_rewriter import AskedBefore, QueryRewriter, extract_names, extract_phrases, rewrite_by_rules
from ragspec.rag.prompt import PromptBuilder

ZAPPA = [AskedBefore("When was Frank Zappa born?"), AskedBefore("Which group did he lead?")]


@pytest.mark.parametrize(("question", "said", "added"), EXAMPLES["what a follow-up leaves out"])
def test_what_a_follow_up_leaves_out_is_added(question: str, said: list[tuple[str, Any]], added: str) -> None:
    """A search for "Why did he leave it?" finds anything."""
    rewritten = rewrite_by_rules(question, [AskedBefore(*each) for each in said])
    assert rewritten.startswith(question) and added in rewritten[len(question) :]


@pytest.mark.parametrize(
    "question", ["When was the Treaty of Westphalia signed?", "What is the capital of Peru called today?"]
)
def test_a_question_that_stands_alone_stays_as_it_is(question: str) -> None:
    """A change of subject was searched for under the old one."""
    assert rewrite_by_rules(question, ZAPPA) == question
    assert rewrite_by_rules("Why did he leave?", []) == "Why did he leave?"


def test_after_a_change_of_subject_the_old_one_is_not_added() -> None:
    """What sort_keys does was looked up among iterators, which another question had been about."""
    said = [
        AskedBefore("What does itertools.batched do with a short batch?"),
        AskedBefore("What does json.dumps do with keys that are not strings?"),
    ]
    rewritten = rewrite_by_rules("And what does sort_keys do?", said)
    assert "json.dumps" in rewritten and "itertools" not in rewritten
    assert rewrite_by_rules("What does textwrap.dedent do?", said) == "What does textwrap.dedent do?"


def test_nothing_is_added_that_the_question_says_already() -> None:
    """Repetition moves the question's own words into the background."""
    assert rewrite_by_rules("Why did he, Frank Zappa, leave?", ZAPPA).count("Zappa") == 1
    said = [AskedBefore("Who was Frank Zappa?"), AskedBefore("Was Zappa a guitarist?")]
    assert rewrite_by_rules("Where was he born?", said) == "Where was he born? (Frank Zappa)"


def test_names_are_runs_of_capitals_and_identifiers() -> None:
    """The first word of a sentence was taken for a name, and a name's small words cut it in two."""
    assert extract_names("Who founded the Bank of England in London?") == ["Bank of England in London"]
    identifiers = extract_names("What does os.path.join do with HTTPServer's myValue?")
    assert identifiers == ["os.path.join", "HTTPServer", "myValue"]
    assert extract_names("where was the mill?") == []
    assert extract_phrases("How does the old water mill grind the corn?") == ["old water mill grind", "corn"]


@settings(deadline=None, max_examples=60)
@given(
    question=st.text(max_size=200),
    said=st.lists(st.builds(AskedBefore, st.text(max_size=200), st.tuples(st.text(max_size=200))), max_size=4),
)
def test_any_text_is_taken(question: str, said: list[AskedBefore]) -> None:
    """A question nobody had thought of broke the request."""
    assert rewrite_by_rules(question, said).startswith(question)


class Failing:
    """An engine that is closed."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise EngineClosed("the engine is closed")


def rewriter(target: Target, engine: Any, **config: Any) -> QueryRewriter:
    return QueryRewriter(ChatConfig(**config), PromptBuilder(target.tokenizer, 4 * CONTEXT), engine)


def test_a_target_writes_the_question_where_the_configuration_says_so(
    target: Target, engine: Engine, switch: Switch
) -> None:
    """A model of 1.5 B was asked unless told otherwise, and gave the first question back in the place of the last."""
    switch.answer = " Why did Frank Zappa leave the Mothers?"
    model = rewriter(target, _Short(engine), rewriter="model")
    assert model.standalone("Why did he leave?", ZAPPA, "ann") == "Why did Frank Zappa leave the Mothers?"
    by_rules = rewrite_by_rules("Why did he leave?", ZAPPA)
    assert rewriter(target, Failing(), rewriter="auto").standalone("Why did he leave?", ZAPPA) == by_rules


class _Short:
    """An engine whose context a long prompt does not fit is asked with the end of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self._engine.generate([replace(each, prompt_ids=each.prompt_ids[-256:]) for each in requests])


@pytest.mark.parametrize("size", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", ["1", "a-", "a.", "“", "A.'", "a ", "_", "A of the ", "x_"])
def test_a_question_of_megabytes_costs_no_more_than_its_beginning(text: str, size: int) -> None:
    """Patterns that look from every place to the end held the whole service for hours."""
    long = text * (size // len(text))
    question = f"tell me about {long}"
    assert rewrite_by_rules(question, [AskedBefore("What is X?"), AskedBefore(long, (long,))]).startswith(question)
    extract_names(text * (size // 10))


def test_a_target_that_fails_is_an_error_and_no_other_question(target: Target) -> None:
    """On a busy day the rules decided instead, and the same conversation got another answer."""
    asked = rewriter(target, Failing(), rewriter="model")
    with pytest.raises(EngineClosed):
        asked.standalone("Why did he leave?", ZAPPA)


async def test_a_template_without_a_system_role_leaves_follow_ups_to_the_rules(target: Target, engine: Engine) -> None:
    """Every second question was refused, for a system message that nobody had sent; or there was a loop that ran already."""
    tokenizer = copy.deepcopy(target.tokenizer)
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refusing + "{% for m in messages %}{{ m.content }}{% endfor %}"
    asked = QueryRewriter(ChatConfig(rewriter="model"), PromptBuilder(tokenizer, 4 * CONTEXT), engine)
    assert asked.standalone("Why did he leave?", ZAPPA) == rewrite_by_rules("Why did he leave?", ZAPPA)
    assert rewriter(target, _Short(engine), rewriter="model").standalone("Why did he leave?", ZAPPA)


def test_turns_that_do_not_fit_the_target_are_left_to_the_rules(target: Target, engine: Engine) -> None:
    """A small context made every follow-up an error."""
    asked = QueryRewriter(ChatConfig(rewriter="model"), PromptBuilder(target.tokenizer, 96), engine)
    assert asked.standalone("Why did he leave?", ZAPPA) == rewrite_by_rules("Why did he leave?", ZAPPA)


@pytest.mark.parametrize("written", [" ", " One?\nTwo?", " One\0?", " x" * 600])
def test_what_is_no_single_question_is_not_looked_up(
    target: Target, engine: Engine, switch: Switch, written: str
) -> None:
    """A target that rambles searched for its own words; NUL, which no search takes, made the follow-up an error."""
    switch.answer = written
    asked = rewriter(target, _Short(engine), rewriter="model")
    assert asked.standalone("Why did he leave?", ZAPPA) == rewrite_by_rules("Why did he leave?", ZAPPA)
