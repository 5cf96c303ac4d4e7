"""Sentences that a person reads beside their passage without their label, and the count of the verdicts on the supported ones.

Sentences and labels are those of `altered_sentences`: 200 that the rule calls supported, and 50 alterations that it calls
unsupported, so that a reader cannot say yes to all. `supported_sentences.md` holds them, `supported_key.json` their labels. A
verdict is a line of a JSONL file: whether the passage says what the sentence says.

    {"sentence": "3f2a9c64d01b77e5", "verdict": "yes"}

A sentence is named by a digest of it and its passage, so a verdict never counts for another one than was read.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ragspec.core import Passage
from ragspec.disk import saving
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.answers.altered_sentences import Statement, alterations, labels_of, statements
from ragspec.evaluation.suites.chat_pairs import read_verdicts

NUM_SUPPORTED, NUM_OTHERS = 200, 50
ANSWERS = {"yes": True, "no": False}
INTRODUCTION = """# Does the passage say this?
Write one line a sentence to the file of verdicts: `{"sentence": "NAME", "verdict": "yes"}`, or `"no"`. Say "no" where the
sentence claims anything that the passage does not, or something else.
"""


class ReadSentence(NamedTuple):
    text: str
    passage: str
    is_supported: bool

    @property
    def name(self) -> str:
        return hashlib.sha256(json.dumps([self.text, self.passage]).encode()).hexdigest()[:16]


def sentences_to_read(passages: Sequence[Passage], seed: int) -> list[ReadSentence]:
    """Of each passage at most one, in an order that tells no label."""
    rng, found = random.Random(seed), statements(passages)
    supported = [ReadSentence(text, source.text, True) for text, source in islice(found, NUM_SUPPORTED)]
    mixed = [*supported, *islice(_unsupported(found, rng), NUM_OTHERS)]
    rng.shuffle(mixed)
    return mixed


def _unsupported(found: Iterator[Statement], rng: random.Random) -> Iterator[ReadSentence]:
    for statement in found:
        altered = [text for _, text in alterations(statement, rng)]
        lost = [text for text in altered if labels_of(text, statement.passage) == ["unsupported"]]
        if lost:
            yield ReadSentence(rng.choice(lost), statement.passage.text, False)


def write_sentences(read: Sequence[ReadSentence], folder: Path) -> None:
    """The file for reading and the key. Raises: SaveError."""
    sections = [f"## {each.name}\n\n~~~~text\n{each.passage}\n~~~~\n\n{each.text}\n" for each in read]
    key = {each.name: "supported" if each.is_supported else "unsupported" for each in read}
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "supported_sentences.md").write_text("\n".join([INTRODUCTION, *sections]), encoding="utf-8")
        (folder / "supported_key.json").write_text(json.dumps(key, indent=1))


def supported_precision(read: Sequence[ReadSentence], path: Path | None) -> Result:
    """Of the judged sentences that are labelled supported, the share that a reader confirms; None without a verdict on one.

    Raises: InputError for a line that is no verdict.
    """
    is_said = read_verdicts(path, "sentence", ANSWERS)
    judged = [is_said[each.name] for each in read if each.is_supported and each.name in is_said]
    return {"supported_precision": sum(judged) / len(judged) if judged else None, "supported_judged": len(judged)}
