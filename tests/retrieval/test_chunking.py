"""Passages are slices of their document, made of whole sentences."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.retrieval.chunking import chunk, sentences

WORDS = st.sampled_from(
    [
        "The",
        "rain",
        "e.g.",
        "Dr.",
        "3.14",
        "U.S.",
        "fell.",
        "Why?",
        '"No!"',
        "雨。",
        "cafe\u0301",
        "a" * 90,
        "\n\n",
        "\n- ",
        " ",
        "\t",
    ]
)
TEXTS = st.one_of(st.lists(WORDS, max_size=60).map(" ".join), st.text(max_size=400))
SIZES = st.builds(ChunkingConfig, max_chars=st.integers(40, 120), overlap_chars=st.integers(0, 80))


@settings(deadline=None, max_examples=300)
@given(TEXTS, SIZES)
def test_every_passage_is_a_slice_no_longer_than_allowed(text: str, config: ChunkingConfig) -> None:
    """Stripped or normalised passages give citations that point beside the quoted words."""
    passages = chunk(Document("d", text, "title", "source"), config)
    for ordinal, passage in enumerate(passages):
        assert text[passage.start : passage.end] == passage.text
        assert 0 < len(passage.text) <= config.max_chars
        assert passage.text.strip() == passage.text
        assert (passage.ordinal, passage.document_id, passage.title, passage.source) == (
            ordinal,
            "d",
            "title",
            "source",
        )


@settings(deadline=None, max_examples=300)
@given(TEXTS, SIZES)
def test_passages_cover_all_text_and_always_go_forward(text: str, config: ChunkingConfig) -> None:
    """An overlap as long as a passage repeats it for ever; a lost sentence can never be found."""
    passages = chunk(Document("d", text), config)
    covered = {position for p in passages for position in range(p.start, p.end)}
    assert all(text[position].isspace() for position in range(len(text)) if position not in covered)
    assert all(b.start > a.start and b.end > a.end for a, b in itertools.pairwise(passages))


@given(TEXTS)
def test_sentences_are_in_order_and_cover_all_text(text: str) -> None:
    """The copy drafter jumps to sentence starts: spans that overlap or skip would draft the wrong words."""
    spans = sentences(text)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert "".join(text[a:b] for a, b in spans).replace(" ", "").split() == "".join(text.split(" ")).split() or all(
        text[position].isspace() for position in set(range(len(text))) - {p for a, b in spans for p in range(a, b)}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Smith paid 3.14 dollars. He left.", ["Dr. Smith paid 3.14 dollars.", "He left."]),
        ("Use tea, e.g. green tea. It helps.", ["Use tea, e.g. green tea.", "It helps."]),
        ("J. R. Smith wrote it. So did I. We know.", ["J. R. Smith wrote it.", "So did I.", "We know."]),
        ('"Really?" he asked. "Yes." Then silence.', ['"Really?" he asked.', '"Yes."', "Then silence."]),
        ("See Fig. 3 or No. 5. Done!", ["See Fig. 3 or No. 5.", "Done!"]),
        ("今日は。元気。", ["今日は。", "元気。"]),
        (
            "Return the sum.\n\n>>> add(1)\n1\n- first\n- second",
            ["Return the sum.", ">>> add(1)\n1", "- first", "- second"],
        ),
        ("A title\n\nand text", ["A title", "and text"]),
        ("wrapped\nline. Next one", ["wrapped\nline.", "Next one"]),
    ],
)
def test_sentences_of_prose_and_docstrings(text: str, expected: list[str]) -> None:
    """A split after "Dr." or inside a decimal cuts a quote in two."""
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


def test_no_text_stalls_the_search_for_tables() -> None:
    """Thirty bars with blanks took longer than anyone waits, and so did a line of blanks and rules that nothing closes."""
    code = """if True:
        from ragspec.retrieval.chunking.tables import tables
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


@pytest.mark.parametrize("text", ["." * 300_000, "a. " * 100_000, "\n" * 300_000, "A.B." * 100_000, 'x."' * 100_000])
def test_time_grows_with_the_length_only(text: str) -> None:
    """A run of dots made the sentence pattern quadratic: one such file stopped a whole build."""
    started_s = time.perf_counter()
    chunk(Document("d", text), ChunkingConfig())
    assert time.perf_counter() - started_s < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Am 3. Oktober regnete es. Im 19. Jahrhundert auch.",
            ["Am 3. Oktober regnete es.", "Im 19. Jahrhundert auch."],
        ),
        ("Er kam am 3. August. Das war gut.", ["Er kam am 3. August.", "Das war gut."]),
        ("Obst, z. B. Äpfel, d. h. Nahrung. Ende.", ["Obst, z. B. Äpfel, d. h. Nahrung.", "Ende."]),
        ("Um 44 v. Chr. Rom usw. und Nr. 5. Schluss.", ["Um 44 v. Chr. Rom usw. und Nr. 5.", "Schluss."]),
        ("Er sagte: „Ja.“ Dann ging er.", ["Er sagte: „Ja.“", "Dann ging er."]),
        ("M. Dupont et MM. Roux, p. ex. Paris. Fin.", ["M. Dupont et MM. Roux, p. ex. Paris.", "Fin."]),
        ("« Vraiment ? » Il part.", ["« Vraiment ? »", "Il part."]),
        (
            "El Sr. López vive en EE. UU. con Ud. Pedro. ¿Sí?",
            ["El Sr. López vive en EE. UU. con Ud. Pedro.", "¿Sí?"],
        ),
        ("Il sig. È qui. Il Dott. Rossi no.", ["Il sig.", "È qui.", "Il Dott. Rossi no."]),
        ("A Sra. Silva e o Exmo. Juiz. Fim.", ["A Sra. Silva e o Exmo. Juiz.", "Fim."]),
        ("Dhr. Jansen, bijv. Piet. Einde.", ["Dhr. Jansen, bijv. Piet.", "Einde."]),
        (
            "राम आया। सीता गई॥",
            ["राम आया।", "सीता गई॥"],
        ),
        (
            "كيف حالك؟! بخير. وأنت؟",
            [
                "كيف حالك؟!",
                "بخير.",
                "وأنت؟",
            ],
        ),
        (
            "پی۔ایچ ہے۔ ہاں۔",
            ["پی۔ایچ ہے۔", "ہاں۔"],
        ),
        (
            "Πού; Εδώ. A; B; α; β.",
            ["Πού;", "Εδώ.", "A; B; α; β."],
        ),
        ("ሰላም። ንዓ።", ["ሰላም።", "ንዓ።"]),
        (
            "Բարև։ Այո։",
            ["Բարև։", "Այո։"],
        ),
        ("ក។ខ ។ល។", ["ក។", "ខ ។ល។"]),
        ("မ။ ဟ။", ["မ။", "ဟ။"]),
        ("Table:\n| a | b |\n| c. d | e |\n| not a row", ["Table:", "| a | b |", "| c. d | e |\n| not a row"]),
    ],
)
def test_sentences_of_other_languages(text: str, expected: list[str]) -> None:
    """A Hindi book was one sentence; a German one broke after every ordinal."""
    assert [text[start:end] for start, end in sentences(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "I am 3. Tom is 4.",
        "It took 5 min. 3 were left.",
        "The set. Then art. Then the cap. End.",
        "It isn't. A cat came.",
        "I met Max. 5 came.",
    ],
)
def test_what_abbreviates_elsewhere_still_ends_an_english_sentence(text: str) -> None:
    """Lists for seven languages at once made English sentences grow."""
    assert len(sentences(text)) == len(re.findall(r"[.](?= |$)", text))
