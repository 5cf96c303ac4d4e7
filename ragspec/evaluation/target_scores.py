"""Scores of a target on held-out questions, for training and for the suite `answers`; and the measures of answers and
corrections: SQuAD's normalisation, EM and F1, GLEU, edit distance, perplexity.

Owns the questions with their passages and the judgement of outputs. The text comes from a callable, so a model of transformers,
the engine or a test's double can be scored alike. The adapter's recipe trains on none of the questions.

    >>> case_scores(model_answers(model, tokenizer), *question_cases(data_dir, 48, seed=0))["quote_exact"]
"""

import math
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ragspec.core import Message
from ragspec.engine.target import Target
from ragspec.evaluation.datasets import Sentence
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.rag.wording import ABSTENTION, parse_answer, question_messages
from ragspec.training.reference import mixture
from ragspec.training.sentences import best_sentence, common_answer, normalise, split_sentences

_PERPLEXITY_ROWS = 128
"""Of one forward: their logits take 25 MB with a vocabulary of 49,152."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower case without ASCII punctuation and articles (SQuAD's script)."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(predicted: str, gold: str) -> float:
    """Harmonic mean of word precision and recall (SQuAD's script)."""
    p, g = normalise_answer(predicted).split(), normalise_answer(gold).split()
    common = sum((Counter(p) & Counter(g)).values())
    return 2 * common / (len(p) + len(g)) if common else 0.0


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 if the text is one of the answers, after SQuAD's normalisation."""
    return float(any(normalise_answer(predicted) == normalise_answer(answer) for answer in answers))


def best_f1(predicted: str, answers: Sequence[str]) -> float:
    """Word F1 against the nearest answer, as in SQuAD."""
    return max((answer_f1(predicted, answer) for answer in answers), default=0.0)


def jfleg_gleu(sentences: Sequence[Sentence], texts: Sequence[str]) -> tuple[float, float]:
    """GLEU of the corrections of JFLEG's sentences, and of the sentences as they are (0 to 100)."""
    sources = [sentence.text.split() for sentence in sentences]
    references = [[reference.split() for reference in sentence.references] for sentence in sentences]
    return gleu(sources, [text.split() for text in texts], references), gleu(sources, sources, references)


def edit_distance(a: list[str], b: list[str]) -> int:
    """Insertions, deletions and substitutions of words (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


def gleu(
    sources: list[list[str]], outputs: list[list[str]], references: list[list[list[str]]], draws: int = 500
) -> float:
    """GLEU of JFLEG, 0-100: BLEU-4 against a randomly drawn reference, minus n-grams kept wrongly; mean over draws.

    Source: Napoles et al. 2015 and 2016 (arXiv 1605.02592), the version without tuning.
    """
    rows = list(zip(sources, outputs, references, strict=True))
    table = np.array([[_gleu_counts(s, o, r) for r in refs] for s, o, refs in rows])  # [sentences, references, 10]
    scores = []
    for draw in range(draws):
        rng = random.Random(draw * 101)
        picked = [rng.randint(0, table.shape[1] - 1) for _ in rows]
        scores.append(_gleu_from_counts(table[np.arange(len(rows)), picked].sum(axis=0).tolist()))
    return 100 * float(np.mean(scores))


def perplexity(target: Target, token_ids: Sequence[int], window_tokens: int = 1024) -> float:
    """e to the mean negative log-likelihood of each token after the first of its window, at temperature 1."""
    window = min(window_tokens, target.max_context_tokens, target.pool.num_slots)
    windows = [np.asarray(token_ids[i : i + window], np.int32) for i in range(0, len(token_ids), window)]
    losses = np.concatenate([_losses(target, tokens) for tokens in windows if len(tokens) > 1])
    return math.exp(losses.mean())


def _ngrams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _gleu_counts(source: list[str], output: list[str], reference: list[str]) -> list[int]:
    """Output length, reference length, then (matches minus penalties, n-grams) for n = 1 to 4."""
    counts = [len(output), len(reference)]
    for n in range(1, 5):
        out, ref = _ngrams(output, n), _ngrams(reference, n)
        wrong = Counter({gram: c for gram, c in _ngrams(source, n).items() if gram not in ref})
        counts += [max(sum((out & ref).values()) - sum((out & wrong).values()), 0), max(len(output) + 1 - n, 0)]
    return counts


def _gleu_from_counts(counts: list[int]) -> float:
    if min(counts) == 0:
        return 0.0
    log_precision = sum(math.log(counts[i] / counts[i + 1]) for i in range(2, 10, 2)) / 4
    return math.exp(min(0.0, 1 - counts[1] / counts[0]) + log_precision)


def _losses(target: Target, tokens: np.ndarray) -> np.ndarray:
    """Shapes: int32 [T] -> float64 [T - 1]."""
    slots, losses = SequenceSlots(target.pool), []
    for start in range(0, len(tokens) - 1, _PERPLEXITY_ROWS):
        known = tokens[start : min(start + _PERPLEXITY_ROWS, len(tokens) - 1)]
        batch = Batch([ScheduledSequence(slots, known)])
        rows = np.arange(len(known), dtype=np.int32)
        logits = target.forward(batch.token_ids, batch.metadata, rows).astype(np.float64)
        batch.keep(())
        top = logits.max(1)
        following = logits[rows, tokens[start + 1 : start + 1 + len(known)]]
        losses.append(top + np.log(np.exp(logits - top[:, None]).sum(1)) - following)
    slots.release()
    return np.concatenate(losses)


MAX_NEW_TOKENS = 192
PASSAGE_WORDS = 120
EVAL_ARTICLES = slice(-mixture.NUM_EVAL_ARTICLES, None)


@dataclass(frozen=True)
class QuestionCase:
    """One question with its passages; `answers` is empty if the passages hold no answer. `said`: the conversation before it,
    in which passages are messages of the role context."""

    question: str
    passages: list[str]
    gold: int
    answers: list[str]
    said: tuple[Message, ...] = ()


Answering = Callable[[Sequence[QuestionCase]], list[str]]


def question_cases(
    data_dir: Path, num_questions: int, seed: int, chosen_articles: slice = EVAL_ARTICLES
) -> tuple[list[QuestionCase], list[QuestionCase]]:
    """Answerable and half as many unanswerable questions of some SQuAD articles, gold passage + 2 others."""
    rng = random.Random(seed)
    articles = mixture.squad_articles(data_dir)[chosen_articles]
    paragraphs = [(a["title"], normalise(p["context"]), p["qas"]) for a in articles for p in a["paragraphs"]]
    by_title: dict[str, list[str]] = {}
    for title, text, _ in paragraphs:
        by_title.setdefault(title, []).append(text)
    everything = [text for _, text, _ in paragraphs]

    def case(title: str, text: str, question: str, answers: list[str]) -> QuestionCase:
        near = rng.choice([t for t in by_title[title] if t != text])
        far = rng.choice([t for t in everything if t != text])
        passages = [passage_with(text, question, answers), _first_passage(near), _first_passage(far)]
        order = rng.sample(range(3), 3)
        return QuestionCase(question, [passages[i] for i in order], order.index(0) + 1, answers)

    asked = [(t, text, q["question"], [a["text"] for a in q["answers"]]) for t, text, qas in paragraphs for q in qas]
    titles = {text: title for title, text, _ in paragraphs}
    texts = {r["id"]: normalise(r["text"]) for r in mixture.json_lines(data_dir / "squad_open/corpus.jsonl")}
    rows = mixture.json_lines(data_dir / "squad_open/questions_unanswerable.jsonl")
    unasked = [(texts[r["gold"]], r["question"]) for r in rows if texts[r["gold"]] in titles]
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


def case_scores(
    answering: Answering, answerable: list[QuestionCase], unanswerable: list[QuestionCase]
) -> dict[str, float]:
    """Quotes of the answerable questions, and abstentions."""
    outputs = answering(answerable + unanswerable)
    answered, refused = outputs[: len(answerable)], outputs[len(answerable) :]
    half = len(unanswerable)  # as many answerable as unanswerable questions, so that precision means something
    abstentions = abstention_scores(answerable[:half] + unanswerable, answered[:half] + refused)
    return question_scores(answerable, answered) | abstentions


def model_answers(model: Any, tokenizer: Any, batch_tokens: int = 12_000) -> Answering:
    """Greedy answers of a loaded model to single questions, in batches of similar length. Nothing holds quotes to passages."""

    def answers(cases: Sequence[QuestionCase]) -> list[str]:
        asked = [[asdict(each) for each in question_messages(case.question, case.passages)] for case in cases]
        prompts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in asked]
        ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        outputs = [""] * len(ids)
        for batch in _length_batches(ids, batch_tokens):
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, padding_side="left", return_tensors="pt")
            with torch.inference_mode():
                generated = model.generate(**inputs.to(model.device), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for i, row in zip(batch, generated[:, inputs["input_ids"].shape[1] :], strict=True):
                outputs[i] = str(tokenizer.decode(row, skip_special_tokens=True))
        return outputs

    return answers


def _length_batches(ids: list[list[int]], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        if batch and (len(batch) + 1) * len(ids[i]) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def question_scores(cases: list[QuestionCase], outputs: list[str]) -> dict[str, float]:
    """Quotes, citations and short answers of answerable questions. EM and F1 as in SQuAD's own script."""
    names = ("quote_exact", "quote_has_answer", "em", "f1", "citation_correct")
    exact, has_answer, em, f1, cited = found = [list[float]() for _ in names]
    for case, output in zip(cases, outputs, strict=True):
        quote, number, short = parse_answer(output) or ("", 0, "")
        sources = [n for n, passage in enumerate(case.passages, start=1) if quote and quote in passage]
        exact.append(bool(sources))
        has_answer.append(bool(sources) and any(answer in quote for answer in case.answers))
        em.append(exact_match(short, case.answers))
        f1.append(best_f1(short, case.answers))
        if sources:
            cited.append(number in sources)
    return {name: mean(values) for name, values in zip(names, found, strict=True)}


def abstention_scores(cases: list[QuestionCase], outputs: list[str]) -> dict[str, float]:
    """Precision and recall of abstentions."""
    abstained = [output.strip().startswith(ABSTENTION) for output in outputs]
    num_unanswerable = sum(not c.answers for c in cases)
    right = sum(a and not c.answers for a, c in zip(abstained, cases, strict=True))
    return {
        "abstain_precision": right / sum(abstained) if any(abstained) else math.nan,
        "abstain_recall": right / num_unanswerable if num_unanswerable else math.nan,
    }


def mean(values: list[float] | list[bool]) -> float:
    """The mean; NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan
