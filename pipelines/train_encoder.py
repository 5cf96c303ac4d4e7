"""Fine-tune an encoder for a kind of documents: low-rank adapters, trained on questions and the passages that answer them.

    python -m pipelines.train_encoder --data rows.jsonl --out runs/encoder --minutes 120

`--data` is a file that `pipelines.documentation_rows rebuild` has written. A question is to be nearer to its own passage than to
the other passages of its step and to a passage that shares its words and does not hold the answer. Writes under `--out`:
`checkpoint.safetensors`, `adapter/`, a PEFT folder of a few megabytes, and `model/`, the encoder with the adapter in its weights,
for `encoder: {model: runs/encoder/model}`. `--resume` continues from the checkpoint.

The softmax over similarities of a question with the passages of its step is to be all its own passage. Low-rank adapters are
trained, the weights stay frozen. The loop is `Trainer`'s. Source: Karpukhin et al., Dense Passage Retrieval (arXiv 2004.04906).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from pipelines.train import training_run
from pipelines.train.training_run import absolute_path, positive
from ragspec.disk import saving
from ragspec.errors import InputError, RagspecError
from ragspec.retrieval.encoder import PACKAGED_MODEL, packaged_folder
from ragspec.training.documentation import Neighbours
from ragspec.training.reference.trainer import AdaptedLinear, adapter_parameters, add_adapters, write_peft
from ragspec.training.trainer import SINGLE_WORKER, StepData, Trainer, TrainingPlan, WorkerGroup

MODULES = ("query", "key", "value", "dense", "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "Wqkv", "Wo", "Wi")
"""Names of the linear layers of BERT and its kin."""
_NEAREST = 8
"""Passages among which a hard negative is looked for."""
_CHARS_PER_TOKEN = 4


class Triple(NamedTuple):
    """A question, its passage and a hard negative, as the encoder reads them: passages under their titles."""

    question: str
    passage: str
    negative: str

    def __len__(self) -> int:
        return 1


def read_triples(rows: Path) -> list[Triple]:
    """The answered questions of a file of rows. Raises: InputError if there are none."""
    with rows.open(encoding="utf-8") as lines:
        answered = [row for row in map(json.loads, lines) if row["quote"]]
    texts = list(dict.fromkeys(row["lead"] + row["passage"] for row in answered))
    neighbours, triples = Neighbours(texts), list[Triple]()
    for row in answered:
        own = row["lead"] + row["passage"]
        near = (texts[number] for number in neighbours.nearest(row["question"], _NEAREST))
        if negative := next((text for text in near if text != own and row["quote"] not in text), None):
            triples.append(Triple(row["question"], own, negative))
    if not triples:
        raise InputError(f"{rows} holds no question with a passage and another passage like it")
    return triples


@dataclass(frozen=True, kw_only=True)
class EncoderPlan(TrainingPlan):
    """`questions_per_step`: each is told apart from twice as many passages. `micro_tokens` has no meaning here."""

    questions_per_step: int = 32
    micro_tokens: int = 0
    peak_lr: float = 2e-4
    final_lr_share: float = 0.05
    warmup_steps: int = 20
    ema_decay: float = 0.99


class _Step(NamedTuple):
    """Token ids of questions, passages and negatives, as the model takes them."""

    features: list[dict[str, Tensor]]
    num_questions: int

    @property
    def num_learnt(self) -> int:
        return self.num_questions


class EncoderTrainer(Trainer[EncoderPlan, Triple, _Step]):
    """Adds adapters to an encoder and trains them."""

    gradient_clip = 1.0

    def __init__(
        self, model: SentenceTransformer, triples: Sequence[Triple], plan: EncoderPlan, workers: WorkerGroup
    ) -> None:
        transformer: Any = model[0]
        add_adapters(transformer.auto_model, plan.seed, MODULES)
        self.model, self._loss = model, MultipleNegativesRankingLoss(model)
        self._names = list(adapter_parameters(transformer.auto_model))
        trained = {name.replace(".", "/"): p for name, p in model.named_parameters() if p.requires_grad}

        def draw(rng: random.Random) -> Triple:
            return rng.choice(triples)

        data = StepData(draw, _num_tokens, len, plan.questions_per_step, f"{plan.seed}/{workers.rank}")
        module = nn.ParameterDict(trained)
        super().__init__(module, [{"params": list(module.parameters())}], plan, str(model.device), workers, data)

    @torch.no_grad()
    def write(self, out: Path) -> None:
        """The averaged adapter as `adapter/`, and the encoder with it in its weights as `model/`; it trains no more.

        Raises: SaveError.
        """
        config = {"task_type": "FEATURE_EXTRACTION", "target_modules": list(MODULES)}
        write_peft(out / "adapter", dict(zip(self._names, self.average, strict=True)), config)
        self._copy_to(self._module, self.average)
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, AdaptedLinear):
                self.model.set_submodule(name, layer.merged())
        with saving(out):
            self.model.save_pretrained(str(out / "model"))

    def _batches(self, texts: list[Triple]) -> list[_Step]:
        """All together: they are each other's negatives. Of one passage one question: the other's is no negative of it."""
        texts = list({triple.passage: triple for triple in texts}.values())
        columns = [list(column) for column in zip(*texts, strict=True)]
        features = [batch_to_device(self.model.preprocess(each), torch.device(self.device)) for each in columns]
        return [_Step(features, len(texts))]

    def _backward(self, batch: _Step, num_learnt: float, noise: torch.Generator) -> list[float]:
        loss = self._loss(batch.features, torch.empty(0)) * (batch.num_questions / num_learnt)
        loss.backward()
        return [float(loss.detach())]

    def _losses(self, sums: list[float]) -> dict[str, float]:
        return {"loss": sums[0]}

    def _model_config(self) -> dict[str, Any]:
        return {"adapter": {name: list(p.shape) for name, p in list(self._module.named_parameters())[:6]}}


def _num_tokens(triple: Triple) -> int:
    return sum(map(len, triple[:])) // _CHARS_PER_TOKEN


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
