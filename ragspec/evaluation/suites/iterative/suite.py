"""The suite `iterative`: answers that retrieve every few tokens, with retrievals speculated in RaLMSpec's variants
and the product's.

Rows are local indexes, and slow indexes in another process. A slow index adds a constant time to every call, so that
a lookup costs b/a = 0.3, 1, 10 or 40 steps of decoding. Columns are the variants.

    >>> with load_engine(target, engine_config(), drafting) as engine:
    ...     IterativeSuite(settings, engine, encoder, iterative_plan(quick=True), tick).measure()["rows"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ragspec.config import DenseConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document
from ragspec.engine.engine import Engine
from ragspec.evaluation.datasets import RagList
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites.iterative.knnlm import KnnPlan, OpenDatastore, RemoteKnn, measure_knnlm
from ragspec.evaluation.suites.iterative.report import METRICS, NOTES, draw_iterative, iterative_tables, with_headlines
from ragspec.evaluation.suites.iterative.rows import IndexUnderTest, table_rows
from ragspec.evaluation.suites.iterative.variants import BASELINE, PSA, TABLE, VARIANTS, Stopwatch, Workload
from ragspec.evaluation.timing import Tick
from ragspec.rag.iterative.policies import Flare, IterRetGen
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.manifest import DENSE
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.approximate import MIN_ROWS
from ragspec.retrieval.search.index_types import IndexLike, RetrievalMode

IN_FLIGHT = 8
_SLOW = 10.0
_PADDING_CHARS = 7_500_000
_NO_PADDING = (
    f"not measured: HNSW is for {MIN_ROWS:,} passages, and there is no data folder with openstax to fill up with"
)
_NOT_QUICK = f"not measured with --quick: to encode the {MIN_ROWS:,} passages that HNSW is for takes minutes"
_NOT_ELSEWHERE = "not measured: nothing was given to open an index elsewhere with"
_NOTE = (
    "every variant speculates only where a gain of 3 % is predicted; rows elsewhere: exact dense search in a process of its own, "
    "plus a stated constant service time a call, whatever it brings"
)


class RemoteIndex(NamedTuple):
    """An index in another process. After `slow_down(service_s)` every call takes so many seconds on top of its work."""

    searchable: IndexLike
    slow_down: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class RemoteOpeners:
    """Open an index for exact dense search, and a datastore of KNN-LM, in another process."""

    index: Callable[[Path, TextEncoder], AbstractContextManager[RemoteIndex]]
    datastore: OpenDatastore


@dataclass(frozen=True, slots=True)
class IterativePlan:
    """Sizes of the rows. `with_hnsw`: whether there are rows of HNSW. `remote`: b/a and the number of questions;
    `slow_variants`, `num_slow_runs`: of b/a = 10 and more, where most time is waiting."""

    num_local: int = 10
    with_hnsw: bool = True
    remote: tuple[tuple[float, int], ...] = ((0.3, 6), (1.0, 8), (10.0, 5), (40.0, 4))
    num_extra: int = 4
    num_runs: int = 3
    num_slow_runs: int = 2
    slow_variants: tuple[str, ...] = tuple(VARIANTS)
    max_tokens: int = 96
    seed: int = 0
    knnlm: KnnPlan = field(default_factory=KnnPlan)
    knnlm_elsewhere: KnnPlan = field(default_factory=KnnPlan)

    @property
    def num_questions(self) -> int:
        """Questions of the longest row and one warm-up question."""
        return 1 + max(self.num_local, self.num_extra, IN_FLIGHT, *(count for _, count in self.remote))

    def table(self, b_over_a: float | None = None) -> Workload:
        """The workload of all variants on a local index, or on a slow index."""
        count = self.num_local if b_over_a is None else dict(self.remote)[b_over_a]
        slow = b_over_a is not None and b_over_a >= _SLOW
        runs = min(self.num_runs, self.num_slow_runs) if slow else self.num_runs
        return Workload(TABLE, count, runs, self.slow_variants if slow else tuple(VARIANTS), max_tokens=self.max_tokens)

    def workloads(self, b_over_a: float) -> Iterator[Workload]:
        """All workloads at this b/a; those beyond the table compare the baseline and the product only."""
        yield (table := self.table(b_over_a))
        pair = replace(table, num_questions=self.num_extra, variants=(BASELINE, PSA))
        if b_over_a == _SLOW:
            yield replace(pair, name="In-Context RALM, T=1", temperature=1.0)
            yield replace(pair, name="FLARE, T=0", policy=Flare())
            yield replace(pair, name="Iter-RetGen, T=0", policy=IterRetGen())
        if b_over_a in (1.0, _SLOW):
            name = f"In-Context RALM, T=0, {IN_FLIGHT} in flight"
            yield replace(pair, name=name, num_questions=IN_FLIGHT, num_in_flight=IN_FLIGHT)


def iterative_plan(
    quick: bool = False, num_runs: int = 3, seed: int = 0, num_questions: int | None = None
) -> IterativePlan:
    """`num_questions` replaces the number of every row."""
    knnlm = KnnPlan(num_prompts=4, num_neighbours=(1, 8, 64, 1024), sampled=(), num_runs=num_runs, seed=seed)
    fewer = replace(knnlm, num_prompts=2, num_runs=1)
    plan = IterativePlan(num_runs=num_runs, seed=seed, knnlm=knnlm, knnlm_elsewhere=fewer)
    if quick:
        knnlm = replace(knnlm, num_entries=20_000, num_neighbours=(64,), num_prompts=2)
        plan = replace(plan, knnlm=knnlm, knnlm_elsewhere=replace(knnlm, num_prompts=1, num_runs=1, num_tokens=32))
        less = ((1.0, 1), (_SLOW, 2), (40.0, 1))
        smaller = replace(plan, num_local=2, remote=less, num_extra=1, max_tokens=32)
        plan = replace(smaller, with_hnsw=False, slow_variants=(BASELINE, PSA))
    if num_questions is None:
        return plan
    remote = tuple((b_over_a, num_questions) for b_over_a, _ in plan.remote)
    return replace(plan, num_local=num_questions, num_extra=num_questions, remote=remote)


@dataclass(frozen=True)
class IterativeSuite:
    """Without `settings.elsewhere` the result names the missing rows of slow indexes."""

    settings: Settings
    engine: Engine
    encoder: TextEncoder
    plan: IterativePlan
    tick: Tick

    def measure(self) -> Result:
        """All rows. Raises: InputError if data is missing, SaveError, RetrievalError, EngineError."""
        memory, plan = PeakMemory(), self.plan
        listed = self.settings.questions(plan.num_questions)
        store = self.settings.store(listed.documents, self.encoder, self.tick)
        approximate = self._approximate(listed) if plan.with_hnsw else None
        stopwatch = Stopwatch(self.engine, [q.text for q in listed.questions], plan.seed, self.tick)
        rows: list[Result] = []
        for place, index in self._here(store, approximate):
            rows += timed_rows(stopwatch, place, index, [plan.table()])
        memory.look()
        rows += self._remote_rows(stopwatch, store, step_s=1e-3 * rows[0]["a_ms"])
        return {
            "label": f"{listed.label}, {store.manifest.num_passages:,} passages",
            "note": _NOTE,
            "hnsw": None if approximate else _NO_PADDING if plan.with_hnsw else _NOT_QUICK,
            "elsewhere": None if self.settings.elsewhere else _NOT_ELSEWHERE,
            "num_prompts": len(listed.questions) - 1,
            "num_runs": plan.num_runs,
            "peak_pss_mb": memory.look(),
            "rows": rows,
        }

    def _here(self, store: Store, approximate: Store | None) -> Iterator[tuple[IndexUnderTest, IndexLike]]:
        """Exact dense search first."""
        yield IndexUnderTest("exact dense"), self._retriever(store, "dense")
        if approximate is not None:
            label = f"HNSW ({approximate.manifest.num_passages:,} passages)"
            yield IndexUnderTest(label), self._retriever(approximate, "dense")
        yield IndexUnderTest("BM25"), self._retriever(store, "sparse")
        yield IndexUnderTest("hybrid"), self._retriever(store, "hybrid")

    def _remote_rows(self, stopwatch: Stopwatch, store: Store, step_s: float) -> Iterator[Result]:
        """Rows of slow indexes. `step_s`: a local step of the baseline. The service time is b minus the search
        itself and the transport."""
        elsewhere = self.settings.elsewhere
        if elsewhere is None:
            return
        with elsewhere.index(store.index_dir, self.encoder) as (index, slow_down):
            own_s = stopwatch.lookup_s(index)
            for b_over_a, _ in self.plan.remote:
                service_s = max(0.0, b_over_a * step_s - own_s)
                slow_down(service_s)
                label = f"elsewhere, b/a = {b_over_a:g} (exact dense + {1e3 * service_s:.0f} ms stated)"
                place = IndexUnderTest(label, b_over_a, service_s)
                yield from timed_rows(stopwatch, place, index, self.plan.workloads(b_over_a))

    def _approximate(self, listed: RagList) -> Store | None:
        """The corpus filled up with textbooks to the size of HNSW; None with too few texts."""
        padding = list(textbooks(self.settings.data_dir)) if self.settings.data_dir else []
        if not padding:
            return None
        documents, config = [*listed.documents, *padding], IndexConfig(dense=DenseConfig(kind="hnsw"))
        store = self.settings.store(documents, self.encoder, self.tick, config)
        return store if any(DENSE in record.files for record in store.manifest.segments) else None

    def _retriever(self, store: Store, mode: RetrievalMode) -> Retriever:
        return Retriever(self.encoder, store, RetrieverConfig(mode=mode), follow=False)


def timed_rows(
    stopwatch: Stopwatch, place: IndexUnderTest, index: IndexLike, workloads: Iterable[Workload]
) -> Iterator[Result]:
    """Rows of every workload on one index."""
    for workload in workloads:
        timed = stopwatch.time(index, workload, f"{place.label.partition(' (')[0]}: {workload.name}")
        yield from table_rows(place, workload, timed)


def knnlm_part(settings: Settings, plan: IterativePlan, tick: Tick) -> Result:
    """KNN-LM over a local datastore, and over a slow datastore with a plan of its own.

    Nothing without data. Raises: InputError if the texts are missing, ModelError, SaveError.
    """
    if settings.data_dir is None:
        return {}
    elsewhere = settings.elsewhere
    remote = RemoteKnn(plan.knnlm_elsewhere, elsewhere.datastore) if elsewhere else None
    return measure_knnlm(settings.target, settings.data_dir, settings.cache_dir, plan.knnlm, tick, remote)


def textbooks(data_dir: Path) -> Iterator[Document]:
    """Modules of textbooks, about ten thousand passages; none without the folder."""
    num_chars = 0
    for path in sorted((data_dir / "openstax").glob("*.jsonl")):
        for number, document in enumerate(read_file(path, path.name)):
            num_chars += len(document.text)
            if num_chars > _PADDING_CHARS:
                return
            yield replace(document, id=f"{path.name}:{number}")  # Why: the file's own ids come twice


def run_iterative(settings: Settings, tick: Tick) -> Outcome:
    """Raises: InputError, ModelError, SaveError, RetrievalError."""
    plan = iterative_plan(settings.quick, settings.plan.num_runs, settings.plan.seed, settings.num_prompts)
    knnlm = knnlm_part(settings, plan, tick)
    encoder = Encoder.load(settings.encoder)
    engine, bitwise = open_engine(settings.target)
    with engine:
        result = IterativeSuite(settings, engine, encoder, plan, tick).measure()
    return Outcome({"bitwise": bitwise} | with_headlines(result, knnlm))


SUITE = Suite("iterative", run_iterative, METRICS, NOTES, iterative_tables, draw_iterative)
