"""Chunks of a stream: whole, ASCII, and of few sizes."""

import json
from typing import Any

import pytest

from services.openai.answers import PAD_BYTES, STRICT_PAD_BYTES, STRICT_TEXT_BYTES, ChunkEncoder, num_fitting_chars
from services.openai.responses import frame_of

HEAD = {"id": "chatcmpl-" + "a" * 32, "object": "chat.completion.chunk", "created": 1, "model": "m"}
TEXTS = ("", "a", 'quote " and \\ and \n', "\u2028\u2029\x85", "Mühle 🏭", "x" * 500)


def choice(text: str) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]


def read(frame: bytes) -> dict[str, Any]:
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n") and frame.count(b"\n") == 2
    value: dict[str, Any] = json.loads(frame[6:])
    return value


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pad_bytes", [0, PAD_BYTES, STRICT_PAD_BYTES])
def test_a_chunk_is_one_event_that_holds_all(text: str, pad_bytes: int) -> None:
    """A line break in a text ended the event; padding broke the JSON."""
    frame = ChunkEncoder(HEAD, pad_bytes, with_usage=True).event(choice(text), ragspec={"x": text})
    told = read(frame)
    assert frame.isascii()
    assert told.pop("obfuscation", None) is not None or not pad_bytes
    assert told == HEAD | {"choices": choice(text), "usage": None, "ragspec": {"x": text}}


def test_sizes_are_multiples_whatever_is_said() -> None:
    """The size of an encrypted packet told how many characters a step accepted."""
    chunks = ChunkEncoder(HEAD)
    sizes = {len(chunks.event(choice("x" * length))) for length in range(100)}
    assert all(size % PAD_BYTES == 0 for size in sizes)
    assert len(sizes) <= 2


def test_the_sizes_of_responses_deltas_do_not_show_their_texts() -> None:
    frames = [frame_of("response.output_text.delta", {"delta": "word " * n}, n, padded=True) for n in range(1, 30)]
    assert all(len(frame) % PAD_BYTES == 0 for frame in frames)
    assert [json.loads(frame.split(b"data: ")[1])["delta"] for frame in frames] == ["word " * n for n in range(1, 30)]


def test_padding_differs_from_chunk_to_chunk() -> None:
    """Padding that never changes is taken out by any compression on the way."""
    chunks = ChunkEncoder(HEAD)
    assert len({read(chunks.event(choice("a")))["obfuscation"] for _ in range(20)}) > 15


def test_the_last_chunk_alone_has_usage() -> None:
    """A client that adds up usage found it twice, or null where it is."""
    chunks = ChunkEncoder(HEAD, with_usage=True)
    assert read(chunks.event(choice("a")))["usage"] is None
    assert read(chunks.event([], usage={"total_tokens": 3}))["usage"] == {"total_tokens": 3}
    assert "usage" not in read(ChunkEncoder(HEAD).event(choice("a")))


@pytest.mark.parametrize("text", [*TEXTS, "🏭" * 300, "a🏭" * 100, "\x01" * 300])
def test_strict_pieces_are_of_one_size_and_lose_nothing(text: str) -> None:
    """A text of characters that JSON escapes did not fit the one size; a piece without progress came for ever."""
    chunks, rest, pieces = ChunkEncoder(HEAD, STRICT_PAD_BYTES), text, []
    while rest or not pieces:
        cut = num_fitting_chars(rest)
        assert cut > 0 or not rest
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert "".join(pieces) == text
    assert all(len(json.dumps(piece)) - 2 <= STRICT_TEXT_BYTES for piece in pieces)
    assert {len(chunks.event(choice(piece))) for piece in pieces} == {STRICT_PAD_BYTES}
