"""From a configuration to an engine that drafts with a head; heads that cannot be served are refused at load."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafting.eagle_heads import LLAMA3, change_config, random_head, save_head
from oracle import decode
from oracle_cases import drafted_as_plainly
from tiny_target import save_model

from ragspec.config import DraftingConfig, DraftTreeConfig, EagleConfig, EngineConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.eagle.layout import HeadCheckpoint
from ragspec.drafting.heads.layer import FINAL
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine import loading, measurements
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine, network_bytes
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.cpu.int8 import Int8Linear
from ragspec.numerics.self_test import Failure, self_test
from ragspec.speculation import Speculation

HIDDEN, VOCAB, TAPS = 64, 320, (0, 1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("target"))


def a_head() -> HeadCheckpoint:
    return random_head("eagle3", hidden=HIDDEN, vocab=VOCAB, aux_layers=TAPS)


SMALL_TREE = DraftTreeConfig(max_nodes=6)


def open_engine(
    model: Path,
    head: Path | str,
    drafters: tuple[str, ...] = ("copy", "eagle"),
    tree: DraftTreeConfig = SMALL_TREE,
    **options: Any,
) -> Engine:
    drafting = DraftingConfig(drafters=drafters, eagle=EagleConfig(path=str(head), **options), tree=tree)
    config = TargetConfig(model=str(model))
    return load_engine(config, EngineConfig(max_kv_tokens=2048), drafting, planner_class=FixedTreePlanner)


@pytest.mark.parametrize(
    ("dialect", "tree"),
    [("official", "dynamic"), ("speculators", "static"), ("speculators", "chain"), ("official", "confidence")],
)
def test_a_published_head_drafts_and_changes_nothing(model: Path, tmp_path: Path, dialect: str, tree: str) -> None:
    """A dialect's head loaded and drafted nothing, or the products of another type changed the target's."""
    save_head(tmp_path, a_head(), dialect)
    paper = {"top_k": 10, "max_depth": 8} if tree == "confidence" else {}
    shape = SMALL_TREE.model_copy(update={"kind": tree, **paper})
    with open_engine(model, tmp_path, ("eagle",), shape) as engine:
        drafted_as_plainly(engine)


def test_a_heads_products_may_be_in_int8(model: Path, tmp_path: Path) -> None:
    """The setting was read and the products stayed in floats, or other numbers came out."""
    save_head(tmp_path, a_head(), "official")
    with open_engine(model, tmp_path, ("eagle",), dtype="int8") as engine:
        drafted_as_plainly(engine)
        (drafter,) = engine._planner._drafters
        product = drafter._drafter.network.head.fc.linear
        assert isinstance(product, Int8Linear)
        x = torch.randn(5, product.in_features)
        expected = F.linear(x, a_head().tensors["fc.weight"].float())
        difference = torch.linalg.norm(product(x) - expected) / torch.linalg.norm(expected)
        assert 0 < difference < 0.05


def test_one_head_at_a_time_is_in_memory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dtype: auto` held a head of every type until the fastest was known."""
    living, built = weakref.WeakSet[Any](), []

    class Watched(loading.PairTimer):
        def __init__(self, network: Any, pool: Any) -> None:
            super().__init__(network, pool)
            living.add(network)
            built.append(len(living))

    monkeypatch.setattr(loading, "PairTimer", Watched)
    save_head(tmp_path, a_head(), "official")
    with open_engine(model, tmp_path, ("eagle",), dtype="auto"):
        assert set(built) == {1}
        assert len(built) > 2 or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), "one type is left to try"


ROPE = LLAMA3 | {"original_max_position_embeddings": 64}
LATER: dict[str, dict[str, Any]] = {
    "a window, Llama-3's rotary positions": {"family": "eagle3", "aux_layers": TAPS, "window": 16, "rope": ROPE},
    "two layers with norms and biases": {"family": "eagle", "num_layers": 2, "qk_norm": True, "qkv_bias": True},
    "PosS-2": {"family": "eagle", "num_layers": 2, "positions_per_layer": 2, "fc_bias": True},
    "no projection": {"family": "eagle3", "aux_layers": (FINAL,)},
    "SpecForge's norm_output": {"family": "eagle3", "aux_layers": TAPS, "norm_output": True},
    "the target's output layer": {"family": "eagle3", "aux_layers": TAPS, "draft_vocab": VOCAB, "shares_lm_head": True},
}


UNCLEAR: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "PosS-2": ({"position_per_layer": ...}, r"layers\.1.*drafting\.eagle\.positions_per_layer", {"positions_per_layer": 2}),
    "SpecForge's norm_output": (
        {"architectures": ["LlamaForCausalLMEagle3"]}, r"drafting\.eagle\.norm_output", {"norm_output": True},
    ),
}  # fmt: skip
"""Heads whose files leave a question open: changes of config.json, the refusal, and the option that answers."""


@pytest.mark.parametrize("name", LATER)
def test_later_dialects_draft_and_change_nothing(model: Path, tmp_path: Path, name: str) -> None:
    """A layer's keys lay under another layer's slots, or a specialist changed a token."""
    head = random_head(hidden=HIDDEN, vocab=VOCAB, **LATER[name])
    save_head(tmp_path, head)
    options: dict[str, Any] = {}
    if name in UNCLEAR:
        changes, refusal, options = UNCLEAR[name]
        change_config(tmp_path, **changes)
        with pytest.raises(ModelError, match=refusal):
            open_engine(model, tmp_path)
    with open_engine(model, tmp_path, ("eagle",), **options) as engine:
        drafted_as_plainly(engine)


def test_several_heads_are_held_and_change_nothing(model: Path, tmp_path: Path) -> None:
    """A second head took the first head's name, its keys or its drafts."""
    save_head(tmp_path / "eagle3", a_head())
    save_head(tmp_path / "poss", random_head(hidden=HIDDEN, vocab=VOCAB, **LATER["PosS-2"]))
    heads = {"poss": EagleConfig(path=str(tmp_path / "poss"))}
    drafting = DraftingConfig(eagle=EagleConfig(path=str(tmp_path / "eagle3")), eagle_heads=heads, tree=SMALL_TREE)
    assert drafting.networks.keys() >= {"eagle", "poss"}
    moved = drafting.with_paths(lambda path: path and f"/there{path}")
    assert moved.eagle_heads["poss"].path == f"/there{tmp_path}/poss" and moved.eagle.path.startswith("/there")
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
    prompts = [tuple(range(20 + i, 50 + 2 * i)) for i in range(3)]
    requests = [
        Request(f"{i}-{ways}", ids, params, speculation=Speculation(ways))
        for i, ids in enumerate(prompts)
        for ways in (None, ("poss",), ("eagle",))
    ]
    config, engine_config = TargetConfig(model=str(model)), EngineConfig(max_kv_tokens=2048)
    with load_engine(config, engine_config, drafting, planner_class=FixedTreePlanner) as engine:
        completions = engine.generate(requests)
        assert engine.num_drafter_failures == 0
        for request, done in zip(requests, completions, strict=True):
            assert done.token_ids == decode(engine.target, request.prompt_ids, params, 0).token_ids
            assert done.stats.num_drafted > 0
            if request.speculation.drafters:
                assert set(done.stats.positions) <= set(request.speculation.drafters)
    clash = DraftingConfig(eagle_heads={"copy": heads["poss"]})
    with pytest.raises(ConfigError, match="'copy', the name of another drafter"):
        load_engine(config, engine_config, clash)


@pytest.mark.parametrize("num_slots", [64, 160])
def test_a_head_is_timed_inside_the_smallest_cache(model: Path, tmp_path: Path, num_slots: int) -> None:
    """Its keys were written behind the end of the cache, into whatever lay there."""
    save_head(tmp_path, a_head(), "official")
    drafting = DraftingConfig(
        drafters=("eagle",), eagle=EagleConfig(path=str(tmp_path)), tree=DraftTreeConfig(max_nodes=8)
    )
    prompt, params = (5, 6, 7), SamplingParams(max_tokens=4)
    with load_engine(TargetConfig(model=str(model)), EngineConfig(max_kv_tokens=num_slots), drafting) as engine:
        (done,) = engine.generate([Request("a", prompt, params)])
        assert done.token_ids == decode(engine.target, prompt, params).token_ids


def test_an_engine_that_failed_its_self_test_promises_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`exactness: fast` still told clients that a draft changes no token, under the fingerprint of machines where that holds."""
    request, told = Request("a", (5, 6, 7), SamplingParams(max_tokens=4)), []
    for failures in ((), (Failure("x", 0.1),)):
        monkeypatch.setattr(
            measurements, "self_test", lambda *args, failures=failures: self_test(*args)._replace(failures=failures)
        )
        config = TargetConfig(model=str(model), exactness="fast")
        with load_engine(config, EngineConfig(max_kv_tokens=2048), DraftingConfig(drafters=("copy",))) as engine:
            told.append(engine.generate([request])[0].stats)
    assert [stats.exactness for stats in told] == ["path", "none"]
    assert told[1].system_fingerprint == f"{told[0].system_fingerprint}-fast"


def test_a_pool_leaves_room_for_the_networks_that_will_draft(tmp_path: Path) -> None:
    """Heads were loaded after the pool had taken a GPU's memory."""
    save_head(tmp_path, random_head("eagle3", hidden=32, vocab=VOCAB))
    num_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    drafting, head = DraftingConfig(eagle=EagleConfig(path=str(tmp_path))), {"other": EagleConfig(path=str(tmp_path))}
    both = drafting.model_copy(update={"eagle_heads": head})
    unused = both.model_copy(update={"drafters": ("copy", "other")}), both.model_copy(update={"speculation": False})
    reserved = [network_bytes(each) / num_bytes for each in (DraftingConfig(), drafting, both, *unused)]
    assert reserved == [0, 2, 4, 2, 0]


def test_a_head_is_named_and_read_or_refused(model: Path, tmp_path: Path) -> None:
    """A missing folder was a traceback; a head of another model was served, with an acceptance of nothing."""
    save_head(tmp_path / "other", random_head("eagle3", hidden=32, vocab=VOCAB))
    with pytest.raises(ModelError, match="hidden states of 32"):
        open_engine(model, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"drafting\.eagle\.path"):
        open_engine(model, "")
    with pytest.raises(ModelError, match="nowhere"):
        open_engine(model, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="unknown drafter 'glide'"):
        open_engine(model, "", ("glide",))
