"""No drafter without weights of its own changes an output: alone, in a batch, or in a small pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datastore_parts import Numbers, write
from oracle_cases import PARAMS, Tiny, assert_equal, generated, requests_of, total, truth
from tiny_target import Free

from ragspec.core import Document
from ragspec.drafting.datastore import Datastore, DatastoreDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.growing.shapes import make_shape
from ragspec.drafting.lookahead import LookaheadDrafter
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.engine.target import Target

Texts = Sequence[Sequence[int]]


def datastore(texts: Texts, folder: Path) -> DatastoreDrafter:
    write(folder, *(Document(f"d{i}", " ".join(map(str, text))) for i, text in enumerate(texts)))
    numbers: Any = Numbers()
    return DatastoreDrafter(Datastore(folder, numbers))


def self_draft(target: Target, layer: int) -> SelfDrafter:
    return SelfDrafter(target, (layer,), make_shape("dynamic", 3, 2, 4), Free(1e-9))


DRAFTERS: dict[str, tuple[Callable[[Target, Texts, Path], Drafter], dict[str, int]]] = {
    "lookahead": (lambda *_: LookaheadDrafter(), {"max_nodes": 24}),
    "datastore": (lambda _, texts, folder: datastore(texts, folder), {}),
    "self": (lambda target, *_: self_draft(target, 0), {}),
    "self, small pool": (lambda target, *_: self_draft(target, 1), {"num_kv_slots": 512, "max_num_batched_tokens": 24}),
}
"""How a drafter is made of a target and the texts that it will write, and the engine's options."""


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in PARAMS), ("T=1", "torch-float32")])
def test_no_output_changes(tiny: Tiny, tmp_path: Path, kind: str, name: str, dtype: str) -> None:
    """A draft changed a token, overwrote keys of the text, or took slots for good; or nothing was drafted at all."""
    target, (make, options) = tiny("llama", dtype), DRAFTERS[kind]
    requests = requests_of(target, PARAMS[name])
    expected = truth(target, requests, name)
    texts = [[*request.prompt_ids, *expected[request.id, 0].token_ids] for request in requests]
    drafter = make(target, texts, tmp_path)
    completions = generated(target, [drafter], [requests, [replace(requests[2], id="r2")]], **options)
    assert_equal(completions, expected)
    assert total(completions, "num_drafted") > 0
    if kind == "datastore":
        assert total(completions, "num_accepted") > 40
