"""The suite `retrieval`: quality, speed and size of search, speed of building, and identity of results.

>>> RetrievalSuite(data_dir, cache_dir, encoder, retrieval_plan(quick=True), tick).measure()["recall10_squad_hybrid"]
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.datasets import cached_store
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import Result, goals_met
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.suites.retrieval.collections import (
    Collection,
    WholeTexts,
    cranfield_collection,
    nq_collection,
    squad_collection,
)
from ragspec.evaluation.suites.retrieval.identity import IdentityCheck
from ragspec.evaluation.suites.retrieval.quality import MODE_NAMES, PUBLISHED_NOTE, WHOLE, Quality, Table
from ragspec.evaluation.suites.retrieval.report import METRICS, NOTES, draw_retrieval, retrieval_tables
from ragspec.evaluation.suites.retrieval.speed import EXACT, FLAT, OWN, Kind, SpeedTable, speed_table
from ragspec.evaluation.suites.retrieval.timing import TimingPlan, build_speed
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.rerank import PairScorer, Reranker, RerankerConfig

Sizes = tuple[tuple[int, tuple[Kind, ...]], ...]

BOTH: tuple[Kind, ...] = ("hnsw", "ivf")
REFERENCE_ROWS = 100_000
_LABEL = "SQuAD with distractors, NQ, Cranfield; synthetic vectors and texts"
_NOT_RERANKED = "not ranking_scores: no reranker was given (--reranker PATH)"
_THREADS = "exact and FAISS Flat: all processors; HNSW and IVF, ours and FAISS's: one, where no other number is named"
_NO_MILLION_HNSW = "1,000,000 vectors: not built, one thread takes most of an hour"


@dataclass(frozen=True, slots=True)
class RetrievalPlan:
    """Sizes of the measurement. `num_questions` None: all; `sizes`: numbers of vectors with their approximate
    indexes."""

    num_questions: int | None = None
    num_nq_questions: int | None = None
    num_reranked: int = 100
    sizes: Sizes = ((10_000, BOTH), (100_000, BOTH))
    num_build_passages: int = 2_000
    num_identity_documents: int = 1_000
    num_identity_queries: int = 1_000
    timing: TimingPlan = field(default_factory=TimingPlan)


def retrieval_plan(
    quick: bool = False, full: bool = False, num_rounds: int = 3, seed: int = 0, num_questions: int | None = None
) -> RetrievalPlan:
    """`full`: a million vectors, 100,000 passages, 10,000 queries; most of an hour. Raises: ConfigError with
    `quick`."""
    if quick and full:
        raise ConfigError("--quick and --full exclude each other")
    timing = TimingPlan(num_rounds=num_rounds, seed=seed)
    plan = RetrievalPlan(num_questions, num_questions, timing=timing)
    if full:
        sizes: Sizes = (*plan.sizes, (1_000_000, ("ivf",)))
        return replace(plan, sizes=sizes, num_build_passages=100_000, num_identity_queries=10_000)
    if not quick:
        return plan
    return RetrievalPlan(
        num_questions or 500,
        num_questions or 300,
        num_reranked=20,
        sizes=((10_000, ()), (20_000, BOTH), (100_000, ())),
        num_build_passages=500,
        num_identity_documents=150,
        num_identity_queries=100,
        timing=replace(timing, num_queries=200, block_s=0.1),
    )


@dataclass(frozen=True)
class RetrievalSuite:
    """`cache_dir` keeps the indexes of the collections; everything else is built anew and removed."""

    data_dir: Path
    cache_dir: Path
    encoder: TextEncoder
    plan: RetrievalPlan
    tick: Tick
    reranker: PairScorer | None = None

    def measure(self) -> Result:
        """All parts as one result. Raises: InputError for missing data, ConfigError for a missing package,
        SaveError."""
        memory = PeakMemory()
        squad, held_out = squad_collection(self.data_dir)
        result: Result = {"label": _LABEL, "encoder": self.encoder.identity.id, "num_runs": self.plan.timing.num_rounds}
        result |= self._quality(squad, held_out)
        memory.look()
        result |= self._identity(squad)
        memory.look()
        result |= self._build() | self._speed()
        return result | {"peak_pss_mb": memory.look(), "goals": goals_met(result, METRICS)}

    def _quality(self, squad: Collection, held_out: frozenset[str]) -> Result:
        passages, abstracts = self._index(squad), self._index(cranfield := cranfield_collection(self.data_dir))
        nq = nq_collection(self.data_dir, squad.documents).first(self.plan.num_nq_questions)
        squad = squad.first(self.plan.num_questions)
        part = squad.only(held_out)
        tables = passages.tables(squad, {"squad_held_out": part}, self.plan.num_reranked, self.tick)
        tables |= passages.tables(nq, {}, self.plan.num_reranked, self.tick)
        tables |= abstracts.tables(cranfield, {}, self.plan.num_reranked, self.tick)
        counts = {each.name: len(each.queries) for each in (squad, nq, cranfield)}
        result: Result = {
            "num_prompts": sum(counts.values()),
            "num_questions": counts | {"squad_held_out": len(part.queries)},
        }
        result |= {"published": PUBLISHED_NOTE, "rerank": "" if self.reranker else _NOT_RERANKED}
        return result | _headlines(tables) | {f"quality_{name}": table for name, table in tables.items()}

    def _index(self, collection: Collection) -> Quality:
        encoder = WholeTexts(self.encoder)
        count = len(collection.documents)
        store = cached_store(
            collection.documents, encoder, self.cache_dir, WHOLE, lambda done, _: self.tick("index (once)", done, count)
        )
        return Quality(store, encoder, self.reranker)

    def _identity(self, squad: Collection) -> Result:
        documents = squad.documents[: self.plan.num_identity_documents]
        queries = list(squad.first(self.plan.num_identity_queries).queries.values())
        with self._folder() as folder:
            identical = IdentityCheck(self.encoder, documents, queries).measure(Path(folder), self.tick)
        return {
            "identical_across_batches": identical.share,
            "identity": identical.counts(),
            "num_identity_queries": len(queries),
        }

    def _build(self) -> Result:
        with self._folder() as folder:
            seed = self.plan.timing.seed
            build = build_speed(self.encoder, self.plan.num_build_passages, Path(folder), seed, self.tick)
        headlines = {"build_passages_per_s": build["passages_per_s"], "build_overhead": build["overhead_share"]}
        return headlines | {"build": build}

    def _speed(self) -> Result:
        tables = []
        for num_rows, kinds in self.plan.sizes:
            with self._folder() as folder:
                tables.append(speed_table(Path(folder), num_rows, kinds, self.plan.timing, self.tick))
        result = speed_headlines(tables)
        for table in tables:
            result |= {f"speed_{size(table.num_rows)}": table.columns, f"curves_{size(table.num_rows)}": table.curves}
        skipped = _NO_MILLION_HNSW if any(n >= 1_000_000 and "hnsw" not in k for n, k in self.plan.sizes) else None
        return result | {"hnsw_skipped": skipped, "search_threads": _THREADS}

    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(dir=self.cache_dir)
        except OSError as cause:
            raise SaveError(f"cannot write to {self.cache_dir}: {cause.strerror}") from cause


def speed_headlines(tables: list[SpeedTable]) -> Result:
    """The numbers of the JSON line, null for sizes not measured. Recall: of the most vectors."""
    result: Result = {}
    blocks = next((table.blocks for table in tables if table.num_rows == REFERENCE_ROWS), None)
    for name, key in ((EXACT, "exact"), (FLAT, "faiss_flat")):
        result[f"{key}_p50_ms_100k"] = blocks and blocks.p50_ms(name, 1)
        result[f"{key}_batch16_over_batch1"] = blocks and blocks.ratio((name, 16), (name, 1))
    for kind, name in OWN.items():
        largest: Any = max((t for t in tables if name in t.columns), key=lambda t: t.num_rows, default=None)
        result[f"{kind}_recall10"] = largest.columns[name]["recall@10"] if largest else None
        result[f"{kind}_recall10_rows"] = largest.num_rows if largest else None
    return result


def size(num_rows: int) -> str:
    """10000: "10k"."""
    return f"{num_rows // 1000}k" if num_rows >= 1000 else f"{num_rows}"


def _headlines(tables: dict[str, Table]) -> Result:
    squad, cranfield = tables["squad"], tables["cranfield"]
    modes = MODE_NAMES.values()
    result: Result = {f"recall10_squad_{name.lower()}": squad[name]["recall@10"] for name in modes}
    return result | {f"ndcg_cranfield_{name.lower()}": cranfield[name]["nDCG@10"] for name in (*modes, "bm25s")}


def run_retrieval(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, SaveError."""
    data_dir = settings.require_data("squad, squad_open and cranfield")
    runs, seed = settings.plan.num_runs, settings.plan.seed
    plan = retrieval_plan(settings.quick, settings.full, runs, seed, settings.num_prompts)
    reranker = Reranker.load(RerankerConfig(model=settings.reranker)) if settings.reranker else None
    encoder = Encoder.load(settings.encoder)
    result = RetrievalSuite(data_dir, settings.cache_dir, encoder, plan, tick, reranker).measure()
    return Outcome({"target": None, "dtype": "float32"} | result)


SUITE = Suite(
    "retrieval", run_retrieval, METRICS, NOTES, retrieval_tables, draw_retrieval, options=("full", "reranker")
)
