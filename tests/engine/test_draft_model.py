"""A small model as drafter: no output changes, its keys are those of a fresh reading, its pool has bounds, tenants stay apart."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Half
from oracle import fresh_forward
from oracle_cases import (
    PARAMS,
    PROMPTS,
    assert_equal,
    assert_pool_is_empty,
    drafted_as_plainly,
    generated,
    names_of,
    requests_of,
    total,
    truth,
)
from tiny_target import Free, Tiny, save_model, target_config, tiny_engine

from ragspec.config import DraftingConfig, DraftModelConfig, DraftTreeConfig, EngineConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting import draft_model as module
from ragspec.drafting.draft_model import ModelDrafter
from ragspec.drafting.growing.draft import DraftBatch, make_shape
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine import target as targets
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine, make_draft_model
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.target import FINAL, Target
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.kv_cache import KvPool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one vocabulary, which often differ: the small one is drafted with."""
    root = tmp_path_factory.mktemp("models")
    save_model("llama", root / "large")
    save_model("llama", root / "small", num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    return root


@functools.cache
def model_at(path: Path, dtype: str) -> Target:
    return Target.load(target_config(str(path), dtype), 2048)


def drafter_for(
    target: Target, model: Target, tree: tuple[str, int, int, int] = ("dynamic", 3, 2, 4), num_slots: int = 2048
) -> ModelDrafter:
    model.reset_pool(num_slots)
    return Watched(model, target.vocab_size, make_shape(*tree), Free(1e-9), PrefixCache(model.pool))


class NotesReads:
    """Mixed into a drafter with a model: notes, at every draft, the model's tokens and the state that the draft grew from, and
    how many tokens its forwards took.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], torch.Tensor]] = []
        self.num_rows: list[int] = []

    def _read(self, drafts: list[Any], rows: DraftBatch, cache: KvPool) -> torch.Tensor:
        states: torch.Tensor = super()._read(drafts, rows, cache)  # type: ignore[misc]
        self.seen += [(list(draft.sequence.tokens), state.clone()) for draft, state in zip(drafts, states, strict=True)]
        self.num_rows.append(sum(draft.num_new for draft in drafts))
        return states


class Watched(NotesReads, ModelDrafter): ...


def assert_nothing_held(drafter: ModelDrafter) -> None:
    """All pages are free but the ones of cached prefixes, and these go with their tenant."""
    assert len(drafter.cache) == 0
    drafter.purge("")
    assert drafter.cache.pool.num_free_pages == drafter.cache.pool.num_pages
    drafter.cache.pool.check_integrity([])


@pytest.mark.parametrize(
    ("name", "dtype"), [("greedy", "torch-float32"), ("T=1", "float32"), ("top-k, min-p", "float32")]
)
def test_the_target_itself_is_right_nearly_always(tiny: Tiny, name: str, dtype: str) -> None:
    """Positions one off, keys of another sequence, the noise of another position: acceptance fell, and nothing else showed it."""
    target = tiny("llama", dtype)
    model = model_at(Path(target.config.model), dtype)
    requests = requests_of(target, PARAMS[name])
    drafter = drafter_for(target, model, ("chain", 1, 1, 4))
    completions = generated(target, [drafter], [requests])
    assert_equal(completions, truth(target, requests, name))
    assert total(completions, "num_accepted") >= 0.98 * total(completions, "num_drafted") > 20


@pytest.mark.parametrize(
    ("options", "num_slots"),
    [
        ({"max_num_batched_tokens": 16}, 2048),
        ({"num_kv_slots": 256}, 2048),
        pytest.param({}, 2048, marks=pytest.mark.slow),
        pytest.param({"enable_prefix_caching": False}, 400, marks=pytest.mark.slow),
    ],
)
def test_states_are_those_of_a_fresh_reading(
    tiny: Tiny, folder: Path, options: dict[str, Any], num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of rejected nodes stayed, an accepted node was kept at another's place, a preempted or evicted text lost its keys."""
    monkeypatch.setattr(module, "_MAX_WAITING", 8)
    monkeypatch.setattr(module, "_CHUNK", 7)
    target, model = tiny(), model_at(folder / "small", "float32")
    requests = requests_of(target, PARAMS["T=1"])
    longer = [replace(r, id=f"x{i}", prompt_ids=(*r.prompt_ids[: 6 + i], 50 + i)) for i, r in enumerate(requests)]
    expected = truth(target, requests, "T=1") | truth(target, longer, "T=1")
    half = Half({key: plain.token_ids for key, plain in expected.items()})
    drafter = drafter_for(target, model, num_slots=num_slots)
    with tiny_engine(target, [half, drafter], **options) as engine:
        for batch in (requests, longer, requests[::2], longer):
            assert_equal(engine.generate(batch), expected)
        assert engine.num_drafter_failures == 0
        if "num_kv_slots" in options:
            assert engine.load().num_preemptions > 0
        assert_pool_is_empty(engine)
    assert_nothing_held(drafter)
    assert len(drafter.seen) > 12
    for tokens, state in drafter.seen[:: max(1, len(drafter.seen) // 60)]:
        assert torch.allclose(state, fresh_forward(model, tokens, (FINAL,))[1][FINAL][-1], atol=1e-4), len(tokens)


def test_accepted_nodes_and_known_prefixes_are_not_read_again(tiny: Tiny) -> None:
    """Every draft read its own accepted nodes again, and every request its whole prompt."""
    target = tiny()
    model = model_at(Path(target.config.model), "float32")
    drafter = drafter_for(target, model, ("chain", 1, 1, 4))
    prompt, params = tuple(range(30, 80)), SamplingParams(max_tokens=30, ignore_eos=True)
    with tiny_engine(target, [drafter]) as engine:
        (first,) = engine.generate([Request("a", prompt, params, salt="one")])
        assert drafter.num_rows[0] == 50 and max(drafter.num_rows[1:]) <= 2
        drafter.num_rows.clear()
        engine.generate([Request("b", (*prompt, *first.token_ids[:9], 7, 8), params, salt="one")])
        assert drafter.num_rows[0] == 2
        drafter.num_rows.clear()
        engine.generate([Request("c", prompt, params, salt="two")])
        assert drafter.num_rows[0] == 50, "another tenant's text was found"
        engine.purge("one")
        drafter.num_rows.clear()
        engine.generate([Request("d", prompt, params, salt="one")])
        assert drafter.num_rows[0] == 50, "purged text was found"


def test_choices_of_one_request_read_its_prompt_once(tiny: Tiny) -> None:
    """Every choice read the prompt for itself."""
    target = tiny()
    drafter = drafter_for(target, model_at(Path(target.config.model), "float32"), ("chain", 1, 1, 4))
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    completions = generated(target, [drafter], [[Request("a", tuple(range(30, 80)), params)]])
    assert len({completion.token_ids for completion in completions}) == 3
    assert total(completions, "num_accepted") >= 0.98 * total(completions, "num_drafted") > 20
    assert sum(drafter.num_rows) < 2 * 50


def test_a_model_that_costs_more_than_it_saves_is_not_asked(tiny: Tiny) -> None:
    """A draft model as slow as its target made every step slower, however right it was."""
    target = tiny()
    model = model_at(Path(target.config.model), "float32")
    requests = requests_of(target, SamplingParams(max_tokens=40, ignore_eos=True), PROMPTS[:2])
    for step_s, is_asked in ((0.01, True), (4.0, False)):  # a step of the target takes 1.0
        model.reset_pool(2048)
        costs, prefixes = Free(step_s), PrefixCache(model.pool)
        drafter = Watched(model, target.vocab_size, make_shape("chain", 1, 1, 4), costs, prefixes)
        completions = generated(target, [drafter], [requests])
        assert (total(completions, "num_drafted") > 0) is is_asked
        assert bool(drafter.num_rows) is is_asked


def test_text_of_a_purged_tenant_is_not_kept_when_it_ends(tiny: Tiny, folder: Path) -> None:
    """A sequence that ran during the purge left its text behind."""
    target = tiny()
    drafter = drafter_for(target, model_at(folder / "small", "float32"))
    request = Request("a", tuple(range(30, 60)), SamplingParams(max_tokens=40, ignore_eos=True), salt="one\0x")
    with tiny_engine(target, [drafter]) as engine:
        steps: list[int] = []

        def purge_once(delta: Any) -> None:
            steps.append(len(delta.token_ids))
            if len(steps) == 3:
                engine.purge("one")

        engine.submit_all([request], purge_once)
        while not engine.idle() or not steps:
            engine.between_steps(lambda: None)
        engine.between_steps(lambda: None)
    assert len(steps) > 3 and len(drafter.cache) == 0
    assert drafter.cache.pool.num_free_pages == drafter.cache.pool.num_pages


@pytest.mark.parametrize("num_slots", [48, 160])
def test_a_small_pool_costs_drafts_alone(tiny: Tiny, folder: Path, num_slots: int) -> None:
    """Texts that did not fit failed, or took the pages of a draft in the same step."""
    target, model = tiny(), model_at(folder / "small", "float32")
    requests = requests_of(target, PARAMS["T=1"])
    drafter = drafter_for(target, model, num_slots=num_slots)
    completions = generated(target, [drafter], [requests, requests])
    assert_equal(completions, truth(target, requests, "T=1"))
    assert total(completions, "num_drafted") > 0
    assert_nothing_held(drafter)


def test_a_text_beyond_the_models_context_gets_no_drafts(tiny: Tiny, tmp_path: Path) -> None:
    """The kernel read beyond the table of rotations."""
    save_model("llama", tmp_path, max_position_embeddings=32, num_hidden_layers=1)
    target = tiny()
    drafter = drafter_for(target, model_at(tmp_path, "float32"))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    request = Request("a", tuple(range(30, 50)), params)
    with tiny_engine(target) as engine:
        expected = engine.generate([request])[0].token_ids
    (done,) = generated(target, [drafter], [[request]])
    assert done.token_ids == expected and done.stats.num_drafted > 0
    assert max(len(tokens) for tokens, _ in drafter.seen) == 31  # type: ignore[attr-defined]


def open_engine(folder: Path, path: Path | str, **options: Any) -> Engine:
    model = DraftModelConfig(path=str(path), **options)
    drafting = DraftingConfig(draft_model=model, tree=DraftTreeConfig(max_nodes=6))
    config = TargetConfig(model=str(folder / "large"))
    return load_engine(config, EngineConfig(max_kv_tokens=1024), drafting, planner_class=FixedTreePlanner)


def test_a_configured_model_drafts_and_changes_nothing(folder: Path) -> None:
    """A path in the configuration was read and nothing drafted with it."""
    with open_engine(folder, folder / "small", max_kv_tokens=768) as engine:
        completions = drafted_as_plainly(engine)
        assert names_of(engine) == ["copy", "draft_model"]
    assert all("draft_model" in done.stats.positions for done in completions)


def test_another_vocabulary_is_refused_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in the tokens of another model: nothing was ever accepted, and nobody knew why."""
    save_model("llama", tmp_path / "foreign")
    path, target = tmp_path / "foreign" / "tokenizer.json", model_at(folder / "large", "float32")
    saved = json.loads(path.read_text())
    ids = saved["model"]["vocab"]
    ids["!"], ids["#"] = ids["#"], ids["!"]
    path.write_text(json.dumps(saved))
    monkeypatch.setattr(targets, "load_whole", None)  # refused before any weight is read
    with pytest.raises(
        ModelError, match=r"foreign has another vocabulary than the target: token \d+ is '#' there and '!'"
    ):
        make_draft_model(target, DraftModelConfig(path=str(path.parent)), DraftTreeConfig())
    with pytest.raises(ConfigError, match=r"drafting\.draft_model\.path"):
        make_draft_model(target, DraftModelConfig(), DraftTreeConfig())
    with pytest.raises(ModelError, match="nowhere"):
        make_draft_model(target, DraftModelConfig(path=str(tmp_path / "nowhere")), DraftTreeConfig())
