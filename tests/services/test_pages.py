"""How the pages are served, and what their files may hold; no browser needed."""

import re
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from service_parts import Service

from ragspec.retrieval.reading import SUFFIXES
from services.app import PAGE_HEADERS
from services.web.pages import PAGES, STATIC, markup

FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
TEXTS = {name: (STATIC / name).read_text() for name in FILES} | {f"{page.name}.html": markup(page) for page in PAGES}


@pytest.fixture
def public(service: Service) -> Iterator[httpx.Client]:
    with service.client("") as client:
        yield client


def test_pages_come_without_a_key_and_under_the_policy(public: httpx.Client) -> None:
    """A page nobody can open to enter a key; or one without the headers that contain it."""
    for name in [*(page.path for page in PAGES), *(f"/web/{name}" for name in FILES)]:
        reply = public.get(name)
        assert reply.status_code == 200, name
        assert {key: reply.headers[key] for key in PAGE_HEADERS} == PAGE_HEADERS, name
        assert len(reply.headers.get_list("content-security-policy")) == 1
    assert public.head("/").status_code == 200 and not public.head("/").content


def test_a_page_that_did_not_change_is_not_sent_again(public: httpx.Client) -> None:
    """Every visit loads everything; or a tag that says "unchanged" of another file."""
    tag = public.get("/web/js/chat.js").headers["etag"]
    assert public.get("/web/js/chat.js", headers={"If-None-Match": tag}).status_code == 304
    assert public.get("/web/js/api.js", headers={"If-None-Match": tag}).status_code == 200


@pytest.mark.parametrize(
    "path", ["__init__.py", "../__init__.py", "%2e%2e/__init__.py", "..%2f__init__.py", "js/", "js", "", "/etc/passwd"]
)
def test_no_path_leads_to_other_files(public: httpx.Client, path: str) -> None:
    """Path traversal, and folders that list themselves."""
    reply = public.get(f"/web/{path}")
    assert reply.status_code in (401, 404) and "build step" not in reply.text


def test_no_file_parses_text_as_markup_or_runs_it() -> None:
    """One innerHTML, and a document becomes a script."""
    banned = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser|setAttribute\(\"style"
    )
    assert not [name for name, text in TEXTS.items() if banned.search(text)]
    assert banned.search("place.innerHTML = text")


def test_pages_hold_nothing_inline_and_nothing_from_elsewhere() -> None:
    """A policy that has to be weakened, or a page that tells another server who visits it."""
    for name, text in TEXTS.items():
        if name.endswith(".html"):
            assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:|<script(?![^>]*\bsrc=)", text), name
            assert all(
                place.startswith(("/web/", "#", "/")) for place in re.findall(r'(?:href|src)="([^"]*)"', text)
            ), name
        elsewhere = [place for place in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org/2000/svg" not in place]
        assert not elsewhere, name
        assert not re.search(r"@import|url\(", text) or not name.endswith(".css"), name


def test_the_page_offers_the_files_that_can_be_read() -> None:
    """A format that the service reads and the page's dialog hides."""
    (offered,) = re.findall(r'accept="([^"]*)"', TEXTS["chat.html"])
    assert sorted(offered.split(",")) == sorted(SUFFIXES)
