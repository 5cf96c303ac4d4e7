"""Edits as LanguageTool's clients see them, whatever the edits are."""

import random
from itertools import pairwise
from typing import Any

import pytest
from random_texts import random_parts, random_rewrite, random_text
from rewriting import rewriting

from ragspec.rag.citations import Utf16Offsets
from ragspec.rag.grammar.correction import CorrectionRequest, build_correction
from ragspec.rag.grammar.edit_filters import EditFilter
from services.languagetool.check import matches_of
from services.languagetool.corrector import LANGUAGES, detect_language


def applied(text: str, matches: list[dict[str, Any]]) -> str:
    """As a client written in Java or JavaScript applies them all."""
    units = text.encode("utf-16-le")
    for match in reversed(matches):
        start, end = 2 * match["offset"], 2 * (match["offset"] + match["length"])
        units = units[:start] + match["replacements"][0]["value"].encode("utf-16-le") + units[end:]
    return units.decode("utf-16-le")


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))])
def test_matches_lead_to_the_corrected_text(seed: int) -> None:
    """A match that is off by one behind an emoji, covers a tag, or overlaps the next; a word put in that nobody sees."""
    rng, num_matches, num_empty = random.Random(1000 + seed), 0, 0
    for number in range(100):
        grammar, engine = rewriting(random_rewrite(rng))
        parts = tuple(random_parts(rng)) if number % 2 else None
        text = "".join(part.text for part in parts) if parts else random_text(rng)
        ready = grammar.prepare(
            CorrectionRequest("m", text, edit_filter=rng.choice([EditFilter(), EditFilter(1.0)]), parts=parts)
        )
        correction = build_correction(ready, engine.generate(ready.requests))
        matches = matches_of(correction, ready.marked, Utf16Offsets(text))
        assert applied(text, matches) == correction.corrected
        assert all(a["offset"] + a["length"] <= b["offset"] for a, b in pairwise(matches))
        units = text.encode("utf-16-le")
        for match in matches:
            covered = units[2 * match["offset"] : 2 * (match["offset"] + match["length"])].decode("utf-16-le")
            context = match["context"]
            shown = context["text"].encode("utf-16-le")[2 * context["offset"] :][: 2 * context["length"]]
            assert shown.decode("utf-16-le") == covered.translate({9: " ", 10: " ", 13: " "})
            num_matches, num_empty = num_matches + 1, num_empty + (not covered)
        position = 0
        for part in parts or ():
            start, position = position, position + len(part.text)
            low, high = Utf16Offsets(text).units(start), Utf16Offsets(text).units(position)
            touching = [m for m in matches if m["length"] and m["offset"] < high and m["offset"] + m["length"] > low]
            assert not (part.is_markup and touching), "a match covers markup"
    assert num_matches > 50 and num_empty <= num_matches / 10


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The mill is old and it grinds no corn today.", "en-US"),
        ("He go to school every days because he like it.", "en-US"),
        ("Teh.", "en-US"),
        ("", "en-US"),
        ("\U0001f600 42", "en-US"),
        ("Die Mühle ist alt und das Wasser fließt nicht mehr zu ihr.", "de"),
        ("Le moulin est vieux et il ne moud plus de grain pour les gens.", "fr"),
        ("El molino es viejo y no muele el grano de los vecinos.", "es"),
        ("Мельница старая и больше не работает.", "ru"),
        ("水车很旧，不再磨谷物了。", "zh"),
        ("水車は古いです。", "ja"),
    ],
)
def test_other_languages_are_told_from_english(text: str, code: str) -> None:
    """German that is corrected as if it were bad English; a learner's English that is taken for no English."""
    found = detect_language(text)
    assert found.code == code and 0.0 <= found.confidence <= 1.0
    assert (found.code in LANGUAGES) == code.startswith("en")
