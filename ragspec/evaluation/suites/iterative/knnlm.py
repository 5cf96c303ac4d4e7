"""KNN-LM: one search a token against speculated searches, over a local datastore and over a slow datastore.

Articles of wikitext-2's validation part are the datastore, beginnings of its test articles are the prompts. Both ways
generate each prompt in turn (A B A B), and every token is compared. A ratio is formed inside one run; the median over
runs counts.

    >>> measure_knnlm(TargetConfig(), data_dir, cache_dir, KnnPlan(), tick)["knnlm"][0]["speedup"]
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from ragspec.config import TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.loading import check_numerics, choose_num_threads
from ragspec.engine.target import Target
from ragspec.errors import InputError, StoreError
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, Tick, take_turns
from ragspec.numerics.threads import AdaptiveThreads, num_processors, run_in_thread
from ragspec.rag.knnlm.build import build_datastore, hidden_state_keys, target_identity
from ragspec.rag.knnlm.generation import KnnGenerator, KnnStats
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.knnlm.datastore import Datastore
from ragspec.retrieval.knnlm.neighbours import DatastoreLike, KnnConfig, PrefetchRequest
from ragspec.retrieval.speculative.stride_costs import StrideCosts, StrideTiming, paper_optimal_plan


class SlowDatastore(DatastoreLike, Protocol):
    """A datastore whose calls can be made longer."""

    def slow_down(self, service_s: float) -> None:
        """From now on every call takes `service_s` seconds on top of its work, however many queries it brings."""
        ...


OpenDatastore = Callable[[Path], AbstractContextManager[SlowDatastore]]
"""folder -> the datastore in another process."""

_ARTICLE = re.compile(r"\n (?== [^=])")
_CONTEXT_TOKENS = 256
_NUM_KV_SLOTS = 4096
_NUM_SEARCHES, _LONG_SEARCH_S = 3, 0.3
"""A longer search is timed once."""
_LONGEST_STRIDE = 64
_LEAST_CHARS = 2_000
_TYPICAL_K = 8
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of states in timed searches; the prediction interpolates between them."""


@dataclass(frozen=True, slots=True)
class KnnPlan:
    """Sizes of the measurement. `sampled`: numbers of neighbours at temperature 1, too. `b_over_a`: of the slow
    datastore."""

    num_entries: int = 100_000
    num_prompts: int = 8
    num_prompt_tokens: int = 96
    num_tokens: int = 64
    num_neighbours: tuple[int, ...] = (1, 8, 64, 256, 1024)
    sampled: tuple[int, ...] = (64,)
    num_runs: int = 3
    b_over_a: float = 40.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RemoteKnn:
    """A datastore in another process, where most of the time is waiting. `plan`: for its rows; its entries and the first of its
    prompts are the local plan's."""

    plan: KnnPlan
    open: OpenDatastore


def measure_knnlm(
    target_config: TargetConfig,
    data_dir: Path,
    cache_dir: Path,
    plan: KnnPlan,
    tick: Tick,
    remote: RemoteKnn | None = None,
) -> Result:
    """A row for each datastore, number of neighbours and temperature. Without `remote` only the local datastore.

    Raises: InputError if the texts are missing, ModelError, SaveError.
    """
    target = Target.load(target_config, _NUM_KV_SLOTS)
    folder, store = _datastore(target, data_dir, cache_dir, plan)
    articles = islice(_articles(data_dir, "test.txt"), plan.num_prompts)
    prompts = [tuple(_ids(target, article)[: plan.num_prompt_tokens]) for article in articles]
    most = num_processors()
    tested = run_in_thread(lambda: check_numerics(target, most), most)
    first = run_in_thread(lambda: choose_num_threads(target, most), most)
    bench = _KnnBenchmark(target, prompts, plan, tick, AdaptiveThreads(most, first))
    rows = list(bench.rows("local", store))
    result: Result = {"knnlm_entries": len(store), "knnlm_bitwise": tested.passed, "knnlm": rows}
    if remote is not None:
        bench = replace(bench, plan=remote.plan, prompts=prompts[: remote.plan.num_prompts])
        with remote.open(folder) as slow:
            slow.slow_down(service_time(rows, remote.plan.b_over_a))
            service_s = service_time(rows, remote.plan.b_over_a, bench.step_ms(slow))
            slow.slow_down(service_s)
            rows += bench.rows("remote", slow)
        result["knnlm_service_s"] = service_s
    return result


def service_time(rows: Sequence[Result], b_over_a: float, step_ms: float | None = None) -> float:
    """Extra seconds a call until a search of one state takes `b_over_a` steps of `step_ms` (by default the local
    steps), at a typical k."""
    row = min(rows, key=lambda row: abs(row["k"] - _TYPICAL_K))
    return max(0.0, 1e-3 * (b_over_a * float(step_ms or row["a_ms"]) - float(row["b_ms"])))


class TimedPrompt(NamedTuple):
    """One prompt, generated one way."""

    seconds: float
    stats: KnnStats
    token_ids: tuple[int, ...]


class PairedRuns(NamedTuple):
    """Runs of both ways on every prompt: `[run][prompt]`."""

    baseline: Sequence[Sequence[TimedPrompt]]
    speculative: Sequence[Sequence[TimedPrompt]]

    def row(self, searches_s: Sequence[float]) -> Result:
        """The row of one setting; `searches_s`: seconds by the numbers of states in `SIZES`."""
        searched_s = total(self.baseline, "verification_s") / total(self.baseline, "num_verifications")
        step_s = total(self.baseline, "step_s") / max(1.0, total(self.baseline, "num_queries"))
        num_right, num_wrong = total(self.speculative, "num_right"), total(self.speculative, "num_wrong")
        longer_s = np.array(searches_s) - searches_s[0]  # [sizes]
        timing = StrideTiming(step_s, lambda size: searched_s + float(np.interp(size, SIZES, longer_s)))
        costs = StrideCosts(timing, num_right / max(1.0, num_right + num_wrong))
        optimum = paper_optimal_plan(costs, _LONGEST_STRIDE, asynchronous=False)
        baseline_s, speculative_s = (
            [sum(prompt.seconds for prompt in run) for run in runs] for runs in (self.baseline, self.speculative)
        )
        speedup = median(a / b for a, b in zip(baseline_s, speculative_s, strict=True))
        return {
            "baseline_s": median(baseline_s),
            "speculative_s": median(speculative_s),
            "speedup": speedup,
            "gamma": costs.gamma,
            "mean_stride": total(self.speculative, "num_queries") / total(self.speculative, "num_verifications"),
            "a_ms": 1e3 * costs.apart.step_s,
            "b_ms": 1e3 * searched_s,
            "b_over_a": searched_s / costs.apart.step_s,
            "b_16_over_b": costs.apart.verification_s(16) / searched_s,
            "optimum": optimum.gain,
            "optimum_stride": optimum.stride,
            "share_of_optimum": speedup / optimum.gain,
            "identical": _tokens(self.baseline) == _tokens(self.speculative),
        }


def total(runs: Sequence[Sequence[TimedPrompt]], name: str) -> float:
    """One counter, summed over all prompts and runs."""
    return sum(float(getattr(prompt.stats, name)) for run in runs for prompt in run)


def _tokens(runs: Sequence[Sequence[TimedPrompt]]) -> list[tuple[int, ...]]:
    return [prompt.token_ids for run in runs for prompt in run]


def _generate(generator: KnnGenerator, speculation: bool, request: Request) -> TimedPrompt:
    begin = time.perf_counter()
    completion, stats = generator.generate(request, speculation)
    return TimedPrompt(time.perf_counter() - begin, stats, completion.token_ids)


@dataclass(frozen=True, slots=True)
class _KnnBenchmark:
    target: Target
    prompts: Sequence[tuple[int, ...]]
    plan: KnnPlan
    tick: Tick
    threads: AdaptiveThreads

    def step_ms(self, store: DatastoreLike) -> float:
        """Milliseconds of a step between long searches; such steps are slower than those between short searches."""
        generator = KnnGenerator(self.target, store, KnnConfig(num_neighbours=_TYPICAL_K), threads=self.threads)
        stats = _generate(generator, False, self._requests(0.0)[0]).stats
        return 1e3 * stats.step_s / stats.num_queries

    def rows(self, name: str, store: DatastoreLike) -> Iterator[Result]:
        """Rows of all numbers of neighbours, greedy rows first."""
        states = run_in_thread(lambda: hidden_state_keys(self.target, self.prompts[0][:_CONTEXT_TOKENS]), 1)
        for temperature, some in ((0.0, self.plan.num_neighbours), (1.0, self.plan.sampled)):
            for k in some:
                config = KnnConfig(num_neighbours=k)
                generator = KnnGenerator(self.target, store, config, threads=self.threads)
                runs = self._runs(f"knnlm {name}, k = {k}, T = {temperature:g}", generator, temperature)
                searches_s = [_search_s(store, config, states[:size]) for size in SIZES]
                yield {"store": name, "k": k, "temperature": temperature} | runs.row(searches_s)

    def _runs(self, stage: str, generator: KnnGenerator, temperature: float) -> PairedRuns:
        ways = {PLAIN: partial(_generate, generator, False), SPECULATIVE: partial(_generate, generator, True)}
        runs = take_turns(ways, self._requests(temperature), self.plan.num_runs, self.tick, stage)
        return PairedRuns(runs[PLAIN], runs[SPECULATIVE])

    def _requests(self, temperature: float) -> list[Request]:
        plan = self.plan
        return [
            Request(f"{i}", ids, SamplingParams(temperature, max_tokens=plan.num_tokens, ignore_eos=True, seed=i))
            for i, ids in enumerate(self.prompts, plan.seed)
        ]


def _search_s(store: DatastoreLike, config: KnnConfig, queries: FloatArray) -> float:
    """Median seconds of one verification of these states, prefetch included; a long search counts alone."""
    wanted = PrefetchRequest(config.num_following, config.num_followed, np.empty(0, np.int64))
    seconds: list[float] = []
    while len(seconds) < _NUM_SEARCHES and (not seconds or seconds[0] < _LONG_SEARCH_S):
        begin = time.perf_counter()
        store.search(queries, config.num_neighbours, wanted)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def _datastore(target: Target, data_dir: Path, cache_dir: Path, plan: KnnPlan) -> tuple[Path, Datastore]:
    """Open the datastore of the articles, or build it. Raises: InputError, SaveError."""
    identity, texts = target_identity(target), []
    num_tokens = 0
    for article in _articles(data_dir, "valid.txt"):
        texts.append(article)
        num_tokens += len(_ids(target, article))
        if num_tokens >= plan.num_entries:
            break
    key = hashlib.sha256("\0".join([identity.fingerprint, f"{_CONTEXT_TOKENS}", *texts]).encode()).hexdigest()
    folder = cache_dir / f"knnlm-{key[:24]}"
    try:
        return folder, Datastore.open(folder, identity)
    except StoreError:
        build_datastore(texts, target, folder, _CONTEXT_TOKENS)
        return folder, Datastore.open(folder, identity)


def _articles(data_dir: Path, name: str) -> Iterator[str]:
    """Articles of at least a usual length. Raises: InputError."""
    try:
        text = (data_dir / "wikitext2" / name).read_text(encoding="utf-8")
    except OSError as cause:
        raise InputError(f"KNN-LM is measured on wikitext2/{name} of the data folder: {cause.strerror}") from cause
    return (article for article in _ARTICLE.split(text) if len(article) >= _LEAST_CHARS)


def _ids(target: Target, text: str) -> list[int]:
    ids: list[int] = target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
