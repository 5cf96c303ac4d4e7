"""The grammar suite's own part: what is edited, what is counted, and that a difference is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ragspec.evaluation.overrides import ForcedAnswers
from ragspec.evaluation.report import write_figures
from ragspec.evaluation.suite import Outcome, Settings, open_engine
from ragspec.evaluation.suites.grammar import (
    EDIT_RATES,
    GrammarPart,
    GrammarPlan,
    draw_grammar,
    edited_sentence,
    passes_saved,
)
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, TimedGeneration, Timings
from ragspec.rag.grammar.edits import word_edits

SENTENCE = "Every spring the water carries sand and small stones from the hills down to the sea below the mills there."


def test_a_share_of_the_words_is_edited() -> None:
    """A curve over edit rates whose points are all the same rate; an edit that leaves its word as it was."""
    rng = random.Random(3)
    for rate in EDIT_RATES:
        count = round(rate * len(SENTENCE.split()))
        for _ in range(20):
            edits = word_edits(SENTENCE, edited_sentence(SENTENCE, rate, rng))
            assert (len(edits) > 0) == (count > 0) and len(edits) <= 2 * count
    assert edited_sentence(SENTENCE, 0.3, random.Random(1)) == edited_sentence(SENTENCE, 0.3, random.Random(1))


def test_passes_are_those_of_both_ways() -> None:
    """A ratio of tokens that is called a ratio of passes."""
    runs = {
        PLAIN: [[TimedGeneration((1,) * 10, 0.1, 1.0, 10), TimedGeneration((1,) * 6, 0.1, 1.0, 6)]],
        SPECULATIVE: [[TimedGeneration((1,) * 10, 0.1, 0.2, 3), TimedGeneration((1,) * 6, 0.1, 0.2, 1)]],
    }
    assert passes_saved(Timings(runs, [0.0, 0.0])) == 4.0


def test_the_part_measures_all_that_it_promises(settings: Settings, tmp_path: Path) -> None:
    """A key that is missing; corrections that are compared with themselves."""
    assert settings.data_dir is not None
    forced = ForcedAnswers()
    engine, _ = open_engine(settings.target, forced)
    plan = GrammarPlan.of(True, 1, 0, 2)
    with engine:
        part = GrammarPart(engine, forced, settings.data_dir, plan, lambda *_: None)
        result = part.measure()
        correct_many = part._grammar.correct_many
        part._grammar.correct_many = lambda texts, **options: correct_many(  # type: ignore[method-assign]
            texts if options.get("speculation", True) else [f"{text} " for text in texts]
        )
        assert part._identity()["identical_corrections_counts"] == "0/2"
    assert list(result["edit_rates"]) == ["0%", "5%", "10%", "15%", "20%", "25%", "30%"]
    assert result["edit_rates"]["0%"]["passes_saved"] > result["edit_rates"]["30%"]["passes_saved"] >= 1.0
    assert result["identical_corrections"] is True and result["identical_corrections_counts"] == "2/2"
    assert result["document"]["num_sentences"] == 1 or result["document"]["num_sentences"] == 2
    assert {"gleu", "gleu_source", "clean_edit_rate"} <= result.keys()
    (path,) = write_figures(lambda: draw_grammar(Outcome(result), "grammar"), tmp_path)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(("quick", "most", "expected"), [(True, None, 4), (False, None, 60), (False, 3, 3)])
def test_a_bound_on_prompts_bounds_every_list(quick: bool, most: int | None, expected: int) -> None:
    """`--num-prompts 3` that decodes two thousand sentences all the same."""
    plan = GrammarPlan.of(quick, 1, 0, most)
    assert plan.num_sentences == expected
    assert most is None or plan.num_identity == plan.num_document == plan.num_jfleg == most
