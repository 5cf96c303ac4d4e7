"""A host serves several clients by polls: everything is told once, to the right one, and nothing waits on a dead engine."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from local_replicas import Targets, standing
from stand_ins import until
from tiny_target import tiny_engine

from ragspec.cluster.engine_host import EngineHost, Polled
from ragspec.core import Delta, FinishReason, Request, SamplingParams, Segment
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, ReplicaLost

PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=200)


@pytest.fixture
def engine(targets: Targets) -> Iterator[Engine]:
    with tiny_engine(targets(1)[0]) as engine:
        engine.generate([ask(name, first=number) for number, name in enumerate("vw", 5)])  # kernels compile
        yield engine


@pytest.fixture
def host(engine: Engine) -> Iterator[EngineHost]:
    host = EngineHost(engine)
    for client in "cd":
        host.join(client)
    yield host


def ask(name: str, params: SamplingParams = PARAMS, first: int = 5) -> Request:
    return Request(name, (first, 6, 7), params)


def poll_to_end(host: EngineHost, client: str, num_choices: int) -> list[Polled]:
    polls: list[Polled] = []
    while num_choices:
        polls.append(host.poll(client, 60.0))
        assert polls[-1].deltas, "a poll came back empty while a request ran"
        num_choices -= sum(delta.finish_reason is not None for delta in polls[-1].deltas)
    return polls


def tokens(deltas: Sequence[Delta], request_id: str) -> tuple[int, ...]:
    return tuple(token for delta in deltas if delta.request_id == request_id for token in delta.token_ids)


def test_two_clients_use_the_same_ids(engine: Engine, host: EngineHost) -> None:
    """One client heard another's tokens, or its request was refused because another's ran under the id."""
    requests = {"c": ask("a"), "d": replace(ask("a", first=9), segment=Segment(choice=1), params=replace(PARAMS, n=2))}
    truth = {name: engine.generate([replace(request, id=f"t{name}")])[0] for name, request in requests.items()}
    for client, request in requests.items():
        host.submit(client, request)
    for client, completion in truth.items():
        deltas = [d for polled in poll_to_end(host, client, 1) for d in polled.deltas]
        assert {(delta.request_id, delta.choice) for delta in deltas} == {("a", completion.choice)}
        assert tokens(deltas, "a") == completion.token_ids
        assert host.poll(client, 0.0).deltas == ()
    assert host.status().num_running == 0


def test_a_poll_waits_for_the_others_of_its_step(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence of a step made a message of its own: eight for each step instead of one."""
    monkeypatch.setattr("ragspec.cluster.engine_host.GATHER_S", 20.0)
    for number in range(8):
        host.submit("c", ask(f"r{number}", first=5 + number))
    polls = poll_to_end(host, "c", 8)
    assert sum(len(polled.deltas) for polled in polls) == 8 * PARAMS.max_tokens
    assert len(polls) <= PARAMS.max_tokens + 8  # requests may begin one after another


def test_a_poll_without_news_ends_in_time_and_finds_what_comes(host: EngineHost) -> None:
    """A poll that slept through a delta, or one that never came back."""
    begin = time.monotonic()
    assert host.poll("c", 0.1).deltas == ()
    assert 0.1 <= time.monotonic() - begin < 30.0
    heard: list[Polled] = []
    waiting = threading.Thread(target=lambda: heard.append(host.poll("c", 50.0)))
    waiting.start()
    host.submit("c", ask("a"))
    waiting.join(60.0)
    assert heard and heard[0].deltas


def test_a_cancelled_request_ends_and_others_go_on(engine: Engine, host: EngineHost) -> None:
    """The id inside the engine is another one: the cancellation reached nothing, or another client's request."""
    with standing(engine):
        for client in ("c", "d"):
            host.submit(client, ask("a", LONG))
        assert host.poll("c", 20.0).deltas
        host.cancel("c", "a")
        host.cancel("c", "unknown")
        assert host.status().num_running == 1
    assert poll_to_end(host, "d", 1)[-1].deltas[-1].finish_reason is FinishReason.LENGTH
    until(lambda: engine.load().num_running == 0)
    assert all(delta.finish_reason is None for delta in host.poll("c", 0.0).deltas)


def test_a_client_that_stops_polling_is_forgotten(engine: Engine) -> None:
    """The requests of a dead client ran to their end, their results were kept for ever, or a client that came back late was not
    told that they are gone."""
    host = EngineHost(engine, client_timeout_s=0.3)
    host.join("c")
    with standing(engine, for_s=0.2):  # all of it takes 40 s
        host.submit("c", ask("a", LONG))
        until(lambda: not host.status().num_running and engine.load().num_running == 0)
    with pytest.raises(ReplicaLost, match="has not heard of this client"):
        host.poll("c", 0.0)


def test_a_client_inside_a_long_poll_is_not_forgotten(engine: Engine) -> None:
    """A client was taken for dead while it waited for an answer."""
    host = EngineHost(engine, client_timeout_s=1.0)
    host.join("c")
    for wait_s in (0.0, 2.0, 0.0):
        assert host.poll("c", wait_s).deltas == ()


def test_a_step_that_lasts_is_seen(engine: Engine, host: EngineHost) -> None:
    """A forward that hangs looked like an engine with nothing to say."""
    with standing(engine):
        host.submit("c", ask("a", LONG))
        until(lambda: host.poll("c", 0.0).busy_s > 0.5)
    until(lambda: host.poll("c", 0.0).busy_s < 0.2)


def test_a_dead_engine_is_a_lost_replica_at_once(engine: Engine, host: EngineHost) -> None:
    """A client was told that its requests failed or were cancelled, although they could go on elsewhere; a poll waited on."""
    raised: list[BaseException] = []

    def poll() -> None:
        try:
            while all(delta.finish_reason is None for delta in host.poll("c", 50.0).deltas):
                pass
        except ReplicaLost as error:
            raised.append(error)

    waiting = threading.Thread(target=poll)
    with standing(engine):
        host.submit("c", ask("a", LONG))
        waiting.start()
        closing = threading.Thread(target=engine.close)
        closing.start()
        until(lambda: not waiting.is_alive())
    closing.join(10.0)
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert len(raised) == 1
    for call in (lambda: host.submit("c", ask("b")), lambda: host.poll("c", 0.0), lambda: host.purge([""])):
        with pytest.raises(ReplicaLost):
            call()


def test_what_a_dying_engine_says_of_its_requests_is_not_told(engine: Engine, host: EngineHost) -> None:
    """A broken group of ranks ended a request with an error, which another replica could have gone on with."""
    host.submit("c", ask("a", LONG))

    def die() -> None:
        engine.lost = "rank 1 is gone"
        raise RuntimeError("a step failed")

    engine.target.forward_tapped = lambda *_: die()  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(ReplicaLost, match="rank 1 is gone"):
            while True:
                assert all(delta.finish_reason is None for delta in host.poll("c", 0.5).deltas)
    finally:
        del engine.target.forward_tapped


def test_the_status_names_what_a_request_can_be_checked_by(engine: Engine, host: EngineHost) -> None:
    """A router that checks requests itself let one through; a refused request kept its id, or took a good request along."""
    status = host.status()
    assert (status.fingerprint, status.num_running) == (engine.fingerprint, 0)
    assert status.bounds.max_context_tokens == engine.max_context_tokens
    host.submit("c", ask("good"))
    for wrong in (
        Request("p", (), PARAMS),
        Request("p", tuple(range(2, 2 + status.bounds.max_context_tokens)), PARAMS),
        Request("p", (5, 9999), PARAMS),
        Request("p", (5,), replace(PARAMS, logit_bias={9999: 1.0})),
        Request("p", (5,), PARAMS, segment=Segment((5,), 1)),
    ):
        with pytest.raises(InputError) as raised:
            status.bounds.limits(wrong)
        host.submit("d", wrong)
        assert host.poll("d", 5.0).deltas[-1].error == str(raised.value)
    assert poll_to_end(host, "c", 1)[-1].deltas[-1].finish_reason is FinishReason.LENGTH
    assert host.status().num_running == 0
