"""`ragspec models`: what int8 weights cost a model in quality.

$ ragspec models check SmolLM2-1.7B-Instruct-Q4_K_M.gguf
"""

from __future__ import annotations

import json
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from ragspec.cli.options import AsJson, group
from ragspec.cli.terminal import loading, note, safe, stay_offline, stderr_console, stdout_console
from ragspec.config import ASSETS, TargetConfig
from ragspec.core import Say

models = group("models", "What int8 weights cost a model in quality.")

_TEXT = ASSETS / "perplexity.txt"
_NUM_TOKENS = 2048
_MOST_RATIO = 1.02
"""A larger ratio is a warning."""


class Perplexities(NamedTuple):
    """Of one text, with int8 and with float32 weights."""

    int8: float
    float32: float
    num_tokens: int

    @property
    def ratio(self) -> float:
        return self.int8 / self.float32


@models.command()
def check(
    name: Annotated[str, typer.Argument(help="As target.model: a GGUF file, a model folder, or a name.")],
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a shipped text with int8 and with float32 weights. Changes no setting."""
    stay_offline(TargetConfig(model=name))
    console = stderr_console()
    with loading(console, "reading the weights") as say:
        found = measured(name, say)
    if as_json:
        print(json.dumps({"model": name, **found._asdict(), "ratio": found.ratio}))
    else:
        line = f"{found.int8:.3f} in int8, {found.float32:.3f} in float32: ratio {found.ratio:.4f}"
        stdout_console().print(Text(f"{safe(name)}: {line}, {found.num_tokens} tokens"))
    if found.ratio > _MOST_RATIO:
        note(console, f"above {_MOST_RATIO}: target.quantization: none keeps the model's quality, in slower steps")


def measured(name: str, say: Say) -> Perplexities:
    """Loads the model twice, one after the other. Raises: ModelError."""
    from ragspec.engine.checkpoints.target_files import return_freed
    from ragspec.engine.target import Target
    from ragspec.evaluation.metrics import perplexity

    found, tokens = dict[str, float](), list[int]()
    for quantization in ("int8", "none"):
        config = TargetConfig(model=name, quantization=quantization, exactness="fast")
        target = Target.load(config, _NUM_TOKENS, say=say)
        say(f"measuring with {config.weight_dtype} weights")
        tokens = target.tokenizer(_TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"][:_NUM_TOKENS]
        found[quantization] = perplexity(target, tokens)
        del target
        return_freed()  # Why: two models at a time may not fit in memory
    return Perplexities(found["int8"], found["none"], len(tokens))
