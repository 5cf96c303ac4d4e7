"""The newest table of a directory, at hand without asking for it.

>>> watch = Watch(directory)
>>> watch.table.of("shard")
>>> watch.close()
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

import ray

from ragspec.cluster.directory import Directory, Table

_POLL_S = 2.0
_PAUSE_S = 0.5

_log = logging.getLogger(__name__)


class Watch:
    """A thread keeps `table` up to date; while the directory does not answer, it stays as it was. Safe to use from any thread.

    Ends with `close`, or when nobody holds it any more.
    """

    def __init__(self, directory: Directory) -> None:
        """Raises: what the directory raises when it is asked for the first time."""
        self._directory = directory
        self._table = directory.table()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        arguments = weakref.ref(self), directory, self._stop
        threading.Thread(target=_follow, args=arguments, name="ragspec-watch", daemon=True).start()

    @property
    def table(self) -> Table:
        return self._table

    def wait(self, after: int, timeout_s: float) -> Table:
        """The table, as soon as its version exceeds `after`, or when the time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._table.version > after, timeout_s)
            return self._table

    def report(self, name: str, epoch: int, why: str) -> None:
        """As `Directory.report`, but does not wait; a directory that cannot be reached hears of it later."""

        def tell() -> None:
            while not self._stop.is_set():
                try:
                    return self._directory.report(name, epoch, why)
                except Exception as error:
                    _log.warning("%s (%s) could not be reported: %s", name, why, error)
                self._stop.wait(_PAUSE_S)

        threading.Thread(target=tell, name="ragspec-report", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _take(self, table: Table) -> None:
        with self._changed:
            if table.version > self._table.version:
                self._table = table
                self._changed.notify_all()


def _follow(reference: weakref.ref[Watch], directory: Directory, stop: threading.Event) -> None:
    """Why a weak reference: a watch that nobody closes must not live for ever."""
    version = -1
    while not stop.is_set():
        begin = time.monotonic()
        try:
            table = directory.table(version, _POLL_S)
        except (Exception, SystemExit) as error:  # the latter: what Ray raises while it is shut down
            if isinstance(error, SystemExit) or not ray.is_initialized():
                return
            _log.warning("the directory does not answer: %s", error)
            stop.wait(_PAUSE_S)
            continue
        watch = reference()
        if watch is None:
            return
        if table.version != version:
            watch._take(table)
        elif time.monotonic() - begin < _PAUSE_S:  # a directory that does not wait
            stop.wait(_PAUSE_S)
        version = table.version
        del watch
