"""The chat page with a keyboard, a screen reader, in the dark, on a small screen, on paper."""

from typing import Any

import pytest
from chat_page import ChatPage, Opening
from looking import contrast, faint_texts, nameless, structure_faults, too_small
from scripted import LONG, LONG_ANSWER, MILL, MILL_ANSWER, MILL_QUOTES, Script
from service_parts import Service

pytestmark = pytest.mark.browser

SIZES = {"wide": 1440, "middle": 768, "narrow": 360}


def test_contrast_is_computed_as_wcag_says() -> None:
    """A check of contrasts that passes everything. The values are WCAG's own examples."""
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21.0)
    assert contrast([119, 119, 119], [255, 255, 255]) == pytest.approx(4.48, abs=0.01)


def all_opened(chat: ChatPage) -> Any:
    """A turn with its further passages, feedback and the comparison."""
    chat.show_telemetry()
    turn = chat.answered(MILL)
    turn.locator(".others summary").click()
    turn.get_by_role("button", name="Good answer").click()
    turn.get_by_text("Kept with this conversation.").wait_for()
    turn.get_by_role("button", name="Run without speculation").click()
    turn.locator(".comparison.same").wait_for()
    return turn


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_every_state(open_page: Opening, service: Service, scheme: str) -> None:
    """Grey on grey; a colour of one scheme left in the other; white on amber while a quote is pointed at."""
    chat = open_page(service, color_scheme=scheme)
    page = chat.page
    assert faint_texts(page) == []
    turn = all_opened(chat)
    assert faint_texts(page) == []
    for quote in turn.locator(".quote").all():
        quote.hover()
        assert faint_texts(page) == []
    page.locator("#more summary").click()
    assert faint_texts(page) == []
    chat.shot(f"answer-wide-{scheme}")
    page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
    chat.ask(MILL)
    page.locator(".notice", has_text="The server does not answer").wait_for()
    assert faint_texts(page) == []
    page.locator("#key-open").click()
    assert faint_texts(page) == []
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    red = int(background.removeprefix("rgb(").split(",")[0])
    assert red < 60 if scheme == "dark" else red > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_documents_colour_is_readable(open_page: Opening, service: Service, scheme: str) -> None:
    """The fifth document's colour, which no other test shows."""
    page = open_page(service, color_scheme=scheme).page
    page.evaluate("""() => {
      for (let n = 1; n <= 6; n++) for (const kind of ["quote", "marker", "quote broken"]) {
        const link = Object.assign(document.createElement("a"), { className: `${kind} doc-${n}`, href: "#turns" });
        link.textContent = `${kind} ${n}`;
        document.getElementById("turns").append(link);
      }
    }""")
    assert page.locator("#turns a").count() == 18
    assert faint_texts(page) == []


def test_everything_has_a_name_and_a_place(chat: ChatPage) -> None:
    """A button that a screen reader calls "button"; headings that skip a level; labels that point nowhere."""
    page = chat.page
    assert nameless(page) == [] and structure_faults(page) == []
    all_opened(chat)
    assert nameless(page) == [] and structure_faults(page) == []
    page.locator("#key-open").click()
    assert nameless(page) == []


def test_names_and_places_that_are_missing_are_found(chat: ChatPage) -> None:
    """Checks that cannot fail."""
    chat.page.evaluate("""() => {
      const faint = Object.assign(document.createElement("p"), { textContent: "faint" });
      faint.style.color = "#bbb";
      const small = Object.assign(document.createElement("button"), { id: "turns" });
      small.style.cssText = "width: 9px; height: 9px; min-height: 0; padding: 0";
      document.body.append(document.createElement("h4"), faint, small);
    }""")
    assert nameless(chat.page) and structure_faults(chat.page) and too_small(chat.page)
    assert [text for text in faint_texts(chat.page) if "faint" in text]


def test_all_of_it_works_with_the_keyboard_alone(open_page: Opening, service: Service) -> None:
    """A quote, a source or a switch that only a mouse reaches; a focus that cannot be seen or gets lost."""
    chat = open_page(service)
    page = chat.page
    _tab_to(page, page.locator(".skip"), back=True)
    assert page.locator(".skip").bounding_box()["y"] > 0
    page.keyboard.press("Enter")
    page.keyboard.type(MILL)
    page.keyboard.press("Enter")
    page.locator(".verdict").wait_for()
    quote = page.locator(".quote").first
    _tab_to(page, quote, back=True)
    assert page.locator("mark.now").text_content() == MILL_QUOTES[0]
    assert _outline(page) >= 2
    with page.expect_popup() as opened:
        page.keyboard.press("Enter")
    assert "/document?" in opened.value.url
    _tab_to(page, page.get_by_role("button", name="Good answer"))
    page.keyboard.press("Enter")
    page.locator(".thumb[aria-pressed=true]").wait_for()
    _tab_to(page, page.locator("#more summary"))
    page.keyboard.press("Enter")
    _tab_to(page, page.locator("#telemetry"))
    page.keyboard.press("Space")
    assert page.locator("#telemetry").is_checked()
    _tab_to(page, page.locator("#new"), back=True)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"


def test_escape_stops_an_answer(chat: ChatPage, script: Script) -> None:
    """Keyboard users have to find the button while the answer runs away."""
    with script.held():
        chat.ask(LONG)
        chat.page.locator(".answer", has_text="Rain 0 falls").wait_for()
        chat.page.keyboard.press("Escape")
        chat.page.locator(".remark", has_text="Stopped").wait_for()


def test_screen_readers_hear_the_answer_once_and_whole(chat: ChatPage) -> None:
    """A live region that speaks with every token."""
    chat.page.evaluate("""() => {
      window.heard = [];
      const live = document.getElementById("live");
      const observer = new MutationObserver(() => live.textContent && window.heard.push(live.textContent));
      observer.observe(live, { childList: true, subtree: true, characterData: true });
    }""")
    live = chat.page.locator("#live")
    assert live.get_attribute("aria-live") == "polite"
    chat.page.locator("#more summary").click()
    chat.page.fill("#max-tokens", "2000")
    chat.answered(LONG)
    live.filter(has_text="Rain").wait_for(state="attached")
    assert chat.page.evaluate("window.heard") == [
        f"Answer: {LONG_ANSWER} Nothing in this answer is quoted word for word. 40 sentences not found in the sources."
    ]
    assert chat.page.locator("#turns [aria-live], #turns [role=log], #turns [role=status]").count() == 0


@pytest.mark.parametrize("size", SIZES)
def test_it_fits_the_screen_and_sources_are_beside_or_below(open_page: Opening, service: Service, size: str) -> None:
    """A page that scrolls sideways; sources far from their answer; buttons that a finger misses."""
    chat = open_page(service, width=SIZES[size], height=800)
    chat.shot(f"empty-{size}")
    turn = chat.answered(MILL)
    chat.shot(f"answer-{size}")
    page = chat.page
    assert page.evaluate("document.scrollingElement.scrollWidth") <= SIZES[size]
    answer, sources = turn.locator(".answer").bounding_box(), turn.locator(".sources").bounding_box()
    if size == "wide":
        assert sources["x"] > answer["x"] + answer["width"] - 1 and abs(sources["y"] - answer["y"]) < 40
    else:
        assert sources["y"] > answer["y"] + answer["height"] - 1 and abs(sources["x"] - answer["x"]) < 2
    source = turn.locator(".sources .title").first.bounding_box()
    assert source["y"] + source["height"] < page.locator("#ask").bounding_box()["y"]
    assert too_small(page) == []


def test_on_a_narrow_screen_a_number_leads_to_its_passage_and_the_drawer_opens_and_closes(
    open_page: Opening, service: Service
) -> None:
    """Sources that cannot be found on a telephone; a drawer that hides what has the focus."""
    chat = open_page(service, width=360, height=700, has_touch=True)
    page, side = chat.page, chat.page.locator("#side")
    turn = chat.answered(MILL)
    turn.locator(".marker").nth(1).tap()
    page.wait_for_function("""() => {
      const box = document.querySelector(".passage:target").getBoundingClientRect();
      return box.top >= 40 && box.bottom <= document.getElementById("ask").getBoundingClientRect().top;
    }""")
    assert not side.is_visible()
    page.locator("#side-open").tap()
    assert side.is_visible() and page.evaluate("document.activeElement.id") == "new"
    chat.shot("drawer-narrow")
    page.keyboard.press("Escape")
    assert not side.is_visible() and page.evaluate("document.activeElement.id") == "side-open"


def test_nothing_moves_for_those_who_asked_for_that(open_page: Opening, service: Service) -> None:
    """Transitions that ignore the setting."""
    durations = "[...document.querySelectorAll('button, .quote')].map(e => getComputedStyle(e).transitionDuration)"
    calm = open_page(service)
    calm.answered(MILL)
    assert set(calm.page.evaluate(durations)) == {"0s"}
    moving = open_page(service, reduced_motion="no-preference")
    moving.answered(MILL)
    assert set(moving.page.evaluate(durations)) != {"0s"}


def test_on_paper_there_are_question_answer_and_sources(chat: ChatPage) -> None:
    """Printed: the menu, and an answer that is cut off at the screen's end."""
    turn = chat.answered(MILL)
    chat.page.emulate_media(media="print")
    for hidden in ("header", "#side", "#ask", ".actions"):
        assert not chat.page.locator(hidden).first.is_visible()
    assert turn.locator(".answer").text_content() == MILL_ANSWER and turn.locator(".answer").is_visible()
    assert turn.locator(".sources > .passages .passage").last.is_visible()


def _outline(page: Any) -> float:
    return float(page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)"))


def _tab_to(page: Any, wanted: Any, back: bool = False) -> None:
    """With Tab, or Shift+Tab; whatever has the focus on the way can be seen to have it."""
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        assert _outline(page) >= 2 or page.evaluate("document.activeElement === document.body")
        if wanted.evaluate("e => e === document.activeElement"):
            return
    raise AssertionError("Tab never got there")
