"""Documentation questions over the documentation's own files: is the gold passage found, and is its absence noticed?

A question's gold passages are those that hold its quote. For the second measure the question's file is left out of the search, as
if it had been deleted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from ragspec.config import RetrieverConfig
from ragspec.core import Document, Passage, SamplingParams
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.wording import abstains
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.index_searcher import CALIBRATED_THRESHOLD
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.training.documentation import DocumentationQuestion, is_for_evaluation

TOP = 3
ANSWER_PARAMS = SamplingParams(max_tokens=96)


def evaluation_documents(folder: Path, quick: bool = False) -> list[Document]:
    """The documentation's files that nothing is trained on; `quick`: a fixed quarter of them."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".rst"))
    named = [(path, path.relative_to(folder).as_posix()) for path in paths]
    chosen = [(path, name) for path, name in named if is_for_evaluation(name) and (not quick or _is_in_quarter(name))]
    return [document for path, name in chosen for document in read_file(path, name)]


def _is_in_quarter(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 4 == 0


def measure_retrieval(
    store: Store, encoder: TextEncoder, questions: Sequence[DocumentationQuestion], tick: Tick
) -> Result:
    """Every question is asked twice, the second time without its file.

    `doc_top1`, `doc_top3`: the share of questions whose gold passage is among the first.
    `_before`: the same by reciprocal ranks alone. `wrongly_answered_ratio`: the share that
    does not abstain without its file; without abstention it is 1. `good_answers_lost`: of the questions whose gold passage is
    among the first three, the share that abstains.
    """
    retriever = Retriever(encoder, store, RetrieverConfig(abstain_below=CALIBRATED_THRESHOLD), follow=False)
    by_rank = Retriever(encoder, store, RetrieverConfig(fusion="rank"), follow=False)
    before = [rank_of(asked, by_rank.retrieve([asked.question], TOP).passages[0]) for asked in questions]
    ranks: list[int] = []
    seconds: list[float] = []
    lost = num_answered = 0
    for number, asked in enumerate(questions, 1):
        begin = perf_counter()
        found = retriever.retrieve([asked.question], TOP)
        seconds.append(perf_counter() - begin)
        rank = rank_of(asked, found.passages[0])
        ranks.append(rank)
        lost += rank < TOP and found.closeness[0] < CALIBRATED_THRESHOLD
        others = SearchScope("", parse_filter({"type": "ne", "key": "document.id", "value": asked.path}))
        num_answered += retriever.retrieve([asked.question], TOP, others).closeness[0] >= CALIBRATED_THRESHOLD
        tick("documentation questions", number, len(questions))
    num_found = sum(rank < TOP for rank in ranks)
    return {
        "doc_top1": sum(rank == 0 for rank in ranks) / len(ranks),
        "doc_top3": num_found / len(ranks),
        "doc_top1_before": sum(rank == 0 for rank in before) / len(ranks),
        "doc_top3_before": sum(rank < TOP for rank in before) / len(ranks),
        "good_answers_lost": lost / max(num_found, 1),
        "wrongly_answered_ratio": num_answered / len(ranks),
        "retrieval_p50_ms": 1e3 * median(seconds),
        "num_doc_questions": len(ranks),
        "num_doc_passages": store.manifest.num_passages,
    }


def measure_together(
    pipeline: Pipeline,
    retriever: Retriever,
    questions: Sequence[DocumentationQuestion],
    tick: Tick,
    abstain_below: float = CALIBRATED_THRESHOLD,
) -> Result:
    """`wrongly_answered_together` and `good_answers_lost_together`: as without "together", where the target abstains too.
    `wrongly_answered_target` and `good_answers_lost_target`: where the target alone abstains.

    The pipeline's target is asked every question, from the passages of `retriever`.
    """
    lost, answered, num_found = Counter[str](), Counter[str](), 0
    for number, asked in enumerate(questions, 1):
        others = {"type": "ne", "key": "document.id", "value": asked.path}
        for left_out in (None, others):
            answer = pipeline.ask(asked.question, ANSWER_PARAMS, filter=left_out)
            scope = SearchScope("", parse_filter(left_out)) if left_out else SearchScope()
            is_close = retriever.retrieve([asked.question], TOP, scope).closeness[0] >= abstain_below
            replies = not abstains(answer.text)
            ways = {"target": replies, "together": replies and is_close}
            if left_out:
                answered.update(ways)
            elif rank_of(asked, answer.passages) < TOP:
                num_found += 1
                lost.update({way: not own for way, own in ways.items()})
        tick("answers and abstentions", number, len(questions))
    found: Result = {"num_together": len(questions)}
    for way in ("target", "together"):
        found |= {f"wrongly_answered_{way}": answered[way] / len(questions)}
        found |= {f"good_answers_lost_{way}": lost[way] / max(num_found, 1)}
    return found


def rank_of(asked: DocumentationQuestion, passages: Sequence[Passage]) -> int:
    """The place of the first gold passage, from 0; `TOP` if there is none."""
    return next((n for n, passage in enumerate(passages) if asked.quote in passage.text), TOP)
