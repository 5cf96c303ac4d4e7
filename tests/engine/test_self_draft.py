"""The target as its own drafter: no output changes, all layers are right nearly always, and no slot stays taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from oracle_cases import PARAMS, assert_equal, generated, requests_of, total, truth
from tiny_target import Free

from ragspec.config import DraftingConfig, SelfDraftConfig
from ragspec.drafting.growing.shapes import make_shape
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.engine.loading import make_drafters
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError

Tiny = Callable[..., Target]


def drafter_for(
    target: Target, keep: Sequence[int], tree: tuple[str, int, int, int] = ("dynamic", 3, 2, 4)
) -> SelfDrafter:
    return SelfDrafter(target, keep, make_shape(*tree), Free(1e-9))


@pytest.mark.parametrize("name", ["greedy", "top-p"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("llama", "torch-float32"), ("mistral", "float32"), ("qwen3", "float32")]
)
def test_all_layers_are_right_nearly_always(tiny: Tiny, name: str, kind: str, dtype: str) -> None:
    """Positions one off, keys of rejected nodes, a window that counts slots: acceptance fell, and nothing else showed it."""
    target = tiny(kind, dtype)
    requests = requests_of(target, PARAMS[name])
    completions = generated(target, [drafter_for(target, (0, 1), ("chain", 1, 1, 4))], [requests])
    assert_equal(completions, truth(target, requests, name))
    assert total(completions, "num_accepted") >= 0.98 * total(completions, "num_drafted") > 20


def test_targets_and_layers_that_cannot_draft_are_refused(tiny: Tiny) -> None:
    """Integer weights, a foreign decoder or layers that are not there failed in every step instead of at the start."""

    def make(target: Target, *keep: int) -> None:
        (drafter,) = make_drafters(target, DraftingConfig(drafters=("self",), self_draft=SelfDraftConfig(keep=keep)))
        assert isinstance(drafter, SelfDrafter)

    make(tiny(), 1)
    with pytest.raises(ConfigError, match=r"self_draft\.keep is empty"):
        make(tiny())
    for layers in ((2,), (1, 0), (-1,), (0, 0)):
        with pytest.raises(ModelError, match="no rising layers of a target of 2 layers"):
            make(tiny(), *layers)
    for kind, dtype in (("llama", "int8"), ("gemma2", "float32")):
        with pytest.raises(ModelError, match="needs a model whose decoder ragspec replaces"):
            make(tiny(kind, dtype), 0)
