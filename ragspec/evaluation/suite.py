"""The suites by name: what each loads, runs and reports. Reads no environment and prints nothing.

>>> outcome = run_suite("rag", Settings(TargetConfig(), data_dir, cache_dir, Plan(num_runs=1), quick=True), tick)
>>> outcome.result["speedup_vs_plain"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ragspec.config import DraftingConfig, EncoderConfig, EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.core import Message as Said
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import SamplerFactory
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import ConfigError, InputError, ModelError
from ragspec.evaluation.cases import RAG_PASSAGES, Case, grammar_cases, rag_cases
from ragspec.evaluation.datasets import (
    NUM_QUESTIONS,
    Question,
    RagList,
    cached_retriever,
    grammar_list,
    squad_list,
    stdlib_list,
)
from ragspec.evaluation.forced_answers import ForcedAnswers, answer_ids, gold_answers, read_answers
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.metrics import answer_scores, grammar_scores
from ragspec.evaluation.peers import load_peer
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.acceptance_bound import t1_bound
from ragspec.evaluation.suites.drafters.suite import DraftersSuite, drafters_plan
from ragspec.evaluation.suites.drafters.variants import Heads
from ragspec.evaluation.suites.generation import GenerationSuite, Measured, Plan, engine_config
from ragspec.evaluation.suites.grammar import GrammarPart, GrammarPlan, passes_saved
from ragspec.evaluation.suites.iterative.report import with_headlines
from ragspec.evaluation.suites.iterative.suite import Elsewhere, IterativeSuite, iterative_plan, knnlm_part
from ragspec.evaluation.suites.numerics import numerics_suite
from ragspec.evaluation.suites.retrieval.suite import RetrievalSuite, retrieval_plan
from ragspec.evaluation.suites.target import MAX_NEW_TOKENS, Generate, evaluate_target
from ragspec.evaluation.suites.verify_cost import Shape, verify_cost
from ragspec.evaluation.timing import SPECULATIVE, Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.rerank import Reranker, RerankerConfig
from ragspec.retrieval.retriever import Retriever
from ragspec.training.reference.text_format import Message

QUICK_QUESTIONS, QUICK_SENTENCES = 40, 20
GOLD = "gold"
SUITES = ("rag", "grammar", "numerics", "target", "retrieval", "iterative", "drafters", "verify_cost")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decides. `forced`: a file of answers, "gold", or nothing; `num_prompts` shortens the lists. `full`
    and `reranker`: of the suite retrieval; `elsewhere`: of the suite iterative; `heads`: a folder, of the suite drafters."""

    target: TargetConfig
    data_dir: Path | None
    cache_dir: Path
    plan: Plan = field(default_factory=Plan)
    quick: bool = False
    forced: str = ""
    peers: bool = True
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    num_prompts: int | None = None
    full: bool = False
    reranker: str = ""
    elsewhere: Elsewhere | None = None
    heads: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for the JSON line, and the timings behind it where the suite generates text."""

    result: Result
    measured: Measured | None = None


def run_suite(name: str, settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError for an unknown suite or one whose data is missing, and whatever loading raises."""
    run = (_rag, _grammar, _numerics, _target, _retrieval, _iterative, _drafters, _verify_cost)
    runners = dict(zip(SUITES, run, strict=True))
    if name not in runners:
        raise ConfigError(f"unknown suite {name!r}; there are: {', '.join(SUITES)}")
    return run_as(name, runners[name], settings, tick)


def run_as(name: str, run: Callable[[Settings, Tick], Outcome], settings: Settings, tick: Tick) -> Outcome:
    """Any suite's `run`, its result with what every result names. Raises: ConfigError for another suite's settings."""
    if settings.forced and name not in ("rag", "grammar"):
        raise ConfigError(f"forced answers are for the suites rag and grammar, not {name}")
    if (settings.full or settings.reranker) and name != "retrieval":
        raise ConfigError(f"--full and --reranker are for the suite retrieval, not {name}")
    if settings.heads and name != "drafters":
        raise ConfigError(f"--heads is for the suite drafters, not {name}")
    outcome = run(settings, tick)
    target = {"target": Path(settings.target.model).name, "dtype": settings.target.dtype}
    named = {"suite": name, "quick": settings.quick, "seed": settings.plan.seed} | target
    return Outcome(named | outcome.result, outcome.measured)


def open_engine(
    config: TargetConfig,
    make_sampler: SamplerFactory | None = None,
    drafting: DraftingConfig | None = None,
    planner_class: type[Planner] = Planner,
) -> tuple[Engine, bool]:
    """The engine a suite measures, and whether its numerics are bitwise. Raises: ModelError."""
    drafting = drafting or DraftingConfig()
    load = partial(load_engine, make_sampler=make_sampler, planner_class=planner_class)
    try:
        return load(config, engine_config(), drafting), config.exactness == "bitwise"
    except ModelError:
        fast = config.model_copy(update={"exactness": "fast"})
        return load(fast, engine_config(), drafting), False


def _rag(settings: Settings, tick: Tick) -> Outcome:
    count = settings.num_prompts or (QUICK_QUESTIONS if settings.quick else NUM_QUESTIONS)
    listed = squad_list(settings.data_dir, count) if settings.data_dir else stdlib_list(count)
    retriever = _retriever(listed, settings, tick)
    forced = ForcedAnswers() if settings.forced else None
    engine, bitwise = open_engine(settings.target, forced)
    with engine:
        prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
        cases = list(rag_cases(listed.questions, retriever, prompts))
        if forced is not None:
            force(forced, given_answers(settings.forced, listed.questions, cases), cases, engine)
        measured = measure(settings, engine, cases, forced, tick)
    result = {"label": _label(listed.label, forced), "bitwise": bitwise} | measured.result
    if forced is None:
        texts = [run.text for run in measured.greedy.runs[SPECULATIVE][0]]
        result["quality"] = answer_scores(listed.questions, texts, [case.passages for case in cases])
    return Outcome(result, measured)


def _grammar(settings: Settings, tick: Tick) -> Outcome:
    if settings.data_dir is None:
        raise ConfigError("the suite grammar needs a data folder with jfleg, squad and pie_errorify: give --data")
    per_part = settings.num_prompts or (QUICK_SENTENCES if settings.quick else None)
    sentences = grammar_list(settings.data_dir, per_part)
    forced = ForcedAnswers()
    own = forced if settings.forced else None
    engine, bitwise = open_engine(settings.target, forced)
    plan = GrammarPlan.of(settings.quick, settings.plan.num_runs, settings.plan.seed, settings.num_prompts)
    with engine:
        part = GrammarPart(engine, forced, settings.data_dir, plan, tick).measure()
        prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
        cases = list(grammar_cases(sentences, prompts))
        if own is not None:
            answers = {s.id: s.references[0] for s in sentences} if settings.forced == GOLD else None
            force(own, answers or read_answers(Path(settings.forced)), cases, engine)
        measured = measure(settings, engine, cases, own, tick)
    label = _label("JFLEG dev, corrupted sentences of 20-40 words, clean sentences", own)
    result = {"label": label, "bitwise": bitwise} | measured.result | part
    result["passes_saved"] = passes_saved(measured.greedy)
    result["identical"] = part["identical_corrections"] and measured.result["identical"] is not False
    if own is None:
        texts = [run.text for run in measured.greedy.runs[SPECULATIVE][0]]
        result["quality"] = grammar_scores(sentences, texts)
    return Outcome(result, measured)


def _numerics(settings: Settings, tick: Tick) -> Outcome:
    memory = PeakMemory()
    result = numerics_suite(settings.target, settings.plan.seed, settings.quick, tick)
    return Outcome(result | {"peak_pss_mb": memory.look()})


def _retriever(listed: RagList, settings: Settings, tick: Tick) -> Retriever:
    count = len(listed.documents)
    encoder = Encoder.load(settings.encoder)
    return cached_retriever(
        listed.documents, encoder, settings.cache_dir, progress=lambda done, _: tick("index (once)", done, count)
    )


def _target(settings: Settings, tick: Tick) -> Outcome:
    if settings.data_dir is None:
        raise ConfigError("the suite target needs a data folder: give --data")
    memory = PeakMemory()
    retriever = _retriever(stdlib_list(), settings, tick)

    def retrieve(question: str) -> list[str]:
        return [passage.text for passage in retriever.retrieve([question], RAG_PASSAGES).passages[0]]

    engine = load_engine(settings.target, EngineConfig(), DraftingConfig())
    num_questions, num_sentences = (QUICK_QUESTIONS, QUICK_QUESTIONS) if settings.quick else (500, 754)
    with engine:
        scores = evaluate_target(
            Path(settings.target.model),
            settings.data_dir,
            generate=engine_generate(engine, tick),
            retrieve=retrieve,
            num_questions=settings.num_prompts or num_questions,
            num_sentences=settings.num_prompts or num_sentences,
            seed=settings.plan.seed,
        )
    bitwise = settings.target.exactness == "bitwise"  # Why: loading would have failed otherwise
    return Outcome({"label": "held-out data", "quality": scores, "bitwise": bitwise, "peak_pss_mb": memory.look()})


def _retrieval(settings: Settings, tick: Tick) -> Outcome:
    if settings.data_dir is None:
        raise ConfigError("the suite retrieval needs a data folder with squad, squad_open and cranfield: give --data")
    plan = retrieval_plan(
        settings.quick, settings.full, settings.plan.num_runs, settings.plan.seed, settings.num_prompts
    )
    reranker = Reranker.load(RerankerConfig(model=settings.reranker)) if settings.reranker else None
    encoder = Encoder.load(settings.encoder)
    result = RetrievalSuite(settings.data_dir, settings.cache_dir, encoder, plan, tick, reranker).measure()
    return Outcome({"target": None, "dtype": "float32"} | result)


def _iterative(settings: Settings, tick: Tick) -> Outcome:
    plan = iterative_plan(settings.quick, settings.plan.num_runs, settings.plan.seed, settings.num_prompts)
    there, knnlm = settings.elsewhere, {}
    if settings.data_dir is not None:
        knnlm = knnlm_part(settings.target, settings.data_dir, settings.cache_dir, plan, tick, there)
    encoder = Encoder.load(settings.encoder)
    engine, bitwise = open_engine(settings.target)
    with engine:
        result = IterativeSuite(engine, encoder, settings.data_dir, settings.cache_dir, plan, tick, there).measure()
    return Outcome({"bitwise": bitwise} | with_headlines(result, knnlm))


def _drafters(settings: Settings, tick: Tick) -> Outcome:
    if settings.data_dir is None:
        raise ConfigError("the suite drafters needs a data folder with squad, sgd, mt_bench and jfleg: give --data")
    plan = drafters_plan(settings.quick, settings.plan.num_runs, settings.plan.seed, settings.num_prompts)
    heads = Heads.find(settings.heads)
    retriever = _retriever(squad_list(settings.data_dir, plan.num_cases), settings, tick)
    suite = DraftersSuite(open_engine, settings.target, settings.data_dir, retriever, heads, plan, tick)
    return Outcome(suite.measure())


def _verify_cost(settings: Settings, tick: Tick) -> Outcome:
    return Outcome({"target": None, "dtype": "bfloat16"} | verify_cost(Shape(), tick))


def measure(
    settings: Settings, engine: Engine, cases: Sequence[Case], forced: ForcedAnswers | None, tick: Tick
) -> Measured:
    """The generation suite, then the bound at T=1, for which the engine is closed."""
    peer = load_peer(settings.target) if settings.peers else None
    measured = GenerationSuite(engine, cases, settings.plan, peer=peer, forced=forced, tick=tick).measure()
    engine.close()
    if measured.sampled is not None:
        tick("bound at T=1", 0, 1)
        measured.result.update(
            t1_bound(
                engine.target,
                engine_config(),
                DraftingConfig(),
                cases,
                measured.greedy.acceptance_length(SPECULATIVE),
                settings.plan.seed,
            )
        )
        tick("bound at T=1", 1, 1)
    return measured


def given_answers(forced: str, questions: Sequence[Question], cases: Sequence[Case]) -> dict[str, str]:
    """Answers by case id, from a file or from the gold annotation. Raises: InputError."""
    if forced == GOLD:
        return gold_answers(questions, [case.passages for case in cases])
    return read_answers(Path(forced))


def force(forced: ForcedAnswers, answers: dict[str, str], cases: Sequence[Case], engine: Engine) -> None:
    """Give every case its answer. Raises: InputError for a case without one."""
    missing = [case.id for case in cases if case.id not in answers]
    if missing:
        raise InputError(f"{len(missing)} of {len(cases)} prompts have no forced answer, the first is {missing[0]!r}")
    for case in cases:
        forced.force(case.id, answer_ids(engine.target.tokenizer, answers[case.id], engine.target.eos_ids))


def engine_generate(engine: Engine, tick: Tick) -> Generate:
    """Greedy decoding of whole conversations by the engine; every message may be copied from."""
    tokenizer = engine.target.tokenizer
    prompts = PromptBuilder(tokenizer, engine.max_context_tokens)

    def generate(conversations: list[list[Message]]) -> list[str]:
        requests = []
        for i, messages in enumerate(conversations):
            ids = prompts.tokens([Said(m["role"], m["content"]) for m in messages])
            sources = tuple(CopySource(SourceKind.HISTORY, m["content"]) for m in messages)
            requests.append(Request(f"target-{i}", ids, SamplingParams(max_tokens=MAX_NEW_TOKENS), sources))
        completions = engine.generate(requests)
        tick("conversations", len(requests), len(requests))
        return [str(tokenizer.decode(list(c.token_ids), skip_special_tokens=True)) for c in completions]

    return generate


def _label(text: str, forced: ForcedAnswers | None) -> str:
    return text if forced is None else f"{text}; forced answers"
