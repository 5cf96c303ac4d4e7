"""The questions that the adapter is trained on, with their paragraphs, read from the data directory.

Owns the split of SQuAD dev by article, in the file's order: the first 36 are trained on, two are for probes during training, the
last ten are for evaluation. No paragraph or title of an article behind the first 36 is trained on, from whatever file.

    >>> question_paragraphs(Path("../shared/data"))[0].questions[0].quote
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences

NUM_TRAIN_ARTICLES, NUM_PROBE_ARTICLES, NUM_EVAL_ARTICLES = 36, 2, 10
MAX_QUOTE_WORDS, MAX_SHORT_WORDS = 60, 12
UNTITLED = ("pubmedqa",)
"""Files whose titles are no words."""
LEFT_OUT = ("qamr",)
"""Files that are not trained on: questions about single words of a sentence, which nobody asks of documents ("Which layers?")."""


class Question(NamedTuple):
    """`quote`: a sentence of its paragraph; `short_answer`: empty where none is known."""

    text: str
    quote: str
    short_answer: str


@dataclass
class Paragraph:
    """`group`: its article, which hard distractors come from. `absent`: questions that it does not answer. `is_whole`: a
    passage as the product cuts it, which is not cut again."""

    text: str
    group: str
    title: str = ""
    is_whole: bool = False
    questions: list[Question] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def question_paragraphs(data_dir: Path) -> list[Paragraph]:
    """All paragraphs with questions, each once; equal files give equal lists. Raises: OSError."""
    articles = squad_articles(data_dir)
    held_out = {_key(p["context"]) for a in articles[NUM_TRAIN_ARTICLES:] for p in a["paragraphs"]}
    held_out_titles = {a["title"].replace("_", " ") for a in articles[NUM_TRAIN_ARTICLES:]}
    found: dict[str, Paragraph] = {}
    rows = itertools.chain(_squad_rows(articles[:NUM_TRAIN_ARTICLES]), _other_rows(data_dir))
    for text, group, title, question, answer in rows:
        if _key(text) not in held_out and title not in held_out_titles:
            _add(found.setdefault(_key(text), Paragraph(text, group, title)), normalise(question), answer)
    texts = {row["id"]: row["text"] for row in json_lines(data_dir / "squad_open/corpus.jsonl")}
    for each in json_lines(data_dir / "squad_open/questions_unanswerable.jsonl"):
        if paragraph := found.get(_key(texts[each["gold"]])):
            paragraph.absent.append(normalise(each["question"]))
    return [p for p in found.values() if p.questions or p.absent]


def squad_articles(data_dir: Path) -> list[dict[str, Any]]:
    """The articles of SQuAD dev 1.1. Raises: OSError."""
    articles: list[dict[str, Any]] = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"]
    return articles


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file. Raises: OSError."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


_Row = tuple[str, str, str, str, str | None]
"""Text, group, title, question, and answer; None: the text holds no answer."""


def _squad_rows(articles: list[dict[str, Any]]) -> Iterator[_Row]:
    for article in articles:
        title = article["title"].replace("_", " ")
        for raw in article["paragraphs"]:
            for asked in raw["qas"]:
                answer = common_answer([each["text"] for each in asked["answers"]])
                yield normalise(raw["context"]), f"squad/{title}", title, asked["question"], answer


def _other_rows(data_dir: Path) -> Iterator[_Row]:
    for path in sorted(path for path in (data_dir / "qa_more").glob("*.jsonl") if path.stem not in LEFT_OUT):
        for row in json_lines(path):
            title = row["title"].replace("_", " ")
            answer = None if row["is_impossible"] else common_answer([each["text"] for each in row["answers"]])
            shown = "" if path.stem in UNTITLED else title
            yield normalise(row["context"]), f"{path.stem}/{title}", shown, row["question"], answer


def _add(paragraph: Paragraph, question: str, answer: str | None) -> None:
    """A question is left out unless a sentence holds its answer and is short enough to quote."""
    if answer is None:
        paragraph.absent.append(question)
        return
    answer, sentences = normalise(answer), split_sentences(paragraph.text)
    index = best_sentence(question, answer, sentences)
    quote = "" if index is None else sentences[index]
    if 2 < len(quote.split()) <= MAX_QUOTE_WORDS and not quote.endswith("?"):
        is_short = len(answer.split()) <= MAX_SHORT_WORDS and answer.rstrip(".") != quote.rstrip(".")
        paragraph.questions.append(Question(question, quote, answer if is_short else ""))


def _key(text: str) -> str:
    """Equal for one paragraph in several files."""
    return re.sub(r"\W", "", text)[:80].lower()
