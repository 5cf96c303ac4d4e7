"""Questions and dialogues of the suite `target`.

Owns the selection and the cutting of passages; never a model or a metric. The adapter's recipe trains on none of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ragspec.core import Document
from ragspec.evaluation.suites.follow_ups import NO_ANSWER, FollowUp, read_canard
from ragspec.rag.wording import ABSTENTION, numbered, quoted_answer, system_text, user_text
from ragspec.training.conversations import Message, message
from ragspec.training.documentation import is_for_evaluation
from ragspec.training.reference.sources import (
    NUM_EVAL_ARTICLES,
    NUM_PROBE_ARTICLES,
    NUM_TRAIN_ARTICLES,
    json_lines,
    squad_articles,
)
from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences

PASSAGE_WORDS, NUM_OTHER_PAGES = 120, 2
FOLLOW_UP_ANSWER_WORDS = range(6, 50)
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
    articles = squad_articles(data_dir)[chosen_articles]
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
    texts = {r["id"]: normalise(r["text"]) for r in json_lines(data_dir / "squad_open/corpus.jsonl")}
    unasked = [
        (texts[r["gold"]], r["question"]) for r in json_lines(data_dir / "squad_open/questions_unanswerable.jsonl")
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


def follow_up_cases(path: Path, count: int, seed: int) -> list[tuple[QuestionCase, list[Message]]]:
    """Follow-up questions of CANARD's evaluation articles: made standalone by a person, and as the end of their dialogue.

    Both come with the same passages: the page of the dialogue, which is all its answers in random order, and the pages of two
    other articles. Questions whose answer is not part of one sentence are left out.
    """
    canard, rng = read_canard(path), random.Random(seed)
    golds = {document.id: document for document in canard.documents if is_for_evaluation(document.title)}
    questions = [asked for asked in canard.questions if asked.gold in golds]
    dialogues = [list(turns) for _, turns in groupby(questions, lambda asked: asked.gold.partition(":")[0])]
    pages = [(golds[turns[0].gold].title, _page(turns, golds, rng), turns) for turns in dialogues]
    cases = []
    for title, page, turns in pages:
        others = [other for other_title, other, _ in pages if other_title != title]
        passages = rng.sample([page, *rng.sample(others, NUM_OTHER_PAGES)], 1 + NUM_OTHER_PAGES)
        gold = passages.index(page) + 1
        for asked in turns:
            answer = normalise(golds[asked.gold].text)
            if len(answer.split()) in FOLLOW_UP_ANSWER_WORDS and any(answer in s for s in split_sentences(page)):
                cases.append((QuestionCase(asked.rewrite, passages, gold, [answer]), _dialogue(asked, passages, gold)))
    return rng.sample(cases, min(count, len(cases)))


def _page(turns: list[FollowUp], golds: dict[str, Document], rng: random.Random) -> str:
    """Why shuffled: in the dialogue's order, the answer would be whatever stands behind the previous quote."""
    answers = [turn.answer for turn in turns[-1].said if not NO_ANSWER.match(turn.answer)]
    texts = list(dict.fromkeys(map(normalise, [*answers, golds[turns[-1].gold].text])))
    return " ".join(rng.sample(texts, len(texts)))


def _dialogue(asked: FollowUp, passages: list[str], gold: int) -> list[Message]:
    """The prompt of the product's chat: each question with its passages, each answer as a quote."""
    messages = [message("system", system_text())]
    for turn in asked.said:
        told = ABSTENTION if NO_ANSWER.match(turn.answer) else quoted_answer(normalise(turn.answer), gold)
        messages += [message("user", user_text(turn.question, numbered(passages))), message("assistant", told)]
    return [*messages, message("user", user_text(asked.question, numbered(passages)))]
