"""Random losses, late answers and cancellations over three replicas: nothing is lost, doubled or changed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from local_replicas import SETTINGS, LocalReplicaClient, LocalReplicas, Targets, replicas
from stand_ins import Heard, until

from ragspec.cluster.actors import Replica
from ragspec.cluster.engine_host import Polled
from ragspec.cluster.routing.router import Router
from ragspec.core import Completion, CopySource, FinishReason, Request, SamplingParams, Segment, SourceKind
from ragspec.engine.client import completion_of
from ragspec.engine.target import Target
from ragspec.errors import ReplicaLost

NUM_REQUESTS, NUM_FAULTS = 30, 25


class Weather:
    """What goes wrong, by one random number generator: connections break before or after their message, or are slow."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_faults = 0
        self._lock = threading.Lock()

    def strikes(self, chance: float) -> bool:
        with self._lock:
            if self.num_faults >= NUM_FAULTS or self.random.random() >= chance:
                return False
            self.num_faults += 1
            return True

    def __call__(self, replica: Replica) -> Stormy:
        return Stormy(replica, self)


class Stormy(LocalReplicaClient):
    def __init__(self, replica: Replica, weather: Weather) -> None:
        super().__init__(replica)
        self._weather, self._is_broken = weather, False

    def submit(self, request: Request) -> None:
        if self._weather.strikes(0.03):
            self._is_broken = True  # before the request was submitted
            return
        super().submit(request)
        if self._weather.strikes(0.03):
            self._is_broken = True  # submitted, but the answer is lost

    def poll(self, wait_s: float) -> Polled:
        if self._weather.strikes(0.02):
            time.sleep(0.05)
        polled = super().poll(wait_s)
        if self._is_broken or (polled.deltas and self._weather.strikes(0.05)):
            raise ReplicaLost("polled, but the answer is lost")
        if self._weather.strikes(0.02):
            self._is_broken = True
            return polled._replace(deltas=polled.deltas[: len(polled.deltas) // 2])
        return polled


def requests_of(target: Target, chance: random.Random) -> list[Request]:
    """Of every kind; some are for what stands behind a part of themselves."""
    prompts = [tuple(target.tokenizer(text).input_ids) for text in ("The river", 'says: "The bridge', "水 A mill")]
    sources = (CopySource(SourceKind.PASSAGE, 'The report says: "The bridge was built in 1874."', "p"),)
    requests = []
    for number in range(NUM_REQUESTS):
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.7, 1.0]),
            top_p=chance.choice([0.8, 1.0]),
            repetition_penalty=chance.choice([1.0, 1.2]),
            seed=number,
            n=chance.choice([1, 1, 2, 3]),
            max_tokens=chance.randrange(1, 40),
            logprobs=chance.choice([None, 0, 2]),
            stop=chance.choice([(), ("e",), ("th", " t")]),
            ignore_eos=chance.random() < 0.5,
        )
        affinity = chance.choice(["", "doc", f"doc{number % 3}"])
        requests.append(Request(f"r{number}", chance.choice(prompts), params, sources, affinity=affinity))
    return requests


def assert_told_once(heard: Heard, truth: Sequence[Completion], cancelled: bool) -> None:
    for plain in truth:
        deltas = [delta for delta in heard.deltas if delta.choice == plain.choice]
        assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
        if deltas[-1].finish_reason is FinishReason.CANCELLED:
            assert cancelled
            tokens = tuple(token for delta in deltas for token in delta.token_ids)
            assert tokens == plain.token_ids[: len(tokens)]
            assert plain.text.startswith("".join(delta.text for delta in deltas))
            continue
        one = completion_of(deltas)
        assert (one.token_ids, one.text, one.logprobs) == (plain.token_ids, plain.text, plain.logprobs)
        assert one.finish_reason == plain.finish_reason
        assert one.stats.num_output_tokens == len(one.token_ids)


def disturb(local: LocalReplicas, weather: Weather, over: threading.Event) -> None:
    """Replicas come and go as well."""
    while not over.wait(0.05):
        name = weather.random.choice(sorted(local.hosts))
        if weather.strikes(0.3):
            local.lose(name)
            over.wait(0.1)
            local.revive(name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_random_faults_change_nothing(targets: Targets, seed: int) -> None:
    """A combination of faults that nobody thought of."""
    weather = Weather(seed)
    with replicas(targets(3)) as local:
        target = local.engines["engine-0"].target
        requests = requests_of(target, random.Random(seed))
        truth = {r.id: local.engines["engine-0"].generate([r]) for r in requests}
        for number in range(0, NUM_REQUESTS, 7):  # some as the rest of what they wrote
            known = truth[f"r{number}"][-1]
            given = known.token_ids[: len(known.token_ids) // 2]
            segment = Segment(given, None, known.token_ids[len(given) :], known.choice)
            requests[number] = replace(requests[number], segment=segment)
            truth[f"r{number}"] = local.engines["engine-0"].generate([requests[number]])
        heard = {request.id: Heard(len(request.choices)) for request in requests}
        cancelled = set(weather.random.sample(sorted(heard), 4))
        settings = SETTINGS.model_copy(update={"max_num_seqs": 12, "max_vain_replays": 100})
        over = threading.Event()
        with Router(local.all, weather, settings) as router:
            disturbing = threading.Thread(target=disturb, args=(local, weather, over))
            disturbing.start()
            try:
                for request in requests:
                    router.submit(request, heard[request.id])
                    time.sleep(weather.random.random() * 0.01)
                for request_id in cancelled:
                    router.cancel(request_id)
                for request_id, listener in heard.items():
                    listener.wait(60.0)
                    assert_told_once(listener, truth[request_id], request_id in cancelled)
            finally:
                over.set()
                disturbing.join()
            assert router.num_choices() == 0
            until(lambda: local.is_idle)
        assert weather.num_faults, "how many, the machine's speed decides"
