"""Measures one engine on one list of prompts: speed beside its peers, and whether every way of decoding writes the same.

All in one process on the same prompts and seeds. The order is: greedy runs with all peers, sampled runs, top-p, eight side by
side, prompts with nothing to copy; the engine is closed after that and the target looked at once more for the bound.

    >>> with load_engine(target, engine_config(), drafting) as engine:
    ...     measured = GenerationSuite(engine, cases, Plan()).measure()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragspec.config import EngineConfig
from ragspec.core import CopySource
from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case, nothing_to_copy_cases
from ragspec.evaluation.forced_answers import ForcedAnswers
from ragspec.evaluation.machine import PeakMemory, read_bandwidth, weight_bytes
from ragspec.evaluation.peers import LOOKUP_TOKENS, TransformersDecoder
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import (
    GENERATE,
    PLAIN,
    PROMPT_LOOKUP,
    SPECULATIVE,
    Decoder,
    EngineDecoder,
    Equality,
    Tick,
    Timings,
)

CONCURRENCY = 8
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
TOP_P: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
_NUM_WARM_UP = 6
_NOTHING_RUNS = 5
"""Fewest runs of what should make no difference: single runs of twelve prompts scatter by several percent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `num_runs`: repetitions whose median counts; `num_nothing`: prompts with nothing to copy."""

    num_runs: int = 3
    num_nothing: int = 12
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The result for the JSON line, and the timings it came from: `sampled` is None for forced answers."""

    result: Result
    greedy: Timings
    sampled: Timings | None


def engine_config() -> EngineConfig:
    """At most eight requests side by side; one alone is not affected. All threads, as the peers."""
    return EngineConfig(max_running=CONCURRENCY, adaptive_threads=False)


def _no_tick(stage: str, done: int, total: int) -> None:
    pass


class GenerationSuite:
    """`peer`: transformers' model of the same weights, or None for no peers; `forced`: answers given instead of decided."""

    def __init__(
        self,
        engine: Engine,
        cases: Sequence[Case],
        plan: Plan,
        *,
        peer: Any = None,
        forced: ForcedAnswers | None = None,
        tick: Tick = _no_tick,
    ) -> None:
        self._engine = engine
        self._cases = cases
        self._plan = plan
        self._peer = peer
        self._forced = forced
        self._tick = tick
        self._equality = Equality()
        self._memory = PeakMemory()

    def measure(self) -> Measured:
        """Everything that needs the engine; see the module for the order."""
        greedy = self._alone("T=0", GREEDY, self._plan.num_runs, self._peers())
        throughput = self._together("T=0", GREEDY, self._plan.num_runs, greedy)
        sampled = None
        if self._forced is None:
            sampled = self._alone("T=1", SAMPLED, self._plan.num_runs, {})
            self._together("T=1", SAMPLED, 1, sampled)
            self._together("top-p", TOP_P, 1, self._alone("top-p", TOP_P, 1, {}))
        result = speeds(greedy) | throughput
        result |= {"parts": self._parts(greedy)} if len({case.part for case in self._cases}) > 1 else {}
        result |= self._sampled_speeds(greedy, sampled)
        in_vain = [case.sources for case in self._cases[: self._plan.num_nothing]]
        result |= {"nothing_to_copy": self._nothing_to_copy([()]), "sources_in_vain": self._nothing_to_copy(in_vain)}
        result |= {"num_nothing_runs": self._num_nothing_runs}
        result |= roofline(self._engine, greedy)
        # Why none for forced answers: they are the same tokens whatever the forward computes
        identical = self._equality.identical if self._forced is None else None
        result |= {"identical": identical, "identical_counts": self._equality.as_text()}
        result |= {"num_prompts": len(self._cases), "num_runs": self._plan.num_runs, "seed": self._plan.seed}
        return Measured(result | {"peak_pss_mb": self._memory.look()}, greedy, sampled)

    @property
    def _num_nothing_runs(self) -> int:
        return max(_NOTHING_RUNS, self._plan.num_runs)

    def _engine_decoders(self, sampling: dict[str, Any]) -> dict[str, EngineDecoder]:
        ways = {SPECULATIVE: True, PLAIN: False}
        return {
            name: EngineDecoder(self._engine, speculation=speculation, seed=self._plan.seed, **sampling)
            for name, speculation in ways.items()
        }

    def _peers(self) -> dict[str, Decoder]:
        if self._peer is None:
            return {}
        return {
            GENERATE: TransformersDecoder(self._peer, self._engine, self._forced),
            PROMPT_LOOKUP: TransformersDecoder(
                self._peer, self._engine, self._forced, prompt_lookup_num_tokens=LOOKUP_TOKENS
            ),
        }

    def _alone(self, setting: str, sampling: dict[str, Any], num_runs: int, peers: dict[str, Decoder]) -> Timings:
        """One request at a time, after a few that are not counted: they compile kernels and fill the acceptance table."""
        decoders: dict[str, Decoder] = {**self._engine_decoders(sampling), **peers}
        Timings.measure(decoders, self._cases[:_NUM_WARM_UP], 1, lambda *_: None)
        timings = Timings.measure(
            decoders, self._cases, num_runs, lambda _, done, total: self._tick(f"{setting}, alone", done, total)
        )
        plain = timings.runs[PLAIN][0]
        for runs in timings.runs[SPECULATIVE]:
            self._equality.check(f"{setting} {SPECULATIVE} alone", plain, runs)
        for runs in timings.runs[PLAIN][1:]:  # the first is what all are compared with
            self._equality.check(f"{setting} {PLAIN} alone", plain, runs)
        self._memory.look()
        return timings

    def _together(self, setting: str, sampling: dict[str, Any], num_runs: int, alone: Timings) -> Result:
        """All cases, eight side by side: tokens a second with and without speculation, prompts included."""
        expected = alone.runs[PLAIN][0]
        rates: dict[str, list[float]] = {SPECULATIVE: [], PLAIN: []}
        for number in range(num_runs):
            for name, decoder in self._engine_decoders(sampling).items():
                together = decoder.together(self._cases)
                self._equality.check(f"{setting} {name} in batches of {CONCURRENCY}", expected, together.runs)
                rates[name].append(together.tokens_per_s)
            self._tick(f"{setting}, {CONCURRENCY} side by side", number + 1, num_runs)
        self._memory.look()
        gains = [a / b for a, b in zip(rates[SPECULATIVE], rates[PLAIN], strict=True)]
        return {
            "batch8_tokens_per_s": median(rates[SPECULATIVE]),
            "batch8_plain_tokens_per_s": median(rates[PLAIN]),
            "batch8_speedup_vs_plain": median(gains),
        }

    def _parts(self, greedy: Timings) -> dict[str, Result]:
        parts = dict.fromkeys(case.part for case in self._cases)
        chosen = {part: [i for i, case in enumerate(self._cases) if case.part == part] for part in parts}
        return {part: speeds(greedy.of(own)) | {"num_prompts": len(own)} for part, own in chosen.items()}

    def _sampled_speeds(self, greedy: Timings, sampled: Timings | None) -> Result:
        if sampled is None:
            return {}
        at_zero, at_one = greedy.ratio(PLAIN, SPECULATIVE), sampled.ratio(PLAIN, SPECULATIVE)
        return {
            "speedup_vs_plain_t1": at_one,
            "acceptance_length_t1": sampled.acceptance_length(SPECULATIVE),
            "tokens_per_s_t1": sampled.tokens_per_s(SPECULATIVE),
            "t1_over_t0": at_one / at_zero if at_one and at_zero else None,
        }

    def _nothing_to_copy(self, sources: Sequence[tuple[CopySource, ...]]) -> float | None:
        """Plain over speculative seconds of decoding, at T=1 on random prompts: 1 is no loss.

        `sources` are offered, and searched, in vain: the prompts do not hold them.
        """
        target, count = self._engine.target, self._plan.num_nothing
        cases = nothing_to_copy_cases(target.vocab_size, target.max_context_tokens, count, self._plan.seed, sources)
        stage = "sources in vain" if any(sources) else "nothing to copy"
        decoders = self._engine_decoders({**SAMPLED, "ignore_eos": True})
        Timings.measure(decoders, cases[:_NUM_WARM_UP], 1, lambda *_: None)
        timings = Timings.measure(
            decoders, cases, self._num_nothing_runs, lambda _, done, total: self._tick(stage, done, total)
        )
        for runs in timings.runs[SPECULATIVE]:
            self._equality.check(stage, timings.runs[PLAIN][0], runs)
        return timings.ratio(PLAIN, SPECULATIVE)


def speeds(greedy: Timings) -> Result:
    """The ratios of greedy decoding; None where a peer did not run."""
    return {
        "tokens_per_s": greedy.tokens_per_s(SPECULATIVE),
        "plain_tokens_per_s": greedy.tokens_per_s(PLAIN),
        "speedup_vs_plain": greedy.ratio(PLAIN, SPECULATIVE),
        "speedup_vs_plain_first_to_last": greedy.ratio(PLAIN, SPECULATIVE, Timings.first_to_last_s),
        "speedup_vs_generate": greedy.ratio(GENERATE, SPECULATIVE),
        "speedup_vs_prompt_lookup": greedy.ratio(PROMPT_LOOKUP, SPECULATIVE),
        "plain_vs_generate": greedy.ratio(GENERATE, PLAIN),
        "prompt_lookup_vs_generate": greedy.ratio(GENERATE, PROMPT_LOOKUP),
        "speedup_end_to_end": greedy.ratio(PLAIN, SPECULATIVE, Timings.end_to_end_s),
        "speedup_end_to_end_vs_generate": greedy.ratio(GENERATE, SPECULATIVE, Timings.end_to_end_s),
        "speedup_end_to_end_vs_prompt_lookup": greedy.ratio(PROMPT_LOOKUP, SPECULATIVE, Timings.end_to_end_s),
        "acceptance_length": greedy.acceptance_length(SPECULATIVE),
        "agrees_with_generate": greedy.agreement(GENERATE, SPECULATIVE),
    }


def roofline(engine: Engine, greedy: Timings) -> Result:
    """Bytes of weights over measured bandwidth: the fastest possible plain step, beside the measured one."""
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
