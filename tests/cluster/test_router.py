"""A router over real engines in this process: what runs where, what waits, and what callers and replicas may do to it."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from local_replicas import SETTINGS, LocalReplicaClient, LocalReplicas, Losing, Targets, connect, replicas, standing
from stand_ins import Heard, until

from ragspec.cluster.actors import Replica
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.router import Router
from ragspec.core import Completion, CopySource, Delta, FinishReason, Request, SamplingParams, SourceKind
from ragspec.engine.client import completion_of
from ragspec.engine.engine import Engine
from ragspec.errors import Cancelled, EngineClosed, EngineError, InputError, Overloaded, PromptTooLong, ReplicaLost

SHORT = SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
LONG = replace(SHORT, max_tokens=200)


@pytest.fixture
def local(targets: Targets) -> Iterator[LocalReplicas]:
    with replicas(targets(2)) as local:
        yield local


def settings(**changes: Any) -> RoutingConfig:
    return SETTINGS.model_copy(update=changes)


def ask(name: str, params: SamplingParams = SHORT, first: int = 5, **rest: Any) -> Request:
    return Request(name, (first, 6, 7), params, **rest)


def engine_of(local: LocalReplicas, number: int = 0) -> Engine:
    return local.engines[f"engine-{number}"]


def plain(local: LocalReplicas, request: Request) -> Completion:
    """Without the router."""
    return engine_of(local).generate([replace(request, id="plain")])[0]


def serving(local: LocalReplicas) -> str:
    """The replica that something runs on."""
    (name,) = [name for name, host in local.hosts.items() if host.status().num_running]
    return name


# What callers see


def test_a_tenant_does_not_wait_for_another_s_queue(targets: Targets) -> None:
    """First come, first served: one tenant's queue in front of the replicas delays everybody by all of it."""
    heard = Heard(9)
    with replicas(targets(1)) as local, Router(local.all, connect, settings(max_num_seqs=2)) as router:
        router.submit_all([ask(f"a{number}", LONG, 5 + number, salt="ann") for number in range(8)], heard)
        router.submit(ask("b", salt="bob"), heard)
        ended = [delta.request_id for delta in heard.wait(60.0) if delta.finish_reason]
    assert ended.index("b") <= 2


def test_it_answers_as_an_engine_does(local: LocalReplicas) -> None:
    """Completions out of order, ids of the wire instead of the callers', or other tokens than one engine's."""
    requests = [ask(f"r{i}", replace(SHORT, n=1 + i % 2, seed=i), first=5 + i) for i in range(8)]
    truth = engine_of(local).generate(requests)
    with Router(local.all, connect, SETTINGS) as router:
        assert router.fingerprint == "tiny"
        assert router.max_context_tokens == engine_of(local).max_context_tokens
        found = router.generate(requests)
    assert [(c.request_id, c.choice, c.token_ids, c.text) for c in found] == [
        (c.request_id, c.choice, c.token_ids, c.text) for c in truth
    ]
    assert all(one.stats.num_replays == 0 and one.stats.system_fingerprint == "tiny" for one in found)


def test_a_stream_that_is_left_ends_in_the_replica(local: LocalReplicas) -> None:
    """A client that went away was computed for to the end."""

    async def first_token(router: Router) -> Delta:
        stream = router.stream(ask("a", LONG))
        delta = await anext(aiter(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        return delta

    with Router(local.all, connect, SETTINGS) as router, standing(*local.engines.values(), for_s=0.2):
        assert asyncio.run(first_token(router)).request_id == "a"
        until(lambda: local.is_idle)


def test_a_wrong_request_is_refused_with_all_that_came_with_it(local: LocalReplicas) -> None:
    """One of several was refused and the others ran; two outputs were mixed under one id, or an id could never be used again; an
    affinity that is no text left a request behind that never ends."""
    heard, unheard = Heard(), Heard()
    with Router(local.all, connect, SETTINGS) as router:
        with standing(*local.engines.values()):
            router.submit(ask("running", LONG), heard)
            for wrong, error, reason in (
                (Request("b", (), SHORT), InputError, "prompt is empty"),
                (Request("b", tuple(range(2, 258)), SHORT), PromptTooLong, "fit the context"),
                (ask("a"), InputError, "an id is in use already"),
                (ask("running", first=9), InputError, "an id is in use already"),
                (ask("b", affinity=5), InputError, "must be strings"),
            ):
                with pytest.raises(error, match=reason):
                    router.submit_all([ask("a"), wrong], unheard)
            assert router.num_choices() == 1
        heard.wait()
        again = ask("running", first=9)
        assert router.generate([again])[0].token_ids == plain(local, again).token_ids
        # a source without a text made the router's own counting raise in a replica's thread, which killed the replica
        assert router.generate([ask("odd", sources=(CopySource(SourceKind.INPUT, None),))])  # type: ignore[arg-type]
    assert not unheard.deltas and not local.num_reconnects


def test_a_listener_that_raises_costs_only_its_request(local: LocalReplicas) -> None:
    """One broken callback ended the thread that tells everybody."""
    with Router(local.all, connect, SETTINGS) as router:
        broken = Heard(act=Mock(side_effect=RuntimeError("a broken listener")))
        router.submit(ask("broken", LONG), broken)
        assert len(router.generate([ask("a")])[0].token_ids) == SHORT.max_tokens
        until(lambda: bool(broken.deltas) and local.is_idle)
        assert len(broken.deltas) == 1


def test_a_listener_may_submit_and_cancel(local: LocalReplicas) -> None:
    """Listeners ran under the router's lock, so one that used the router waited for itself."""
    second = Heard()
    with Router(local.all, connect, SETTINGS) as router:

        def act(delta: Delta) -> None:
            if len(first.deltas) == 1:
                router.submit(ask("second"), second)
                router.cancel("first")

        first = Heard(act=act)
        with standing(*local.engines.values()):
            router.submit(ask("first", LONG), first)
            assert first.wait()[-1].finish_reason is FinishReason.CANCELLED
        assert second.wait()[-1].finish_reason is FinishReason.LENGTH


def test_a_slow_listener_does_not_look_like_a_dead_replica(local: LocalReplicas) -> None:
    """While a listener slept no poll was answered, so its replica was replaced; or messages were lost meanwhile."""
    with Router(local.all, connect, settings(heartbeat_timeout_s=0.3)) as router:
        heard = Heard(act=lambda delta: time.sleep(0.3))
        router.submit(ask("a"), heard)
        assert completion_of(heard.wait()).token_ids == plain(local, ask("a")).token_ids
    assert not local.num_reconnects


def test_a_request_that_breaks_what_prepares_it_costs_only_itself(local: LocalReplicas) -> None:
    """A TypeError over one request was booked on its replica, and on the next that it was sent to: six died for it."""

    def poisoned(engine: Engine) -> Callable[..., None]:
        submit = engine.submit

        def raises(request: Request, listener: Callable[[Delta], None]) -> None:
            if request.salt == "poison":
                raise TypeError("a bug")
            submit(request, listener)

        return raises

    for engine in local.engines.values():
        engine.submit = poisoned(engine)  # type: ignore[method-assign]
    requests = [ask("a"), ask("bad", salt="poison"), ask("b")]
    heard = Heard(num_choices=3)
    with Router(local.all, connect, SETTINGS) as router:
        router.submit_all(requests, heard)
        last = {delta.request_id: delta for delta in heard.wait() if delta.finish_reason}
    assert (last["bad"].finish_reason, last["bad"].error) == (FinishReason.ERROR, "a bug")
    assert last["a"].finish_reason is last["b"].finish_reason is FinishReason.LENGTH
    assert not local.num_reconnects


# What waits


def test_replicas_are_sent_only_so_much_and_the_rest_in_order(local: LocalReplicas) -> None:
    """Everything was sent at once, later requests overtook earlier ones, or the last place in the queue was never free."""
    arrived: list[int] = []
    ended = Heard(num_choices=8)
    most = 0

    class Noting(LocalReplicaClient):
        def submit(self, request: Request) -> None:
            arrived.append(request.prompt_ids[0])
            super().submit(request)

    with Router(local.all, Noting, settings(max_num_seqs=1, max_queued=6)) as router:
        router.submit_all([ask(f"r{i}", replace(SHORT, max_tokens=30), first=i) for i in range(8)], ended)
        with pytest.raises(Overloaded):
            router.submit(ask("too many"), Heard())
        while not ended.ended.wait(0.005):
            most = max(most, *local.num_running)
        assert router.generate([ask("later")])
    assert most == 1
    # Of those before a request, one may still be on its way to the other replica.
    assert sorted(arrived[:8]) == list(range(8))
    assert all(place >= number - 1 for place, number in enumerate(arrived[:8])), arrived


def test_a_waiting_request_can_be_cancelled(local: LocalReplicas) -> None:
    """A request in the queue ran all the same, or took its place with it."""
    with Router(local.all, connect, settings(max_num_seqs=1)) as router:
        heard = {name: Heard() for name in ("a", "b", "c", "d")}
        with standing(*local.engines.values()):
            for name, each in heard.items():
                router.submit(ask(name), each)
            router.cancel("c")
            router.cancel("unknown")
            assert heard["c"].wait() == [replace(heard["c"].deltas[0], token_ids=(), text="")]
            router.cancel("a")
            assert heard["a"].wait()[-1].finish_reason is FinishReason.CANCELLED
        assert len(completion_of(heard["d"].wait()).token_ids) == SHORT.max_tokens


def test_like_requests_go_to_one_replica_until_it_is_loaded(local: LocalReplicas) -> None:
    """Affinity was ignored, or everything waited at one replica while the other was idle."""
    with Router(local.all, connect, SETTINGS) as router:
        for first, affinity in enumerate("abcdefgh", 10):
            requests = [ask(f"{affinity}{i}", first=first, affinity=affinity) for i in range(3)]
            cached = [router.generate([request])[0].stats.num_cached_tokens for request in requests]
            assert [num > 0 for num in cached] == [False, True, True], affinity
        heard = Heard(num_choices=12)
        with standing(*local.engines.values()):
            router.submit_all([ask(f"hot{i}", affinity="a") for i in range(12)], heard)
            until(lambda: sum(local.num_running) == 12)
            assert sorted(local.num_running) == [4, 8]
        heard.wait()


# Ends


def test_a_drain_lets_the_running_end(local: LocalReplicas) -> None:
    """A shutdown threw away answers that were nearly there, or took new requests meanwhile, or waited without end."""
    heard, names = Heard(), itertools.count()

    def is_refused(router: Router) -> bool:
        try:
            router.submit(ask(f"late {next(names)}"), Heard())
        except EngineClosed:
            return True
        return False

    router = Router(local.all, connect, SETTINGS)
    router.submit(ask("a", LONG), heard)
    closing = threading.Thread(target=router.close, args=(20.0,))
    closing.start()
    until(lambda: is_refused(router))
    closing.join(10.0)
    assert not closing.is_alive()
    assert len(completion_of(heard.wait(0.1)).token_ids) == LONG.max_tokens


def test_what_has_not_ended_is_cancelled_when_the_drain_is_over(local: LocalReplicas) -> None:
    """Replicas went on computing for a router that is gone, or its callers waited for ever."""
    heard = [Heard() for _ in range(3)]
    with Router(local.all, connect, settings(max_num_seqs=1)) as router, standing(*local.engines.values()):
        for number, each in enumerate(heard):
            router.submit(ask(f"r{number}", LONG), each)
        router.close(drain_s=0.05)
        for each in heard:
            with pytest.raises(Cancelled):
                completion_of(each.wait(1.0))
        router.close()
    until(lambda: local.is_idle)
    assert not local.killed, "a router that leaves takes no replica with it"


def test_no_replica_at_all_is_said_in_time(local: LocalReplicas) -> None:
    """A request waited for ever for somebody to run it, or the router for a first replica."""
    with Router(local.all, connect, settings(replay_timeout_s=0.6)) as router:
        for name in local.hosts:
            local.lose(name)
        until(lambda: not router.num_connected)
        with pytest.raises(ReplicaLost, match=r"for 0\.6 s there was no replica"):
            router.generate([ask("a")])
        waiting = Heard()
        router.submit(ask("b"), waiting)
        time.sleep(0.2)
        local.revive("engine-1")
        assert completion_of(waiting.wait()).token_ids == plain(local, ask("b")).token_ids
    for name in local.hosts:
        local.lose(name)
    with pytest.raises(ReplicaLost, match="no engine is live"):
        Router(local.all, connect, settings(start_timeout_s=0.2))


# Losses that tokens alone do not show


def test_the_choices_of_a_lost_replica_go_on_elsewhere(local: LocalReplicas) -> None:
    """What ran on a replica that is declared lost was waited for, or what it still said was told as well."""
    request = ask("a", replace(LONG, n=3))
    truth = engine_of(local).generate([replace(request, id="plain")])
    with Router(local.all, connect, SETTINGS) as router:
        heard = Heard(num_choices=3)
        with standing(*local.engines.values()):
            router.submit(request, heard)
            until(lambda: len({delta.choice for delta in heard.deltas}) == 3)
            num_lost = local.num_running[0]
            local.lose("engine-0")
            until(lambda: router.num_connected == 1)
        deltas = heard.wait()
    num_replays = 0
    for plain_one in truth:
        one = completion_of([delta for delta in deltas if delta.choice == plain_one.choice])
        assert (one.token_ids, one.text) == (plain_one.token_ids, plain_one.text)
        num_replays += one.stats.num_replays
    assert num_replays == num_lost > 0


def test_a_step_that_never_ends_is_a_lost_replica(local: LocalReplicas) -> None:
    """A hung forward was waited for, since its host still answers polls."""
    truth = plain(local, ask("a", LONG))
    local.lose("engine-1")
    local.step_timeout_s = 1.0
    with Router(local.all, connect, settings(step_timeout_s=1.0)) as router, standing(engine_of(local, 0)):
        heard = Heard()
        router.submit(ask("a", LONG), heard)
        heard.began.wait(10.0)
        local.revive("engine-1")
        assert completion_of(heard.wait()).token_ids == truth.token_ids
    assert "engine-0" in local.killed


def test_a_router_that_was_asleep_begins_again_and_kills_nobody(targets: Targets) -> None:
    """A client that had been stopped for a while waited for requests that its replica had dropped, or had it replaced."""
    with replicas(targets(1), client_timeout_s=0.3) as local:
        host, request = local.hosts["engine-0"], ask("a", LONG)
        truth = plain(local, request)
        clients: list[LocalReplicaClient] = []

        def noting(replica: Replica) -> LocalReplicaClient:
            clients.append(LocalReplicaClient(replica))
            return clients[-1]

        with Router(local.all, noting, SETTINGS) as router:
            heard = Heard()
            with standing(*local.engines.values()):
                router.submit(request, heard)
                heard.began.wait(10.0)
                host.leave(clients[-1].id)  # as after `client_timeout_s`, at whatever moment that comes
            one = completion_of(heard.wait())
        assert (one.token_ids, one.text) == (truth.token_ids, truth.text)
        assert not local.killed


def test_a_request_that_kills_replicas_is_given_up(local: LocalReplicas) -> None:
    """One request that no replica survives took them all down, again and again, for ever."""
    with Router(local.all, Losing([0] * 9), settings(max_vain_replays=2)) as router:
        with pytest.raises(EngineError, match="lost 3 times in a row") as raised:
            router.generate([ask("a")])
        assert not isinstance(raised.value, ReplicaLost)
        until(lambda: local.num_reconnects >= 3)
    assert local.num_reconnects == 3


def test_other_numerics_do_not_go_on(local: LocalReplicas) -> None:
    """An answer was begun under one arithmetic and ended under another without a word."""
    engine_of(local, 1).fingerprint = "other"
    local.lose("engine-1")
    losing = Losing([5])
    with Router(local.all, losing, settings(replay_timeout_s=0.4)) as router:
        local.revives = False
        heard = Heard()
        router.submit(ask("a"), heard)
        until(lambda: losing.num_lost == 1)
        local.revive("engine-1")
        last = heard.wait()[-1]
    assert last.finish_reason is FinishReason.LOST
    assert "'tiny'" in last.error and "'other'" in last.error


def test_equal_numerics_are_waited_for(local: LocalReplicas) -> None:
    """A replica that came back a moment later found its requests ended, or gone on with under other numerics."""
    engine_of(local, 1).fingerprint = "other"
    local.revive("engine-1")
    local.lose("engine-0")
    with Router(local.all, connect, SETTINGS) as router:
        local.revive("engine-0")
        until(lambda: router.num_connected == 2)
        assert router.fingerprint == "other+tiny"
        heard, unheard = Heard(), Heard()
        with standing(*local.engines.values()):
            for name, each in (("a", heard), ("b", unheard)):
                router.submit(ask(name, LONG, affinity="doc"), each)
            until(lambda: heard.began.is_set() and unheard.began.is_set())
            name = serving(local)
            local.lose(name)
            until(lambda: router.num_connected == 1)
        router.cancel("b")  # between two replicas
        assert unheard.wait()[-1].finish_reason is FinishReason.CANCELLED
        assert not heard.ended.wait(0.5)
        local.revive(name)
        one = completion_of(heard.wait())
    assert one.token_ids == plain(local, ask("a", LONG)).token_ids
    assert (one.stats.exactness, one.stats.system_fingerprint) == ("path", local.engines[name].fingerprint)
    assert not local.killed, "the choice that was cancelled was sent all the same"


def test_a_purge_reaches_a_replica_that_was_away(local: LocalReplicas) -> None:
    """A replica whose connection broke kept a tenant's prefixes through the purge."""
    local.lose("engine-1")
    with Router(local.all, connect, SETTINGS) as router:
        first = router.generate([ask("a", salt="x")])[0]
        assert router.generate([ask("b", salt="x")])[0].stats.num_cached_tokens > 0
        router.purge("x")
        assert router.generate([ask("c", salt="x")])[0].stats.num_cached_tokens == 0
        local.lose("engine-0")
        until(lambda: not router.num_connected)
        router.purge("x")
        local.revive("engine-0")
        again = router.generate([ask("d", salt="x")])[0]
    assert (again.token_ids, again.stats.num_cached_tokens) == (first.token_ids, 0)
