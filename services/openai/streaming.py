"""An answer told while it is written: which pieces, and when.

Normally a piece is what came since the last one, at once. Under `privacy: strict` a piece goes out at every tick, whether there
is something to say or not, each of one size: who sees the packets alone learns how long an answer took, not how its text came.

    >>> await tell(sender, chunks, paced(run), account)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ragspec.core import Delta, TokenLogprob
from services.openai.engine_stream import Key, Run
from services.openai.events import DONE, WAITING, Chunks
from services.openai.sending import Sender

KEEP_ALIVE_S = 10.0
TICK_S = 0.05
STRICT_PAD_BYTES = 1024
STRICT_TEXT_BYTES = 256
"""Of a piece's text, as it is escaped in JSON: with what is around it, it fits into one size."""

Chunk = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""The choices of a chunk, and what else it says."""


class Piece(NamedTuple):
    """What is new of one choice; `deltas` are the steps that it came in."""

    key: Key
    text: str
    deltas: tuple[Delta, ...]
    is_last: bool

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for delta in self.deltas for logprob in delta.logprobs]


class Account(Protocol):
    """What the pieces of one kind of answer look like."""

    def opening(self) -> Sequence[Chunk]: ...

    def told(self, piece: Piece) -> Chunk: ...

    async def ending(self, key: Key) -> Chunk:
        """A choice is complete."""
        ...

    def closing(self) -> Sequence[Chunk]:
        """All are."""
        ...


async def at_once(run: Run) -> AsyncIterator[Piece | None]:
    """Pieces as they come; None: for a long time nothing has. Raises: as `Run.news`."""
    while run.is_open:
        news = await run.news(KEEP_ALIVE_S)
        if not news:
            yield None
        for key, deltas in news.items():
            text = "".join(delta.text for delta in deltas)
            yield Piece(key, text, tuple(deltas), deltas[-1].finish_reason is not None)


async def paced(run: Run, tick_s: float = TICK_S) -> AsyncIterator[Piece | None]:
    """One piece of every unfinished choice a tick. Raises: as `Run.news`."""
    loop = asyncio.get_running_loop()
    due, backlog, ended = loop.time(), dict.fromkeys(run.keys, ""), set[Key]()
    while backlog:
        due = max(due + tick_s, loop.time())
        await asyncio.sleep(due - loop.time())
        news = run.take()
        for key, deltas in news.items():
            backlog[key] += "".join(delta.text for delta in deltas)
            if deltas[-1].finish_reason is not None:
                ended.add(key)
        for key, text in list(backlog.items()):
            cut = _fitting(text)
            backlog[key] = text[cut:]
            is_last = key in ended and cut == len(text)
            if is_last:
                del backlog[key]
            yield Piece(key, text[:cut], tuple(news.get(key, ())), is_last)


async def tell(
    sender: Sender, chunks: Chunks, pieces: AsyncIterator[Piece | None], account: Account, *, silent: bool = True
) -> None:
    """The whole stream. `silent`: pieces without anything new are left out. Raises: what `pieces` raises."""
    await sender.begin_events()
    await _send(sender, chunks, account.opening())
    async for piece in pieces:
        if piece is None:
            await sender.event(WAITING)
            continue
        if piece.text or not silent or (piece.deltas and piece.logprobs):
            await _send(sender, chunks, [account.told(piece)])
        if piece.is_last:
            await _send(sender, chunks, [await account.ending(piece.key)])
    await _send(sender, chunks, account.closing())
    await sender.end(DONE)


async def _send(sender: Sender, chunks: Chunks, said: Sequence[Chunk]) -> None:
    if said:
        await sender.event(b"".join(chunks.event(choices, **more) for choices, more in said))


def _fitting(text: str) -> int:
    """How many characters of a text go into one piece."""
    num_bytes = 0
    for count, letter in enumerate(text[:STRICT_TEXT_BYTES]):
        num_bytes += len(json.dumps(letter)) - 2
        if num_bytes > STRICT_TEXT_BYTES:
            return count
    return min(len(text), STRICT_TEXT_BYTES)
