"""Fine-tune an encoder for a kind of documents: low-rank adapters, trained on questions and the passages that answer them.

    python -m pipelines.train_encoder --data rows.jsonl --out runs/encoder --minutes 120

`--data` is a file that `pipelines.documentation_rows rebuild` has written. A question is to be nearer to its own passage than to
the other passages of its step and to a passage that shares its words and does not hold the answer. Writes under `--out`:
`checkpoint.safetensors`, `adapter/`, a PEFT folder of a few megabytes, and `model/`, the encoder with the adapter in its weights,
for `encoder: {model: runs/encoder/model}`. `--resume` continues from the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from pipelines.train import training_run
from pipelines.train.training_run import absolute_path, positive
from ragspec.errors import InputError, RagspecError
from ragspec.retrieval.encoder import PACKAGED_MODEL, packaged_folder
from ragspec.training.encoder_training import EncoderPlan, EncoderTrainer, read_triples
from ragspec.training.trainer import SINGLE_WORKER


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fine-tune an encoder.")
    add, plan, count, rate = parser.add_argument, EncoderPlan, positive(int), positive(float)
    add("--data", type=absolute_path, required=True, help="rows with their texts")
    add("--out", type=absolute_path, required=True, help="run directory")
    add("--encoder", default=PACKAGED_MODEL, help="the packaged encoder, or a folder of sentence-transformers")
    add("--minutes", type=rate, help="length of the run in minutes of training")
    add("--tokens", dest="total_tokens", type=count, default=4_000_000, help="length of the run in tokens, roughly")
    add("--questions", dest="questions_per_step", type=count, default=plan.questions_per_step, help="of a step")
    add("--peak-rate", dest="peak_lr", type=rate, default=plan.peak_lr, help="peak learning rate")
    add("--seed", type=int, default=0)
    add("--threads", type=count, help="CPU threads")
    add("--resume", action="store_true", help="continue from the run's checkpoint; only the length may change")
    return parser


def train(args: argparse.Namespace) -> Any:
    """Raises: InputError, ConfigError, ModelError."""
    if not args.data.is_file():
        raise InputError(f"there is no file {args.data}")
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = packaged_folder() if args.encoder == PACKAGED_MODEL else args.encoder
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(str(folder), device=device, local_files_only=True)
    plan = EncoderPlan(**training_run.values_of(EncoderPlan, args))
    trainer = EncoderTrainer(model, read_triples(args.data), plan, SINGLE_WORKER)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint: Path = args.out / "checkpoint.safetensors"
    if args.resume and checkpoint.exists():
        trainer.load(checkpoint)
    saved_s = trainer.progress.elapsed_s
    for record in trainer.run():
        if record["elapsed_s"] - saved_s > plan.checkpoint_every_s:
            trainer.save(checkpoint)
            saved_s = record["elapsed_s"]
        print(f"step {record['step']}, {trainer.share_done():.1%}: loss {record['loss']:.3f}", file=sys.stderr)
    trainer.save(checkpoint)
    trainer.write(args.out)
    return trainer


def main() -> None:
    """Train as the command line says."""
    try:
        train(parser().parse_args())
    except RagspecError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
