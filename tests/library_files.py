"""Files of tests in a library."""

import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.stores.library import Library


def attached(library: Library, name: str = "zebra.txt", text: str = "A zebra has stripes.") -> tuple[str, str]:
    """The store and the file of the tenant "ann"."""
    return attached_by("ann", library, name, text)


def attached_by(tenant: str, library: Library, name: str, text: str) -> tuple[str, str]:
    store = library.create_store(tenant).id
    file = library.upload(tenant, name, "assistants", io.BytesIO(text.encode())).id
    library.attach(tenant, store, file, {})
    return store, file


def indexed(
    library: Library, name: str = "zebra.txt", text: str = "A zebra has stripes.", tenant: str = "ann"
) -> tuple[str, str]:
    """As `attached_by`, and completed."""
    pair = attached_by(tenant, library, name, text)
    assert ended(library, *pair, tenant=tenant) == ("completed", "")
    return pair


def ended(library: Library, store: str, file: str, tenant: str = "ann") -> tuple[str, str]:
    """Status and code, once it is over."""
    while (member := library.records.member(tenant, store, file)).status == "in_progress":
        time.sleep(0.01)
    return member.status, member.code


def status_of(library: Library, tenant: str, store: str, file: str) -> str:
    """Also of a member that is being deleted; empty once it is gone."""
    members = library.records.members_of_file(tenant, file)
    return next((member.status for member in members if member.store == store), "")


@contextmanager
def commits_paused(library: Library) -> Iterator[None]:
    """Files are read and not committed inside the block."""
    worker = library.ingest
    worker.members_due_s = math.inf
    yield
    with worker.wake:
        worker.members_due_s = 0.0
        worker.wake.notify_all()


def failing(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    errors: list[Any],
    when: Callable[..., bool] = lambda *_, **__: True,
) -> None:
    """The method `name` raises `errors`, one a call and None for nothing, and then works. `when`: of which arguments."""
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if errors and when(*arguments, **options) and (error := errors.pop(0)) is not None:
            raise error
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
