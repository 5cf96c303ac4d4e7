"""The chat page: answers, their quotes and sources, the run without speculation, conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_page import ChatPage
from scripted import EMOJI, EMOJI_ANSWER, EMOJI_QUOTES, LONG, MILL, MILL_ANSWER, MILL_QUOTES, Script
from service_parts import Service

pytestmark = pytest.mark.browser


def _shown_at(page: Any, quote: Any) -> str:
    """What is marked in the passages while a quote is pointed at."""
    quote.hover()
    marks = page.locator(".passage.active mark.now")
    assert marks.count() == 1
    return str(marks.text_content())


def test_a_quote_pointed_at_is_marked_in_its_passage_and_is_the_same_text(chat: ChatPage) -> None:
    """Marks one place off, or in another passage than the one that was quoted."""
    turn = chat.answered(MILL)
    assert turn.locator(".answer").text_content() == MILL_ANSWER
    quotes = turn.locator(".quote")
    assert tuple(quotes.all_text_contents()) == MILL_QUOTES
    for quote, text in zip(quotes.all(), MILL_QUOTES, strict=True):
        assert _shown_at(chat.page, quote) == text
        assert text in chat.page.locator(".passage.active .passage-text").text_content()
    chat.shot("answer-wide-light")
    assert " 2 sources. " in turn.locator(".verdict").text_content()
    assert turn.locator(".sources h3").text_content() == "2 sources used"
    others = turn.locator(".support li").all_text_contents()
    assert "Not found in the sources: That is all." in others
    assert not any(text.partition(": ")[2].startswith((quote, f'"{quote}')) for text in others for quote in MILL_QUOTES)
    under = turn.locator(".under > *").evaluate_all("all => all.map((e) => e.className)")
    assert under.index("support") < under.index("figures")
    colours = [quote.evaluate("e => getComputedStyle(e).backgroundColor") for quote in quotes.all()]
    chat.page.mouse.move(0, 0)
    assert chat.page.locator("mark.now").count() == 0
    assert len(set(colours)) == 2


def test_the_marked_place_of_a_passage_is_scrolled_into_view(chat: ChatPage) -> None:
    """A mark below the fold of the sources, which nobody sees."""
    chat.page.set_viewport_size({"width": 1440, "height": 420})
    turn = chat.answered(MILL)
    for quote in turn.locator(".quote").all():
        quote.focus()
        mark, aside = chat.page.locator("mark.now").bounding_box(), chat.page.locator(".sources").bounding_box()
        assert aside["y"] <= mark["y"] and mark["y"] + mark["height"] <= aside["y"] + aside["height"] + 1


def test_spans_count_characters_where_emoji_take_two_units(chat: ChatPage) -> None:
    """Offsets read as UTF-16 units: every mark behind an emoji slips, and the page says the quote is wrong."""
    turn = chat.answered(EMOJI)
    assert turn.locator(".answer").text_content() == EMOJI_ANSWER
    quotes = turn.locator(".quote")
    assert tuple(quotes.all_text_contents()) == EMOJI_QUOTES
    assert [_shown_at(chat.page, quote) for quote in quotes.all()] == list(EMOJI_QUOTES)
    assert turn.locator(".quote.broken").count() == 0


def test_a_chosen_passage_lights_up_its_quotes_and_no_others(chat: ChatPage) -> None:
    """A click on a source that shows nothing, or everything."""
    turn = chat.answered(MILL)
    card = turn.locator(".passage", has_text="The old mill was built").first
    card.locator("button").click()
    assert turn.locator(".quote.lit").all_text_contents() == [MILL_QUOTES[0]]
    turn.locator(".passage.quoted").nth(1).locator("button").click()
    assert turn.locator(".quote.lit").count() == 1
    assert turn.locator(".passage-title[aria-pressed=true]").count() == 1


def test_a_quote_has_a_number_unless_the_answer_writes_the_right_one_behind_it(chat: ChatPage) -> None:
    """A quote followed by the number of another passage, and nothing that says which one it is from."""
    turn = chat.answered(MILL)
    numbers = turn.locator(".passage.quoted .number").all_text_contents()
    written = turn.locator(".marker").all_text_contents()
    for quote, number, marker in zip(turn.locator(".quote").all(), numbers, written, strict=True):
        assert quote.get_attribute("data-number") == (None if marker == f"[{number}]" else number)
    assert chat.answered(EMOJI).locator(".quote[data-number]").count() == len(EMOJI_QUOTES)


def test_a_passage_that_is_not_what_was_quoted_is_said_so(chat: ChatPage) -> None:
    """A page that believes the offsets: a wrong citation looks like a right one."""

    def forge(route: Any) -> None:
        body = route.fetch().text()
        route.fulfill(
            body=body.replace(
                "built in 1874 by the people of the valley. It", "built in 1875 by the people of the valley. It"
            ),
            content_type="text/event-stream",
        )

    chat.page.route("**/v1/chat/completions", forge)
    turn = chat.answered(MILL)
    assert turn.locator(".quote.broken").all_text_contents() == [MILL_QUOTES[0]]
    assert (
        turn.locator(".verdict.broken[role=alert]").text_content()
        == "1 quote in this answer: not what the source says."
    )


@pytest.mark.parametrize("automatic", [False, True])
def test_the_run_without_speculation_asks_the_same_and_is_the_same_text(chat: ChatPage, automatic: bool) -> None:
    """Another seed, or speculation left on: equal texts that prove nothing."""
    if automatic:
        chat.page.locator("#comparing").check()
    turn = chat.answered(MILL)
    if not automatic:
        turn.get_by_role("button", name="Run without speculation").click()
    turn.locator(".comparison.same").wait_for()
    assert [body.pop("speculation") for body in chat.asked] == [True, False, True]
    first, *others = chat.asked
    assert others == [first, first] and isinstance(first["seed"], int)
    assert turn.locator(".comparison .answer").text_content() == MILL_ANSWER
    verdict = turn.locator(".comparison .verdict").text_content()
    assert verdict.startswith(f"The same text, all {len(MILL_ANSWER)} characters.") and "times as fast" in verdict
    assert turn.locator(".time .value").count() == 2
    if automatic:
        chat.shot("comparison")


def test_texts_that_differ_are_said_loudly_and_where(chat: ChatPage) -> None:
    """A comparison that cannot fail."""
    turn = chat.answered(EMOJI)

    def forge(route: Any) -> None:
        lines = route.fetch().text().split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        last = [event for event in events if (event.get("choices") or [{}])[0].get("delta", {}).get("content")][-1]
        last["choices"][0]["delta"]["content"] = last["choices"][0]["delta"]["content"].replace("👍", "👎")
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(body=body + "data: [DONE]\n\n", content_type="text/event-stream")

    chat.page.route("**/v1/chat/completions", forge)
    turn.get_by_role("button", name="Run without speculation").click()
    verdict = turn.locator(".comparison.differs .verdict.broken[role=alert]")
    verdict.wait_for()
    assert f"from character {len(EMOJI_ANSWER)} on" in verdict.text_content()
    assert verdict.locator("q").all_text_contents() == ["👍", "👎"]


def test_stop_ends_the_answer_here_and_on_the_server(chat: ChatPage, service: Service, script: Script) -> None:
    """A stop button that hides the text while the server goes on writing it."""
    with script.held():
        chat.ask(LONG)
        chat.page.locator(".answer", has_text="Rain 0 falls").wait_for()
        chat.page.locator("#stop").click()
        chat.page.locator(".remark", has_text="Stopped before the end").wait_for()
    said = chat.page.locator(".answer").text_content()
    assert said.startswith("Rain 0 falls") and "Rain 39" not in said
    assert chat.page.locator("#send").is_visible() and not chat.page.locator("#stop").is_visible()
    for _ in range(200):
        if service.backend.rate_limiter.running == 0:
            break
        chat.page.wait_for_timeout(50)
    assert service.backend.rate_limiter.running == 0


def test_a_follow_up_sends_what_was_said_before_and_a_new_conversation_nothing(chat: ChatPage) -> None:
    """Follow-ups without their history; or a new conversation that drags the old one along."""
    chat.answered(MILL)
    chat.answered(EMOJI)
    assert chat.asked[1]["messages"] == [
        {"role": "user", "content": MILL},
        {"role": "assistant", "content": MILL_ANSWER},
        {"role": "user", "content": EMOJI},
    ]
    chat.page.locator("#new").click()
    assert chat.page.locator("#empty").is_visible() and chat.page.locator(".turn").count() == 0
    chat.answered(MILL)
    assert [message["content"] for message in chat.asked[2]["messages"]] == [MILL]


def test_conversations_stay_in_the_tab_until_they_are_forgotten(chat: ChatPage) -> None:
    """A reload that loses everything; a forgotten conversation that is still stored."""
    chat.answered(MILL)
    chat.page.locator("#new").click()
    chat.answered(EMOJI)
    chat.page.reload()
    titles = chat.page.locator("#conversations .open")
    assert titles.all_text_contents() == [EMOJI, MILL]
    titles.nth(1).click()
    quotes = chat.page.locator(".quote")
    assert tuple(quotes.all_text_contents()) == MILL_QUOTES
    assert _shown_at(chat.page, quotes.nth(1)) == MILL_QUOTES[1]
    chat.page.get_by_role("button", name=f"Forget: {MILL}").click()
    assert titles.all_text_contents() == [EMOJI]
    assert MILL_ANSWER not in chat.page.evaluate("JSON.stringify(sessionStorage)")
    assert chat.page.evaluate("localStorage.length") == 0


def test_copy_gives_the_answer_and_nothing_else(chat: ChatPage) -> None:
    """Numbers and marks of the page in what was copied."""
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn = chat.answered(EMOJI)
    turn.get_by_role("button", name="Copy").click()
    turn.get_by_role("button", name="Copied").wait_for()
    assert chat.page.evaluate("navigator.clipboard.readText()") == EMOJI_ANSWER


def test_figures_are_there_while_the_answer_is_written(chat: ChatPage, script: Script) -> None:
    """Live figures that come when everything is over; or an answer that is shown only then."""
    with script.held():
        chat.ask(LONG)
        chat.page.locator(".answer[aria-busy=true]", has_text="Rain 0 falls").wait_for()
        names = chat.page.locator(".figures dt").all_text_contents()
        assert {"first word", "tokens/s", "tokens a step"} <= set(names) and "in all" not in names
        assert chat.page.locator(".passage").count() == 3  # the sources are there before the answer is
        chat.shot("writing")
    chat.page.locator(".verdict").wait_for()


def test_figures_are_the_servers_for_trusted_keys_and_fewer_for_others(
    chat: ChatPage, open_page: Callable[..., ChatPage], service: Service
) -> None:
    """Invented numbers where the server says none; or a page that breaks without them."""
    trusted = chat.answered(MILL)
    names = trusted.locator(".figures dt").all_text_contents()
    assert {"first word", "tokens/s", "tokens a step", "in all", "tokens"} <= set(names)
    assert "copy" in trusted.locator(".legend").text_content()
    length = dict(zip(names, trusted.locator(".figures dd").all_text_contents(), strict=True))["tokens a step"]
    assert float(length) > 1.0  # most of the answer is copied
    stranger = open_page(service, service.keys.ann).answered(MILL)
    assert "tokens a step" not in stranger.locator(".figures dt").all_text_contents()
    assert stranger.locator(".shares").count() == 0
