"""The web pages: one head and one frame around the body of each, and the files that they load.

A page is a name: its body here, and a style sheet and a script of that name in `static`. Plain files, without a build step or
foreign resources.
"""

from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

_HERE = Path(__file__).parent
STATIC = _HERE / "static"


class Page(NamedTuple):
    """`start`: the id of the element that the keyboard skips the header to."""

    path: str
    name: str
    title: str
    start: str


PAGES = (
    Page("/", "chat", "Chat", "question"),
    Page("/grammar", "grammar", "Grammar", "text"),
    Page("/document", "document", "Source", "source"),
)
_IN_MENU = PAGES[:2]
_END_OF_TOOLS = "<!-- body -->\n"
"""Before it, a page's file has the page's own buttons for the header."""


def head(title: str, *styles: str) -> str:
    """The beginning of a page with these style sheets, up to its body."""
    links = "\n".join(f'<link rel="stylesheet" href="/web/{name}.css">' for name in styles)
    return _template("head").substitute(title=escape(title), links=links)


def markup(page: Page) -> str:
    """The whole of a page."""
    current = {page.path: ' aria-current="page"'}
    nav = " ".join(f'<a href="{each.path}"{current.get(each.path, "")}>{each.title}</a>' for each in _IN_MENU)
    tools, _, body = (_HERE / f"{page.name}.html").read_text(encoding="utf-8").rpartition(_END_OF_TOOLS)
    frame = _template("frame").substitute(page._asdict(), nav=nav, tools=tools, body=body)
    return head(f"{page.title} - ragspec", "base", "parts", page.name) + frame


def _template(name: str) -> Template:
    return Template((_HERE / f"{name}.html").read_text(encoding="utf-8"))
