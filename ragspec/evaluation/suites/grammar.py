"""What correcting is worth whatever the target's skill, and what its corrections are worth: the grammar suite beyond speed.

* edit rates: correct sentences of 20 to 40 words with a given share of words changed; the correct ones are forced as answers
* document:   hundreds of such sentences at once, as one long text comes
* identity:   corrections of thousands of sentences with speculation and without, by `Grammar`, the target's own
* quality:    GLEU of JFLEG through `Grammar` with its guards, and the share of words changed in clean text

    >>> part = GrammarPart(engine, forced, data_dir, GrammarPlan(quick=True), tick)
    >>> part.measure()["edit_rates"]
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ragspec.engine.engine import Engine
from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.cases import Case, grammar_cases
from ragspec.evaluation.datasets import CLEAN, JFLEG, Sentence, correct_sentences, grammar_list
from ragspec.evaluation.forced_answers import ForcedAnswers, answer_ids
from ragspec.evaluation.plots import INK, OWN, new_figure, save_figure
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, Decoder, EngineDecoder, Tick, Timings
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.grammar_errors import FILLERS, misspell
from ragspec.training.grammar_metrics import gleu

EDIT_RATES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
DOCUMENT_RATE = 0.1
_SEED = 17
_NUM_WARM_UP = 6
_TEXTS_AT_ONCE = 250


@dataclass(frozen=True, slots=True)
class GrammarPlan:
    """How much is measured. `num_sentences`: of each edit rate."""

    num_sentences: int = 60
    num_document: int = 500
    num_identity: int = 2000
    num_jfleg: int = 754
    num_runs: int = 3
    seed: int = 0

    @classmethod
    def of(cls, quick: bool, num_runs: int, seed: int, num_prompts: int | None) -> GrammarPlan:
        """`num_prompts` bounds every list."""
        most = num_prompts or 10**6
        sizes = (16, 64, 200, 120) if quick else (60, 500, 2000, 754)
        rate, document, identity, jfleg = (min(size, most) for size in sizes)
        return cls(rate, document, identity, jfleg, num_runs, seed)


class GrammarPart:
    """`engine` decides by `forced` for those cases that have an answer there."""

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
        """One at a time: decode time, plain over speculative, and how many passes of the target are saved."""
        cases = self._edited_cases(rate, self._plan.num_sentences)
        decoders: dict[str, Decoder] = {name: self._decoder(name) for name in (SPECULATIVE, PLAIN)}
        Timings.measure(decoders, cases[:_NUM_WARM_UP], 1, lambda *_: None)
        timings = Timings.measure(
            decoders,
            cases,
            self._plan.num_runs,
            lambda _, done, total: self._tick(f"edit rate {rate:.0%}", done, total),
        )
        return {
            "speedup_vs_plain": timings.ratio(PLAIN, SPECULATIVE),
            "passes_saved": passes_saved(timings),
            "acceptance_length": timings.acceptance_length(SPECULATIVE),
            "slowest_sentence": min(timings.of([i]).ratio(PLAIN, SPECULATIVE) or 1.0 for i in range(len(cases))),
        }

    def _document(self) -> Result:
        """Side by side, as many as the engine runs; tokens a second with prompts, median of the runs."""
        cases = self._edited_cases(DOCUMENT_RATE, self._plan.num_document)
        rates: list[dict[str, float]] = []
        for number in range(self._plan.num_runs):
            rates.append({name: self._decoder(name).together(cases).tokens_per_s for name in (SPECULATIVE, PLAIN)})
            self._tick("document", number + 1, self._plan.num_runs)
        return {
            "num_sentences": len(cases),
            "speedup_vs_plain": median(rate[SPECULATIVE] / rate[PLAIN] for rate in rates),
            "tokens_per_s": median(rate[SPECULATIVE] for rate in rates),
            "plain_tokens_per_s": median(rate[PLAIN] for rate in rates),
        }

    def _identity(self) -> Result:
        """Whole corrections, edits and all, in batches with speculation and without."""
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
        sentences = grammar_list(self._data_dir, self._plan.num_jfleg, {JFLEG: self._plan.num_jfleg})
        jfleg, clean = ([s for s in sentences if s.part == part] for part in (JFLEG, CLEAN))
        corrected = [c.corrected for c in self._grammar.correct_many([s.text for s in jfleg])]
        sources, references = [s.text.split() for s in jfleg], [[r.split() for r in s.references] for s in jfleg]
        untouched = self._grammar.correct_many([s.text for s in clean])
        num_changed = sum(max(len(e.original.split()), len(e.replacement.split())) for c in untouched for e in c.edits)
        return {
            "gleu": gleu(sources, [text.split() for text in corrected], references),
            "gleu_source": gleu(sources, sources, references),
            "clean_edit_rate": num_changed / max(1, sum(len(s.text.split()) for s in clean)),
            "withheld_on_clean": sum(len(c.withheld) for c in untouched),
        }

    def _decoder(self, name: str) -> EngineDecoder:
        return EngineDecoder(self._engine, speculation=name == SPECULATIVE, seed=self._plan.seed, temperature=0.0)

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
        """Learners' sentences first, then edited ones."""
        rng = random.Random(_SEED)
        learners = [s.text for s in grammar_list(self._data_dir, None, {JFLEG: 754})]
        rest = correct_sentences(self._data_dir, max(0, count - len(learners)))
        return [*learners, *(edited_sentence(text, DOCUMENT_RATE, rng) for text in rest)][:count]


def passes_saved(timings: Timings) -> float:
    """Forwards of plain decoding over those of speculative decoding, of the same cases; the prompt's counts in both."""
    plain, fast = (sum(run.num_steps for run in timings.runs[name][0]) for name in (PLAIN, SPECULATIVE))
    return plain / max(1, fast)


def edited_sentence(text: str, rate: float, rng: random.Random) -> str:
    """The sentence with this share of its words misspelt, left out, replaced, or with another put in beside them."""
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


def rates_of(result: Result) -> Sequence[tuple[float, float]]:
    """(edit rate, speed-up) of a result, for a plot."""
    points = [(float(rate.rstrip("%")) / 100, each["speedup_vs_plain"]) for rate, each in result["edit_rates"].items()]
    return [(rate, speedup) for rate, speedup in points if speedup is not None]


def draw_grammar(result: Result, title: str, folder: Path) -> list[Path]:
    """Write `grammar_edit_rates.png`. Raises: ConfigError without matplotlib, SaveError."""
    path = folder / "grammar_edit_rates.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure, axes = new_figure(7.0, 4.2)
        rates, speedups = zip(*rates_of(result), strict=True)
        axes.plot([100 * rate for rate in rates], speedups, color=OWN, marker="o", markersize=5)
        for rate, speedup in zip(rates, speedups, strict=True):
            axes.annotate(
                f"{speedup:.1f}", (100 * rate, speedup), (0, 7), textcoords="offset points", ha="center", color=INK
            )
        axes.axhline(1.0, color=INK, linewidth=1.2)
        axes.annotate("plain decoding", (0.0, 1.0), (4, 3), textcoords="offset points", color=INK)
        axes.set_ylim(0, 1.25 * max(*speedups, 1.0))
        axes.set_xlabel("words changed by the correction (%), sentences of 20 to 40 words, forced answers")
        axes.set_ylabel("speed-up of decoding (times)")
        axes.set_title(textwrap.fill(title, 68), loc="left")
        save_figure(figure, path)
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return [path]
