"""A head that learns while it serves: it drafts better, changes no output, and one tenant's learning is no other's."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_parts import free, head_for
from oracle_cases import (
    PARAMS,
    PROMPTS,
    assert_equal,
    assert_pool_is_empty,
    drafts_of,
    generated,
    requests_of,
    total,
    truth,
)
from tiny_target import Tiny, tiny_engine

from ragspec.config import DraftingConfig, EagleConfig, OnlineConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.eagle import online as online_module
from ragspec.drafting.eagle.checkpoint import write_head
from ragspec.drafting.eagle.layout import HeadCheckpoint
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.eagle.online import HeadLearner, OnlineEagleDrafter, RecordedText, Recording, trainable_head
from ragspec.drafting.growing.draft import make_shape
from ragspec.engine.loading import make_drafters
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.speculation import Speculation

FAST = OnlineConfig(enabled=True)
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


class AtOnce(OnlineEagleDrafter):
    """Learns in the engine's thread as soon as there is time: the same at every run."""

    def _wake(self) -> None:
        if self._next_learner() is not None:
            self._learn()


def drafter_for(
    target: Target,
    online: OnlineConfig = FAST,
    kind: type[OnlineEagleDrafter] = AtOnce,
    learning_rate: float = 1e-2,
    max_bytes: int = 2**29,
    **fields: Any,
) -> OnlineEagleDrafter:
    checkpoint, shape = head_for(target, "eagle3", **fields), make_shape("dynamic", 3, 2, 4)
    network, head = EagleNetwork(checkpoint, target, 300), trainable_head(checkpoint, target.backend.device)
    return kind(network, shape, free(), head=head, online=online, learning_rate=learning_rate, max_bytes=max_bytes)


def repeated(requests: Sequence[Request], count: int, salt: str) -> list[Request]:
    return [
        replace(request, id=f"{salt}{n}-{i}", salt=salt) for n in range(count) for i, request in enumerate(requests)
    ]


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param("greedy", "float32", marks=pytest.mark.slow), ("T=1", "torch-float32")]
)
def test_no_output_changes_while_the_head_learns(tiny: Tiny, name: str, dtype: str) -> None:
    """Other weights in the middle of an answer changed a token; or nothing was learned, so the test could not fail."""
    target = tiny("llama", dtype)
    requests, drafter = requests_of(target, PARAMS[name], PROMPTS[:6]), drafter_for(target)
    with tiny_engine(target, [drafter]) as engine:
        rounds = [engine.generate(requests) for _ in range(4)]
        assert engine.num_drafter_failures == 0
        assert_pool_is_empty(engine)
    assert_equal([done for each in rounds for done in each], truth(target, requests * 4, name))
    (learner,) = drafter.learners.values()
    assert learner.num_learned > 16 and learner.network is not None
    assert total(rounds[-1], "num_accepted") > 1.4 * total(rounds[0], "num_accepted")


def test_a_thread_learns_while_no_request_is_open(tiny: Tiny) -> None:
    """Training took time from running requests, or nothing trained at all."""
    target = tiny()

    seen: list[bool] = []

    class Watched(OnlineEagleDrafter):
        def _next_learner(self) -> HeadLearner | None:
            learner = super()._next_learner()
            seen.append(learner is not None and not self._is_idle)
            return learner

    drafter = drafter_for(target, kind=Watched)
    requests = requests_of(target, LONG, PROMPTS[:3])
    with tiny_engine(target, [drafter]) as engine:
        for _ in range(2):
            engine.generate(requests)
            engine.between_steps(lambda: None)  # the last request has ended in the drafters too
            drafter.wait()
    (learner,) = drafter.learners.values()
    assert learner.num_learned == 2 * len(requests) and not learner.waits
    assert len(seen) > 2 * len(requests) and not any(seen)
    assert not drafter._has_failed


def test_learning_ends_with_the_engine(tiny: Tiny) -> None:
    """A thread inside torch outlived its engine and aborted the end of the process."""
    target = tiny()
    drafter = drafter_for(target, kind=OnlineEagleDrafter)
    with tiny_engine(target, [drafter]) as engine:
        engine.generate(requests_of(target, LONG))
        engine.between_steps(lambda: None)
        thread = drafter._thread
    assert thread is not None and not thread.is_alive()
    drafter.learners.used("").add(RecordedText(list(range(300, 340)), [1.0] * 40, torch.zeros(39, 3)))
    drafter._wake()
    assert drafter._thread is thread


def test_beside_requests_training_takes_its_share_of_the_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is never idle learned without a limit, or never."""
    clock = [100.0]
    monkeypatch.setattr(online_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class TwoSeconds(HeadLearner):
        waits = True  # type: ignore[assignment]

        def advance(self) -> None:
            clock[0] += 2.0

    never, quarter = (drafter_for(tiny(), FAST.model_copy(update={"busy_share": share})) for share in (0.0, 0.25))
    for drafter in (never, quarter):
        drafter._is_idle = False
        drafter.learners["a"] = TwoSeconds.__new__(TwoSeconds)
        drafter._learn()
    assert clock == [102.0] and never._next_learner() is None
    clock[0] = 107.9
    quarter._learn()
    assert clock == [107.9]
    clock[0] = 108.0
    quarter._learn()
    assert clock == [110.0]
    never._is_idle = True
    assert never._next_learner() is not None


def test_requests_without_drafts_count_as_open(tiny: Tiny) -> None:
    """Training ran beside requests that the drafters never saw."""
    drafter, seen = drafter_for(tiny()), list[bool]()
    drafter.note_idle = seen.append  # type: ignore[method-assign]
    with tiny_engine(tiny(), [drafter]) as engine:
        engine.generate([Request("a", (5, 6, 7), LONG, speculation=Speculation(drafters=()))])
        engine.between_steps(lambda: None)
    assert seen == [False, True]


@pytest.mark.slow
def test_a_tenants_learned_drafts_are_the_same_whatever_others_did(tiny: Tiny) -> None:
    """A head, or the record of its drafts, learned from two tenants."""
    target = tiny()
    requests = requests_of(target, LONG)
    own, others = repeated(requests[:2], 7, "b"), repeated(requests[1:3], 7, "a")
    alone, beside = (drafter_for(target) for _ in range(2))
    first = drafts_of(target, alone, [], own)
    second = drafts_of(target, beside, others, own)
    assert beside.learners["a"].network is not None and beside.learners["b"].network is not None
    assert first == second and sum(len(nodes) for _, nodes in first) > 100
    shared = drafter_for(target, FAST.model_copy(update={"shared": True}))
    assert drafts_of(target, shared, others, own[:2]) != first[: len(first) // 7]
    assert list(shared.learners) == [""]


@pytest.mark.slow
def test_worse_weights_never_draft_for_long(tiny: Tiny) -> None:
    """Learning from texts that no longer come made drafts worse than the loaded head's, and stayed."""
    target = tiny()
    drafter = drafter_for(target)
    generated(target, [drafter], [repeated(requests_of(target, LONG), 4, "b")])
    honest = list(drafter.learners["b"]._kept)
    good = drafter.learners["b"]._head
    assert good is not None
    learner = HeadLearner(good, drafter._loaded.relearned(dict(good.named_parameters())), 1e-2)
    for _ in range(30):
        learn(learner, poisoned(honest[0]))
    assert learner.network is not None, "poisoned texts were fitted"
    learner._optimizer.param_groups[0]["lr"] = 0.0  # it would learn them again
    for text in honest[:10]:
        learn(learner, text)
    assert learner.network is None and learner.num_restarts == 1


def learn(learner: HeadLearner, text: RecordedText) -> None:
    learner.add(text)
    while learner.waits:
        learner.advance()


def poisoned(text: RecordedText) -> RecordedText:
    """The same states with a token that never follows them."""
    return text._replace(ids=[7] * len(text.ids))


def test_weights_that_are_no_numbers_never_draft(tiny: Tiny) -> None:
    """A step of training that diverged was served."""
    target = tiny()
    drafter = drafter_for(target, learning_rate=1e30)
    requests = requests_of(target, PARAMS["greedy"], PROMPTS[:3])
    with tiny_engine(target, [drafter]) as engine:
        completions = [engine.generate(requests) for _ in range(3)]
    assert_equal([done for each in completions for done in each], truth(target, requests * 3, "greedy"))
    assert drafter.learners[""].network is None


def test_an_error_in_learning_costs_nothing_but_learning(tiny: Tiny) -> None:
    """An exception ended the engine or drafting, or was raised again for every request."""
    target = tiny()
    requests, drafter = requests_of(target, LONG), drafter_for(target)
    with tiny_engine(target, [drafter]) as engine:
        first = engine.generate(requests)
        drafter.learners[""]._choose = None  # type: ignore[method-assign, assignment]
        again = [engine.generate(requests) for _ in range(2)]
        assert engine.num_drafter_failures == 0 and drafter._has_failed
    assert [d.token_ids for d in again[0]] == [d.token_ids for d in again[1]] == [d.token_ids for d in first]
    assert drafter.learners[""].network is None and total(again[1], "num_drafted") > 0


def test_a_purged_tenant_leaves_nothing(tiny: Tiny) -> None:
    """Learned weights or texts stayed, or a sequence that ran during the purge was learned."""
    target, drafter = tiny(), drafter_for(tiny())
    steps: list[int] = []
    with tiny_engine(target, [drafter]) as engine:
        engine.generate([Request("b", (7, 8, 9), LONG, salt="b"), Request("a", (7, 8, 9), LONG, salt="a\0y")])
        assert {salt for salt, learner in drafter.learners.items() if learner.num_learned} == {"b", "a\0y"}

        def purge_once(delta: Any) -> None:
            steps.append(len(delta.token_ids))
            if len(steps) == 2:
                engine.purge("a")

        engine.submit_all([Request("c", (7, 8, 9), LONG, salt="a\0x")], purge_once)
        while sum(steps) < 24:
            engine.between_steps(lambda: None)
        engine.between_steps(lambda: None)
        learned = {salt for salt, learner in drafter.learners.items() if learner.num_learned or learner.waits}
        assert learned == {"b"} and not drafter._recordings and len(steps) > 3


def test_learned_heads_are_bounded(tiny: Tiny) -> None:
    """A learner took more than it was counted with, or a tenant with many salts pushed others out."""
    target = tiny()
    needed = HeadLearner.num_bytes(trainable_head(head_for(target, "eagle3"), "cpu"))
    drafter = drafter_for(target, max_bytes=3 * needed + 1)
    requests = requests_of(target, LONG)
    with tiny_engine(target, [drafter]) as engine:
        engine.generate(repeated(requests, 2, "b"))
        for number in range(6):
            engine.generate(repeated(requests[:1], 1, f"a\0{number}"))
    assert list(drafter.learners) == ["b", "a\0004", "a\0005"]
    learner = drafter.learners["b"]
    assert learner._head is not None and learner.network is not None
    trained = [p for p in learner._head.parameters() if p.requires_grad]
    moments = [t for state in learner._optimizer.state.values() for t in state.values()]
    texts = [text.features for text in (*learner._kept, *learner._waiting)]
    taken = sum(t.numel() * t.element_size() for t in (*trained, *trained, *trained, *moments, *texts))
    assert 4 * sum(t.numel() * t.element_size() for t in trained) < taken <= needed
    with pytest.raises(ConfigError, match=rf"may take 10 bytes, and one of this size takes {needed}"):
        drafter_for(target, max_bytes=10)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.int8])
def test_relearned_weights_are_those_that_draft(tiny: Tiny, dtype: torch.dtype) -> None:
    """A weight that was trained and not served, or the other way round; int8 products read behind the end of their weights."""
    target = tiny()
    config, tensors = head_for(target, "eagle3")
    _, others = head_for(target, "eagle3", seed=5)
    others |= {name: tensors[name] for name in ("lm_head.weight", "d2t", "t2d")}
    head = trainable_head(HeadCheckpoint(config, others), "cpu")
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert trained.keys() == {name for name, t in others.items() if t.is_floating_point()} - {"lm_head.weight"}
    expected = EagleNetwork(HeadCheckpoint(config, others), target, 300, dtype)
    loaded = EagleNetwork(HeadCheckpoint(config, tensors), target, 300, dtype)
    drafts = []
    for network in (loaded, expected, loaded):
        drafter = drafter_for(target)
        drafter._loaded = drafter.network = network.relearned(trained) if len(drafts) == 2 else network
        drafts.append(drafts_of(target, drafter, [], requests_of(target, SamplingParams(max_tokens=6))))
    assert drafts[0] != drafts[1] == drafts[2]


def test_only_the_outputs_end_is_learned() -> None:
    """A prompt's tokens were learned as if the target had said them, or states were shifted against their tokens."""

    class View:
        tokens, num_prompt = list(range(300, 660)), 40

    view: SequenceView = View()  # type: ignore[assignment]
    recording = Recording("")
    states = torch.arange(359.0)[:, None].expand(-1, 3)
    recording.append(0, states[:20])
    recording.append(8, states[8:40])  # computed anew from position 8
    for start in range(40, 359):
        recording.append(start, states[start : start + 1])
    text = recording.text(view)
    assert text is not None and text.ids == view.tokens[231:] and len(text.features) == 128
    assert text.features[:, 0].tolist() == states[231:, 0].bfloat16().tolist() and all(text.weights[2:])
    short = Recording("")
    short.append(8, states[8:60])
    view.tokens = view.tokens[:50]
    text = short.text(view)
    assert text is not None and text.ids == list(range(308, 350)) and text.weights == [0.0] * 32 + [1.0] * 10
    view.tokens = view.tokens[:47]
    assert short.text(view) is None


def test_it_is_off_unless_configured(tiny: Tiny, tmp_path: Any) -> None:
    """The setting was not read, on for everybody, or taken for a head that cannot learn."""
    target = tiny()
    write_head(tmp_path / "head", head_for(target, "eagle3"))
    write_head(tmp_path / "first", head_for(target, "eagle"))

    def made(head: str, online: OnlineConfig) -> Any:
        eagle = EagleConfig(path=str(tmp_path / head), dtype="float32", online=online)
        return make_drafters(target, DraftingConfig(drafters=("eagle",), eagle=eagle))[0]

    assert not isinstance(made("head", OnlineConfig()), OnlineEagleDrafter)
    assert isinstance(made("head", FAST), OnlineEagleDrafter)
    with pytest.raises(ModelError, match="only EAGLE-3 heads learn online"):
        made("first", FAST)
