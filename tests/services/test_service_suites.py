"""The suites `chat`, `load` and `attack`: they count what happened, and clients in another process reach a real service."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_parts import MODEL, make_backend
from stand_ins import no_tick

from pipelines.benchmarks import attack
from pipelines.benchmarks.chat.first_token import FirstTokens
from pipelines.benchmarks.chat.suite import identical
from pipelines.benchmarks.chat.tenants import OWNER, STRANGER, cliffs_delta, foreign_tokens, probe
from pipelines.benchmarks.clients import LoadRequest, LoadStats, MixedClients, chat_body
from pipelines.benchmarks.llama_server import prompts_of
from pipelines.benchmarks.load import leaked_slots
from pipelines.benchmarks.load_curve import MIXED, RAG, LoadCurve, bursts, measured, mixes_of, poisson, sent_by
from pipelines.benchmarks.service import Service, free_port, run_clients, service_here, started
from ragspec.config import load_settings
from ragspec.core import Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import EngineError
from services.gateway import AuthMiddleware
from services.settings import ServiceConfig

CROWD = "crowd"
QUESTIONS = ["Who built the bridge?", "When is the mill open?"]


@pytest.fixture(scope="module")
def here(letter_index: Path, service_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = {"model": MODEL, "port": 0, "data_dir": str(tmp_path_factory.mktemp("data"))}
    overrides = {f"service.{name}": value for name, value in settings.items()}
    config = load_settings(ServiceConfig, **overrides, **{"retriever.index_dir": str(letter_index)})
    with (
        make_backend(config, service_target, {}) as backend,
        service_here(backend, (OWNER, STRANGER, CROWD), unlimited=(CROWD,)) as service,
    ):
        yield service


def test_texts_over_http_are_equal_with_and_without_speculation(here: Service) -> None:
    """Clients in another process got errors, and two errors were counted as equal texts."""
    found = identical(here, QUESTIONS, 0, no_tick)
    assert found == {"identical": True, "num_equal": 4, "num_compared": 4}
    assert not identical(Service(here.url, {OWNER: "nobody's"}, here.backend), QUESTIONS, 0, no_tick)["num_equal"]


def test_first_tokens_of_every_way_are_timed(here: Service) -> None:
    """A way that answered nothing had the best times."""
    row = FirstTokens(here, QUESTIONS, 0).measure(2, 1, no_tick)
    assert min(row["engine_ttft_ms"], row["http_ttft_ms"], row["http_with_retrieval_ttft_ms"]) > 0
    assert row["gateway_ttft_ms"] == row["http_ttft_ms"] - row["engine_ttft_ms"]


def test_the_load_curve_compares_equal_work_of_both_ways(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that answered from the other's cached prompts, or stopped early, looked faster; arrivals that nobody waited for."""
    sent: list[tuple[dict[str, Any], Any]] = []
    timed = Service.timed

    def recorded(self: Service, bodies: Any, users: int, **options: Any) -> Any:
        answers = timed(self, bodies, users, **options)
        sent.append((bodies[0], [answer["usage"]["completion_tokens"] for answer in answers]))
        return answers

    monkeypatch.setattr(Service, "timed", recorded)
    curve = LoadCurve(here, mixes_of(MODEL, QUESTIONS, 0), no_tick)
    rows = [curve.row(MIXED, 3, 2), curve.row(RAG, 2, 1, poisson, 50.0), curve.row(RAG, 2, 1, bursts, 50.0)]
    assert [row["arrivals"] for row in rows] == ["closed", "poisson", "bursts"]
    assert all(row[way]["tokens_per_s"] > 0 and row[way]["goodput_per_s"] >= 0 for row in rows for way in ("on", "off"))
    assert [body["speculation"] for body, _ in sent] == [True, False, False, True, True, False, True, False]
    assert len({body["cache_salt"] for body, _ in sent}) == len(sent)
    for first, second in zip(sent[::2], sent[1::2], strict=True):
        assert first[1] == second[1] and sum(first[1]) > 0


def test_each_of_many_users_sends_a_body_of_its_own() -> None:
    """64 users asked 16 questions, and how many found a cached prompt depended on when others ended."""
    mixes = mixes_of(MODEL, [f"Why {number}?" for number in range(16)], 0)
    for users, mix, count in ((1, RAG, 2), (1, MIXED, 8), (12, RAG, 12), (16, MIXED, 16)):
        sent = sent_by(users, mix, mixes[mix], num_questions=2)
        assert len({str(body) for body in sent}) == len(sent) == count
    assert len(sent_by(20, RAG, mixes[RAG])) == 20 and sent_by(1, RAG, mixes[RAG]) == mixes[RAG]


def test_more_users_ask_than_a_key_may_have_requests(here: Service) -> None:
    """The load curve's last users, beyond 32, were refused, and the suite ended with an error."""
    bodies = [chat_body(MODEL, QUESTIONS[0], max_tokens=1, retrieval=False)] * 40
    assert all(answer["ended"] for answer in here.timed(bodies, len(bodies), tenant=CROWD))
    assert not all(answer["ended"] for answer in here.timed(bodies, len(bodies)))


def test_llama_server_gets_the_prompts_that_the_service_writes(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program on shorter prompts, or without the passages, looked faster."""
    mixes, written = mixes_of(MODEL, QUESTIONS, 0), list[list[int]]()
    submit_all = Engine.submit_all

    def recorded(self: Engine, requests: Sequence[Request], listener: Any) -> None:
        written.extend([*request.prompt_ids] for request in requests)
        submit_all(self, requests, listener)

    monkeypatch.setattr(Engine, "submit_all", recorded)
    here.timed(mixes[MIXED])
    given = prompts_of(here, mixes[MIXED])
    assert [body["prompt"] for body in given] == written and len(written) == 8
    assert {body["max_tokens"] for body in given} == {64} and {body["temperature"] for body in given} == {0.0, 1.0}


def test_throughput_and_latencies_of_a_run() -> None:
    """Time before the first request, or after the last token, counted; a slow answer counted as good."""
    ended = {"ended": True, "usage": {"completion_tokens": 11}}
    answers = [
        {**ended, "begin_s": 5.0, "first_s": 1.0, "total_s": 2.0},
        {**ended, "begin_s": 6.0, "first_s": 3.0, "total_s": 9.0},
    ]
    run = measured(answers)
    assert (run["tokens_per_s"], run["answers_per_s"], run["goodput_per_s"]) == (2.2, 0.2, 0.1)
    assert run["first_p50_ms"] == 3000.0 and run["token_p99_ms"] == pytest.approx(600.0)
    with pytest.raises(EngineError, match="1 of 2 answers did not end"):
        measured([answers[0], {**answers[1], "ended": False, "error": "gone"}])


def test_arrivals_have_the_rate_that_is_asked_for() -> None:
    """Bursts that brought eight times the load."""
    for arrivals in (poisson, bursts):
        at_s = arrivals(4000, 8.0, random.Random(0))
        assert at_s == sorted(at_s) and at_s[-1] == pytest.approx(500.0, rel=0.15)
    assert len(set(bursts(16, 8.0, random.Random(0)))) == 2


def test_the_probe_finds_nothing_of_another_tenant_and_does_find_what_is_shared(here: Service) -> None:
    """One tenant's words were drafted for another; or the probe could not have seen it."""
    apart = probe(here, 4, 0, no_tick)
    assert (apart["tenant_drafted"], apart["tenant_cache_hits"], apart["tenant_pairs"]) == (0, 0, 4)
    same = {OWNER: here.keys[OWNER], STRANGER: here.keys[OWNER]}
    assert probe(Service(here.url, same, here.backend), 4, 0, no_tick)["tenant_cache_hits"] > 0


def test_tokens_from_others_texts_are_counted() -> None:
    """A draft from another tenant's documents or answers counted as one's own."""
    assert foreign_tokens({"history": 4, "output": 3, "input": 1}) == 0
    assert foreign_tokens({"history": 4, "passage": 2, "earlier": 1}) == 3


def test_an_answer_that_breaks_off_equals_none(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams that failed had the same text: none."""
    monkeypatch.setattr(Service, "timed", lambda *_: [{"text": "", "ended": False, "status": 200} for _ in QUESTIONS])
    assert not identical(here, QUESTIONS, 0, no_tick)["identical"]


def test_cliffs_delta_counts_pairs() -> None:
    """A sign or a share was wrong."""
    assert cliffs_delta([3.0, 4.0], [1.0, 2.0]) == 1.0
    assert cliffs_delta([1.0, 2.0], [2.0, 3.0]) == -0.75
    assert cliffs_delta([1.0], [1.0]) == 0.0


def test_slots_that_somebody_holds_are_leaked_ones(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak was not seen, or a cache counted as one."""
    monkeypatch.setattr("pipelines.benchmarks.load._SETTLE_S", 0.2)
    engine = here.backend.engine
    assert isinstance(engine, Engine)
    begun = threading.Event()
    params = SamplingParams(temperature=1.0, max_tokens=900, n=4, ignore_eos=True, seed=0)
    engine.submit(Request("held", (5, 6, 7), params, salt=OWNER), lambda _: begun.set())
    assert begun.wait(30.0)
    assert leaked_slots(engine, (*here.keys,)) > 0
    engine.cancel("held")
    assert leaked_slots(engine, (*here.keys,)) == 0


def test_clients_of_every_kind_are_answered(here: Service) -> None:
    """Mixed requests met errors that nobody counted, or never ended."""
    orders = {"url": here.url, "keys": list(here.keys.values()), "questions": QUESTIONS, "model": MODEL}
    found = run_clients(orders | {"seconds": 2.0, "num_clients": 4, "seed": 1})
    assert found["requests"] >= 8 and found["statuses"]["200"] > 0
    assert (found["errors_5xx"], found["hangs"], found["faults"]) == (0, 0, {})


def test_what_clients_met_is_counted() -> None:
    """A hang, a client that went away and a server's error were one and the same."""
    tally, order = LoadStats(), LoadRequest("/v1/models", None)
    orders = {"url": "", "keys": [""], "questions": [""], "model": "", "seconds": 0, "num_clients": 1, "seed": 0}
    clients = MixedClients(orders)
    clients.tally = tally

    async def answers(status: int) -> int:
        return status

    async def meet() -> None:
        await clients._meet(lambda: answers(200), order, None)
        await clients._meet(lambda: answers(503), order, None)
        await clients._meet(lambda: asyncio.sleep(9.0, 200), order, 0.01)

    asyncio.run(meet())
    summary = tally.summary()
    assert (summary["statuses"], summary["errors_5xx"], summary["given_up"], summary["hangs"]) == (
        {"200": 1, "503": 1},
        1,
        1,
        0,
    )
    assert summary["faults"] == {"/v1/models: 503": 1} and summary["p50_ms"] is not None


def test_clients_that_cannot_reach_a_service_say_so() -> None:
    """A benchmark without a service ended in a traceback."""
    orders = {"url": "http://127.0.0.1:9", "key": "", "path": "/v1/models", "bodies": [{}], "concurrency": 1}
    with pytest.raises(EngineError, match=r"clients failed: .*127\.0\.0\.1"):
        run_clients(orders)


@pytest.fixture
def attacked_service(here: Service) -> Service:
    return Service(here.url, {attack.ATTACKER: here.keys[OWNER], attack.VICTIM: here.keys[STRANGER]}, here.backend)


def test_an_attack_is_survived_only_if_the_other_tenant_s_chat_is_its_own(attacked_service: Service) -> None:
    """A chat that ended in an error was counted as survived."""
    bodies = [chat_body(MODEL, QUESTIONS[0], max_tokens=8, seed=1)]
    quiet = attacked_service.timed(bodies, tenant=attack.VICTIM)
    found = attack.attacked(attacked_service, "records", bodies, quiet)
    assert found["survived"] and found["health_s"] < 30.0 and found["ratio"] > 0
    assert found["num_effects"] >= attack.LOADS["records"]
    other = [answer | {"text": "another text"} for answer in quiet]
    assert not attack.attacked(attacked_service, "private_files", bodies, other)["survived"]


def test_an_attack_without_effect_is_not_survived(attacked_service: Service) -> None:
    """An attacker whose requests were all refused attacked nothing, and the suite counted it as survived."""
    bodies = [chat_body(MODEL, QUESTIONS[0], max_tokens=8, seed=1)]
    quiet = attacked_service.timed(bodies, tenant=attack.VICTIM)
    refused = replace(attacked_service, keys=dict(attacked_service.keys) | {attack.ATTACKER: "nobody's"})
    found = attack.attacked(refused, "records", bodies, quiet, most_s=1.0)
    assert (found["survived"], found["num_effects"]) == (False, 0)


@pytest.mark.slow
def test_pages_of_other_sites_are_tried_where_nobody_is_asked_for_a_key(
    here: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page was refused for want of a key, and would have been with any check of its site taken away."""
    assert attack.pages(here)
    monkeypatch.setattr(AuthMiddleware, "_check_origin", lambda self, headers: None)
    assert not attack.pages(here)


def test_a_program_is_waited_for_and_one_that_ends_is_an_error() -> None:
    """A program that ended at once was waited for until the time was over."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}/"
    with started([sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1"], url, 600.0) as seconds:
        assert 0.0 < seconds < 600.0
    with pytest.raises(EngineError, match="not ready"), started([sys.executable, "-c", ""], url, 600.0):
        raise AssertionError("nothing answers")
