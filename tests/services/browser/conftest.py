"""A browser, a service, and a page in it that must not complain.

Screenshots go into the folder that RAGSPEC_SCREENSHOTS names, or into the test's own temporary one.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_page import ChatPage
from scripted import CONTEXT, KV_SLOTS, Script, scripted
from service_parts import Service
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.target import Target

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Why not for longer: while it runs, this thread has a running event loop, and no other test may start one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    path = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_model("llama", tmp_path_factory.mktemp("target"), max_position_embeddings=CONTEXT)
    return Target.load(TargetConfig(model=str(folder)), num_kv_slots=KV_SLOTS)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, page_target: Target) -> Iterator[tuple[Service, Script]]:
    with scripted(tmp_path_factory.mktemp("service"), page_target) as both:
        yield both


@pytest.fixture
def service(running: tuple[Service, Script]) -> Service:
    return running[0]


@pytest.fixture
def script(running: tuple[Service, Script]) -> Script:
    return running[1]


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("RAGSPEC_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def open_page(browser: Any, shots: Path) -> Iterator[Callable[..., ChatPage]]:
    """`open_page(service, key, width=360, color_scheme="dark")`. At the end no page may have met a script error."""
    pages: list[ChatPage] = []

    def open_one(
        service: Service, key: str | None = None, path: str = "/", width: int = 1440, height: int = 900, **look: Any
    ) -> ChatPage:
        context = browser.new_context(
            viewport={"width": width, "height": height}, **{"reduced_motion": "reduce", "color_scheme": "light", **look}
        )
        pages.append(ChatPage(context.new_page(), service.url, shots))
        pages[-1].visit(service.keys.trusted if key is None else key, path)
        return pages[-1]

    yield open_one
    complaints = [complaint for page in pages for complaint in page.complaints]
    for page in pages:
        page.page.context.close()
    assert not complaints


@pytest.fixture
def chat(open_page: Callable[..., ChatPage], service: Service) -> ChatPage:
    """The page with the trusted key, on a wide screen."""
    return open_page(service)
