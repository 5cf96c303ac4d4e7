"""Train the reference target and export it.

    python -m pipelines.train_target --data ../shared/data --out runs/target --size cpu --minutes 100

On cores that others use too, `OMP_WAIT_POLICY=PASSIVE` keeps two threads from spinning (several times faster, measured).
Writes under `--out`: `tokenizer/`, `checkpoint.pt`, `curves.png`, and `model/`, which loads with plain transformers.
"""

import argparse
import itertools
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerFast

from ragspec.training import training_attention
from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.target_batches import ExampleEncoder
from ragspec.training.target_examples import ExampleStream, Lengths
from ragspec.training.target_export import draw_curves, export_target
from ragspec.training.target_model import SIZES, build_target
from ragspec.training.target_sources import Sources, load_sources
from ragspec.training.target_tokenizer import load_tokenizer, marker_tokens, train_tokenizer
from ragspec.training.target_trainer import TargetTrainer, TrainingPlan

DEFAULT_TOKENS = {"tiny": 200_000, "cpu": 40_000_000, "gpu": 2_000_000_000}
REPORT_EVERY_STEPS = 25


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the reference target.")
    parser.add_argument("--data", type=Path, required=True, help="data directory")
    parser.add_argument("--out", type=Path, required=True, help="run directory")
    parser.add_argument("--size", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--tokens", type=int, help="length of the run in tokens")
    parser.add_argument("--minutes", type=float, help="length of the run in minutes of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="continue from the run directory's checkpoint")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    plan = TrainingPlan(total_tokens=args.tokens or DEFAULT_TOKENS[args.size], minutes=args.minutes, seed=args.seed)
    train(args.data, args.out, args.size, plan, args.resume)


def train(data_dir: Path, out: Path, size: str, plan: TrainingPlan, resume: bool) -> None:
    """One run from data to exported model."""
    sources = load_sources(data_dir)
    tokenizer = obtain_tokenizer(sources, out / "tokenizer", SIZES[size].vocab_size)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = build_target(SIZES[size], marker_tokens(tokenizer), seed=plan.seed, **special)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        model.set_attn_implementation(training_attention.register())
    errors = GrammarErrors(data_dir)

    def stream_for(lengths: Lengths, seed: int) -> ExampleStream:
        return ExampleStream(sources, errors, lengths, seed)

    trainer = TargetTrainer(model, ExampleEncoder(tokenizer), stream_for, plan, device)
    checkpoint = out / "checkpoint.pt"
    if resume and checkpoint.exists():
        trainer.load(checkpoint)
    run_with_progress(trainer, checkpoint)
    draw_curves(trainer.history, out / "curves.png")
    export_target(trainer.averaged_model(), tokenizer, out / "model")


def obtain_tokenizer(sources: Sources, directory: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """The run's tokenizer, trained once."""
    if not (directory / "tokenizer.json").exists():
        texts = itertools.chain(
            (" ".join(p.sentences) for p in sources.prose),
            (q.text for q in sources.squad),
            (text for _, text in sources.stdlib),
            sources.plain_sentences,
            sources.book_paragraphs[::12],
        )
        train_tokenizer(texts, vocab_size).save_pretrained(str(directory))
    return load_tokenizer(directory)


def run_with_progress(trainer: TargetTrainer, checkpoint: Path) -> None:
    """Train to the end of the plan with a progress bar, checkpoints in between."""
    saved_at_s = trainer.progress.elapsed_s
    columns = (BarColumn(), TextColumn("{task.percentage:.1f}%"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("starting", total=1.0)
        bar.update(task, completed=trainer.share_done())
        for record in trainer.run():
            if trainer.progress.step % REPORT_EVERY_STEPS == 0:
                text = report(trainer.history[-REPORT_EVERY_STEPS:])
                bar.update(task, completed=record["share"], description=text)
                if not bar.console.is_terminal:
                    print(text, flush=True)
            if record["elapsed_s"] - saved_at_s > trainer.plan.checkpoint_every_s:
                trainer.save(checkpoint)
                saved_at_s = record["elapsed_s"]
    trainer.save(checkpoint)


def report(records: list[dict[str, float]]) -> str:
    """One line about the latest steps."""
    first, last = records[0], records[-1]
    loss = sum(r["answer_loss"] for r in records) / len(records)
    rate = (last["tokens"] - first["tokens"]) / max(1e-9, last["elapsed_s"] - first["elapsed_s"])
    return (
        f"step {last['step']:.0f} {last['tokens'] / 1e6:.2f} M tokens {rate:.0f}/s "
        f"answer loss {loss:.3f} lr {last['lr']:.2e} norm {last['grad_norm']:.2f} done {last['share']:.3f}"
    )


if __name__ == "__main__":
    main()
