"""Prompts of conversations: each begins with the one before it, and what does not fit is told to the last passage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_tokenizers import ALL

from ragspec.core import Message, Passage
from ragspec.errors import PromptTooLong
from ragspec.rag.chat.prompt import ChatPrompt, PastTurn, build_chat_prompt
from ragspec.rag.prompt import PromptBuilder

TEXT = st.text("ab <|>\n[1]é", min_size=1, max_size=12).filter(str.strip)
PASSAGES = st.lists(
    st.builds(lambda text, number: Passage(f"d{number}", 0, text, 0, len(text)), TEXT, st.integers(0, 9)), max_size=3
).map(tuple)
TURNS = st.lists(st.builds(PastTurn, TEXT, TEXT, PASSAGES), min_size=1, max_size=7)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=20)
@given(turns=TURNS, system=st.sampled_from(["", "Be brief."]))
def test_every_prompt_begins_with_the_one_before_it(name: str, turns: list[PastTurn], system: str) -> None:
    """The instruction moved to the newest question, or passages were left out of history: nothing cached held any more."""
    prompts = PromptBuilder(ALL[name], 100_000)
    before: tuple[int, ...] = ()
    for number, turn in enumerate(turns):
        prompt = build_chat_prompt(prompts, system, turns[:number], turn.question, turn.passages, 8)
        assert prompt.num_dropped_turns == 0 and not prompt.dropped and not prompt.dropped_history
        if name == "strict" or not turn.passages or any(earlier.passages for earlier in turns[:number]):
            assert prompt.prompt_ids[: len(before)] == before, "only the first passages bring the instruction"
        before = prompt.prompt_ids


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=25)
@given(turns=TURNS, share=st.floats(0.0, 1.0))
def test_what_is_not_in_the_prompt_is_reported_and_nothing_else(name: str, turns: list[PastTurn], share: float) -> None:
    """A turn or a passage vanished without a word; or was reported and stood in the prompt all the same."""
    *history, last = turns
    everything = len(_prompt(name, 100_000, history, last).prompt_ids)
    least = len(_prompt(name, 100_000, [], PastTurn(last.question, "")).prompt_ids)
    room = least + int(share * (everything - least))
    prompt = _prompt(name, room + 8, history, last)
    assert len(prompt.prompt_ids) <= room
    assert (*prompt.passages, *prompt.dropped) == last.passages
    kept = [*(("", "", ()),) * prompt.num_dropped_turns, *((t.question, t.answer, t.passages) for t in prompt.history)]
    assert len(kept) == len(history)
    gone: list[Passage] = []
    for turn, (question, answer, passages) in zip(history, kept, strict=True):
        assert passages in ((), turn.passages)
        assert (question, answer) in (("", ""), (turn.question, turn.answer))
        gone += () if passages else turn.passages
    assert tuple(gone) == prompt.dropped_history
    alone = _prompt(name, 100_000, prompt.history, PastTurn(last.question, "", prompt.passages))
    assert alone.prompt_ids == prompt.prompt_ids
    if room == everything:
        assert not prompt.dropped_history and not prompt.dropped
    with pytest.raises(PromptTooLong):
        _prompt(name, least + 7, history, last)


def test_the_oldest_goes_first_and_the_beginning_then_holds_for_a_while() -> None:
    """One turn was dropped with each new one, and the whole rest computed again every time."""
    turns = [
        PastTurn(f"Question {n}?", f"Answer {n}.", (Passage(f"d{n}", 0, "It rained. " * 8, 0, 88),)) for n in range(24)
    ]
    prompts = [_prompt("chat", 700, turns[:n], turns[n]) for n in range(24)]
    assert all(prompt.passages and not prompt.dropped for prompt in prompts)
    assert prompts[-1].num_dropped_turns > 0 and prompts[-1].history[-1].passages
    shared = [
        sum(itertools.takewhile(bool, (a == b for a, b in zip(earlier.prompt_ids, later.prompt_ids, strict=False))))
        for earlier, later in itertools.pairwise(prompts)
    ]
    kept = [count > len(earlier.prompt_ids) / 2 for count, earlier in zip(shared, prompts, strict=False)]
    assert sum(kept) >= 0.7 * len(kept)


def _prompt(name: str, context: int, history: list[PastTurn] | tuple[PastTurn, ...], last: PastTurn) -> ChatPrompt:
    return build_chat_prompt(PromptBuilder(ALL[name], context), "", history, last.question, last.passages, 8)


def test_a_turn_without_an_answer_leaves_no_two_messages_of_the_user_in_a_row() -> None:
    """Templates that want roles to alternate refused every later turn of a conversation that held one."""
    prompts = PromptBuilder(ALL["chat"], 2048)
    passage = Passage("d", 0, "The mill is old.", 0, 16)
    turns = [PastTurn("One?", "1."), PastTurn("", ""), PastTurn("Two?", " ", (passage,)), PastTurn("Three?", "")]
    found = build_chat_prompt(prompts, "", turns, "Four?", [], 64)
    expected = prompts.tokens(
        [Message("user", "One?"), Message("assistant", "1."), Message("user", "Two?\n\nThree?\n\nFour?")]
    )
    assert found.prompt_ids == expected
    assert found.dropped_history == (passage,) and [turn.passages for turn in found.history] == [(), (), (), ()]
