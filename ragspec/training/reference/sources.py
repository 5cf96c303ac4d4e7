"""The questions that the adapter is trained on, with their paragraphs, read from the data directory.

Owns the split of SQuAD dev by article, in the file's order: the first 36 are trained on, two are for probes during training, the
last ten are for evaluation. No paragraph or title of an article behind the first 36 is trained on, from whatever file.

    >>> question_paragraphs(Path("../shared/data"))[0].questions[0].quote
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.training.documentation import is_for_evaluation
from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences

NUM_TRAIN_ARTICLES, NUM_PROBE_ARTICLES, NUM_EVAL_ARTICLES = 36, 2, 10
MAX_QUOTE_WORDS, MAX_SHORT_WORDS = 60, 12
CANARD_QUOTE_WORDS, NO_ANSWER = range(6, 50), "CANNOTANSWER"
UNTITLED = ("pubmedqa",)
"""Files whose titles are no words."""
LEFT_OUT = ("qamr",)
"""Files that are not trained on: questions about single words of a sentence, which nobody asks of documents ("Which layers?")."""


class Question(NamedTuple):
    """`quote`: words of its paragraph; `short_answer`: empty where none is known. `follow_up`: as asked in its dialogue."""

    text: str
    quote: str
    short_answer: str = ""
    follow_up: str = ""


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
    for name, row in _rows(data_dir, articles[:NUM_TRAIN_ARTICLES]):
        text, title = normalise(row["context"]), row["title"].replace("_", " ")
        if _key(text) not in held_out and (title not in held_out_titles or name in UNTITLED):
            new = Paragraph(text, f"{name}/{title}", "" if name in UNTITLED else title)
            _add(found.setdefault(_key(text), new), row)
    texts = {row["id"]: row["text"] for row in json_lines(data_dir / "squad_open/corpus.jsonl")}
    for each in json_lines(data_dir / "squad_open/questions_unanswerable.jsonl"):
        if paragraph := found.get(_key(texts[each["gold"]])):
            paragraph.absent.append(normalise(each["question"]))
    return [p for p in found.values() if p.questions or p.absent]


def canard_pages(data_dir: Path) -> list[tuple[str, list[Question]]]:
    """Title and questions of CANARD's pages with at least two questions in a row; a quote is empty where there is no answer.

    A page's questions follow each other, its answers are words of the page, and a person made every question standalone. Articles
    for evaluation are left out. Raises: OSError.
    """
    dialogues: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in json.loads((data_dir / "canard/dev.json").read_text(encoding="utf-8")):
        dialogues[row["QuAC_dialog_id"]][row["Question_no"]] = row
    pages = []
    for rows in dialogues.values():
        title, _, *texts = max((row["History"] for row in rows.values()), key=len)
        turns = list[Question]()
        for number, answer in enumerate(map(normalise, texts[1::2]), start=1):
            if number in rows and (answer == NO_ANSWER or len(answer.split()) in CANARD_QUOTE_WORDS):
                follow_up, alone = (normalise(rows[number][kind]) for kind in ("Question", "Rewrite"))
                turns.append(Question(alone, "" if answer == NO_ANSWER else answer, follow_up=follow_up))
        if len(turns) >= 2 and answers_of(turns) and not is_for_evaluation(title):
            pages.append((title, turns))
    return pages


def answers_of(turns: list[Question]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(turn.quote for turn in turns if turn.quote))


def canard_paragraph(title: str, turns: list[Question]) -> Paragraph:
    """All answers in an order that the title tells."""
    answers = answers_of(turns)
    text = " ".join(random.Random(title).sample(answers, len(answers)))
    absent = [turn.text for turn in turns if not turn.quote]
    return Paragraph(text, "canard", is_whole=True, questions=[turn for turn in turns if turn.quote], absent=absent)


def squad_articles(data_dir: Path) -> list[dict[str, Any]]:
    """The articles of SQuAD dev 1.1. Raises: OSError."""
    articles: list[dict[str, Any]] = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"]
    return articles


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file. Raises: OSError."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _rows(data_dir: Path, articles: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The set's name, and a question with `title` and `context`, of the given articles and of all files in `qa_more`."""
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                yield "squad", asked | {"title": article["title"], "context": paragraph["context"]}
    for path in sorted(path for path in (data_dir / "qa_more").glob("*.jsonl") if path.stem not in LEFT_OUT):
        yield from ((path.stem, row) for row in json_lines(path))


def _add(paragraph: Paragraph, row: dict[str, Any]) -> None:
    """A question is left out unless a sentence holds its answer and is short enough to quote."""
    question = normalise(row["question"])
    if row.get("is_impossible"):
        paragraph.absent.append(question)
        return
    answer = normalise(common_answer([each["text"] for each in row["answers"]]))
    sentences = split_sentences(paragraph.text)
    index = best_sentence(question, answer, sentences)
    quote = "" if index is None else sentences[index]
    if 2 < len(quote.split()) <= MAX_QUOTE_WORDS and not quote.endswith("?"):
        is_short = len(answer.split()) <= MAX_SHORT_WORDS and answer.rstrip(".") != quote.rstrip(".")
        paragraph.questions.append(Question(question, quote, answer if is_short else ""))


def _key(text: str) -> str:
    """Equal for one paragraph in several files."""
    return re.sub(r"\W", "", text)[:80].lower()
