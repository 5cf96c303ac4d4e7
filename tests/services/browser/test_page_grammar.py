"""The grammar page: suggestions in the text and beside it, taken or left, and undone. Against the real service."""

from typing import Any

import pytest
from chat_page import ChatPage, Opening
from looking import faint_texts, nameless, structure_faults, too_small
from scripted import CORRECTED, MISTAKEN, Script
from service_parts import Service

pytestmark = pytest.mark.browser


@pytest.fixture
def editor(open_page: Opening, service: Service) -> ChatPage:
    return open_page(service, path="/grammar")


def _corrected(editor: ChatPage, text: str = MISTAKEN) -> Any:
    """Write, correct, and wait; the cards."""
    editor.page.fill("#text", text)
    editor.page.press("#text", "Control+Enter")
    editor.page.locator("#outcome .checked").wait_for()
    return editor.page.locator(".card")


def _text(editor: ChatPage) -> str:
    return str(editor.page.input_value("#text"))


def test_accepting_all_suggestions_gives_the_corrected_text(editor: ChatPage) -> None:
    """Offsets off by one behind an emoji, or edits applied one after the other at places that moved."""
    cards = _corrected(editor)
    assert cards.count() >= 3
    marked = editor.page.locator("#marks .edit").all_text_contents()
    originals = [card.locator("del").text_content() if card.locator("del").count() else "" for card in cards.all()]
    assert marked == originals
    assert all(card.locator(".kind").text_content() for card in cards.all())
    editor.shot("grammar-wide")
    editor.page.locator("#accept-all").click()
    assert _text(editor) == CORRECTED and cards.count() == 0


def test_accepting_them_one_by_one_in_any_order_gives_the_same_text(editor: ChatPage) -> None:
    """An accepted edit that moves the others to wrong places."""
    cards = _corrected(editor)
    for turn in range(cards.count()):
        (cards.last if turn % 2 else cards.first).get_by_role("button", name="Accept").click()
    assert _text(editor) == CORRECTED


def test_a_rejected_suggestion_changes_nothing_and_does_not_come_back(editor: ChatPage) -> None:
    """A suggestion that has to be rejected after every correction."""
    cards = _corrected(editor)
    count, first = cards.count(), cards.first.locator(".change").text_content()
    cards.first.get_by_role("button", name="Reject").click()
    assert _text(editor) == MISTAKEN and cards.count() == count - 1
    again = _corrected(editor)
    again.first.wait_for()
    assert again.count() == count - 1 and first not in again.locator(".change").all_text_contents()


def test_undo_and_redo_restore_text_and_suggestions_together(editor: ChatPage) -> None:
    """Undone text with the suggestions of another one, or the browser's own undo that knows of none."""
    cards = _corrected(editor)
    count = cards.count()
    cards.first.get_by_role("button", name="Accept").click()
    once = _text(editor)
    assert once != MISTAKEN
    editor.page.locator("#accept-all").click()
    editor.page.focus("#text")
    editor.page.keyboard.press("Control+z")
    assert _text(editor) == once and cards.count() == count - 1
    editor.page.locator("#undo").click()
    assert _text(editor) == MISTAKEN and cards.count() == count
    editor.page.focus("#text")
    editor.page.keyboard.press("Control+Shift+z")
    assert _text(editor) == once and cards.count() == count - 1
    editor.page.locator("#accept-all").click()
    assert _text(editor) == CORRECTED and editor.page.locator("#redo").is_disabled()


def test_suggestions_follow_the_text_that_is_typed_before_and_end_where_it_is_typed(editor: ChatPage) -> None:
    """Marks that stay where they were while the text moves under them."""
    cards = _corrected(editor)
    count = cards.count()
    editor.page.focus("#text")
    editor.page.keyboard.press("Control+Home")
    editor.page.keyboard.type("😀 So: ")
    marked = editor.page.locator("#marks .edit").all_text_contents()
    originals = [card.locator("del").text_content() if card.locator("del").count() else "" for card in cards.all()]
    assert marked == originals and cards.count() >= count - 1
    editor.page.locator("#accept-all").click()
    assert _text(editor).endswith(CORRECTED[-20:])


def test_the_marks_lie_under_the_words_they_mark(editor: ChatPage) -> None:
    """An underline beside its word: another font, padding or width than the text has."""
    _corrected(editor, f"{MISTAKEN} " * 12)
    same = """() => {
      const [field, marks] = [document.getElementById("text"), document.getElementById("marks")];
      const font = ["fontFamily", "fontSize", "lineHeight", "letterSpacing", "tabSize"];
      const box = ["paddingLeft", "paddingTop", "whiteSpace", "overflowWrap"];
      const differ = [...font, ...box].filter((name) => getComputedStyle(field)[name] !== getComputedStyle(marks)[name]);
      field.scrollTop = 1e6;
      const heights = Math.abs(field.scrollHeight - marks.scrollHeight) < 40;
      return [differ, field.clientWidth - marks.clientWidth, heights, field.scrollTop > 0];
    }"""
    assert editor.page.evaluate(same) == [[], 0, True, True]
    editor.page.wait_for_function(
        "document.getElementById('marks').scrollTop === document.getElementById('text').scrollTop"
    )


def test_without_speculation_the_corrections_are_the_same(editor: ChatPage) -> None:
    """Corrections that depend on the draft."""
    editor.page.locator("#comparing").check()
    _corrected(editor)
    editor.page.locator(".comparison.same").wait_for()
    assert editor.page.locator(".comparison .answer").text_content() == CORRECTED
    editor.shot("grammar-comparison")


def test_a_text_changed_meanwhile_keeps_what_was_typed(editor: ChatPage, script: Script) -> None:
    """Suggestions for an old text marked in a new one."""
    with script.held(at=0):
        editor.page.fill("#text", MISTAKEN)
        editor.page.press("#text", "Control+Enter")
        editor.page.locator("#outcome", has_text="Reading").wait_for()
        editor.page.fill("#text", "Another text.")
    editor.page.locator("#outcome", has_text="changed meanwhile").wait_for()
    assert _text(editor) == "Another text." and editor.page.locator("#marks .edit").count() == 0


def test_markup_in_the_text_is_text(editor: ChatPage) -> None:
    """A pasted page that runs in this one."""
    text = "<img src=x onerror='window.hit=1'><script>window.hit=2</script> He go home."
    _corrected(editor, text)
    assert editor.page.locator("#marks img, #marks script").count() == 0
    assert editor.page.evaluate("window.hit") is None
    assert editor.page.locator("#marks").text_content().strip() == text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_named_and_used_without_a_mouse(open_page: Opening, service: Service, scheme: str) -> None:
    """An editor for those who see and click."""
    editor = open_page(service, path="/grammar", color_scheme=scheme)
    page = editor.page
    assert faint_texts(page) == [] and nameless(page) == [] and structure_faults(page) == []
    cards = _corrected(editor)
    assert faint_texts(page) == [] and nameless(page) == [] and structure_faults(page) == []
    editor.shot(f"grammar-{scheme}")
    count = cards.count()
    for _ in range(30):
        page.keyboard.press("Tab")
        if (page.evaluate("document.activeElement.getAttribute('aria-label')") or "").startswith("Accept "):
            break
    assert page.locator("#marks .edit.active").count() == 1
    page.keyboard.press("Enter")
    assert cards.count() == count - 1
    assert page.evaluate("document.activeElement.closest('.card') !== null")


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_the_editor_fits_the_screen(open_page: Opening, service: Service, width: int) -> None:
    """A page that scrolls sideways on a telephone."""
    editor = open_page(service, path="/grammar", width=width, height=800)
    _corrected(editor)
    editor.shot(f"grammar-{width}")
    assert editor.page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert too_small(editor.page) == []
