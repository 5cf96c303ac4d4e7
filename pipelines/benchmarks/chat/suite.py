"""The suite `chat`: the service's overhead over the engine, equality of its texts, and isolation of tenants.

>>> with ray_session("local"):
...     run_chat(settings, tick).result["gateway_ttft_ms_c1"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.benchmarks.chat.first_token import FirstTokens, serve_rows
from pipelines.benchmarks.chat.tenants import OWNER, STRANGER, probe
from pipelines.benchmarks.clients import chat_body
from pipelines.benchmarks.service import Service, backend_of, service_here
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import Metric, Result, Table, at_most, equal_to, under
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.suites.follow_ups import AS_ASKED, PERSON, RULES, measure_follow_ups
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import Encoder

CONCURRENCIES = (1, 16)
_TEMPERATURES = (0.0, 1.0)
_MAX_TOKENS = 48
_RECALLS = {"follow_up_recall": RULES, "follow_up_recall_plain": AS_ASKED, "follow_up_recall_people": PERSON}


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """Numbers of requests, prompts, pairs and questions."""

    num_timed: int = 64
    num_prompts: int = 200
    num_pairs: int = 500
    num_follow_ups: int = 1_000

    @classmethod
    def of(cls, settings: Settings) -> ChatPlan:
        plan = cls(16, 12, 20, 60) if settings.quick else cls()
        if settings.num_prompts is None:
            return plan
        return cls(min(plan.num_timed, settings.num_prompts), settings.num_prompts, plan.num_pairs, plan.num_follow_ups)


def run_chat(settings: Settings, tick: Tick) -> Outcome:
    """Needs a Ray that is running. Raises: ConfigError, ModelError, StoreError, EngineError."""
    plan, memory, seed = ChatPlan.of(settings), PeakMemory(), settings.plan.seed
    with backend_of(settings, tick) as (backend, listed):
        questions = [question.text for question in listed.questions]
        with service_here(backend, (OWNER, STRANGER)) as service:
            first = FirstTokens(service, questions[: plan.num_timed], seed)
            ttft_rows = [first.measure(number, settings.plan.num_runs, tick) for number in CONCURRENCIES]
            equal = identical(service, questions[: plan.num_prompts], seed, tick)
            tenants = probe(service, plan.num_pairs, seed, tick)
        served = serve_rows(backend.config, questions[: plan.num_timed], seed, settings.plan.num_runs, tick)
    served["serve_ttft_ms"] = served["serve_chat_ms"] - ttft_rows[0]["engine_ttft_ms"]
    follow_up_rows = {}  # recall by set and writer
    if settings.data_dir is not None:
        encoder = Encoder.load(settings.encoder)
        follow_up_rows = measure_follow_ups(settings.data_dir, encoder, num_rows=plan.num_follow_ups, tick=tick)
    headlines = {f"gateway_ttft_ms_c{row['concurrency']}": row["gateway_ttft_ms"] for row in ttft_rows} | served
    rest = {"label": listed.label, "num_prompts": plan.num_prompts, "num_runs": settings.plan.num_runs}
    found: Result = headlines | equal | tenants | {"ttft_rows": ttft_rows, "follow_up_rows": follow_up_rows} | rest
    found |= {name: follow_up_rows.get("canard", {}).get(who) for name, who in _RECALLS.items()}
    return Outcome(found | {"peak_pss_mb": memory.look()})


def identical(service: Service, questions: Sequence[str], seed: int, tick: Tick) -> Result:
    """Stream the same requests with speculation and without, in batches: counts of equal texts."""
    num_equal = num_compared = 0
    fixed = {"max_tokens": _MAX_TOKENS, "seed": seed}
    for number, temperature in enumerate(_TEMPERATURES, 1):
        asked = [chat_body(service.backend.model, text, temperature=temperature, **fixed) for text in questions]
        with_drafts, without = (
            service.timed([{**body, "speculation": on} for body in asked], concurrency)
            for on, concurrency in ((True, 8), (False, 3))
        )
        pairs = list(zip(with_drafts, without, strict=True))
        num_compared += len(pairs)
        num_equal += sum(a["text"] == b["text"] and a["ended"] and b["ended"] for a, b in pairs)
        tick("texts compared", number, len(_TEMPERATURES))
    return {"identical": num_equal == num_compared, "num_equal": num_equal, "num_compared": num_compared}


METRICS = (
    Metric("gateway_ttft_ms_c1", "time to first token over HTTP minus the engine's, one request, medians", at_most(5)),
    Metric("gateway_ttft_ms_c16", "the same, 16 requests at once", at_most(20)),
    Metric("serve_noop_ms", "a Ray Serve deployment that only answers: median time of one request"),
    Metric("serve_ttft_ms", "time to first token of the Serve deployment minus the engine's, one request at a time"),
    Metric("identical", "every text equal over HTTP with speculation and without, T=0 and T=1", equal_to(True)),
    Metric("num_compared", "pairs of texts compared"),
    Metric(
        "follow_up_recall", "follow-up questions (CANARD, held-out half) with gold passage in the first 3, rewritten"
    ),
    Metric("follow_up_recall_plain", "the same without rewriting"),
    Metric("follow_up_recall_people", "the same with questions rewritten by people"),
    Metric("tenant_drafted", "tokens drafted from another tenant's texts", equal_to(0)),
    Metric("tenant_cache_hits", "tokens cached from another tenant's texts", equal_to(0)),
    Metric("tenant_drafts_delta", "tokens drafted for another tenant's texts against new texts, -1 to 1", under(0.1)),
    Metric("tenant_cliffs_delta", "first-token times of another tenant's texts against new texts, -1 to 1", under(0.1)),
)


def chat_tables(result: Result) -> dict[str, Table]:
    first = {
        f"{row['concurrency']} at once": {key: value for key, value in row.items() if key.endswith("_ms")}
        for row in result["ttft_rows"]
    }
    return {"milliseconds to the first token, medians": first, "follow-ups found": result["follow_up_rows"]}


SUITE = Suite("chat", run_chat, METRICS, tables=chat_tables)
