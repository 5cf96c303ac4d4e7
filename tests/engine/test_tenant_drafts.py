"""What drafters learn while serving belongs to one tenant: its drafts are the same whatever other tenants did."""

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
    requests_of,
    total,
    truth,
)
from tiny_target import SENTENCES, tiny_engine

from ragspec.core import Document, SamplingParams
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.datastore import Datastore, DatastoreDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.lookahead import LookaheadDrafter
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
