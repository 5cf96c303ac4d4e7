"""Passages are slices of their document, made of whole sentences of one section, and no longer than an encoder reads."""

import itertools
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.config import ChunkingConfig
from ragspec.core import Block, BlockKind, Document, Heading
from ragspec.errors import ConfigError
from ragspec.retrieval.chunking import TokenLimit, chunk, embedded_text, sentences
from ragspec.retrieval.encoder import Encoder

SENTENCES: dict[str, list[Any]] = json.loads(Path(__file__).with_name("sentences.json").read_text(encoding="utf-8"))
"""Texts, each with its sentences."""
WORDS = st.sampled_from(
    [*"The rain e.g. Dr. 3.14 U.S. fell. Why? 雨。 cafe\u0301".split(), '"No!"', "a" * 90, "\n\n", "\n- ", " ", "\t"]
)
TEXTS = st.one_of(st.lists(WORDS, max_size=60).map(" ".join), st.text(max_size=400))
SIZES = st.builds(ChunkingConfig, max_chars=st.integers(40, 120), overlap_chars=st.integers(0, 80))


@given(TEXTS)
def test_sentences_are_in_order_and_cover_all_text(text: str) -> None:
    """The copy drafter jumps to sentence starts: spans that overlap or skip would draft the wrong words."""
    spans = sentences(text)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert "".join(text[a:b] for a, b in spans).replace(" ", "").split() == "".join(text.split(" ")).split() or all(
        text[position].isspace() for position in set(range(len(text))) - {p for a, b in spans for p in range(a, b)}
    )


@pytest.mark.parametrize(("text", "expected"), [*SENTENCES["prose and docstrings"], *SENTENCES["other languages"]])
def test_sentences_of_prose_and_docstrings_in_any_language(text: str, expected: list[str]) -> None:
    """A split after "Dr." or inside a decimal cuts a quote in two. A Hindi book was one sentence; a German one broke after every
    ordinal."""
    assert [text[start:end] for start, end in sentences(text)] == expected


def test_neighbours_share_whole_sentences() -> None:
    """An overlap cut in the middle of a sentence starts passages with half a thought."""
    text = " ".join(f"Sentence number {n} is here." for n in range(20))
    passages = chunk(Document("d", text), ChunkingConfig(max_chars=90, overlap_chars=30))
    for before, after in itertools.pairwise(passages):
        shared = text[after.start : before.end]
        assert shared.startswith("Sentence") and shared.endswith("here.")


_ROWS = [(f"part {n}", f"{n} kg") for n in range(30)]
_TABLES = {
    "Markdown": "| Part | Weight |\n|:--|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in _ROWS),
    "grid": "+------+------+\n| Part | Weight |\n+======+======+\n"
    + "".join(f"| {a} | {b} |\n+------+------+\n" for a, b in _ROWS),
    "simple": "======== ======\nPart     Weight\n======== ======\n"
    + "".join(f"{a:8} {b}\n" for a, b in _ROWS)
    + "======== ======\n",
}


@pytest.mark.parametrize("table", _TABLES.values(), ids=_TABLES)
def test_every_passage_of_a_table_has_its_header(table: str) -> None:
    """Rows without the names of their columns: "part 29, 29 kg" answered no question about weights."""
    document = Document("a", f"Before it.\n\n{table}\nAfter it.", headings=())
    before, *rows, after = chunk(document, ChunkingConfig(max_chars=200))
    assert (before.text, before.heading, after.text, after.heading) == ("Before it.", "", "After it.", "")
    assert len(rows) > 2 and {row.heading for row in rows} == {"Part | Weight"}
    assert [passage.heading for passage in chunk(document, ChunkingConfig(max_chars=5000))] == [""]


@pytest.mark.parametrize("kind", [BlockKind.TABLE, BlockKind.CODE])
def test_a_block_of_lines_is_whole_or_cut_between_lines(kind: BlockKind) -> None:
    """The last row of a price list without the names of its columns; a setting cut in its middle."""
    before, table = "It rained all day. " * 4, "".join(f"| part {n} | {n} kg |\n" for n in range(6))
    blocks = (Block(0, len(before), BlockKind.PARAGRAPH), Block(len(before) + 2, len(before) + 2 + len(table), kind))
    document = Document("a", f"{before}\n\n{table}", blocks=blocks)
    assert [passage.text for passage in chunk(document, ChunkingConfig(max_chars=130))][-1] == table.strip()
    for passage in chunk(document, ChunkingConfig(max_chars=50, overlap_chars=0)):
        assert not passage.text.startswith("| ") or all(line[-1] == "|" for line in passage.text.splitlines())


def test_no_text_stalls_the_search_for_tables() -> None:
    """Thirty bars with blanks took longer than anyone waits, and so did a line of blanks and rules that nothing closes."""
    code = """if True:
        from ragspec.retrieval.chunking.chunker import tables
        rules = (" ".join("==" if bit == "1" else "=" for bit in f"{n:016b}") for n in range(40_000))
        for text in ("a|b\\n--" + "| " * 30 + "x\\n", "a|b\\n--" + "|  " * 30 + "x\\n", " " * 1_000_000, "|--" * 300_000,
                     "a|b\\n--|" + " " * 400_000 + "x", "".join(f"{rule}\\nh\\n{rule}\\n" for rule in rules)):
            assert not list(tables(text))
    """
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, check=True)


def test_a_cut_never_parts_a_letter_from_its_accent() -> None:
    """A passage that begins with a combining mark shows a broken letter and matches nothing."""
    for text in ("e\u0301" * 200, "👩\u200d🚀" * 100):
        for passage in chunk(Document("d", text), ChunkingConfig(max_chars=41)):
            assert not unicodedata.combining(passage.text[0]) and passage.text[0] != "\u200d"
            assert passage.text[-1] != "\u200d"


@pytest.mark.parametrize("piece", [".", "a. ", "\n", "A.B.", 'x."'])
def test_time_grows_with_the_length_only(piece: str) -> None:
    """A run of dots made the sentence pattern quadratic: one such file stopped a whole build."""
    chunk(Document("d", piece * (200_000 // len(piece))), ChunkingConfig())


@pytest.mark.parametrize("text", SENTENCES["English"])
def test_what_abbreviates_elsewhere_still_ends_an_english_sentence(text: str) -> None:
    """Lists for seven languages at once made English sentences grow."""
    assert len(sentences(text)) == len(re.findall(r"[.](?= |$)", text))


HEADINGS = st.lists(
    st.builds(Heading, st.integers(0, 420), st.integers(1, 4), st.text("Title é", max_size=80)), max_size=8
)
GUIDE = (Path(__file__).with_name("files") / "guide.md").read_text().rstrip()


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
    assert texts[0] == "Guide\nPreface."
    assert texts[3:] == ["Guide > Remove\n## Remove", "Guide\nIndex\n# Index"]


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


@settings(deadline=None, max_examples=150)
@given(
    TEXTS, HEADINGS, st.text("Tt é", max_size=300), SIZES, st.sampled_from([None, words, letters]), st.integers(32, 80)
)
def test_passages_of_any_document_obey_both_limits(
    text: str, headings: list[Heading], title: str, config: ChunkingConfig, count: Any, max_tokens: int
) -> None:
    """What an encoder cuts silently is never found; a sentence lost between two sections neither; stripped or normalised
    passages give citations that point beside the quoted words; an overlap as long as a passage repeats it for ever."""
    document = Document("d", text, title, "source", headings=tuple(sorted(headings)))
    limit = None if count is None else TokenLimit(64, count)
    passages = chunk(document, config.model_copy(update={"max_tokens": max_tokens if limit else None}), limit)
    covered = {position for p in passages for position in range(p.start, p.end)}
    assert all(text[position].isspace() for position in range(len(text)) if position not in covered)
    assert all(b.start > a.start and b.end > a.end for a, b in itertools.pairwise(passages))
    assert [passage.ordinal for passage in passages] == list(range(len(passages)))
    for passage in passages:
        assert text[passage.start : passage.end] == passage.text == passage.text.strip() != ""
        assert len(passage.text) <= config.max_chars
        assert (passage.document_id, passage.title, passage.source) == ("d", title, "source")
        assert limit is None or limit.count([embedded_text(passage)])[0] <= min(64, max_tokens)
    if limit is not None:
        assert passages == chunk(document, config, replace(limit, max_tokens=min(64, max_tokens)))


@settings(deadline=None, max_examples=50)
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
    for sentence in ("今日は元気。", "Hello there. ", "\U0001f680" * 5 + ". ", "हिन्दी। ", "q" * 700):
        text = sentence * (2000 // len(sentence))
        passages = chunk(Document("d", text, "A title", headings=(Heading(0, 1, "Part"),)), ChunkingConfig(), limit)
        assert max(encoder.count_tokens([embedded_text(p) for p in passages])) <= 256
        assert sum(len(p.text) for p in passages) >= len(text.replace(" ", "")) * 0.9
