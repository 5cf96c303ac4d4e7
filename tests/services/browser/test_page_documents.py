"""The dialog of documents: collections made, filled, asked and emptied, against the real stores."""

from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from looking import faint_texts, nameless
from scripted import PRICE, ROW

pytestmark = pytest.mark.browser

TEXT = "The lighthouse keeper owns eleven grey cats. He feeds them at noon."


def a_collection(chat: ChatPage, name: str) -> None:
    chat.page.locator("#documents-open").click()
    chat.page.fill("#collection-name", name)
    chat.page.keyboard.press("Enter")
    chat.page.locator("#documents-said", has_text="ready for documents").wait_for()


def test_a_collection_is_made_filled_asked_and_emptied(chat: ChatPage, tmp_path: Path) -> None:
    """An upload that is never searched; answers from other documents than those chosen; a document that cannot be removed."""
    page = chat.page
    a_collection(chat, "Lighthouse 🗼 <b>")
    said = page.locator("#documents-said")
    assert page.locator("#collection-chosen").text_content() == "Lighthouse 🗼 <b>"
    assert page.locator("#files .none").is_visible()
    (tmp_path / "cats & dogs.txt").write_text(TEXT)
    page.set_input_files("#upload", str(tmp_path / "cats & dogs.txt"))
    said.filter(has_text="1 document added").wait_for()
    assert page.locator("#files .name").all_text_contents() == ["cats & dogs.txt"]
    assert nameless(page) == [] and faint_texts(page) == []
    chat.shot("documents")
    page.locator("#documents-close").click()
    turn = chat.answered("How many cats does the keeper own?")
    assert turn.locator(".passage").count() == 1
    assert "eleven grey cats" in turn.locator(".passage-text").text_content()
    page.locator("#documents-open").click()
    page.get_by_role("button", name="Remove cats & dogs.txt").click()
    said.filter(has_text="removed").wait_for()
    page.keyboard.press("Escape")
    assert chat.answered("How many cats does the keeper own now?").locator(".none").is_visible()


def test_a_quoted_row_stands_below_its_tables_header(chat: ChatPage, tmp_path: Path) -> None:
    """A price without the name of its column; or rows that run on as one line."""
    a_collection(chat, "Prices")
    rows = "".join(f"| Tool {n} | {n + 20} |\n" for n in range(12))
    (tmp_path / "prices.md").write_text(f"# Price list\n\n| Tool | Price |\n|---|---|\n{rows}{ROW}\n| Nail | 1 |\n")
    chat.page.set_input_files("#upload", str(tmp_path / "prices.md"))
    chat.page.locator("#documents-said", has_text="1 document added").wait_for()
    chat.page.locator("#documents-close").click()
    shown = chat.answered(PRICE).locator(".passage-text").first
    assert shown.inner_text().splitlines()[:3] == ["| Tool | Price |", ROW, "| Nail | 1 |"]
    chat.shot("table")


def test_a_file_that_cannot_be_read_is_said_in_the_dialog(chat: ChatPage, tmp_path: Path) -> None:
    """An upload that fails in silence."""
    page = chat.page
    a_collection(chat, "Broken")
    (tmp_path / "torn.pdf").write_bytes(b"%PDF-1.7 torn")
    page.set_input_files("#upload", str(tmp_path / "torn.pdf"))
    page.locator("#documents-said.wrong").wait_for()
    assert "torn.pdf" in page.locator("#documents-said").text_content()


def test_a_choice_outlives_a_listing_that_failed(chat: ChatPage) -> None:
    """One refused request, and answers came from all documents without a word."""
    page = chat.page
    a_collection(chat, "Kept")
    chosen = page.evaluate("sessionStorage.getItem('ragspec.collection')")
    page.route("**/v1/vector_stores*", lambda route: route.fulfill(status=429, body="{}"))
    page.reload()
    page.locator("#model", has_text="scripted").wait_for()
    page.locator("#collection-chosen", has_text="chosen before").wait_for()
    assert page.evaluate("sessionStorage.getItem('ragspec.collection')") == chosen
    page.unroute("**/v1/vector_stores*")
    page.locator("#documents-open").click()
    page.locator("#collection-chosen", has_text="Kept").wait_for()


def test_a_failed_upload_can_be_tried_again_with_the_same_file(chat: ChatPage, tmp_path: Path) -> None:
    """The same file chosen again was no change to the browser, and nothing happened."""
    page = chat.page
    a_collection(chat, "Twice")
    (tmp_path / "cats.txt").write_text(TEXT)
    page.route("**/v1/files", lambda route: route.fulfill(status=500, body="{}"))
    page.set_input_files("#upload", str(tmp_path / "cats.txt"))
    page.locator("#documents-said.wrong").wait_for()
    page.unroute("**/v1/files")
    assert page.evaluate("document.querySelector('#upload').files.length") == 0
    page.set_input_files("#upload", str(tmp_path / "cats.txt"))
    page.locator("#documents-said", has_text="1 document added").wait_for()


def test_a_limit_of_the_key_is_waited_for(chat: ChatPage, tmp_path: Path) -> None:
    """Twenty files asked for more than a key may in a minute, and the rest of them was given up."""
    page = chat.page
    a_collection(chat, "Many")
    refused = iter(range(2))

    def limit(route: Any) -> None:
        if next(refused, None) is None:
            route.continue_()
        else:
            route.fulfill(
                status=429, headers={"Retry-After": "1"}, body='{"error": {"message": "more than 60 a minute."}}'
            )

    page.route("**/v1/files", limit)
    (tmp_path / "cats.txt").write_text(TEXT)
    page.set_input_files("#upload", str(tmp_path / "cats.txt"))
    page.locator("#documents-said", has_text="more than 60 a minute. It goes on in 1 s").wait_for()
    page.locator("#documents-said", has_text="1 document added").wait_for()


def test_the_keyboard_stays_where_it_chose(chat: ChatPage) -> None:
    """Each choice built the list anew, and the next arrow key did nothing."""
    page = chat.page
    for name in ("One", "Two"):
        page.keyboard.press("Escape")
        a_collection(chat, name)
    page.locator("#collections input:checked").focus()
    for _ in range(2):
        before = page.evaluate("document.activeElement.value")
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "(before) => document.activeElement.value !== before && document.activeElement.checked", arg=before
        )


def test_a_removed_file_can_be_deleted_from_the_server(chat: ChatPage, tmp_path: Path) -> None:
    """What was called removed could still be read, and counted against the tenant's space."""
    page = chat.page
    a_collection(chat, "Gone")
    (tmp_path / "secret.txt").write_text(TEXT)
    page.set_input_files("#upload", str(tmp_path / "secret.txt"))
    page.locator("#documents-said", has_text="1 document added").wait_for()
    page.get_by_role("button", name="Remove secret.txt").click()
    page.locator("#documents-said", has_text="still has the file").wait_for()
    chat.shot("removed")
    page.get_by_role("button", name="Delete the file, too").click()
    page.locator("#documents-said", has_text="was deleted").wait_for()
    names = page.evaluate(
        "fetch('/v1/files', {headers: {Authorization: 'Bearer ' + sessionStorage.getItem('ragspec.key')}})"
        ".then((found) => found.json()).then((found) => found.data.map((file) => file.filename))"
    )
    assert "secret.txt" not in names


def test_files_dropped_anywhere_on_the_page_are_added(chat: ChatPage) -> None:
    """The browser left the page and showed the file."""
    chat.page.locator("#documents-open").wait_for()
    chat.page.evaluate("""() => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["The ferry costs two coins."], "ferry.txt", { type: "text/plain" }));
      for (const kind of ["dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
    }""")
    chat.page.locator("#documents-said", has_text="1 document added").wait_for()
    assert "My documents" in chat.page.locator("#collections").text_content()
