"""Options that every batch job has, as typer reads them, and the job they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COST_HELP = (
    "What one machine costs an hour, in any currency. Cost of 1,000 rows = machines x seconds of the whole run / 3600 x price "
    "/ rows answered x 1000; without a price the summary gives machine seconds of 1,000 rows only."
)

Inputs = Annotated[
    Path,
    typer.Option(
        "--input", help="A .jsonl or .parquet file of rows, or a folder of them (batch_grammar: or of texts)."
    ),
]
Out = Annotated[Path, typer.Option(help="The folder of the results; in a submitted job an absolute path.")]
Config = Annotated[Path | None, typer.Option(help="A YAML configuration, with a `topology` if need be; options win.")]
Target = Annotated[str | None, typer.Option(help="The model that writes: a folder or a Hugging Face name.")]
Seed = Annotated[int | None, typer.Option(help="Rows get seeds made from this and their ids.")]
Temperature = Annotated[float | None, typer.Option(help="For rows that do not say.")]
TopP = Annotated[float | None, typer.Option(help="For rows that do not say.")]
Replicas = Annotated[
    int | None, typer.Option("--replicas", "--engines", min=1, help="Engines beside each other.", show_default="1")
]
TensorParallel = Annotated[
    int | None, typer.Option(min=1, help="Processes that share a target: 1, 2 or 4.", show_default="1")
]
Shards = Annotated[int | None, typer.Option(min=1, help="Processes that the index is spread over.", show_default="1")]
Cluster = Annotated[
    str,
    typer.Option(
        help="A deployment that is up (`ragspec cluster up`), instead of one of its own; it decides target and index."
    ),
]
Address = Annotated[
    str | None, typer.Option(help="A Ray cluster; default RAY_ADDRESS, else one of its own if it takes one.")
]
Resume = Annotated[bool, typer.Option(help="Keep the results in the folder, and add those that miss.")]
Strict = Annotated[bool, typer.Option(help="Exit with 1 if any row has no result.")]
PricePerHour = Annotated[float | None, typer.Option(min=0.0, help=COST_HELP)]
