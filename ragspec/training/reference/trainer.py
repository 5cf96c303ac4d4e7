"""What the reference target learns from: turns over passages, and where attention heads look. The loop is `Trainer`'s."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragspec.training.reference.batches import ANSWER_WEIGHT, ExampleEncoder
from ragspec.training.reference.examples import Lengths
from ragspec.training.reference.guidance import Guidance, Guide
from ragspec.training.reference.initialisation.spelling_head import left_alone
from ragspec.training.reference.initialisation.structured_init import centre_signatures
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.rows import RowEncoder
from ragspec.training.reference.steps import RowBatch, draw_rows
from ragspec.training.trainer import SINGLE_WORKER, Trainer, TrainingPlan, WorkerGroup, mixed_precision


@dataclass(frozen=True)
class Stage:
    """Examples of one length class, up to `until` (a share of the whole run)."""

    until: float
    max_tokens: int
    lengths: Lengths
    step_tokens: int


STAGES = (
    Stage(0.1, 320, Lengths(2, (12, 45), 100), 3_840),
    Stage(0.45, 512, Lengths(3, (25, 80), 200), 4_096),
    Stage(0.88, 768, Lengths(4, (35, 125), 350), 4_608),
    Stage(1.01, 1152, Lengths(4, (60, 190), 500), 6_144),
)


@dataclass(frozen=True, kw_only=True)
class TargetPlan(TrainingPlan):
    """How long and how fast."""

    micro_tokens: int = 4_608
    peak_lr: float = 1.2e-3
    final_lr_share: float = 0.03
    positional_lr_share: float = 0.2
    embedding_lr_share: float = 0.3
    weight_decay: float = 0.05
    first_stage: int = 0
    continued_from: str = ""


def continued(plan: TargetPlan, weights: str) -> TargetPlan:
    """The same run over trained weights: half the rate, and not the stage of the shortest examples."""
    return replace(plan, peak_lr=plan.peak_lr / 2, first_stage=1, continued_from=weights)


class TargetTrainer(Trainer[TargetPlan]):
    """Trains one model in place."""

    gradient_clip = 1.0

    def __init__(
        self,
        model: LlamaForCausalLM,
        encoder: ExampleEncoder,
        stream_for: Callable[[Lengths, int], PackStream],
        plan: TargetPlan,
        device: str = "cpu",
        workers: WorkerGroup = SINGLE_WORKER,
    ) -> None:
        torch.nn.Module.to(model, device)
        super().__init__(model, parameter_groups(model, plan), plan, device, workers)
        for name, mask in left_alone(model).items():
            model.get_parameter(name).register_hook(mask.__mul__)
        self.model, self.encoder, self.stream_for = model, encoder, stream_for
        self.rows = RowEncoder(encoder)

    @torch.no_grad()
    def centre(self) -> None:
        """Finish the initialisation with what sentences have in common; once, before the first step."""
        stage = STAGES[1]
        stream = self.stream_for(stage.lengths, self.plan.seed)
        seen: list[Tensor] = []
        for batch in draw_rows(stream, self.rows, stage.max_tokens, 4 * stage.step_tokens, self.plan.micro_tokens):
            starts = [
                (g.text, int(keys.nonzero()[0])) for g in batch.guided if g.guide is Guide.START for keys in g.keys
            ]
            layer = self.model.model.layers[Guide.START.layer]
            handle = layer.input_layernorm.register_forward_hook(
                lambda _module, _args, normed, starts=starts: seen.extend(
                    normed[text, at].float() for text, at in set(starts)
                )
            )
            self.token_losses(batch)
            handle.remove()
        centre_signatures(self.model, torch.stack(seen))

    def run(self) -> Iterator[dict[str, float]]:
        """Train to the end of the plan, one yielded record per step."""
        self.model.train()
        yield from super().run()

    def _accumulate_gradients(self, seed: int, share: float) -> tuple[int, dict[str, float]]:
        stage = next(s for s in STAGES[self.plan.first_stage :] if share < s.until)
        stream = self.stream_for(stage.lengths, seed)
        batches = draw_rows(stream, self.rows, stage.max_tokens, stage.step_tokens, self.plan.micro_tokens)
        total_weight = self.workers.sums(sum(float(batch.weights.sum()) for batch in batches))[0]
        own = sum((batch.num_guided for batch in batches), Counter[Guide]())
        num_guided = dict(zip(Guide, self.workers.sums(*(own[guide] for guide in Guide)), strict=True))
        guided_losses = dict.fromkeys(num_guided, 0.0)
        answer_loss, answer_tokens = 0.0, 0
        for batch in batches:
            losses, guided = self.token_losses(batch)
            weights = batch.weights.to(self.device)
            loss = (losses * weights).sum() / total_weight
            for guide, total in guided.items():
                loss = loss + guide.weight * total / num_guided[guide]
                guided_losses[guide] += float(total.detach()) / num_guided[guide]
            torch.autograd.backward(loss)
            is_answer = weights >= ANSWER_WEIGHT
            answer_loss += float(losses.detach()[is_answer].sum())
            answer_tokens += int(is_answer.sum())
        loss_sum, loss_tokens = self.workers.sums(answer_loss, answer_tokens)
        guided_sums = self.workers.sums(*guided_losses.values())
        found = {f"guide_{guide.name.lower()}": value for guide, value in zip(guided_losses, guided_sums, strict=True)}
        num_tokens = sum(batch.ids.numel() for batch in batches)
        return num_tokens, {"answer_loss": loss_sum / max(1, loss_tokens), **found}

    def token_losses(self, batch: RowBatch) -> tuple[Tensor, dict[Guide, Tensor]]:
        """Cross entropy at the positions that carry loss, shape [M], float32; the sum of each guided head's losses."""
        guidance = Guidance(batch.bias, batch.guided).to(self.device)
        with mixed_precision(self.device):
            hidden = self.model.model(
                input_ids=batch.ids.to(self.device),
                position_ids=batch.places.to(self.device),
                use_cache=False,
                guidance=guidance,
            ).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[batch.positions.to(self.device)])  # [M, V]
        losses = torch.nn.functional.cross_entropy(logits.float(), batch.targets.to(self.device), reduction="none")
        return losses, guidance.losses

    def averaged_model(self) -> LlamaForCausalLM:
        """A copy of the model with the averaged weights."""
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = "sdpa"  # the training kernel knows neither caches nor left padding
        averaged = LlamaForCausalLM(config)
        self._copy_average_to(averaged)
        averaged.eval()
        return averaged

    def _model_config(self) -> dict[str, Any]:
        config = self.model.config
        return {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}


def parameter_groups(model: LlamaForCausalLM, plan: TargetPlan) -> list[dict[str, Any]]:
    """Weight decay on matrices only; slower steps for the layer of the positional heads and for the embedding all circuits read.

    The other circuits are held by their guides.

    Why: a structured head's score is one large product, so a step that suits fresh weights soon destroys it. Seen with
    an earlier form of the circuits: the first quoted token cost 5.0 nats after 0.65 M tokens at the full rate, and 3.5
    after 0.52 M at a slower one.
    """
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        share = 1.0
        if "embed_tokens" in name:
            share = plan.embedding_lr_share
        elif name.startswith("model.layers.") and int(name.split(".")[2]) == 0:
            share = plan.positional_lr_share
        groups.setdefault((share, plan.weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    return [{"params": p, "lr": plan.peak_lr, "lr_share": s, "weight_decay": d} for (s, d), p in groups.items()]
