"""No drafter changes an output: alone, in a batch, in a small pool, beside other drafters.

What drafters learn while serving belongs to one tenant.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datastore_parts import Numbers, write
from drafting.block_heads import BLOCK, network_for
from drafting.medusa_heads import position_drafter
from head_parts import drafter_for, free
from oracle_cases import (
    PARAMS,
    PROMPTS,
    asked,
    assert_equal,
    assert_pool_is_empty,
    drafts_of,
    generated,
    requests_of,
    total,
    truth,
)
from tiny_target import SENTENCES, Tiny, save_model, target_config, tiny_engine

import ragspec.drafting
from ragspec.config import DraftingConfig, SelfDraftConfig
from ragspec.core import Document, SamplingParams
from ragspec.drafting import self_draft
from ragspec.drafting.block.drafter import BlockDrafter
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.datastore import Datastore, DatastoreDrafter
from ragspec.drafting.draft_model import ModelDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.growing.draft import make_shape
from ragspec.drafting.lookahead import LookaheadDrafter
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.engine.loading import make_drafters
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.kv_cache import SequenceSlots

Texts = Sequence[Sequence[int]]
REPEATED = "the mill and the river and the mill and the river and the mill and"
README = Path(next(iter(ragspec.drafting.__path__))) / "README.md"


def datastore(_: Target, texts: Texts, folder: Path) -> DatastoreDrafter:
    write(folder, *(Document(f"d{i}", " ".join(map(str, text))) for i, text in enumerate(texts)))
    numbers: Any = Numbers()
    return DatastoreDrafter(Datastore(folder, numbers))


def draft_model(target: Target, _: Texts, folder: Path) -> ModelDrafter:
    path = save_model("llama", folder / "small", num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    dtype = "float32" if target.backend.name == "cpu" else "torch-float32"
    model = Target.load(target_config(str(path), dtype), 2048)
    return ModelDrafter(model, target.vocab_size, make_shape("dynamic", 3, 2, 4), free(), PrefixCache(model.pool))


def self_drafter(target: Target, *keep: int, tree: tuple[str, int, int, int] = ("dynamic", 3, 2, 4)) -> SelfDrafter:
    return SelfDrafter(target, keep, make_shape(*tree), free())


def block(form: str, tree: str, num_nodes: int | None = None) -> Callable[[Target, Texts, Path], Drafter]:
    shape = make_shape(tree, 3, 3, BLOCK, num_nodes=num_nodes)
    return lambda target, _, folder: BlockDrafter(network_for(target, folder, form), shape, free())


def readme_drafter(*_: Any) -> Any:
    """The example of `ragspec/drafting/README.md`."""
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["BigramDrafter"]()


DRAFTERS: dict[str, tuple[Callable[[Target, Texts, Path], Drafter], dict[str, int]]] = {
    "lookahead": (lambda *_: LookaheadDrafter(), {"max_nodes": 24}),
    "datastore": (datastore, {}),
    "self": (lambda target, *_: self_drafter(target, 0), {}),
    "self, small pool": (
        lambda target, *_: self_drafter(target, 1),
        {"num_kv_slots": 512, "max_num_batched_tokens": 24},
    ),
    "draft model": (draft_model, {}),
    "readme": (readme_drafter, {}),
    "eagle": (lambda target, *_: drafter_for(target, "eagle", "static"), {}),
    "eagle3": (lambda target, *_: drafter_for(target, "eagle3"), {}),
    "poss": (lambda target, *_: drafter_for(target, "poss", "chain"), {}),
    "medusa": (lambda target, _, folder: position_drafter(target, folder, "medusa"), {}),
    "hydra": (lambda target, _, folder: position_drafter(target, folder, "hydra", "static"), {}),
    "ungrounded hydra": (lambda target, _, folder: position_drafter(target, folder, "ungrounded hydra"), {}),
    "hydra++": (lambda target, _, folder: position_drafter(target, folder, "hydra++"), {}),
    "dflash": (block("DFlash, z-lab", "dynamic"), {"fixed_nodes": 6, "num_kv_slots": 256}),
    "dflash, by confidence": (block("DFlash, z-lab", "dynamic", 9), {"fixed_nodes": 6}),
    "dspark": (block("DSpark, DeepSpec", "dynamic", 9), {"fixed_nodes": 6, "max_num_batched_tokens": 16}),
    "p-eagle, dynamic": (block("P-EAGLE, SpecForge", "dynamic"), {"fixed_nodes": 6}),
    "p-eagle": (block("P-EAGLE, SpecForge", "static"), {"fixed_nodes": 6}),
    "p-eagle, chain": (block("P-EAGLE, speculators", "chain"), {"fixed_nodes": 6, "num_kv_slots": 256}),
}
"""How a drafter is made of a target and the texts that it will write, and the engine's options."""
QUICK = {(kind, list(PARAMS)[(i + n) % len(PARAMS)], "float32") for i, kind in enumerate(DRAFTERS) for n in (0, 3)}
QUICK |= {(kind, "T=1", "torch-float32") for kind in ("eagle3", "hydra", "lookahead", "dspark", "p-eagle")}
QUICK |= {(kind, "top-p", "torch-float32") for kind in ("dflash", "dspark", "p-eagle, chain")}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(DRAFTERS, PARAMS, ("float32", "torch-float32"))
]


@pytest.mark.parametrize(("kind", "name", "dtype"), CASES)
def test_no_output_changes(tiny: Tiny, tmp_path: Path, kind: str, name: str, dtype: str) -> None:
    """A draft changed a token, overwrote keys of the text, or took slots for good; or nothing was drafted at all."""
    target, (make, options) = tiny("llama", dtype), DRAFTERS[kind]
    requests, expected = asked(target, name, [REPEATED] * 3 if kind == "readme" else PROMPTS)
    texts = [[*request.prompt_ids, *expected[request.id, 0].token_ids] for request in requests]
    drafter = make(target, texts, tmp_path)
    completions = generated(target, [drafter], [requests, [replace(requests[2], id="r2")]], **options)
    assert_equal(completions, expected)
    assert total(completions, "num_drafted") > 0
    if kind == "datastore":
        assert total(completions, "num_accepted") > 40


def test_all_drafters_at_once_change_no_output(tiny: Tiny, tmp_path: Path) -> None:
    """Merged trees of several drafters moved a node, or one drafter's features or slots were another's."""
    target = tiny()
    write(tmp_path, *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES)))
    drafters = [
        CopyDrafter(target.tokenizer, target.eos_ids, earlier_tokens=5_000),
        LookaheadDrafter(),
        DatastoreDrafter(Datastore(tmp_path, target.tokenizer)),
        self_drafter(target, 0),
    ]
    requests = requests_of(target, PARAMS["T=1"])
    completions = generated(target, drafters, [requests, requests[::2]], max_nodes=24)
    assert_equal(completions, truth(target, requests, "T=1"))
    proposed = {drafter for completion in completions for drafter in completion.stats.positions}
    assert proposed == {"copy", "lookahead", "datastore", "self"}


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [
        ("llama", "torch-float32", "greedy"),
        ("llama", "float32", "top-p"),
        ("mistral", "float32", "greedy"),
        ("qwen3", "float32", "top-p"),
    ],
)
def test_all_layers_draft_what_the_target_says(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, name: str
) -> None:
    """Positions one off, keys of rejected nodes, a window that counts slots: acceptance fell, and nothing else showed it. Or each
    call made its slots anew."""
    made, target = list[SequenceSlots](), tiny(kind, dtype)
    monkeypatch.setattr(self_draft, "SequenceSlots", lambda pool: made.append(SequenceSlots(pool)) or made[-1])
    requests = requests_of(target, PARAMS[name], PROMPTS[:5])
    completions = generated(target, [self_drafter(target, 0, 1, tree=("chain", 1, 1, 4))], [requests])
    assert_equal(completions, truth(target, requests, name))
    assert total(completions, "num_accepted") >= 0.98 * total(completions, "num_drafted") > 20
    assert len(made) == 2, "one for each pool of the target, which the engine replaces"


def test_targets_and_layers_that_cannot_draft_are_refused(tiny: Tiny) -> None:
    """Integer weights, a foreign decoder or layers that are not there failed in every step instead of at the start."""

    def make(target: Target, *keep: int) -> None:
        (drafter,) = make_drafters(target, DraftingConfig(drafters=("self",), self_draft=SelfDraftConfig(keep=keep)))
        assert isinstance(drafter, SelfDrafter)

    make(tiny(), 1)
    assert isinstance(make_drafters(tiny(), DraftingConfig(drafters=("lookahead",)))[0], LookaheadDrafter)
    with pytest.raises(ConfigError, match=r"self_draft\.keep is empty"):
        make(tiny())
    for layers in ((2,), (1, 0), (-1,), (0, 0)):
        with pytest.raises(ModelError, match="no rising layers of a target of 2 layers"):
            make(tiny(), *layers)
    for kind, dtype in (("llama", "int8"), ("gemma2", "float32")):
        with pytest.raises(ModelError, match="needs a model whose decoder ragspec replaces"):
            make(tiny(kind, dtype), 0)


LEARNING: dict[str, Callable[[Target, Path], Drafter]] = {
    "copy": lambda target, _: CopyDrafter(target.tokenizer, target.eos_ids),
    "earlier answers": lambda target, _: CopyDrafter(target.tokenizer, target.eos_ids, earlier_tokens=5_000),
    "lookahead": lambda *_: LookaheadDrafter(),
    "datastore": lambda target, folder: DatastoreDrafter(Datastore(folder, target.tokenizer)),
}


@pytest.mark.parametrize("kind", LEARNING)
def test_a_tenants_drafts_are_the_same_whatever_others_did(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """Another tenant's text, or how often its drafts were right, showed in the drafts."""
    target = tiny()
    write(tmp_path, *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES)))
    requests = requests_of(target, SamplingParams(max_tokens=12, ignore_eos=True), PROMPTS[:4])
    own = [replace(request, id=f"b{i}", salt="b") for i, request in enumerate(requests[:2] * 2)]
    other = [replace(request, id=f"a{i}", salt=f"a\0{i}") for i, request in enumerate(requests * 2)]
    alone, beside, same = (
        drafts_of(target, LEARNING[kind](target, tmp_path), before, own)
        for before in ([], other, [replace(request, salt="b") for request in other])
    )
    assert sum(len(nodes) for _, nodes in alone) > 10
    assert beside == alone
    assert same != alone, "a test that cannot fail"


def test_earlier_answers_change_no_output_and_are_drafted(tiny: Tiny) -> None:
    """A recalled answer changed a token, alone or in a batch; or what was answered before was not drafted again."""
    target, name = tiny(), "T=1"
    requests = [replace(request, sources=()) for request in requests_of(target, PARAMS[name])]
    drafter = CopyDrafter(target.tokenizer, target.eos_ids, earlier_tokens=5_000)
    with tiny_engine(target, [drafter]) as engine:
        first = engine.generate(requests)
        again = [*engine.generate(requests), *engine.generate([replace(requests[2], id="r2")])]
        assert engine.num_drafter_failures == 0
        assert_pool_is_empty(engine)
    expected = truth(target, requests, name)
    assert_equal([*first, *again], expected)
    assert total(again, "num_accepted") > max(40, 2 * total(first, "num_accepted"))
    assert len(PROMPTS) == len(first)
