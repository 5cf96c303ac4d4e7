"""From one replica's measured costs to a thousand replicas: a simulation of routing and prefix caches, without any model.

    python infra/simulate_scaling.py --replicas 1 10 100 1000

A replica is a server that works at the measured speed of `BATCH` sequences at once, first come, first served, with a prefix cache
of so many documents, the least recently used evicted first. Requests arrive by a Poisson process and ask about documents by
Zipf's law. Routing is the router's own `choose_replica`. infra/SCALING.md says what this leaves out.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from ragspec.cluster.routing.policy import affinity_key, choose_replica
from ragspec.core import Request

BATCH = 16
Choose = Callable[[int, dict[str, int]], str]
"""A replica for a request about a document, given how many requests each replica has."""


@dataclass(frozen=True)
class Costs:
    """Measured with two cores and the default target, int8. `row_s`: a row of a step of 16, `infra/results/cpu_quick.json`."""

    row_s: float = 0.03274 / BATCH
    dense_passages_per_s: float = 100_000 / 0.008305  # exact search, `infra/results/retrieval.json`


@dataclass(frozen=True)
class Load:
    """`utilisation`: of what the replicas could do if no prompt were cached. A document is the shared part of a prompt."""

    num_documents_a_replica: int = 200
    zipf: float = 1.0
    document_rows: int = 600
    other_rows: int = 40
    answer_tokens: int = 64
    cached_documents: int = 40
    utilisation: float = 1.0
    requests_a_replica: int = 120


def policies(draw: random.Random) -> dict[str, Choose]:
    def affine(document: int, loads: dict[str, int]) -> str:
        key = affinity_key(Request("r", (1,), affinity=str(document)))
        chosen = choose_replica(key, loads, load_factor=1.25)
        assert chosen is not None
        return chosen

    return {
        "affine": affine,
        "least loaded": lambda document, loads: min(loads, key=lambda name: (loads[name], draw.random())),
        "random": lambda document, loads: draw.choice(list(loads)),
    }


def simulate(num_replicas: int, choose: Choose, costs: Costs, load: Load, seed: int = 0) -> dict[str, float]:
    """Share of cached documents, seconds until the first token (median and 99th percentile), requests a second."""
    draw = random.Random(seed)
    names = [f"engine-{i}" for i in range(num_replicas)]
    loads, free_at = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    caches: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}
    num_documents = load.num_documents_a_replica * num_replicas
    weights = list(accumulate((rank + 1) ** -load.zipf for rank in range(num_documents)))
    answer_s = load.answer_tokens * costs.row_s
    whole_s = (load.document_rows + load.other_rows) * costs.row_s + answer_s
    rate, now, hits = load.utilisation * num_replicas / whole_s, 0.0, 0
    ends, first_s = list[tuple[float, str]](), list[float]()
    for _ in range(load.requests_a_replica * num_replicas):
        now += draw.expovariate(rate)
        while ends and ends[0][0] <= now:
            loads[heapq.heappop(ends)[1]] -= 1
        (document,) = draw.choices(range(num_documents), cum_weights=weights)
        name = choose(document, loads)
        cache, is_hit = caches[name], document in caches[name]
        cache[document] = None
        cache.move_to_end(document)
        if len(cache) > load.cached_documents:
            cache.popitem(last=False)
        hits += is_hit
        prompt_s = (load.other_rows + (0 if is_hit else load.document_rows)) * costs.row_s
        begin = max(now, free_at[name])
        first_s.append(begin + prompt_s - now)
        free_at[name] = begin + prompt_s + answer_s
        loads[name] += 1
        heapq.heappush(ends, (free_at[name], name))
    first_s.sort()
    return {
        "hits": hits / len(first_s),
        "first_p50_s": median(first_s),
        "first_p99_s": first_s[int(0.99 * (len(first_s) - 1))],
        "requests_per_s": len(first_s) / max(free_at.values()),
    }


def shards_for(num_passages: int, most_s: float, costs: Costs) -> int:
    """Shards of two cores each whose exact search over so many passages takes at most `most_s`."""
    return math.ceil(num_passages / (costs.dense_passages_per_s * most_s))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--passages", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    costs, load = Costs(), Load()
    for count in given.replicas:
        for name, choose in policies(random.Random(given.seed)).items():
            print(json.dumps({"replicas": count, "routing": name} | simulate(count, choose, costs, load, given.seed)))
    print(json.dumps({"passages": given.passages, "shards_100_ms": shards_for(given.passages, 0.1, costs)}))


if __name__ == "__main__":
    main()
