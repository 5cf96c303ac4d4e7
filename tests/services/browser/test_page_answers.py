"""The chat page: answers, their quotes and sources, the run without speculation, conversations."""

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
    assert turn.locator(".sources h3").text_content() == "2 sources"
    others = turn.locator(".support li").all_text_contents()
    assert "Not found in the sources: That is all." in others
    assert not any(text.partition(": ")[2].startswith((quote, f'"{quote}')) for text in others for quote in MILL_QUOTES)
    under = turn.locator(".under > *").evaluate_all("all => all.map((e) => e.className)")
    assert under.index("support") < under.index("outcome") < under.index("made")
    colours = [quote.evaluate("e => getComputedStyle(e).backgroundColor") for quote in quotes.all()]
    chat.page.mouse.move(0, 0)
    assert chat.page.locator("mark.now").count() == 0
    assert len(set(colours)) == 2


def test_spans_count_characters_where_emoji_take_two_units(chat: ChatPage) -> None:
    """Offsets read as UTF-16 units: every mark behind an emoji slips, and the page says the quote is wrong."""
    turn = chat.answered(EMOJI)
    assert turn.locator(".answer").text_content() == EMOJI_ANSWER
    quotes = turn.locator(".quote")
    assert tuple(quotes.all_text_contents()) == EMOJI_QUOTES
    assert [_shown_at(chat.page, quote) for quote in quotes.all()] == list(EMOJI_QUOTES)
    assert turn.locator(".quote.broken").count() == 0


def test_passages_that_are_not_used_stand_behind_one_line_and_no_telemetry_is_shown(chat: ChatPage) -> None:
    """An answer between three cards, of which it uses one, and two rows of figures."""
    turn = chat.answered(MILL)
    assert turn.locator(".sources > .passages .passage").count() == 2
    other = turn.locator(".others .passage")
    assert other.count() == 1 and not other.is_visible()
    turn.locator(".others summary").click()
    assert other.is_visible() and turn.locator(".others summary").text_content() == "1 other passage found, not used"
    assert not turn.locator(".made").is_visible() and "metrics" not in chat.asked[0]
    chat.show_telemetry()
    assert chat.page.locator(".made").is_visible()


def test_a_quote_has_a_number_unless_the_answer_writes_the_right_one_behind_it(chat: ChatPage) -> None:
    """A quote followed by the number of another passage, and nothing that says which one it is from."""
    turn = chat.answered(MILL)
    numbers = turn.locator(".sources > .passages .number").all_text_contents()
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


def test_the_run_without_speculation_asks_the_same_and_is_the_same_text(chat: ChatPage) -> None:
    """Another seed, or speculation left on: equal texts that prove nothing. Or a run that the conversation keeps."""
    chat.show_telemetry()
    turn = chat.answered(MILL)
    turn.get_by_role("button", name="Run without speculation").click()
    turn.locator(".comparison.same").wait_for()
    assert [body.pop("speculation") for body in chat.asked] == [True, False, True]
    first, *others = chat.asked
    assert first.pop("conversation") and others == [first | {"store": False}] * 2 and isinstance(first["seed"], int)
    assert turn.locator(".comparison .answer").text_content() == MILL_ANSWER
    verdict = turn.locator(".comparison .verdict").text_content()
    assert verdict.startswith(f"The same text, all {len(MILL_ANSWER)} characters.") and "times as fast" in verdict
    assert turn.locator(".time .value").count() == 2
    chat.shot("comparison")


def test_texts_that_differ_are_said_loudly_and_where(chat: ChatPage) -> None:
    """A comparison that cannot fail."""
    chat.show_telemetry()
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
    """A stop button that hides the text while the server goes on writing it; a stopped answer that a reload loses."""
    with script.held():
        chat.ask(LONG)
        chat.page.locator(".answer", has_text="Rain 0 falls").wait_for()
        chat.page.locator("#stop").click()
        chat.page.locator(".remark", has_text="Stopped before the end").wait_for()
    said = chat.page.locator(".answer").text_content()
    assert said.startswith("Rain 0 falls") and "Rain 39" not in said
    chat.page.reload()
    chat.page.locator(".remark", has_text="Stopped before the end").wait_for()
    assert chat.page.locator(".answer").text_content() == said
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


def test_conversations_are_opened_renamed_exported_and_deleted(chat: ChatPage, service: Service) -> None:
    """A reload that loses everything, an answer that comes back without its sources, or a deleted one that stays."""
    chat.answered(MILL)
    chat.page.locator("#new").click()
    chat.answered(EMOJI)
    chat.page.reload()
    quotes = chat.page.locator(".quote")
    quotes.first.wait_for()
    assert tuple(quotes.all_text_contents()) == EMOJI_QUOTES
    titles = chat.page.locator("#conversations .open")
    titles.nth(1).click()
    chat.page.locator(".turn", has_text=MILL).wait_for()
    assert tuple(quotes.all_text_contents()) == MILL_QUOTES
    assert _shown_at(chat.page, quotes.nth(1)) == MILL_QUOTES[1]
    chat.page.get_by_role("button", name=f"Rename: {MILL}").click()
    chat.page.keyboard.type("Mills")
    chat.page.keyboard.press("Enter")
    mills = titles.filter(has_text="Mills")
    mills.wait_for()
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Export: Mills").click()
    kept = json.loads(download.value.path().read_text())
    assert kept["title"] == "Mills" and kept["items"][1]["ragspec"]["citations"]
    assert "7 days after their last use" in chat.page.locator("#kept").text_content()
    deleting = chat.page.get_by_role("button", name="Delete: Mills")
    chat.dialog_answers += [False, True]
    deleting.click()
    assert mills.count() == 1
    deleting.click()
    mills.wait_for(state="detached")
    with service.client() as client:
        assert client.get(f"/v1/conversations/{kept['id']}").status_code == 404
    assert MILL_ANSWER not in chat.page.evaluate("JSON.stringify(sessionStorage)")
    assert chat.page.evaluate("localStorage.length") == 0


def test_feedback_is_kept_with_its_note_and_taken_back(chat: ChatPage) -> None:
    """A thumb that only looks pressed."""
    turn = chat.answered(MILL)
    turn.get_by_role("button", name="Wrong answer").click()
    turn.get_by_label("Note").last.fill("The year is missing.")
    with chat.page.expect_response("**/feedback"):  # the page says of the verdict already that it is kept
        turn.get_by_role("button", name="Save note").click()
    chat.page.reload()
    pressed = chat.page.locator(".thumb[aria-pressed=true]")
    pressed.wait_for()
    assert pressed.text_content() == "Wrong answer"
    assert chat.page.locator(".note textarea").input_value() == "The year is missing."
    pressed.click()
    chat.page.locator(".feedback", has_text="Taken back.").wait_for()
    chat.page.reload()
    chat.page.locator(".thumb").first.wait_for()
    assert pressed.count() == 0


def test_an_example_is_asked_and_the_page_says_how_much_is_indexed(chat: ChatPage) -> None:
    """A first page that says nothing of the documents behind it."""
    example = chat.page.locator("#examples button", has_text="The old mill")
    example.wait_for()
    assert "documents can be searched; the index changed last on" in chat.page.locator("#indexed").text_content()
    example.click()
    chat.page.locator(".turn .question", has_text="What does “The old mill” cover?").wait_for()


def test_copy_gives_the_answer_and_nothing_else(chat: ChatPage) -> None:
    """Numbers and marks of the page in what was copied."""
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn = chat.answered(EMOJI)
    turn.get_by_role("button", name="Copy").click()
    turn.get_by_role("button", name="Copied").wait_for()
    assert chat.page.evaluate("navigator.clipboard.readText()") == EMOJI_ANSWER


def test_figures_are_there_while_the_answer_is_written(chat: ChatPage, script: Script) -> None:
    """Live figures that come when everything is over; or an answer that is shown only then."""
    chat.show_telemetry()
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
    chat.show_telemetry()
    trusted = chat.answered(MILL)
    names = trusted.locator(".figures dt").all_text_contents()
    assert {"first word", "tokens/s", "tokens a step", "in all", "tokens"} <= set(names)
    assert "copy" in trusted.locator(".legend").text_content()
    length = dict(zip(names, trusted.locator(".figures dd").all_text_contents(), strict=True))["tokens a step"]
    assert float(length) > 1.0  # most of the answer is copied
    page = open_page(service, service.keys.ann)
    page.show_telemetry()
    stranger = page.answered(MILL)
    assert "tokens a step" not in stranger.locator(".figures dt").all_text_contents()
    assert stranger.locator(".shares").count() == 0
