"""What the commands of batch jobs share: options, and errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.terminal import one_line, print_error
from ragspec.errors import RagspecError

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
Seed = Annotated[int | None, typer.Option(help="A row's seed is a hash of this and its id.")]
Temperature = Annotated[float | None, typer.Option(help="For rows without a value of their own.")]
TopP = Annotated[float | None, typer.Option(help="For rows without a value of their own.")]
Cluster = Annotated[
    str,
    typer.Option(help="A running deployment (`ragspec cluster up`) to use; the deployment decides target and index."),
]
Resume = Annotated[bool, typer.Option(help="Keep the results in the folder, and add the missing ones.")]
Strict = Annotated[bool, typer.Option(help="Exit with 1 if any row has no result.")]
PricePerHour = Annotated[float | None, typer.Option(min=0.0, help=COST_HELP)]


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Prints an error in one line on stderr, without a traceback. Raises: typer.Exit."""
    try:
        yield
    except RagspecError as error:
        print_error(one_line(error))
        raise typer.Exit(1) from error
