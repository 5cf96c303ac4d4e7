"""Questions and sentences of the suite `target`.

Owns the selection and the cutting of passages; never a model or a metric. No target was trained on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.training.reference.sources import NUM_EVAL_ARTICLES, NUM_PROBE_ARTICLES, NUM_TRAIN_ARTICLES
from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences

PASSAGE_WORDS = 120
EVAL_ARTICLES = slice(-NUM_EVAL_ARTICLES, None)
PROBE_ARTICLES = slice(NUM_TRAIN_ARTICLES, NUM_TRAIN_ARTICLES + NUM_PROBE_ARTICLES)


@dataclass(frozen=True)
class QuestionCase:
    """One question with its passages; `answers` is empty if the passages hold no answer."""

    question: str
    passages: list[str]
    gold: int
    answers: list[str]


def question_cases(
    data_dir: Path, num_questions: int, seed: int, chosen_articles: slice = EVAL_ARTICLES
) -> tuple[list[QuestionCase], list[QuestionCase]]:
    """Answerable and half as many unanswerable questions of some SQuAD articles, gold passage + 2 others."""
    rng = random.Random(seed)
    articles = json.loads((data_dir / "squad/dev-v1.1.json").read_text())["data"][chosen_articles]
    paragraphs = [(a["title"], normalise(p["context"]), p["qas"]) for a in articles for p in a["paragraphs"]]
    by_title: dict[str, list[str]] = {}
    for title, text, _ in paragraphs:
        by_title.setdefault(title, []).append(text)
    everything = [text for _, text, _ in paragraphs]

    def case(title: str, text: str, question: str, answers: list[str]) -> QuestionCase:
        near, far = (
            rng.choice([t for t in by_title[title] if t != text]),
            rng.choice([t for t in everything if t != text]),
        )
        passages = [passage_with(text, question, answers), _first_passage(near), _first_passage(far)]
        order = rng.sample(range(3), 3)
        return QuestionCase(question, [passages[i] for i in order], order.index(0) + 1, answers)

    asked = [(t, text, q["question"], [a["text"] for a in q["answers"]]) for t, text, qas in paragraphs for q in qas]
    titles = {text: title for title, text, _ in paragraphs}
    texts = {r["id"]: normalise(r["text"]) for r in _json_lines(data_dir / "squad_open/corpus.jsonl")}
    unasked = [
        (texts[r["gold"]], r["question"]) for r in _json_lines(data_dir / "squad_open/questions_unanswerable.jsonl")
    ]
    unasked = [(text, question) for text, question in unasked if text in titles]
    answerable = [case(*row) for row in rng.sample(asked, min(num_questions, len(asked)))]
    chosen = rng.sample(unasked, min(num_questions // 2, len(unasked)))
    return answerable, [case(titles[text], text, normalise(question), []) for text, question in chosen]


def passage_with(text: str, question: str, answers: list[str]) -> str:
    """Whole sentences of at most 120 words, around the sentence that holds the answer."""
    sentences = split_sentences(text)
    index = best_sentence(question, common_answer(answers), sentences) if answers else 0
    first = last = index or 0
    while True:
        grown = [(a, b) for a, b in ((first - 1, last), (first, last + 1)) if a >= 0 and b < len(sentences)]
        grown = [(a, b) for a, b in grown if len(" ".join(sentences[a : b + 1]).split()) <= PASSAGE_WORDS]
        if not grown:
            return " ".join(sentences[first : last + 1])
        first, last = grown[-1] if (last - first) % 2 else grown[0]


def _first_passage(text: str) -> str:
    return passage_with(text, "", [])


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())
