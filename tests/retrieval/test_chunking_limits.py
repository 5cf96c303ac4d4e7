"""Passages stay inside their section and hold no more than an encoder reads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chunking import SIZES, TEXTS

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Heading
from ragspec.errors import ConfigError
from ragspec.retrieval.chunking import TokenLimit, chunk, embedded_text
from ragspec.retrieval.encoder import Encoder

HEADINGS = st.lists(
    st.builds(Heading, st.integers(0, 420), st.integers(1, 4), st.text("Title é", max_size=80)), max_size=8
)
GUIDE = """Preface.

# Guide
## Install
First line. Second.
### On Linux
Use apt.
## Remove
# Index"""


def guide(title: str = "") -> Document:
    headings = [Heading(m.start(), len(m[1]), m[2]) for m in re.finditer(r"^(#+) (.*)$", GUIDE, re.MULTILINE)]
    return Document("g", GUIDE, title, headings=tuple(headings))


def test_a_title_begins_a_passage_that_knows_where_it_stands() -> None:
    """Text of two sections in one passage answers for the wrong one; a title alone in a passage answers nothing."""
    assert [(p.heading, p.text) for p in chunk(guide(), ChunkingConfig())] == [
        ("", "Preface."),
        ("Guide > Install", "# Guide\n## Install\nFirst line. Second."),
        ("Guide > Install > On Linux", "### On Linux\nUse apt."),
        ("Guide > Remove", "## Remove"),
        ("Index", "# Index"),
    ]
    texts = [embedded_text(p) for p in chunk(guide("Guide"), ChunkingConfig())]
    assert (
        texts[0] == "Guide\nPreface."
        and texts[3] == "Guide > Remove\n## Remove"
        and texts[4] == "Guide\nIndex\n# Index"
    )


def test_without_headings_the_title_leads_as_ever() -> None:
    """Every vector of every index built before would have changed."""
    for title, expected in (("T", "T\nText."), ("", "Text.")):
        (passage,) = chunk(Document("d", "Text.", title), ChunkingConfig())
        assert embedded_text(passage) == expected
    assert embedded_text(replace(passage, title="Installing", heading="Install")) == "Installing\nInstall\nText."


def words(texts: Sequence[str]) -> list[int]:
    """A tokenizer: a token for every three letters of a word and for every sign, and two special ones."""
    return [2 + sum(-(-len(w) // 3) if w[0].isalnum() else 1 for w in re.findall(r"\w+|[^\w\s]", t)) for t in texts]


def letters(texts: Sequence[str]) -> list[int]:
    """Bytes, and more for a whole than for its parts."""
    return [2 + len(t.encode()) + len(t.encode()) // 50 for t in texts]


@settings(deadline=None, max_examples=300)
@given(TEXTS, HEADINGS, st.text("Tt é", max_size=300), SIZES, st.sampled_from([words, letters]), st.integers(32, 80))
def test_passages_of_any_document_obey_both_limits(
    text: str, headings: list[Heading], title: str, config: ChunkingConfig, count: object, max_tokens: int
) -> None:
    """What an encoder cuts silently is never found; a sentence lost between two sections neither."""
    assert callable(count)
    document = Document("d", text, title, headings=tuple(sorted(headings)))
    limit = TokenLimit(64, count)
    passages = chunk(document, config.model_copy(update={"max_tokens": max_tokens}), limit)
    covered = {position for p in passages for position in range(p.start, p.end)}
    assert all(text[position].isspace() for position in range(len(text)) if position not in covered)
    assert all(b.start > a.start and b.end > a.end for a, b in itertools.pairwise(passages))
    for passage in passages:
        assert text[passage.start : passage.end] == passage.text == passage.text.strip() != ""
        assert len(passage.text) <= config.max_chars and passage.title == title
        assert count([embedded_text(passage)])[0] <= min(64, max_tokens)
    assert passages == chunk(document, config, replace(limit, max_tokens=min(64, max_tokens)))


@settings(deadline=None, max_examples=100)
@given(TEXTS, SIZES)
def test_a_limit_that_is_not_reached_changes_nothing(text: str, config: ChunkingConfig) -> None:
    """Counting tokens must not move a border of any index that is there."""
    document = Document("d", text, "title")
    assert chunk(document, config, TokenLimit(1000, letters)) == chunk(document, config)


def test_nothing_is_counted_where_the_length_alone_tells() -> None:
    """A collection of a million short texts was tokenised twice."""
    calls: list[Sequence[str]] = []

    def count(texts: Sequence[str]) -> list[int]:
        calls.append(texts)
        return words(texts)

    limit = TokenLimit(256, count)
    for _ in range(3):
        chunk(guide("A title"), ChunkingConfig(), limit)
    assert calls == [[""]]
    chunk(Document("d", "Some more words. " * 200), ChunkingConfig(), limit)
    assert [len(texts) for texts in calls] == [1, 6]


def test_a_long_title_leaves_half_of_the_room_to_the_text() -> None:
    """A title of a hundred words pushed the passage itself out of what the encoder reads."""
    path = (Heading(0, 1, "One " * 20), Heading(4, 2, "Two " * 8), Heading(8, 3, "Three"))
    long = "Title " * 100
    for title, headings, heading in (
        ("T", path, "Two " * 8 + " > Three"),
        ("Title " * 14, path, "Three"),
        ("Title " * 15, path, ""),
        (long, path, "Title Title Title"),
    ):
        document = Document("d", "a\n\nb\n\nc\n\n" + "Some words here. " * 40, title, headings=headings)
        passages = chunk(document, ChunkingConfig(), TokenLimit(64, words))
        assert {p.title for p in passages} == {title} and passages[-1].heading.startswith(heading)
        assert max(words([embedded_text(p) for p in passages])) <= 64 and len(passages) < 15
    assert embedded_text(passages[-1]).startswith("Title Title") and passages[-1].heading.endswith("Title…")
    assert embedded_text(passages[-1]).count("Title") < 20


def test_a_wide_table_keeps_the_headings_above_it() -> None:
    """The names of thirty columns took the place of the section's headings."""
    for num_columns, heading in ((2, "Mill > Prices > Part | Part"), (30, "Mill > Prices")):
        table = "| Part " * num_columns + "|\n" + "|---" * num_columns + "|\n" + "| a sack | nine shillings |\n" * 30
        document = Document("d", "a\n\nb\n\n" + table, headings=(Heading(0, 1, "Mill"), Heading(3, 2, "Prices")))
        *_, last = chunk(document, ChunkingConfig(max_chars=200), TokenLimit(64, words))
        assert last.heading == heading


def test_a_token_limit_that_nobody_can_count_is_refused() -> None:
    """A setting that is silently ignored."""
    with pytest.raises(ConfigError, match="max_tokens"):
        chunk(Document("d", "x"), ChunkingConfig(max_tokens=64))


def test_texts_of_many_scripts_fit_the_packaged_encoder(encoder: Encoder) -> None:
    """600 Chinese characters are 600 tokens, of which MiniLM reads 256."""
    limit = TokenLimit(256, encoder.count_tokens)
    for sentence in (
        "今日は元気。",
        "Hello there. ",
        "\U0001f680" * 5 + ". ",
        "हिन्दी। ",
        "q" * 700,
    ):
        text = sentence * (2000 // len(sentence))
        passages = chunk(Document("d", text, "A title", headings=(Heading(0, 1, "Part"),)), ChunkingConfig(), limit)
        assert max(encoder.count_tokens([embedded_text(p) for p in passages])) <= 256
        assert sum(len(p.text) for p in passages) >= len(text.replace(" ", "")) * 0.9
