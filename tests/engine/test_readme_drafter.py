"""The drafter that `ragspec/drafting/README.md` shows drafts, and changes no output."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import decode
from tiny_target import tiny_engine

import ragspec.drafting
from ragspec.core import Request, SamplingParams
from ragspec.engine.target import Target

PAGE = Path(next(iter(ragspec.drafting.__path__))) / "README.md"
PROMPT = "the mill and the river and the mill and the river and the mill and"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_example_equals_plain_decoding(tiny: Callable[..., Target], temperature: float) -> None:
    """Bug guarded: an example that raises (contained, so it would only draft nothing), or that the protocol has outgrown."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    target = tiny()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24)
    request = Request("r", tuple(target.tokenizer(PROMPT).input_ids), params)
    with tiny_engine(target, [names["BigramDrafter"]()]) as engine:
        (completion,) = engine.generate([request])
    assert completion.token_ids == decode(target, request.prompt_ids, params, 0).token_ids
    assert completion.stats.num_drafted > 0
