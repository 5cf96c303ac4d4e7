"""Arithmetic from timed answers to the rows and headlines of the suite `iterative`. Nothing is timed here.

>>> rows = list(table_rows(IndexUnderTest("exact dense"), workload, timed))
>>> headlines(rows, knnlm_rows=[])["slowdown_worst"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from ragspec.config import StrideConfig
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.iterative.variants import (
    BASELINE,
    PSA,
    TABLE,
    VARIANTS,
    TimedUnit,
    Workload,
    WorkloadTimes,
)
from ragspec.rag.answer import IterativeStats
from ragspec.retrieval.speculative.stride_costs import StrideCosts, StridePlan, StrideTiming, paper_optimal_plan

_STRIDES = StrideConfig()
_PREDICTION = ("optimum", "optimum_stride", "share_of_optimum", "optimum_of_answers", "share_of_optimum_of_answers")


@dataclass(frozen=True, slots=True)
class IndexUnderTest:
    """An index as a row names it. `b_over_a` and `service_s` were set for a slow index; None for a local index."""

    label: str
    b_over_a: float | None = None
    service_s: float | None = None


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """A variant and the baseline on the same units: `takes[unit][run]`."""

    baseline: Sequence[Sequence[TimedUnit]]
    variant: Sequence[Sequence[TimedUnit]]

    @property
    def speedup(self) -> float:
        """Speed-up over all units together, each the median of its runs."""
        return sum(unit_seconds(self.baseline)) / sum(unit_seconds(self.variant))

    @property
    def median_speedup(self) -> float:
        """Median speed-up of a unit."""
        pairs = zip(unit_seconds(self.baseline), unit_seconds(self.variant), strict=True)
        return median(slow / fast for slow, fast in pairs)

    @property
    def judged(self) -> tuple[float, float]:
        """Right and wrong guesses."""
        return total(self.variant, "num_right"), total(self.variant, "num_wrong")

    def identical(self) -> tuple[int, int]:
        """(answers that equal the baseline's first run in tokens and text, all answers)."""
        same = [
            (one.token_ids, one.text) == (other.token_ids, other.text)
            for truth, runs in zip(self.baseline, self.variant, strict=True)
            for take in runs
            for one, other in zip(truth[0].answers, take.answers, strict=True)
        ]
        return sum(same), len(same)


def unit_seconds(takes: Sequence[Sequence[TimedUnit]]) -> list[float]:
    """The median seconds of each unit's runs."""
    return [median(take.seconds for take in runs) for runs in takes]


def run_stats(takes: Sequence[Sequence[TimedUnit]]) -> Iterator[IterativeStats]:
    for runs in takes:
        for take in runs:
            for answer in take.answers:
                assert answer.stats.iterative is not None
                yield answer.stats.iterative


def total(takes: Sequence[Sequence[TimedUnit]], name: str) -> float:
    """One counter, summed over all answers."""
    return sum(float(getattr(stats, name)) for stats in run_stats(takes))


def optimum(timing: StrideTiming, gamma: float, asynchronous: bool) -> StridePlan:
    """OS3's prediction for its best stride at these costs; `asynchronous`: verifications may run beside decoding."""
    costs = StrideCosts(timing, gamma)
    ways = (False, True) if asynchronous else (False,)
    plans = [paper_optimal_plan(costs, _STRIDES.max_stride, beside) for beside in ways]
    return max(plans, key=lambda plan: plan.gain)


def table_rows(place: IndexUnderTest, workload: Workload, timed: WorkloadTimes) -> Iterator[Result]:
    """A row for each variant but the baseline."""
    for name in workload.variants:
        if name == BASELINE:
            continue
        comparison = VariantComparison(timed.takes[BASELINE], timed.takes[name])
        row: Result = {
            "retriever": place.label,
            "workload": workload.name,
            "variant": name,
            "stated_b_over_a": place.b_over_a,
            "service_ms": None if place.service_s is None else 1e3 * place.service_s,
            "num_questions": sum(len(runs[0].answers) for runs in comparison.variant),
            "num_runs": workload.num_runs,
        }
        row |= _speed(comparison) | _guesses(comparison) | _costs(timed.apart, timed.beside[name])
        beside = place.b_over_a is not None and VARIANTS[name].asynchronous
        yield row | _prediction(workload, timed.apart, comparison, beside)


def _speed(comparison: VariantComparison) -> Result:
    num_identical, num_compared = comparison.identical()
    return {
        "baseline_s": sum(unit_seconds(comparison.baseline)),
        "seconds": sum(unit_seconds(comparison.variant)),
        "speedup": comparison.speedup,
        "median_speedup": comparison.median_speedup,
        "baseline_wait_share": total(comparison.baseline, "wait_s") / total(comparison.baseline, "total_s"),
        "wait_share": total(comparison.variant, "wait_s") / total(comparison.variant, "total_s"),
        "num_identical": num_identical,
        "num_compared": num_compared,
        "identical": num_identical == num_compared,
    }


def _guesses(comparison: VariantComparison) -> Result:
    strides = [stride for stats in run_stats(comparison.variant) for stride in stats.strides]
    right, wrong = comparison.judged
    kept, lost = total(comparison.variant, "num_kept_tokens"), total(comparison.variant, "num_lost_tokens")
    return {
        "num_rounds": total(comparison.variant, "num_rounds"),
        "num_lookups": total(comparison.variant, "num_lookups"),
        "gamma": right / (right + wrong) if right + wrong else None,
        "mean_stride": mean(strides) if strides else None,
        "num_kept_tokens": kept,
        "num_lost_tokens": lost,
        "kept_after_mismatch": kept / lost if lost else None,
    }


def _costs(timing: StrideTiming, beside: StrideTiming | None) -> Result:
    step_s, lookup_s = timing.step_s, timing.verification_s(1)
    return {
        "a_ms": 1e3 * step_s,
        "b_ms": 1e3 * lookup_s,
        "b_over_a": lookup_s / step_s,
        "b_8_over_b": timing.verification_s(8) / lookup_s,
        "a_beside_ms": 1e3 * beside.step_s if beside else None,
        "b_beside_ms": 1e3 * beside.verification_s(1) if beside else None,
    }


def _prediction(workload: Workload, timing: StrideTiming, comparison: VariantComparison, asynchronous: bool) -> Result:
    """Predictions with the scheduler's estimate of gamma, which is never 1. Without any guess (even right guesses
    would not pay), the prediction for right guesses."""
    if not workload.has_optimum:
        return dict.fromkeys(_PREDICTION)
    right, wrong = comparison.judged
    gamma = (right + 0.5) / (right + wrong + 1.0) if right + wrong else _STRIDES.gamma_max
    best = optimum(timing, gamma, asynchronous)
    gain = max(1.0, best.gain)
    bound = optimum_of_answers([stats.num_rounds for stats in run_stats(comparison.variant)], gain)
    return dict(
        zip(_PREDICTION, (gain, best.stride, comparison.speedup / gain, bound, comparison.speedup / bound), strict=True)
    )


def optimum_of_answers(num_rounds: Sequence[int], gain: float) -> float:
    """The gain in answers of these numbers of rounds, whose first round nothing can guess."""
    return sum(num_rounds) / sum(1.0 + (count - 1) / gain for count in num_rounds)


def headlines(rows: Sequence[Result], knnlm_rows: Sequence[Result]) -> Result:
    """The numbers of the JSON line; null where no row measures them."""
    table = [row for row in rows if row["variant"] == PSA and row["workload"] == TABLE]
    kept, lost = (sum(row[name] for row in rows) for name in ("num_kept_tokens", "num_lost_tokens"))
    same = [(row["num_identical"], row["num_compared"]) for row in rows]
    same += [(int(row["identical"]), 1) for row in knnlm_rows]
    return {
        "share_of_optimum_min": _extreme(min, [row["share_of_optimum"] for row in table]),
        "share_of_optimum_of_answers_min": _extreme(min, [row["share_of_optimum_of_answers"] for row in table]),
        "speedup_b_over_a_40": _extreme(min, [row["speedup"] for row in table if row["stated_b_over_a"] == 40.0]),
        "speedup_b_over_a_1": _extreme(min, [row["speedup"] for row in table if row["stated_b_over_a"] == 1.0]),
        "slowdown_worst": _extreme(min, [row["speedup"] for row in (*rows, *knnlm_rows)]),
        "knnlm_best": _extreme(max, [row["speedup"] for row in knnlm_rows if row["store"] == "remote"]),
        "kept_after_mismatch": kept / lost if lost else None,
        "identical": sum(equal for equal, _ in same) / sum(count for _, count in same),
        "identical_counts": {"answers equal": sum(row["num_identical"] for row in rows),
                             "answers compared": sum(row["num_compared"] for row in rows)},
    }  # fmt: skip


def _extreme(choose: Callable[[list[float]], float], values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None
