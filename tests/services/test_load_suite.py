"""The suite `load`: it counts what happened, and clients in another process reach a real service."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from service_parts import MODEL, make_backend

from pipelines.benchmarks import load
from pipelines.benchmarks.harness import Run
from pipelines.benchmarks.users.clients import MixedClients, chat_body
from pipelines.benchmarks.users.service import Service, run_clients, service_here
from ragspec.config import TargetConfig, load_settings
from ragspec.core import Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import EngineError
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
        service_here(backend, ("ann", "bob", CROWD), unlimited=(CROWD,)) as service,
    ):
        yield service


def test_bodies_that_come_again_find_no_cached_prompt() -> None:
    """64 users asked 16 questions, and how many found a cached prompt depended on when others ended."""
    bodies = load.mixes_of(MODEL, QUESTIONS, 0)[load.MIXED]
    sent = load.sent_by(bodies, 20)
    assert len({str(body) for body in sent}) == len(sent) == 20 and len({body["cache_salt"] for body in sent[:8]}) == 1


@pytest.mark.slow
def test_more_users_ask_than_a_key_may_have_requests(here: Service) -> None:
    """The load curve's last users, beyond 32, were refused, and the suite ended with an error."""
    bodies = [chat_body(MODEL, QUESTIONS[0], max_tokens=1, retrieval=False)] * 40
    assert all(answer["ended"] for answer in here.timed(bodies, len(bodies), tenant=CROWD))
    assert not all(answer["ended"] for answer in here.timed(bodies, len(bodies)))


@pytest.mark.slow
def test_llama_server_gets_the_prompts_that_the_service_writes(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program on shorter prompts, or without the passages, looked faster."""
    mixes, written = load.mixes_of(MODEL, QUESTIONS, 0), list[list[int]]()
    submit_all = Engine.submit_all

    def recorded(self: Engine, requests: Sequence[Request], listener: Any) -> None:
        written.extend([*request.prompt_ids] for request in requests if not request.attention_heads)
        submit_all(self, requests, listener)

    monkeypatch.setattr(Engine, "submit_all", recorded)
    here.timed(mixes[load.MIXED])
    given = load.prompts_of(here, mixes[load.MIXED])
    assert [body["prompt"] for body in given] == written and len(written) == 8
    assert {body["max_tokens"] for body in given} == {64} and {body["temperature"] for body in given} == {0.0, 1.0}


@pytest.mark.slow
def test_the_load_curve_compares_equal_work_of_both_ways(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that answered from the other's cached prompts, or stopped early, looked faster."""
    sent: list[tuple[dict[str, Any], Any]] = []
    timed = Service.timed

    def recorded(self: Service, bodies: Any, users: int, **options: Any) -> Any:
        answers = timed(self, bodies, users, **options)
        sent.append((bodies[0], [answer["usage"]["completion_tokens"] for answer in answers]))
        return answers

    monkeypatch.setattr(Service, "timed", recorded)
    mixes = load.mixes_of(MODEL, QUESTIONS, 0)
    cells = (load.MIXED, 3, 0), (load.MIXED, 3, 1), (load.RAG, 2, 0)
    rows = [load.pair_row(here, mixes[mix], users, number) for mix, users, number in cells]
    assert all(row[f"{way}_tokens_per_s"] > 0 for row in rows for way in ("on", "off"))
    assert [body["speculation"] for body, _ in sent] == [True, False, False, True, True, False]
    assert len({body["cache_salt"] for body, _ in sent}) == len(sent)
    for first, second in zip(sent[::2], sent[1::2], strict=True):
        assert first[1] == second[1] and sum(first[1]) > 0


def test_a_cell_is_as_sure_as_its_pairs_agree() -> None:
    """A cell of two lucky pairs looked as good as one that is known."""
    pairs = [
        {f"{way}_{name}": 5.0 for way in ("on", "off") for name in ("token_p95_ms", "first_p50_ms")}
        | {"on_tokens_per_s": on, "off_tokens_per_s": 10.0}
        for on in (9, 11, 13)
    ]
    cell = load.pooled(pairs)
    assert cell.items() >= {"num_pairs": 3, "on_tokens_per_s": 11, "on_off_p95": 1, "on_off_p95_error": 0}.items()
    assert cell["on_off"] == pytest.approx(1.0877, abs=1e-4) and cell["on_off_error"] == pytest.approx(0.1156, abs=1e-4)
    run, alike = Run(TargetConfig(), Path()), pairs[:1] * 5
    late = [pair | {"on_token_p95_ms": 5.0 + number} for number, pair in enumerate(alike)]
    ends = {"alike": alike, "few": alike[:4], "late": late, "far": [*alike, *pairs], "many": 4 * pairs}
    assert [name for name, each in ends.items() if load._is_enough(run, each)] == ["alike", "many"]


def test_cells_take_turns(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped knew all of some cells and nothing of others."""
    asked = list[tuple[int, Any]]()

    def answered(_: Service, bodies: Sequence[Any], users: Any, number: int, tenant: str) -> load.Row:
        assert tenant == CROWD and len(bodies) >= (users if isinstance(users, int) else len(users))
        asked.append((number, users))
        figures = "tokens_per_s", "answers_per_s", "token_p95_ms", "first_p50_ms"
        return {f"{way}_{name}": 4.0 for way in ("on", "off") for name in figures}

    monkeypatch.setattr("pipelines.benchmarks.load._CROWD", CROWD)
    monkeypatch.setattr("pipelines.benchmarks.load.pair_row", answered)
    monkeypatch.setattr("pipelines.benchmarks.load._timed", lambda *_: {"answers_per_s": 0.5})
    rows = list(load._curve_rows(Run(TargetConfig(), Path()), here, load.mixes_of(MODEL, QUESTIONS, 0)))
    assert len(rows) == 21 and {row["num_pairs"] for row in rows} == {5} and sum("users" in row for row in rows) == 16
    assert [number for number, _ in asked[1:]] == [number for number in range(5) for _ in rows]
    arrivals = [users for _, users in asked if not isinstance(users, int)]
    assert len(arrivals) == len({str(each) for each in arrivals}) == 25
    assert all(30 < len(each) < 95 and sorted(each) == each and each[-1] >= 20.0 for each in arrivals)


@pytest.mark.slow
def test_a_body_is_sent_at_its_time(here: Service) -> None:
    """All came at once."""
    arrivals = [0.0, 0.3, 0.6]
    bodies = [chat_body(MODEL, QUESTIONS[0], max_tokens=1, retrieval=False)] * 3
    sent = [answer["begin_s"] for answer in here.timed(bodies, arrivals)]
    assert all(begin >= at for begin, at in zip(sent, arrivals, strict=True)) and sent[1] < arrivals[2]


def test_throughput_and_latencies_of_a_run() -> None:
    """Time before the first request, or after the last token, counted; a slow answer counted as good."""
    ended = {"ended": True, "usage": {"completion_tokens": 11}}
    answers = [
        {**ended, "begin_s": 5.0, "first_s": 1.0, "total_s": 2.0},
        {**ended, "begin_s": 6.0, "first_s": 3.0, "total_s": 9.0},
    ]
    run = load.measured(answers)
    assert (run["tokens_per_s"], run["answers_per_s"], run["goodput_per_s"]) == (2.2, 0.2, 0.1)
    assert run["first_p50_ms"] == 3000.0 and run["token_p95_ms"] == pytest.approx(600.0)
    with pytest.raises(EngineError, match="1 of 2 answers did not end"):
        load.measured([answers[0], {**answers[1], "ended": False, "error": "gone"}])


@pytest.mark.slow
def test_first_tokens_of_every_way_are_timed(here: Service) -> None:
    """A way that answered nothing had the best times."""
    row = load.first_tokens(here, QUESTIONS, 2, 1, 0)
    assert min(row["engine_ttft_ms"], row["http_ttft_ms"], row["http_with_retrieval_ttft_ms"]) > 0
    assert row["gateway_ttft_ms"] == row["http_ttft_ms"] - row["engine_ttft_ms"]
    nobody = Service(here.url, {"ann": "nobody's"}, here.backend)
    with pytest.raises(EngineError, match="2 of 2 answers had no text"):
        load.first_tokens(nobody, QUESTIONS, 2, 1, 0)


@pytest.mark.slow
def test_mixed_clients_meet_no_fault(here: Service) -> None:
    """Mixed requests met errors that nobody counted, or never ended."""
    orders = {"url": here.url, "keys": list(here.keys.values()), "questions": QUESTIONS, "model": MODEL}
    found = run_clients(orders | {"seconds": 2.0, "num_clients": 4, "seed": 1})
    assert found["requests"] >= 4 and found["p50_ms"] > 0
    assert (found["errors_5xx"], found["hangs"], found["num_faults"]) == (0, 0, 0)


async def test_every_outcome_of_a_client_is_counted_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang, a client that went away and a server's error were one and the same."""
    monkeypatch.setattr("pipelines.benchmarks.users.clients.HANG_S", 0.01)
    clients = MixedClients({})

    async def answer(status: int, after_s: float = 0.0) -> int:
        await asyncio.sleep(after_s)
        return status

    for status in (200, 503, 429, 0):  # 0: a stream without an end
        await clients.meet(answer(status), 200, None)
    await clients.meet(answer(404), 404, None)
    await clients.meet(answer(200, 600.0), 200, 0.01)
    await clients.meet(answer(200, 600.0), 200, None)
    counts = {"requests": 7, "errors_5xx": 1, "num_faults": 2, "given_up": 1, "hangs": 1}
    assert +clients.counts == counts and len(clients.answered_s) == 1


def test_the_worst_row_decides_and_a_peer_that_did_not_run_has_no_figure() -> None:
    """A mean over mixes that hides the mix which speculation slows; a ratio to a program that never ran."""
    curve = [
        {"row": f"{mix} {users}", "mix": mix, "users": users, "on_off": on_off, "on_off_error": 0.02}
        | {"on_tokens_per_s": 30.0, "on_off_p95": on_off, "on_off_p95_error": 0.1, "num_pairs": 5}
        for mix, users, on_off in ((load.RAG, 8, 1.6), (load.RAG, 32, 1.3), (load.MIXED, 8, 1.0), (load.MIXED, 32, 0.9))
    ]
    first = [{"row": f"first token {n}", "gateway_ttft_ms": 1.0, "retrieval_ttft_ms": 2.0} for n in (1, 16)]
    rest = [{"row": "mixed clients", "leaked": 0}, {"row": "start", "ready_again_s": 1.0, "commit": "c"}]
    peer = {"row": "llama-server 8", "users": 8, "llama_tokens_per_s": 10.0}
    curve.append(curve[0] | {"row": f"{load.RAG} arrivals", "on_off_p95": 0.7})
    del curve[-1]["users"]
    found = load.summarise([*curve, *first, *rest, peer])
    assert (found["on_off_min"], found["rag_on_off_8"], found["rag_on_off_32"]) == (0.9, 1.6, 1.3)
    assert (found["on_off_slower"], found["on_off_p95_slower"], found["mixes_slower"]) == (1, 1, 1)
    assert (found["vs_llama_server_8"], found["vs_llama_server_32"]) == (3.0, None)
    assert {metric.name for metric in load.SUITE.metrics} >= found.keys() - {"retrieval_ttft_ms_c1"}
    hasty = load.summarise([*(row | {"num_pairs": 2} for row in curve), *first, *rest, peer])
    assert not {"on_off_slower", "on_off_p95_slower", "mixes_slower"} & hasty.keys()


@pytest.mark.slow
def test_slots_that_somebody_holds_are_leaked_ones(here: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak was not seen, or a cache counted as one."""
    monkeypatch.setattr("pipelines.benchmarks.load._SETTLE_S", 0.2)
    engine = here.backend.target.engine
    assert isinstance(engine, Engine)
    begun, num_free = threading.Event(), load.free_pages(engine, (*here.keys,))
    params = SamplingParams(temperature=1.0, max_tokens=900, n=4, ignore_eos=True, seed=0)
    engine.submit(Request("held", (5, 6, 7), params, salt="ann"), lambda _: begun.set())
    assert begun.wait(600.0)
    assert load.leaked_slots(engine, (*here.keys,), num_free) > 0
    engine.cancel("held")
    monkeypatch.setattr("pipelines.benchmarks.load._SETTLE_S", 60.0)
    assert load.leaked_slots(engine, (*here.keys,), num_free) == 0
