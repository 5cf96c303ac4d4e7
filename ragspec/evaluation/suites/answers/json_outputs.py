"""JSON schemas under the real target: are outputs valid, and the same with drafts and without?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ragspec.core import CopySource, FinishReason, Message, Request, SamplingParams, SourceKind
from ragspec.engine.engine import Engine
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.speculation import Speculation

_FACTS = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "maximum": 2100, "minimum": 0},
    },
    "required": ["subject", "year"],
    "additionalProperties": False,
}
_WORDS = {"type": "array", "items": {"enum": ["yes", "no", "unclear"]}, "minItems": 1, "maxItems": 3}
SCHEMAS: dict[str, dict[str, Any]] = {"facts": _FACTS, "words": _WORDS}


def measure_json(engine: Engine, questions: Sequence[str], tick: Tick, seed: int) -> Result:
    """`json_valid`: the share of outputs at T = 0 and 1 that a parser takes and that hold what their schema requires.
    `json_identical`: whether drafts changed any."""
    prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
    cases = [(t, s, q) for t in (0.0, 1.0) for s in SCHEMAS for q in questions]
    num_valid, is_identical = 0, True
    for number, (temperature, name, question) in enumerate(cases, 1):
        params = SamplingParams(temperature, max_tokens=96, seed=seed, json_schema=json.dumps(SCHEMAS[name]))
        prompt_ids = prompts.tokens([Message("user", question)])
        source = CopySource(SourceKind.INPUT, question)
        on, off = (
            engine.generate(
                [Request(f"{number}-{drafts}", prompt_ids, params, (source,), speculation=Speculation.of(drafts))]
            )[0]
            for drafts in (True, False)
        )
        is_identical &= on.token_ids == off.token_ids
        num_valid += on.finish_reason is FinishReason.STOP and is_valid(name, on.text)
        tick("JSON schemas", number, len(cases))
    return {"json_valid": num_valid / len(cases), "json_identical": is_identical, "num_json": len(cases)}


def is_valid(name: str, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if name == "words":
        return isinstance(value, list) and 1 <= len(value) <= 3 and set(value) <= {"yes", "no", "unclear"}
    return (
        isinstance(value, dict)
        and value.keys() == {"subject", "year"}
        and isinstance(value["subject"], str)
        and len(value["subject"]) <= 24
        and type(value["year"]) is int
        and 0 <= value["year"] <= 2100
    )
