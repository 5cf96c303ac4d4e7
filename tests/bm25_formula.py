"""BM25 as its formula reads, for tests of the index."""

import math
from collections import Counter
from collections.abc import Sequence


def formula_scores(rows: Sequence[Sequence[str]], readable: Sequence[bool], query: Sequence[str]) -> dict[int, float]:
    """The scores of the readable rows that hold a term of the query, by number; statistics count readable rows."""
    seen = [terms for terms, is_readable in zip(rows, readable, strict=True) if is_readable]
    total = sum(map(len, seen))
    scores: dict[int, float] = {}
    for number, terms in enumerate(rows):
        if not readable[number]:
            continue
        for term, times in sorted(Counter(query).items()):
            tf = terms.count(term)
            if tf:
                df = sum(term in others for others in seen)
                weight = times * math.log(1.0 + (len(seen) - df + 0.5) / (df + 0.5))
                norm = 1.2 * ((1.0 - 0.75) + 0.75 * len(terms) / (total / len(seen)))
                scores[number] = scores.get(number, 0.0) + weight * tf / (tf + norm)
    return scores
