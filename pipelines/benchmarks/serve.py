"""The suite `serve`: the engine under users on a GPU, without HTTP: tokens a second and time to the first token.

The smallest and the third model of the suite `gpu`, with drafts and without by turns. A row for each model and number of users.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median

import torch

from pipelines.benchmarks.cases.timing import TimedBatch
from pipelines.benchmarks.gpu import SHAPES, Shape, engine_over, target_of, with_and_without_drafts
from pipelines.benchmarks.harness import Result, Row, Run, Suite, metrics_of
from ragspec.config import EngineConfig
from ragspec.engine.engine import Engine
from ragspec.errors import ConfigError

_USERS, _NUM_TOKENS = (1, 8, 32, 64), 64
_BUDGET_S = 300.0
"""No row is begun after so many seconds."""


def run_serve(run: Run) -> Iterator[Row]:
    """Raises: ConfigError without a GPU, ModelError."""
    if not torch.cuda.is_available():
        raise ConfigError("the suite serve needs a CUDA device")
    yield from rows_of(run, (SHAPES[0], SHAPES[2]), "cuda")


def rows_of(run: Run, shapes: Sequence[Shape], device: str) -> Iterator[Row]:
    """A row for each shape and number of users, until the time is used up. Raises: ModelError."""
    begin = time.perf_counter()
    for shape in shapes:
        with ExitStack() as stack:
            started = functools.cache(functools.partial(_started, stack, run, shape, device))
            for number, users in enumerate(_USERS, 1):
                if time.perf_counter() - begin > _BUDGET_S:
                    return
                yield run.row(f"{shape.name}, {users} users", functools.partial(_row, started, users))
                run.tick(f"users of {shape.name}", number, len(_USERS))
        del started
        torch.cuda.empty_cache()


def _started(stack: ExitStack, run: Run, shape: Shape, device: str) -> Engine:
    """An engine that ends with the stack."""
    target = target_of(run.target, shape, "cuda" if device == "cuda" else "torch", device)
    return stack.enter_context(engine_over(target, EngineConfig()))


def _row(started: Callable[[], Engine], users: int) -> Row:
    engine = started()
    on, off = with_and_without_drafts(engine, users, _NUM_TOKENS)
    return {
        "parameters_b": engine.target.num_parameters / 1e9,
        "users": users,
        "tokens_per_s": median(batch.tokens_per_s for batch in on),
        "tokens_per_s_off": median(batch.tokens_per_s for batch in off),
        "first_token_ms": _first_token_ms(on),
        "first_token_ms_off": _first_token_ms(off),
        "on_over_off": median(b.wall_s / a.wall_s for a, b in zip(on, off, strict=True)),
    }


def _first_token_ms(batches: Sequence[TimedBatch]) -> float:
    """Of all requests, from the request on."""
    return 1e3 * median(run.first_s for batch in batches for run in batch.runs)


def summarise(rows: Sequence[Row]) -> Result:
    """Of all rows the least ratio, of the last model the rates of one user and of the most users."""
    largest = max(row["parameters_b"] for row in rows)
    last = [row for row in rows if row["parameters_b"] == largest]
    return {
        "on_off_min": min(row["on_over_off"] for row in rows),
        "tokens_per_s_one": last[0]["tokens_per_s"],
        "tokens_per_s_most": last[-1]["tokens_per_s"],
        "first_token_ms_one": last[0]["first_token_ms"],
    }


SUITE = Suite("serve", run_serve, summarise, metrics_of("serve"))
