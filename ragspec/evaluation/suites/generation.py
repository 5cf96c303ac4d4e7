"""Measures one engine on one list of prompts: speed beside its peers, and equality of all outputs.

Everything runs in one process on the same prompts and seeds, in this order: greedy runs with all peers, sampled runs, top-p,
eight requests side by side, prompts with nothing to copy. The engine is closed before the bound at T=1 is computed.

    >>> with load_engine(target, engine_config(), drafting) as engine:
    ...     measured = GenerationSuite(engine, cases, Repetitions()).measure()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragspec.core import CopySource
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.evaluation.cases import Case, nothing_to_copy_cases
from ragspec.evaluation.machine import PeakMemory, read_bandwidth, weight_bytes
from ragspec.evaluation.overrides import ForcedAnswers, answer_ids
from ragspec.evaluation.peers import load_peer, transformers_decoders
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import CONCURRENCY, Repetitions, Settings
from ragspec.evaluation.suites.acceptance_bound import t1_bound
from ragspec.evaluation.timing import (
    GENERATE,
    PLAIN,
    PROMPT_LOOKUP,
    SPECULATIVE,
    Decoder,
    EngineDecoder,
    Equality,
    Tick,
    TimedBatch,
    Timings,
    no_tick,
    take_turns,
)

GOLD = "gold"
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
TOP_P: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
_BATCH_RUNS = 3
"""Fewest runs of batches: reading the prompts is most of their time, and varies by more than speculation changes it."""


@dataclass(frozen=True, slots=True)
class MeasuredGeneration:
    """The result for the JSON line, and the timings behind it: `sampled` is None for forced answers."""

    result: Result
    greedy: Timings
    sampled: Timings | None


class GenerationSuite:
    """`peers`: decoders of other programs, which decode greedily beside; `forced`: answers given to the engine."""

    def __init__(
        self,
        engine: Engine,
        cases: Sequence[Case],
        plan: Repetitions,
        *,
        peers: Mapping[str, Decoder] | None = None,
        forced: ForcedAnswers | None = None,
        tick: Tick = no_tick,
    ) -> None:
        self._engine, self._cases, self._plan = engine, cases, plan
        self._peers, self._forced, self._tick = peers or {}, forced, tick
        self._equality, self._memory = Equality(), PeakMemory()
        self._nothing_runs = max(plan.num_nothing_runs, plan.num_runs)

    def measure(self) -> MeasuredGeneration:
        """All measurements that need the engine, in the order of the module's docstring."""
        plan, sampled = self._plan, None
        greedy = self._alone("T=0", GREEDY, plan.num_runs, self._peers)
        result = speeds(greedy) | self._batched("T=0", GREEDY, max(plan.num_runs, _BATCH_RUNS), greedy)
        if self._forced is None:
            sampled = self._alone("T=1", SAMPLED, plan.num_runs)
            self._batched("T=1", SAMPLED, 1, sampled)
            self._batched("top-p", TOP_P, 1, self._alone("top-p", TOP_P, 1))
            result |= _sampled_speeds(greedy, sampled)
        result |= self._parts(greedy)
        unrelated = [case.sources for case in self._cases[: plan.num_nothing]]
        result |= {
            "nothing_to_copy": self._nothing_to_copy([()]),
            "sources_in_vain": self._nothing_to_copy(unrelated),
            "num_nothing_runs": self._nothing_runs,
            **roofline(self._engine, greedy),
            # Why none for forced answers: they are the same tokens whatever the forward computes
            "identical": self._equality.identical if self._forced is None else None,
            "identical_counts": self._equality.as_text(),
            "num_prompts": len(self._cases),
            "num_runs": plan.num_runs,
            "seed": plan.seed,
            "peak_pss_mb": self._memory.look(),
        }
        return MeasuredGeneration(result, greedy, sampled)

    def _engine_decoders(self, sampling: dict[str, Any]) -> dict[str, EngineDecoder]:
        return engine_decoders(self._engine, self._plan.seed, sampling)

    def _alone(
        self, setting: str, sampling: dict[str, Any], num_runs: int, peers: Mapping[str, Decoder] | None = None
    ) -> Timings:
        """One request at a time, after warm-up runs: they compile kernels and fill the acceptance table."""
        decoders: dict[str, Decoder] = {**self._engine_decoders(sampling), **(peers or {})}
        num_warm_up = self._plan.num_warm_up
        timings = Timings.measure(decoders, self._cases, num_runs, self._tick, f"{setting}, alone", num_warm_up)
        plain = timings.runs[PLAIN][0]
        for name, tables in ((SPECULATIVE, timings.runs[SPECULATIVE]), (PLAIN, timings.runs[PLAIN][1:])):
            for runs in tables:
                self._equality.check(f"{setting} {name} alone", plain, runs)
        self._memory.look()
        return timings

    def _batched(self, setting: str, sampling: dict[str, Any], num_runs: int, alone: Timings) -> Result:
        """All cases, eight side by side: tokens a second with and without speculation, prompts included."""
        stage = f"{setting}, {CONCURRENCY} side by side"
        batches = together(self._engine_decoders(sampling), self._cases, num_runs, self._tick, stage)
        for name, runs in batches.items():
            for batch in runs:
                self._equality.check(f"{setting} {name} in batches of {CONCURRENCY}", alone.runs[PLAIN][0], batch.runs)
        self._memory.look()
        return {f"batch8_{key}": value for key, value in batch_speeds(batches).items()}

    def _parts(self, greedy: Timings) -> Result:
        """Speeds by part of the prompt list, where there are several."""
        parts = dict.fromkeys(case.part for case in self._cases)
        chosen = {part: [i for i, case in enumerate(self._cases) if case.part == part] for part in parts}
        rows = {part: speeds(greedy.of(own)) | {"num_prompts": len(own)} for part, own in chosen.items()}
        return {"parts": rows} if len(rows) > 1 else {}

    def _nothing_to_copy(self, sources: Sequence[tuple[CopySource, ...]]) -> float | None:
        """Plain over speculative seconds of decoding, at T=1 on random prompts that hold no source: 1 is no loss."""
        target, plan = self._engine.target, self._plan
        cases = nothing_to_copy_cases(
            target.vocab_size, target.max_context_tokens, plan.num_nothing, plan.seed, sources
        )
        stage = "sources in vain" if any(sources) else "nothing to copy"
        decoders = self._engine_decoders({**SAMPLED, "ignore_eos": True})
        timings = Timings.measure(decoders, cases, self._nothing_runs, self._tick, stage, plan.num_warm_up)
        for runs in timings.runs[SPECULATIVE]:
            self._equality.check(stage, timings.runs[PLAIN][0], runs)
        return timings.ratio(PLAIN, SPECULATIVE)


def measure_engine(
    settings: Settings, engine: Engine, cases: Sequence[Case], forced: ForcedAnswers | None, tick: Tick
) -> MeasuredGeneration:
    """The generation suite, then the bound at T=1. Closes the engine."""
    peers = transformers_decoders(load_peer(settings.target), engine, forced) if settings.peers else None
    measured = GenerationSuite(engine, cases, settings.plan, peers=peers, forced=forced, tick=tick).measure()
    engine.close()
    if measured.sampled is not None:
        tick("bound at T=1", 0, 1)
        length = measured.greedy.acceptance_length(SPECULATIVE)
        bound = t1_bound(engine.target, cases, length, settings.plan)
        measured.result.update(bound)
        tick("bound at T=1", 1, 1)
    return measured


def engine_decoders(engine: Engine, seed: int, sampling: dict[str, Any]) -> dict[str, EngineDecoder]:
    """The engine with speculation and without."""
    ways = {SPECULATIVE: True, PLAIN: False}
    return {name: EngineDecoder(engine, speculation=on, seed=seed, **sampling) for name, on in ways.items()}


def together(
    decoders: Mapping[str, EngineDecoder], cases: Sequence[Case], num_runs: int, tick: Tick, stage: str
) -> dict[str, list[TimedBatch]]:
    """All cases at once by each decoder, `num_runs` times in turns."""
    runs = take_turns({name: each.together for name, each in decoders.items()}, [cases], num_runs, tick, stage)
    return {name: [batch for (batch,) in table] for name, table in runs.items()}


def batch_speeds(batches: Mapping[str, Sequence[TimedBatch]]) -> Result:
    """Tokens a second with prompts, medians of the runs."""
    fast, plain = ([batch.tokens_per_s for batch in batches[name]] for name in (SPECULATIVE, PLAIN))
    return {
        "tokens_per_s": median(fast),
        "plain_tokens_per_s": median(plain),
        "speedup_vs_plain": median(a / b for a, b in zip(fast, plain, strict=True)),
    }


def speeds(greedy: Timings) -> Result:
    """The ratios of greedy decoding; None where a peer did not run."""
    ratio, end_to_end = greedy.ratio, Timings.end_to_end_s
    return {
        "tokens_per_s": greedy.tokens_per_s(SPECULATIVE),
        "plain_tokens_per_s": greedy.tokens_per_s(PLAIN),
        "speedup_vs_plain": ratio(PLAIN, SPECULATIVE),
        "speedup_vs_plain_first_to_last": ratio(PLAIN, SPECULATIVE, Timings.first_to_last_s),
        "speedup_vs_generate": ratio(GENERATE, SPECULATIVE),
        "speedup_vs_prompt_lookup": ratio(PROMPT_LOOKUP, SPECULATIVE),
        "plain_vs_generate": ratio(GENERATE, PLAIN),
        "prompt_lookup_vs_generate": ratio(GENERATE, PROMPT_LOOKUP),
        "speedup_end_to_end": ratio(PLAIN, SPECULATIVE, end_to_end),
        "speedup_end_to_end_vs_generate": ratio(GENERATE, SPECULATIVE, end_to_end),
        "speedup_end_to_end_vs_prompt_lookup": ratio(PROMPT_LOOKUP, SPECULATIVE, end_to_end),
        "acceptance_length": greedy.acceptance_length(SPECULATIVE),
        "agrees_with_generate": greedy.agreement(GENERATE, SPECULATIVE),
    }


def _sampled_speeds(greedy: Timings, sampled: Timings) -> Result:
    at_zero, at_one = greedy.ratio(PLAIN, SPECULATIVE), sampled.ratio(PLAIN, SPECULATIVE)
    return {
        "speedup_vs_plain_t1": at_one,
        "acceptance_length_t1": sampled.acceptance_length(SPECULATIVE),
        "tokens_per_s_t1": sampled.tokens_per_s(SPECULATIVE),
        "t1_over_t0": at_one / at_zero if at_one and at_zero else None,
    }


def roofline(engine: Engine, greedy: Timings) -> Result:
    """Bytes of weights over measured bandwidth: the fastest possible plain step, beside the measured step."""
    num_bytes = weight_bytes(engine.target)
    bandwidth = read_bandwidth(num_bytes)
    step_s = greedy.step_s(PLAIN)
    return {
        "roofline": {
            "weights_mb": num_bytes / 1e6,
            "bandwidth_gb_per_s": bandwidth / 1e9,
            "fastest_step_ms": num_bytes / bandwidth * 1e3,
            "plain_step_ms": step_s * 1e3 if step_s else None,
        }
    }


def force_answers(forced: ForcedAnswers, answers: dict[str, str], cases: Sequence[Case], engine: Engine) -> None:
    """Give every case its answer. Raises: InputError for a case without one."""
    missing = [case.id for case in cases if case.id not in answers]
    if missing:
        raise InputError(f"{len(missing)} of {len(cases)} prompts have no forced answer, the first is {missing[0]!r}")
    for case in cases:
        forced.force(case.id, answer_ids(engine.target.tokenizer, answers[case.id], engine.target.eos_ids))


def label_of(text: str, forced: ForcedAnswers | None) -> str:
    """The label of a result, which names forced answers."""
    return text if forced is None else f"{text}; forced answers"
