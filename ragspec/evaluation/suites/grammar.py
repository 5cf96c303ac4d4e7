"""The suite `grammar`: how fast corrections are, whatever the target's skill, and how good they are.

* edit rates: correct sentences of 20 to 40 words with a share of words changed; the correct sentences are forced as answers
* document:   hundreds of such sentences at once, as a long text has them
* identity:   corrections of thousands of sentences with speculation and without, by `Grammar`
* quality:    GLEU of JFLEG through `Grammar` with its guards, and the share of words changed in clean text

The generation suite runs on the suite's prompt list after that.

    >>> run_suite("grammar", settings, tick).result["edit_rates"]
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass
from pathlib import Path

from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case, grammar_cases
from ragspec.evaluation.datasets import CLEAN, JFLEG, Sentence, correct_sentences, grammar_list
from ragspec.evaluation.metrics import grammar_scores, jfleg_gleu
from ragspec.evaluation.overrides import ForcedAnswers, answer_ids, read_answers
from ragspec.evaluation.report import (
    INK,
    OWN,
    Figures,
    Metric,
    Result,
    Table,
    label_axes,
    mark_level,
    nested,
    new_figure,
)
from ragspec.evaluation.suite import NUM_WARM_UP, Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites import generation_report
from ragspec.evaluation.suites.generation import (
    GOLD,
    GREEDY,
    batch_speeds,
    engine_decoders,
    force_answers,
    label_of,
    measure_engine,
    together,
)
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, Tick, Timings
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.grammar_errors import FILLERS, misspell

EDIT_RATES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
DOCUMENT_RATE = 0.1
QUICK_SENTENCES = 3
_SEED = 17
_TEXTS_AT_ONCE = 250
_LABEL = "JFLEG dev, corrupted sentences of 20-40 words, clean sentences"


@dataclass(frozen=True, slots=True)
class GrammarPlan:
    """Sizes of the parts. `num_sentences`: of each edit rate."""

    num_sentences: int
    num_document: int
    num_identity: int
    num_jfleg: int
    num_runs: int = 3
    seed: int = 0

    @classmethod
    def of(cls, quick: bool, num_runs: int, seed: int, num_prompts: int | None) -> GrammarPlan:
        """`num_prompts` bounds every list."""
        sizes = (4, 12, 40, 16) if quick else (60, 500, 2000, 754)
        rate, document, identity, jfleg = (min(size, num_prompts or size) for size in sizes)
        return cls(rate, document, identity, jfleg, num_runs, seed)


class GrammarPart:
    """`engine` must sample by `forced`; cases without a forced answer are decoded as usual."""

    def __init__(self, engine: Engine, forced: ForcedAnswers, data_dir: Path, plan: GrammarPlan, tick: Tick) -> None:
        self._engine, self._forced, self._plan, self._tick = engine, forced, plan, tick
        self._prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        self._grammar = Grammar(engine, self._prompts)
        self._data_dir = data_dir
        self._correct = correct_sentences(data_dir, max(plan.num_document, plan.num_sentences))

    def measure(self) -> Result:
        """Raises: InputError where the data is missing."""
        result: Result = {"edit_rates": {f"{rate:.0%}": self._at_rate(rate) for rate in EDIT_RATES}}
        result |= {"document": self._document(), **self._quality(), **self._identity()}
        return result | {"num_edit_rate_sentences": self._plan.num_sentences}

    def _at_rate(self, rate: float) -> Result:
        """One sentence at a time: decode time, plain over speculative, and saved forwards."""
        cases = self._edited_cases(rate, self._plan.num_sentences)
        decoders = engine_decoders(self._engine, self._plan.seed, GREEDY)
        stage = f"edit rate {rate:.0%}"
        timings = Timings.measure(decoders, cases, self._plan.num_runs, self._tick, stage, NUM_WARM_UP)
        return {
            "speedup_vs_plain": timings.ratio(PLAIN, SPECULATIVE),
            "passes_saved": passes_saved(timings),
            "acceptance_length": timings.acceptance_length(SPECULATIVE),
            "slowest_sentence": min(timings.of([i]).ratio(PLAIN, SPECULATIVE) or 1.0 for i in range(len(cases))),
        }

    def _document(self) -> Result:
        """All sentences at once: tokens a second with prompts, medians of the runs."""
        cases = self._edited_cases(DOCUMENT_RATE, self._plan.num_document)
        decoders = engine_decoders(self._engine, self._plan.seed, GREEDY)
        batches = together(decoders, cases, self._plan.num_runs, self._tick, "document")
        return {"num_sentences": len(cases), **batch_speeds(batches)}

    def _identity(self) -> Result:
        """Corrections with all edits, in batches, with speculation and without."""
        texts = self._texts(self._plan.num_identity)
        equal = 0
        for begin in range(0, len(texts), _TEXTS_AT_ONCE):
            chosen = texts[begin : begin + _TEXTS_AT_ONCE]
            fast, plain = (self._grammar.correct_many(chosen, speculation=on) for on in (True, False))
            equal += sum((a.corrected, a.edits) == (b.corrected, b.edits) for a, b in zip(fast, plain, strict=True))
            self._tick("identical corrections", begin + len(chosen), len(texts))
        counts = f"{equal}/{len(texts)}"
        return {"identical_corrections": equal == len(texts), "identical_corrections_counts": counts}

    def _quality(self) -> Result:
        sentences = grammar_list(self._data_dir, self._plan.num_jfleg, self._plan.num_jfleg)
        jfleg, clean = ([s for s in sentences if s.part == part] for part in (JFLEG, CLEAN))
        corrected = self._grammar.correct_many([s.text for s in jfleg])
        corrected_gleu, source_gleu = jfleg_gleu(jfleg, [each.corrected for each in corrected])
        untouched = self._grammar.correct_many([s.text for s in clean])
        num_changed = sum(max(len(e.original.split()), len(e.replacement.split())) for c in untouched for e in c.edits)
        return {
            "gleu": corrected_gleu,
            "gleu_source": source_gleu,
            "clean_edit_rate": num_changed / max(1, sum(len(s.text.split()) for s in clean)),
            "withheld_on_clean": sum(len(c.withheld) for c in untouched),
        }

    def _edited_cases(self, rate: float, count: int) -> list[Case]:
        """Prompts of edited sentences; the correct ones are forced as their answers."""
        rng = random.Random(f"{_SEED}:{rate}")
        target, right = self._engine.target, self._correct[:count]
        edited = [
            Sentence(f"rate-{rate}-{number}", "edited", edited_sentence(text, rate, rng), (text,))
            for number, text in enumerate(right)
        ]
        for sentence in edited:
            self._forced.force(sentence.id, answer_ids(target.tokenizer, sentence.references[0], target.eos_ids))
        return list(grammar_cases(edited, self._prompts))

    def _texts(self, count: int) -> list[str]:
        """Learners' sentences first, then edited sentences."""
        rng = random.Random(_SEED)
        learners = [s.text for s in grammar_list(self._data_dir, num_jfleg=754)]
        rest = correct_sentences(self._data_dir, max(0, count - len(learners)))
        return [*learners, *(edited_sentence(text, DOCUMENT_RATE, rng) for text in rest)][:count]


def passes_saved(timings: Timings) -> float:
    """Forwards of plain decoding over those of speculative decoding, the prompt's forward included."""
    plain, fast = (sum(run.num_steps for run in timings.runs[name][0]) for name in (PLAIN, SPECULATIVE))
    return plain / max(1, fast)


def edited_sentence(text: str, rate: float, rng: random.Random) -> str:
    """The sentence with a share of its words misspelt, deleted, inserted or inflected."""
    words = text.split(" ")
    for at in sorted(rng.sample(range(len(words)), round(rate * len(words))), reverse=True):
        way, word = rng.randrange(4), words[at]
        if way == 0 and len(word) > 3 and word.isalpha():
            words[at] = misspell(word, rng)
        elif way == 1:
            del words[at]
        elif way == 2:
            words.insert(at, rng.choice(FILLERS))
        else:
            words[at] = word[:-1] if word.endswith("s") else f"{word}s" if word.isalpha() else rng.choice(FILLERS)
    return " ".join(words)


METRICS = (
    *generation_report.METRICS,
    Metric("passes_saved", "forwards of plain decoding over those of speculative decoding, T=0, one request"),
    Metric("gleu", "GLEU of JFLEG dev, corrected with all guards, 0 to 100"),
    Metric("gleu_source", "the same of the untouched sentences"),
    Metric("clean_edit_rate", "words changed of 1 in sentences that are correct"),
    Metric("identical_corrections", "corrections and edits the same with speculation and without"),
)


def run_grammar(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, ModelError."""
    data_dir = settings.require_data("jfleg, squad and pie_errorify")
    sentences = grammar_list(data_dir, settings.num_prompts or (QUICK_SENTENCES if settings.quick else None))
    forced = ForcedAnswers()
    given = forced if settings.forced else None
    engine, bitwise = open_engine(settings.target, forced)
    plan = GrammarPlan.of(settings.quick, settings.plan.num_runs, settings.plan.seed, settings.num_prompts)
    with engine:
        part = GrammarPart(engine, forced, data_dir, plan, tick).measure()
        prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
        cases = list(grammar_cases(sentences, prompts))
        if given is not None:
            gold = {s.id: s.references[0] for s in sentences} if settings.forced == GOLD else None
            force_answers(given, gold or read_answers(Path(settings.forced)), cases, engine)
        measured = measure_engine(settings, engine, cases, given, tick)
    result = {"label": label_of(_LABEL, given), "bitwise": bitwise} | measured.result | part
    result["passes_saved"] = passes_saved(measured.greedy)
    result["identical"] = part["identical_corrections"] and measured.result["identical"] is not False
    if given is None:
        texts = [run.text for run in measured.greedy.runs[SPECULATIVE][0]]
        result["quality"] = grammar_scores(sentences, texts)
    return Outcome(result, measured)


def grammar_tables(result: Result) -> dict[str, Table]:
    return nested(result, "edit_rates", "document") | generation_report.generation_tables(result)


def draw_grammar(outcome: Outcome, title: str) -> Figures:
    """`grammar_edit_rates`, and the figures of the generation suite."""
    rates = {rate: each["speedup_vs_plain"] for rate, each in outcome.result["edit_rates"].items()}
    points = {float(rate.rstrip("%")): speedup for rate, speedup in rates.items() if speedup is not None}
    figure, axes = new_figure(7.0, 4.2, textwrap.fill(title, 68))
    axes.plot([*points], [*points.values()], color=OWN, marker="o", markersize=5)
    for point in points.items():
        axes.annotate(f"{point[1]:.1f}", point, (0, 7), textcoords="offset points", ha="center", color=INK)
    mark_level(axes, 1.0, "plain decoding")
    axes.set_ylim(0, 1.25 * max(*points.values(), 1.0))
    label_axes(
        axes,
        "words changed by the correction (%), sentences of 20 to 40 words, forced answers",
        "speed-up of decoding (times)",
    )
    return {"grammar_edit_rates": figure} | generation_report.draw_generation(outcome, title)


SUITE = Suite("grammar", run_grammar, METRICS, tables=grammar_tables, draw=draw_grammar, options=("forced",))
