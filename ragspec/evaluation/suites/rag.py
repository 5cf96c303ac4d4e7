"""The suite `rag`: answers to questions of held-out articles, with retrieved passages to copy from."""

from __future__ import annotations

from pathlib import Path

from ragspec.evaluation.cases import rag_cases
from ragspec.evaluation.datasets import NUM_QUESTIONS
from ragspec.evaluation.metrics import answer_scores
from ragspec.evaluation.overrides import ForcedAnswers, gold_answers, read_answers
from ragspec.evaluation.suite import QUICK_QUESTIONS, Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites.generation import GOLD, force_answers, label_of, measure_engine
from ragspec.evaluation.suites.generation_report import METRICS, draw_generation, generation_tables
from ragspec.evaluation.timing import SPECULATIVE, Tick
from ragspec.rag.prompt import PromptBuilder


def run_rag(settings: Settings, tick: Tick) -> Outcome:
    """Raises: InputError, ModelError, SaveError."""
    listed = settings.questions(settings.num_prompts or (QUICK_QUESTIONS if settings.quick else NUM_QUESTIONS))
    forced = ForcedAnswers() if settings.forced else None
    engine, bitwise = open_engine(settings.target, forced)
    with engine:
        retriever = settings.retriever(listed, tick)
        prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
        cases = list(rag_cases(listed.questions, retriever, prompts))
        if forced is not None:
            is_gold = settings.forced == GOLD
            gold = gold_answers(listed.questions, [case.passages for case in cases]) if is_gold else None
            force_answers(forced, gold or read_answers(Path(settings.forced)), cases, engine)
        measured = measure_engine(settings, engine, cases, forced, tick)
    result = {"label": label_of(listed.label, forced), "bitwise": bitwise} | measured.result
    if forced is None:
        texts = [run.text for run in measured.greedy.runs[SPECULATIVE][0]]
        result["quality"] = answer_scores(listed.questions, texts, [case.passages for case in cases])
    return Outcome(result, measured)


SUITE = Suite("rag", run_rag, METRICS, tables=generation_tables, draw=draw_generation, options=("forced",))
