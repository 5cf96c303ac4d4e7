"""Quality of answers and corrections: SQuAD's normalisation, EM and F1, GLEU, edit distance; perplexity."""

import math
import random
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ragspec.engine.target import Target
from ragspec.evaluation.datasets import Sentence
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots

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
