"""The chat page when something goes wrong, and when somebody wants it to."""

from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage, Opening
from scripted import MILL, MILL_ANSWER, SCRIPT_TAG, TRAP, TRAP_ANSWER, scripted
from service_parts import Service

from ragspec.engine.target import Target

pytestmark = pytest.mark.browser


def test_a_key_in_the_address_is_taken_from_it(chat: ChatPage, service: Service) -> None:
    """A key that stays in the address bar, in the history and in every link that is copied from it."""
    assert chat.page.url == f"{service.url}/"
    assert chat.page.evaluate("sessionStorage.getItem('ragspec.key')") == service.keys.trusted
    assert chat.page.evaluate("history.length") <= 2
    assert service.keys.trusted not in chat.page.content()


def test_a_key_in_a_link_opened_in_the_same_tab_is_taken(chat: ChatPage, service: Service) -> None:
    """After a restart of the server its new link changed the address alone: the old key stayed, the new one in the address."""
    chat.page.evaluate("location.hash = '#key=rs-new'")
    chat.page.locator("#key-remark", has_text="not accepted").wait_for()
    assert chat.page.evaluate("sessionStorage.getItem('ragspec.key')") == "rs-new"
    assert "rs-new" not in chat.page.url


def test_another_conversation_while_the_server_is_looked_for(chat: ChatPage) -> None:
    """The page was stuck: nothing could be sent or stopped any more."""
    chat.page.route("**/v1/models", lambda route: route.abort())
    chat.page.reload()
    chat.page.locator("#model", has_text="not connected").wait_for()
    chat.page.unroute("**/v1/models")
    held: list[Any] = []
    chat.page.route("**/v1/models", lambda route: held.append(route))
    chat.ask(MILL)
    chat.page.locator("#stop").wait_for()
    while not held:
        chat.page.wait_for_timeout(20)
    chat.page.locator("#new").click()
    held[0].continue_()
    chat.page.locator("#send").wait_for()
    chat.page.unroute("**/v1/models")
    assert chat.answered(MILL).locator(".answer").text_content() == MILL_ANSWER


def test_a_conversation_begun_while_the_list_is_fetched_is_in_it(chat: ChatPage) -> None:
    """The older list was shown in its place: no conversation was open, and none could be renamed or deleted."""
    held: list[Any] = []
    chat.page.locator("#kept", has_text="keeps conversations").wait_for()
    chat.page.route("**/v1/conversations?*", lambda route: held.append((route, route.fetch())))
    chat.page.reload()
    while not held:
        chat.page.wait_for_timeout(20)
    chat.answered(MILL)
    [(route, reply)] = held
    route.fulfill(response=reply)
    chat.page.locator("#kept", has_text="keeps conversations").wait_for()
    assert chat.page.locator("#conversations [aria-current]").text_content() == MILL


def test_texts_of_other_passages_are_no_fault(chat: ChatPage) -> None:
    """After an upload the comparison called the difference a fault to be reported."""
    chat.show_telemetry()
    turn = chat.answered(MILL)

    def change(route: Any) -> None:
        reply = route.fetch()
        added = '"passages":[{"number":9,"id":"new","text":"x","document_id":"d"},{'
        body = reply.text().replace('"passages":[{', added, 1)
        route.fulfill(response=reply, body=body.replace("mill", "well"))

    chat.page.route("**/v1/chat/completions", change)
    turn.get_by_role("button", name="Run without speculation").click()
    chat.page.locator(".comparison.failed", has_text="Other passages").wait_for()


def test_without_a_key_the_page_asks_for_one_and_then_goes_on(open_page: Opening, service: Service) -> None:
    """A dead end at 401; a wrong key that is kept."""
    chat = open_page(service, "")
    dialog = chat.page.locator("#key-dialog")
    dialog.wait_for()
    chat.page.keyboard.press("Escape")
    assert not dialog.is_visible()
    chat.ask(MILL)
    dialog.wait_for()
    chat.shot("key")
    chat.enter("rs-wrong")
    chat.page.locator("#key-remark", has_text="not accepted").wait_for()
    chat.enter(service.keys.trusted)
    chat.page.locator(".verdict").wait_for()
    assert chat.page.locator(".answer").text_content() == MILL_ANSWER


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_refusal_of_the_page_behind_that_of_a_question(open_page: Opening, service: Service, when: str) -> None:
    """Before the next key is entered it took the question with it; after, it said that the right key is not accepted."""
    chat = open_page(service, "")
    held: list[Any] = []
    chat.page.route("**/v1/models", lambda route: held.append(route), times=1)
    chat.page.reload()
    chat.ask(MILL)
    dialog = chat.page.locator("#key-dialog")
    dialog.wait_for()
    if when == "after":
        chat.enter(service.keys.trusted)
        chat.page.locator("#model", has_text="scripted").wait_for()
    with chat.page.expect_response("**/v1/models"):
        held[0].continue_()
    chat.page.wait_for_timeout(100)
    if when == "before":
        chat.page.evaluate("key => { location.hash = `#key=${key}`; }", service.keys.trusted)
    chat.page.locator(".verdict").wait_for()
    assert chat.page.locator(".answer").text_content() == MILL_ANSWER and not dialog.is_visible()


def test_too_many_requests_count_down_to_the_next_try(open_page: Opening, tmp_path: Path, page_target: Target) -> None:
    """A page that hammers a server which asked for patience, or that never lets its user try again."""
    limits = {
        "service.limits.key": {"requests_per_minute": 6}
    }  # four when it opens, one makes a conversation, and one answer
    with scripted(tmp_path, page_target, **limits) as (service, _):
        chat = open_page(service)
        chat.page.locator("#model", has_text="scripted").wait_for()
        for num_before in range(3):
            if chat.page.locator(".notice").count():
                break
            chat.ask(MILL)
            chat.page.locator(".verdict, .notice").nth(num_before).wait_for()
        again = chat.page.locator(".notice button")
        assert again.is_disabled() and again.text_content().startswith("Try again in ")
        first = int(again.text_content().split()[-2])
        assert 0 < first <= 60
        chat.shot("busy")
        chat.page.wait_for_function(
            "n => parseInt(document.querySelector('.notice button').textContent.match(/\\d+/)) < n", arg=first
        )
        num_asked = len(chat.asked)
        chat.page.wait_for_timeout(300)
        assert len(chat.asked) == num_asked


def test_a_countdown_that_is_over_asks_again(chat: ChatPage) -> None:
    """A button that stays disabled."""
    refusal = {
        "error": {"message": "more than 3 requests a minute", "type": "rate_limit_error", "param": None, "code": None}
    }
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=429, json=refusal, headers={"Retry-After": "1"}),
        times=1,
    )
    chat.ask(MILL)
    chat.page.get_by_role("button", name="Try again", exact=True).click(timeout=10_000)
    chat.page.locator(".verdict").wait_for()
    assert chat.page.locator(".answer").text_content() == MILL_ANSWER and len(chat.asked) == 2


@pytest.mark.parametrize("cut", ["half an event", "no end mark"])
def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(chat: ChatPage, cut: str) -> None:
    """The stream ends, and the page shows half an answer as if that were all."""

    def break_off(route: Any) -> None:
        body = route.fetch().text()
        end = body.rindex("data: [DONE]") if cut == "no end mark" else body.rindex("old mill") + 3
        route.fulfill(body=body[:end], content_type="text/event-stream")

    chat.page.route("**/v1/chat/completions", break_off)
    chat.ask(MILL)
    chat.page.locator(".notice", has_text="broke off").wait_for()
    assert chat.page.locator(".verdict").count() == 0
    assert chat.page.locator("#send").is_visible()


def test_an_error_in_the_middle_of_an_answer_is_shown_with_what_was_said(chat: ChatPage) -> None:
    """An error event that is read as an empty piece of text."""
    event = '{"error": {"message": "the engine was closed", "type": "server_error", "param": null, "code": null}}'

    def fail(route: Any) -> None:
        body = route.fetch().text()
        body = body[: body.index("\n\n", body.index('"content":', body.index("\n\n"))) + 2]
        route.fulfill(body=f"{body}data: {event}\n\n", content_type="text/event-stream")

    chat.page.route("**/v1/chat/completions", fail)
    chat.ask(MILL)
    chat.page.locator(".notice", has_text="the engine was closed").wait_for()
    assert chat.page.locator(".answer").text_content().strip()


def test_a_conversation_too_long_for_the_model_is_explained(chat: ChatPage) -> None:
    """The server's wording as the only help, and no way on."""
    chat.ask("qzxj " * 3900)
    notice = chat.page.locator(".notice")
    notice.wait_for()
    assert "too long for the model" in notice.text_content()
    notice.get_by_role("button").click()
    assert chat.page.input_value("#question").startswith("qzxj qzxj") and chat.page.locator(".turn").count() == 0


def test_markup_in_documents_questions_and_answers_is_text(chat: ChatPage) -> None:
    """Cross-site scripting from a document, its title or source, from the question or the answer."""
    turn = chat.answered(TRAP)
    assert chat.page.evaluate("window.hit") is None
    assert turn.locator("img, script, b").count() == 0
    assert turn.locator("h2").text_content() == TRAP
    assert turn.locator(".answer").text_content() == TRAP_ANSWER
    card = turn.locator(".passage", has_text="The trap was set")
    assert card.locator(".title").text_content() == f"Trap {SCRIPT_TAG}"
    assert SCRIPT_TAG in card.locator(".passage-text").text_content()
    assert "javascript:window.hit=3" in card.locator(".source").text_content()
    assert all("/document?" in link for link in card.locator("a").evaluate_all("all => all.map(a => a.href)"))
    assert chat.page.locator("#conversations [aria-current]").text_content() == TRAP
    links = chat.page.locator("a[href]").evaluate_all("all => all.map(a => new URL(a.href).protocol)")
    assert set(links) <= {"http:", "https:"}


def test_the_policy_of_the_page_refuses_scripts_and_markup_from_text(open_page: Opening, service: Service) -> None:
    """A policy that is sent and does nothing."""
    chat = open_page(service)
    refused = """() => {
      const failed = [];
      try { document.body.innerHTML = "<b>x</b>"; } catch { failed.push("markup"); }
      const script = document.createElement("script");
      try { script.textContent = "window.hit = 4"; } catch { failed.push("script text"); }
      return failed;
    }"""
    assert chat.page.evaluate(refused) == ["markup", "script text"]
    image = """() => new Promise((done) => {
      const image = new Image();
      image.onload = image.onerror = (event) => done(event.type);
      image.src = "http://127.0.0.1:9/x.png";
    })"""
    assert chat.page.evaluate(image) == "error"
    assert any("Content Security Policy" in complaint for complaint in chat.complaints)
    chat.complaints.clear()


def test_a_question_that_was_stopped_is_not_called_refused(chat: ChatPage) -> None:
    """Stopped before its first word, it came back as one that the server had refused, or could not be asked again."""
    page = chat.page
    page.route("**/v1/chat/completions", lambda route: None)  # the server is never reached
    chat.ask(MILL)
    page.locator("#stop").click()
    turn = page.locator(".turn")
    turn.locator(".remark", has_text="Stopped before the end").wait_for()
    assert "refused" not in turn.text_content()
    page.unroute("**/v1/chat/completions")
    turn.get_by_role("button", name="Try again").click()
    page.locator(".turn .verdict").first.wait_for()
    assert page.locator(".turn .answer").last.text_content() == MILL_ANSWER


def test_an_answer_may_not_be_longer_than_what_the_model_can_see(chat: ChatPage) -> None:
    """4,096 was taken for a context of less, and the way out that was offered could not help."""
    page = chat.page
    page.locator("#more summary").click()
    for given, sent in (("999999", int(page.get_attribute("#max-tokens", "max"))), ("0", 1), ("", 128)):
        page.fill("#max-tokens", given)
        chat.answered(MILL)
        assert chat.asked[-1]["max_completion_tokens"] == min(sent, int(page.get_attribute("#max-tokens", "max")))
        assert page.input_value("#max-tokens") == str(chat.asked[-1]["max_completion_tokens"])
    assert int(page.get_attribute("#max-tokens", "max")) < 4096
