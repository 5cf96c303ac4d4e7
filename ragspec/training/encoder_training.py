"""Contrastive training of a text encoder on questions and the passages that answer them. The loop is `Trainer`'s.

The softmax over similarities of a question with the passages of its step is to be all its own passage: in-batch negatives, and
for each question one hard negative, a passage that shares its words and does not hold the answer. Low-rank adapters are trained,
the weights stay frozen. Source: Karpukhin et al., Dense Passage Retrieval (arXiv 2004.04906).

>>> trainer = EncoderTrainer(SentenceTransformer(folder), read_triples(rows), EncoderPlan(total_tokens=4_000_000), SINGLE_WORKER)
>>> for record in trainer.run(): ...
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from ragspec.disk import saving
from ragspec.errors import InputError
from ragspec.training.documentation import Neighbours
from ragspec.training.reference.trainer import AdaptedLinear, adapter_parameters, add_adapters, write_peft
from ragspec.training.trainer import StepData, Trainer, TrainingPlan, WorkerGroup

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
