"""Whether a follow-up question finds its passage: as it was asked, made standalone by the rules, and by a person.

    >>> found = measure_follow_ups(Path("../shared/data"), Encoder.load(EncoderConfig()))
    >>> Console().print(found.table())
    >>> found.recall["canard"]
    {'as asked': 0.2, 'rules': 0.5, 'person': 0.6}

The rules were made looking at one half of the dialogues; `recall` is of the other. The corpora and what counts as found are
described in `ragspec.evaluation.follow_ups_data`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ragspec.config import RetrieverConfig
from ragspec.evaluation.follow_ups_data import FollowUp, FollowUpSet, Half, read_canard, read_sgd
from ragspec.rag.chat.rewrite_rules import standalone
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index

AS_ASKED, RULES, PERSON = "as asked", "rules", "person"
_BATCH = 128

Rewrite = Callable[[FollowUp], str]
Progress = Callable[[str, int, int], None]
"""Called with (what is being measured, queries looked up so far, queries in all)."""


@dataclass(frozen=True, slots=True)
class FollowUpRecall:
    """The part of the questions whose gold passage is among the first ones found, by who wrote the query.

    `num_gained` questions found it with the rules and not as they were asked, `num_lost` the other way round.
    """

    name: str
    half: Half
    num_questions: int
    recall: dict[str, float]
    num_gained: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class FollowUps:
    """`num_passages`: how many first ones count."""

    parts: tuple[FollowUpRecall, ...]
    num_passages: int

    @property
    def recall(self) -> dict[str, dict[str, float]]:
        """Of each set's held-out half."""
        return {part.name: part.recall for part in self.parts if part.half == "held_out"}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        table = Table(title=f"Follow-up questions: gold passage among the first {self.num_passages}")
        for column in ("dialogues", "half", "questions", AS_ASKED, RULES, PERSON, "gained", "lost"):
            table.add_column(column, justify="left" if column in ("dialogues", "half") else "right")
        for part in self.parts:
            found = [f"{part.recall[who]:.1%}" if who in part.recall else "-" for who in (AS_ASKED, RULES, PERSON)]
            half = part.half.replace("_", " ")
            table.add_row(part.name, half, str(part.num_questions), *found, str(part.num_gained), str(part.num_lost))
        return table


def measure_follow_ups(
    data: Path,
    encoder: TextEncoder,
    *,
    num_rows: int | None = None,
    num_passages: int = 3,
    retriever: RetrieverConfig | None = None,
    progress: Progress | None = None,
) -> FollowUps:
    """`data` holds the folders canard and sgd; `num_rows`: questions of each half at most, of corpora that stay whole.

    Raises: ConfigError if the data is not there.
    """
    sets = (read_canard(data / "canard" / "dev.json"), read_sgd(data / "sgd" / "dev.jsonl"))
    parts: list[FollowUpRecall] = []
    for each in sets:
        with tempfile.TemporaryDirectory(prefix="ragspec-follow-ups-") as folder:
            index = Path(folder) / "index"
            build_index(each.documents, index, encoder)
            config = retriever or RetrieverConfig()
            searched = Retriever(encoder, Store.open(index, encoder.identity), config)
            for half in _HALVES:
                parts.append(_measured(each, half, searched, num_rows, num_passages, progress))
    return FollowUps(tuple(parts), num_passages)


_HALVES: tuple[Half, ...] = ("tuned", "held_out")


def _measured(
    given: FollowUpSet, half: Half, retriever: Retriever, num_rows: int | None, k: int, progress: Progress | None
) -> FollowUpRecall:
    questions = spread([each for each in given.questions if each.half == half], num_rows)
    writers: dict[str, Rewrite] = {
        AS_ASKED: lambda each: each.question,
        RULES: lambda each: standalone(each.question, each.said),
    }
    if all(each.rewrite for each in questions):
        writers[PERSON] = lambda each: each.rewrite
    found: dict[str, list[bool]] = {}
    for number, (who, write) in enumerate(writers.items()):
        hits = found.setdefault(who, [])
        for at in range(0, len(questions), _BATCH):
            some = questions[at : at + _BATCH]
            passages = retriever.retrieve([write(each) for each in some], k).passages
            pairs = zip(some, passages, strict=True)
            hits += [any(p.document_id == each.gold for p in best) for each, best in pairs]
            if progress is not None:
                progress(f"{given.name}, {half}", number * len(questions) + len(hits), len(writers) * len(questions))
    pairs_of = list(zip(found[AS_ASKED], found[RULES], strict=True))
    return FollowUpRecall(
        given.name,
        half,
        len(questions),
        {who: sum(hits) / max(len(hits), 1) for who, hits in found.items()},
        sum(after and not before for before, after in pairs_of),
        sum(before and not after for before, after in pairs_of),
    )


def spread(questions: Sequence[FollowUp], most: int | None) -> list[FollowUp]:
    """At most so many, from all over the list."""
    if most is None or len(questions) <= most:
        return list(questions)
    return [questions[number * len(questions) // most] for number in range(most)]
