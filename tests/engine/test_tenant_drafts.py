"""What drafters learn while serving belongs to one tenant: its drafts are the same whatever other tenants did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from datastore_parts import write
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
from tiny_target import SENTENCES, Free, tiny_engine

from ragspec.core import Document, SamplingParams
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.datastore import Datastore, DatastoreDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.growing.shapes import make_shape
from ragspec.drafting.lookahead import LookaheadDrafter
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.engine.target import Target

Tiny = Callable[..., Target]
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
    requests = requests_of(target, SamplingParams(max_tokens=16, ignore_eos=True))
    own = [replace(request, id=f"b{i}", salt="b") for i, request in enumerate(requests[:3] * 2)]
    other = [replace(request, id=f"a{i}", salt=f"a\0{i}") for i, request in enumerate(requests * 2)]
    alone, beside, same = (
        drafts_of(target, LEARNING[kind](target, tmp_path), before, own)
        for before in ([], other, [replace(request, salt="b") for request in other])
    )
    assert sum(len(nodes) for _, nodes in alone) > 10
    assert beside == alone
    assert same != alone, "a test that cannot fail"


@pytest.mark.parametrize("name", ["greedy", "T=1"])
def test_earlier_answers_change_no_output_and_are_drafted(tiny: Tiny, name: str) -> None:
    """A recalled answer changed a token, alone or in a batch; or what was answered before was not drafted again."""
    target = tiny()
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


@pytest.mark.parametrize("name", ["greedy", "T=1"])
def test_all_drafters_at_once_change_no_output(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Merged trees of several drafters moved a node, or one drafter's features or slots were another's."""
    target = tiny()
    write(tmp_path, *(Document(f"s{i}", text) for i, text in enumerate(SENTENCES)))
    drafters = [make(target, tmp_path) for kind, make in LEARNING.items() if kind != "copy"]
    drafters.append(SelfDrafter(target, (0,), make_shape("dynamic", 3, 2, 4), Free(1e-9)))
    requests = requests_of(target, PARAMS[name])
    completions = generated(target, drafters, [requests, requests[::2]], max_nodes=24)
    assert_equal(completions, truth(target, requests, name))
    proposed = {drafter for completion in completions for drafter in completion.stats.positions}
    assert proposed == {"copy", "lookahead", "datastore", "self"}
