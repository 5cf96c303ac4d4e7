"""Options that several commands share, the configuration keys that options set, and a constructor for groups of commands."""

import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.cli.terminal import cache_folder
from ragspec.config import PipelineConfig, load_config
from ragspec.errors import ConfigError
from ragspec.retrieval.index.pointer import configured_index_dir, read_pointer

HELP = {"help_option_names": ["-h", "--help"]}
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that passes its arguments on to another command line."""

_KEYS = {
    "index": "retriever.index_dir",
    "k": "retriever.num_passages",
    "mode": "retriever.mode",
    "target": "target.model",
    "adapter": "target.adapter",
    "temperature": "generation.temperature",
    "seed": "generation.seed",
    "max_tokens": "generation.max_tokens",
    "top_p": "generation.top_p",
    "replicas": "topology.num_replicas",
    "tensor_parallel": "topology.tensor_parallel_size",
    "shards": "topology.num_shards",
}
"""The configuration key that an option sets; of other options, the key of the same name in `service`."""

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "--model",
        help="A model folder, a GGUF file or a Hugging Face name; default: SmolLM2-135M-Instruct.",
    ),
]
Adapter = Annotated[str | None, typer.Option(help="The folder of a PEFT LoRA adapter; none: the model as it is.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
IndexOrLibrary = Annotated[
    Path | None, typer.Option("--index", help="The index's folder; default: Python's standard library.")
]
Index = Annotated[Path | None, typer.Option(help="The index's folder; default: that of the configuration.")]
Data = Annotated[Path | None, typer.Option("--data", help="The service's data folder; default: in the user's own.")]
Address = Annotated[str | None, typer.Option(help="A Ray cluster; default: RAY_ADDRESS, else one on this machine.")]
Replicas = Annotated[
    int | None, typer.Option("--replicas", "--engines", min=0, help="Engines beside each other.", show_default="1")
]
TensorParallel = Annotated[
    int | None, typer.Option(min=1, help="Ranks that share an engine's target: 1, 2 or 4.", show_default="1")
]
Shards = Annotated[int | None, typer.Option(min=0, help="Parts of the index, each in a process.", show_default="1")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error; may stand behind any command.", show_default=False),
]
Config = Annotated[Path | None, typer.Option(help="A YAML configuration; the options win.")]
Speculation = Annotated[bool, typer.Option(help="Off decodes plainly: the same text, later.")]


def index_folder(index: Path | None, config: Path | None) -> Path:
    """The index that the option or the configuration names. Raises: ConfigError."""
    if folder := load_config(config, **overrides(index=index)).retriever.index_dir:
        return Path(folder)
    raise ConfigError("no index: name its folder with --index, or as retriever.index_dir with --config")


def library_corpus(configurations: Collection[PipelineConfig]) -> list[tuple[str, str]] | None:
    """The docstrings of the standard library, if one of the configurations has no index of its own.

    Raises: StoreError for an index that is not there, before torch is imported, which takes seconds.
    """
    for settings in configurations:
        if settings.retriever.index_dir:
            read_pointer(configured_index_dir(settings.retriever))
    if all(settings.retriever.index_dir for settings in configurations):
        return None
    from ragspec.training.stdlib_corpus import kept_documents

    return kept_documents(cache_folder())  # Why before torch, which adds functions to the standard library


def overrides(**options: Any) -> dict[str, Any]:
    """The options that were given, by the configuration keys that they set; paths as text."""
    given = {name: value for name, value in options.items() if value is not None}
    return {_KEYS.get(name, f"service.{name}"): str(v) if isinstance(v, Path) else v for name, v in given.items()}


def group(name: str, help: str, no_args_is_help: bool = True) -> typer.Typer:
    """`ragspec`, or a group of its commands, such as `ragspec index`."""
    return typer.Typer(
        name=name,
        help=help,
        no_args_is_help=no_args_is_help,
        context_settings=HELP,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def pass_on(module: str, args: Sequence[str], name: str) -> None:
    """Runs another module's command line under the name `name`."""
    importlib.import_module(module).app(args=list(args), prog_name=name)
