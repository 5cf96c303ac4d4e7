"""Text from tokens: no half characters, no beginnings of stop strings, no white space lost."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_target import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from ragspec.engine.text import IncrementalDetokenizer


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@functools.cache
def token_of_byte() -> dict[int, int]:
    """The token that is one byte, for every byte that UTF-8 may hold."""
    text = "".join(map(chr, range(1, 0x250))) + "水🌊\U000f0000\U0010ffff\u0fff\uffff"
    found: dict[int, int] = {}
    vocabulary = tokenizer().get_vocab()
    for char in text:
        encoded = char.encode()
        pieces = tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str(char)
        for byte, symbol in zip(encoded, "".join(piece for piece, _ in pieces), strict=True):
            found[byte] = vocabulary[symbol]
    return found


def tokens_of(text: str, seed: int) -> list[int]:
    """A random way to write `text`: some stretches as the tokenizer would, some byte by byte."""
    draw = random.Random(seed)
    ids: list[int] = []
    for start in range(0, len(text), 3):
        piece = text[start : start + 3]
        known = all(byte in token_of_byte() for byte in piece.encode())
        if known and draw.random() < 0.6:
            ids += [token_of_byte()[byte] for byte in piece.encode()]
        else:
            ids += tokenizer()(piece, add_special_tokens=False).input_ids
    return ids


def write(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """(pieces as a stream would send them, number of tokens until a stop string)."""
    text = IncrementalDetokenizer(tokenizer(), stop)
    pieces = []
    for i, token in enumerate(ids, 1):
        if text.push(token):
            text.finish()
            return [*pieces, text.take()], i
        pieces.append(text.take())
    text.finish()
    return [*pieces, text.take()], len(ids)


TEXTS = st.text(st.one_of(st.sampled_from(" aé水🌊\n\"'.,ab"), st.characters(exclude_categories=["Cs"])), max_size=25)


@settings(max_examples=300, deadline=None)
@given(TEXTS.filter(lambda text: "\ufffd" not in text), st.integers(0, 9))
def test_split_characters_never_show(text: str, seed: int) -> None:
    """A character whose bytes lie in several tokens was streamed as U+FFFD."""
    pieces, _ = write(tokens_of(text, seed))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


@settings(max_examples=300, deadline=None)
@given(
    st.text("aab é水", max_size=25),
    st.lists(st.text("aab é水", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_stop_strings_cut_where_they_begin(text: str, stop: list[str], seed: int) -> None:
    """A stop string missed across tokens, found twice, or partly streamed."""
    ids = tokens_of(text, seed)
    pieces, num_tokens = write(ids, tuple(stop))
    sent = "".join(pieces)
    cuts = [text.find(s) for s in stop if s in text]
    if not cuts:
        assert sent == text
        assert num_tokens == len(ids)
        return
    whole = tokenizer().decode(ids[:num_tokens], clean_up_tokenization_spaces=False)
    assert any(s in whole for s in stop)
    assert sent == whole[: min(whole.find(s) for s in stop if s in whole)]
    before = tokenizer().decode(ids[: num_tokens - 1], clean_up_tokenization_spaces=False)
    assert not any(s in before for s in stop)


def test_half_a_character_at_the_end_is_dropped() -> None:
    """A reply cut by `max_tokens` inside a character ended in U+FFFD."""
    ids = [token_of_byte()[byte] for byte in "a水".encode()]
    assert "".join(write(ids[:-1])[0]) == "a"
    assert "".join(write(ids)[0]) == "a水"


def test_garbage_does_not_block_the_stream() -> None:
    """Bytes that never become a character held back all that followed."""
    garbage = [token_of_byte()[0xA0]] * 30
    pieces, _ = write([*garbage, *tokenizer()("fine").input_ids])
    assert "".join(pieces).endswith("fine")


@pytest.mark.parametrize("lead", [7, 8, 15])
def test_a_character_after_garbage_is_whole(lead: int) -> None:
    """After bytes that are no text, the next real character was swallowed."""
    garbage = [token_of_byte()[0xA0]] * lead
    pieces, _ = write([*garbage, *(token_of_byte()[byte] for byte in "é水 x".encode())])
    assert "".join(pieces).endswith("é水 x")


def test_special_tokens_write_nothing() -> None:
    """The name of a control token in the text."""
    pieces, _ = write([5, 1, 6, 0, 7])
    assert "".join(pieces) == tokenizer().decode([5, 6, 7])
