"""A training run as a command: common options, one process or several through Ray Train, progress, checkpoints and probes."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ragspec.errors import InputError, RagspecError
from ragspec.training.trainer import SINGLE_WORKER, Trainer, WorkerGroup

REPORT_EVERY_STEPS, SMOOTHING_STEPS = 25, 50


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Options of every training command. `threads` None: as many as PyTorch uses. `data_workers`: processes beside each worker
    that draw its texts. `checkpoint_minutes`: of training between two checkpoints; None: as the plan says.

    Raises: InputError if there are no data.
    """

    data_dir: Path
    out: Path
    resume: bool = False
    threads: int | None = None
    data_workers: int = 1
    checkpoint_minutes: float | None = None

    def __post_init__(self) -> None:
        if not self.data_dir.is_dir():
            raise InputError(f"there is no data directory {self.data_dir}")

    @property
    def checkpoint(self) -> Path:
        """The run's own."""
        return self.out / "checkpoint.safetensors"

    def prepare(self) -> None:
        """Write the files that all workers read, before they start: none may read a file that another is writing."""


Train = Callable[[Any, WorkerGroup, str], None]
"""One worker's part of a run, on a device."""


def training_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every training command."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", dest="data_dir", type=absolute_path, required=True, help="data directory")
    add("--out", type=absolute_path, required=True, help="run directory")
    add("--minutes", type=positive(float), help="length of the run in minutes of training")
    add("--seed", type=int, default=0)
    add("--threads", type=positive(int), help="CPU threads")
    add("--workers", type=positive(int), default=1, help="processes that train together")
    add("--data-workers", type=positive(int, least=0), default=1, help="processes that draw texts beside each worker")
    add("--checkpoint-minutes", type=positive(float), help="minutes of training between two checkpoints")
    add("--resume", action="store_true", help="continue from the run's checkpoint; only the length may change")
    return parser


def positive(kind: type[int] | type[float], least: int = 1, most: float = math.inf) -> Callable[[str], float]:
    """A type for argparse: integers from `least` on, or finite numbers above 0, up to `most`."""

    def number(text: str) -> float:
        value = kind(text)
        if not (value >= least if kind is int else 0.0 < value <= most and value < math.inf):
            above = "above 0" if most == math.inf else f"above 0 and at most {most:g}"
            wanted = f"at least {least}" if kind is int else above
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    number.__name__ = "number"  # argparse shows it in its errors
    return number


def absolute_path(text: str) -> Path:
    """A type for argparse. Why absolute: Ray's workers run in another folder."""
    return Path(text).resolve()


def values_of(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The options that are called as fields of the dataclass."""
    return {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}


def run_command(
    parser: argparse.ArgumentParser, run_of: Callable[[argparse.Namespace], TrainingRun], train: Train
) -> None:
    """Parse the command line, prepare the run and train. An expected error ends the program in one line."""
    args = parser.parse_args()
    try:
        run = run_of(args)
        run.prepare()
        train_with(train, run, args.workers)
    except (RagspecError, FileNotFoundError) as cause:
        sys.exit(f"error: {cause}")


def train_with(train: Train, run: TrainingRun, num_workers: int) -> None:
    """Trains in this process, or in several workers with a GPU each if there is one. Raises: a worker's RagspecError."""
    has_gpu = torch.cuda.is_available()
    if num_workers == 1:
        _set_threads_and_train(train, run, SINGLE_WORKER, "cuda" if has_gpu else "cpu")
        return
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import WorkerGroupError

    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config={"train": train, "run": run},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=has_gpu),
        run_config=RunConfig(storage_path=str(run.out / "ray")),
    )
    try:
        trainer.fit()
    except WorkerGroupError as cause:
        for failure in cause.worker_failures.values():
            if isinstance(failure, RagspecError):
                raise failure from cause
        raise


def _ray_worker(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import get_device

    context = ray.train.get_context()
    workers = WorkerGroup(context.get_world_rank(), context.get_world_size())
    _set_threads_and_train(config["train"], config["run"], workers, str(get_device()))


def _set_threads_and_train(train: Train, run: TrainingRun, workers: WorkerGroup, device: str) -> None:
    if run.threads:
        torch.set_num_threads(run.threads)
    train(run, workers, device)


def resumes(trainer: Trainer[Any, Any, Any], run: TrainingRun) -> bool:
    """Load the run's checkpoint if the run is to go on where it stopped. Raises: ConfigError for another run's."""
    is_resumed = run.resume and run.checkpoint.exists()
    if is_resumed:
        trainer.load(run.checkpoint)
    return is_resumed


def run_to_end(
    trainer: Trainer[Any, Any, Any],
    run: TrainingRun,
    shown: Sequence[str],
    probe: Callable[[], dict[str, float]],
    num_probes: int,
) -> None:
    """Trains to the end of the plan; the first worker shows progress, writes checkpoints and probes the model.

    `shown`: names of the values whose means the progress shows.
    """
    if not trainer.workers.is_first:
        for _ in trainer.run():
            pass
        return
    saved_at_s = trainer.progress.elapsed_s
    minutes = run.checkpoint_minutes
    every_s = trainer.plan.checkpoint_every_s if minutes is None else 60.0 * minutes
    columns = (BarColumn(), TextColumn("{task.percentage:.1f}%"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("starting", total=1.0)
        bar.update(task, completed=trainer.share_done())
        for record in trainer.run():
            if trainer.progress.step % REPORT_EVERY_STEPS == 0:
                text = progress_line(trainer.history[-REPORT_EVERY_STEPS:], shown)
                bar.update(task, completed=record["share"], description=text)
                if not bar.console.is_terminal:
                    print(text, flush=True)
            if is_probed(num_probes, record["step"], record["share"], trainer.share_done()):
                trainer.probes.append({"tokens": trainer.progress.tokens, **probe()})
                print(f"probe at step {record['step']}: {trainer.probes[-1]}", flush=True)
            if record["elapsed_s"] - saved_at_s > every_s:
                trainer.save(run.checkpoint)
                saved_at_s = record["elapsed_s"]
    trainer.save(run.checkpoint)


def is_probed(num_probes: int, step: float, before: float, after: float) -> bool:
    """Whether a probe is due: after the first step, and at even shares of the run."""
    return num_probes > 0 and (step == 1 or int(num_probes * after) > int(num_probes * before))


def progress_line(records: list[dict[str, float]], names: Sequence[str]) -> str:
    """Step, tokens so far and their number a second, the means of the named values, and the last step's rate."""
    first, last = records[0], records[-1]
    speed = (last["tokens"] - first["tokens"]) / max(1e-9, last["elapsed_s"] - first["elapsed_s"])
    means = " ".join(f"{name} {sum(record[name] for record in records) / len(records):.3f}" for name in names)
    rate = f"lr {last['lr']:.2e} norm {last['grad_norm']:.2f} done {last['share']:.3f}"
    return f"step {last['step']:.0f} {last['tokens'] / 1e6:.2f} M tokens {speed:.0f}/s {means} {rate}"


def draw_curves(trainer: Trainer[Any, Any, Any], loss_prefix: str, probe_part: str, path: Path) -> None:
    """Losses, probe scores and learning rate over tokens, as PNG. The names of the curves hold the given texts."""
    from matplotlib.figure import Figure

    history, probes = trainer.history, trainer.probes
    tokens = [record["tokens"] / 1e6 for record in history]
    width = min(SMOOTHING_STEPS, len(history))
    figure = Figure((8, 9), layout="tight")
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    for name in sorted(key for key in (history[0] if history else {}) if key.startswith(loss_prefix)):
        values = torch.tensor([record[name] for record in history])
        upper.plot(tokens[width - 1 :], values.unfold(0, width, 1).mean(1), label=name)
    upper.set(ylabel=f"loss (nats, mean of {width} steps)", yscale="log")
    for name in sorted(key for key in (probes[0] if probes else {}) if key != "tokens" and probe_part in key):
        middle.plot([p["tokens"] / 1e6 for p in probes], [p[name] for p in probes], marker=".", label=name)
    middle.set(ylabel="share of the probes", ylim=(0, 1))
    for axes in (upper, middle):
        if axes.get_lines():
            axes.legend(fontsize=7, ncols=3)
    lower.plot(tokens, [record["lr"] for record in history])
    lower.set(ylabel="learning rate", xlabel="tokens (millions)")
    figure.savefig(path, dpi=110)
