"""Losses, checkpoints, workers and export of the drafter's training loop, on a tiny target with made-up texts."""

import functools
import random
import re
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_target import tiny_config, tiny_tokenizer
from torch import Tensor
from training_parts import unbroken_and_resumed
from transformers import LlamaForCausalLM

from pipelines.train.training_run import draw_curves
from ragspec.drafting.block.checkpoint import BlockFamily, read_block, read_look_ahead
from ragspec.drafting.block.network import BlockConfig, BlockHead
from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.eagle.layout import EagleFamily, check_fits
from ragspec.drafting.eagle.network import EagleHead
from ragspec.drafting.heads.learning import Inputs, LossWeights, Objective, collate
from ragspec.errors import ConfigError, ModelError
from ragspec.training.conversations import Encoded
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import (
    block_config,
    fresh_head,
    fresh_look_ahead,
    head_config,
    spread_aux_layers,
    start_from,
    trained_head,
)
from ragspec.training.heads.trainer import DrafterPlan, DrafterTrainer, batch_scores
from ragspec.training.trainer import SINGLE_WORKER, WorkerGroup

TAPS = (0, 1, 2)
OBJECTIVE = Objective(num_steps=3, noise=0.2)
FAMILIES = [*EagleFamily, *BlockFamily]
FAST_FAMILIES = (EagleFamily.EAGLE3,)


@functools.cache
def tiny_target() -> FrozenTarget:
    torch.manual_seed(11)
    model = LlamaForCausalLM(tiny_config(vocab_size=512))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.1)  # each word nearly gives the next, so there is something to learn
    return FrozenTarget(model, tiny_tokenizer())


def draw(rng: random.Random) -> Encoded:
    """Words from a small circle, the first few of them prompt."""
    start, length = rng.randrange(40), rng.randint(12, 24)
    return Encoded([10 + (start + i) % 40 for i in range(length)], [0.0] * 5 + [1.0] * (length - 5))


def make_head(target: FrozenTarget, family: EagleFamily | BlockFamily, draft_vocab: int = 60) -> Any:
    if family is BlockFamily.PASS:
        return fresh_look_ahead(3, target, seed=0)
    vocabulary = None if family is EagleFamily.EAGLE else torch.arange(0, draft_vocab * 2, 2)
    if isinstance(family, EagleFamily):
        return fresh_head(head_config(target, family, TAPS, draft_vocab), target, vocabulary, seed=0)
    num_layers = 1 if family is BlockFamily.PEAGLE else 2
    shape = head_config(target, EagleFamily.EAGLE3, TAPS, draft_vocab, num_layers)
    return fresh_head(block_config(shape, family, 3, 8), target, vocabulary, seed=0)


def make_trainer(
    family: EagleFamily | BlockFamily = EagleFamily.EAGLE, workers: WorkerGroup = SINGLE_WORKER, **changes: Any
) -> DrafterTrainer:
    target, sizes = tiny_target(), {"step_tokens": 120, "micro_tokens": 80, "warmup_steps": 2}
    plan = DrafterPlan(**{"total_tokens": 3_000, "objective": OBJECTIVE, **sizes, **changes})
    return DrafterTrainer(make_head(target, family), target, draw, plan, workers)


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_run_equals_an_unbroken_one(family: EagleFamily | BlockFamily, tmp_path: Path) -> None:
    """Optimizer state, averages, the draft vocabulary, the data position or the noise lost at a kill."""

    def forget(trainer: DrafterTrainer) -> None:
        if family not in (EagleFamily.EAGLE, BlockFamily.PASS):
            trainer.head.get_buffer("d2t").zero_()

    unbroken, resumed = unbroken_and_resumed(lambda: make_trainer(family), tmp_path, forget)
    for name, tensor in unbroken.head.state_dict().items():
        assert torch.equal(tensor, resumed.head.state_dict()[name]), name
    assert all(torch.equal(a, b) for a, b in zip(unbroken.average, resumed.average, strict=True))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"\x02\0\0\0\0\0\0\0{}"])
def test_what_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    """A traceback of the file format's library, or weights of some other job."""
    (tmp_path / "checkpoint.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="no checkpoint"):
        make_trainer().load(tmp_path / "checkpoint.safetensors")


OBJECTIVE_CHANGES: dict[str, Any] = {"num_steps": 2, "position_decay": 0.5, "inputs": Inputs.UNSHIFTED, "noise": 0.0}
OBJECTIVE_CHANGES |= {"loss_weights": LossWeights(1.0, 0.2)}
PLAN_CHANGES = {
    "seed": 1, "max_tokens": 200, "step_tokens": 240, "micro_tokens": 60, "peak_lr": 2e-3, "final_lr_share": 0.1,
    "warmup_steps": 9, "weight_decay": 0.0, "ema_decay": 0.9, "answers": "target", "num_answers": 7,
}  # fmt: skip
LENGTH_CHANGES: dict[str, Any] = {"total_tokens": 9_000, "minutes": 3.0, "checkpoint_every_s": 5.0}


def test_a_checkpoint_of_another_run_is_refused_by_the_first_difference(tmp_path: Path) -> None:
    """Half of the run would follow one plan and half another, and its record would name only the second; every worker draws by
    its rank among all; a new option that resumes silently; or a run that is too short had to begin again."""
    checkpoint, trainer = tmp_path / "checkpoint.safetensors", make_trainer()
    trainer.train_step()
    trainer.save(checkpoint)
    trainer, plan = make_trainer(), trainer.plan
    for name, value in (OBJECTIVE_CHANGES | PLAN_CHANGES).items():
        of_objective = name in OBJECTIVE_CHANGES
        changes = {"objective": replace(OBJECTIVE, **{name: value})} if of_objective else {name: value}
        trainer.plan = replace(plan, **changes)
        shown = asdict(value) if is_dataclass(value) else value
        with pytest.raises(ConfigError, match=f"its {name} is .*, and this run's is {re.escape(str(shown))}"):
            trainer.load(checkpoint)
    assert trainer.progress.step == 0
    with pytest.raises(ConfigError, match="its num_workers is 1, and this run's is 2"):
        make_trainer(workers=WorkerGroup(0, 2)).load(checkpoint)
    with pytest.raises(ConfigError, match=r"its family is eagle, and this run's is eagle3$"):
        make_trainer(EagleFamily.EAGLE3, WorkerGroup(0, 2), seed=1).load(checkpoint)
    longer = make_trainer(**LENGTH_CHANGES)
    longer.load(checkpoint)
    assert longer.progress.step == 1
    assert set(DrafterPlan.__dataclass_fields__) == {"objective", *PLAN_CHANGES, *LENGTH_CHANGES}


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    """A record of a step that had no such loss; or the records of a long run did not fit the header of the file."""
    trainer, again, headers = make_trainer(), make_trainer(), list[int]()
    records = [{"step": float(n), "tokens": 1e7 + n / 3, **({"guide": 0.1 * n} if n % 2 else {})} for n in range(9)]
    for count in (1, 100):
        trainer.history = records * count
        trainer.save(tmp_path / "checkpoint.safetensors")
        again.load(tmp_path / "checkpoint.safetensors")
        assert again.history == trainer.history
        headers.append(int.from_bytes((tmp_path / "checkpoint.safetensors").read_bytes()[:8], "little"))
    assert headers[1] < headers[0] + 1000


@pytest.mark.parametrize(
    "family", [f if f in FAST_FAMILIES else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_a_run_ends_with_its_plan_and_its_head_is_read_again(family: EagleFamily | BlockFamily, tmp_path: Path) -> None:
    """A loss that looks one token too far or too near cannot be learnt from a text where each word gives the next; a trained
    target makes every answer another's; the shipped file must be the published layout, with the averaged weights."""
    most_left, peak_lr = (0.98, 3e-2) if family is BlockFamily.PASS else (0.9, 3e-3)  # embeddings alone learn little
    trainer = make_trainer(family, total_tokens=5_000, peak_lr=peak_lr)
    model = trainer.target.model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    texts = [collate([draw(random.Random(seed)) for seed in range(16)])]
    untrained = trainer.probe(texts, num_steps=3)
    records = list(trainer.run())
    probe = trainer.probe(texts, num_steps=5)
    assert all(probe[f"loss_{step}"] < most_left * untrained[f"loss_{step}"] for step in (1, 2, 3))
    assert records[-1]["lr"] < max(record["lr"] for record in records)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    most = 5 if family in (*EagleFamily, BlockFamily.PEAGLE) else 3
    assert {f"top{k}_{step}" for k in (1, 4) for step in range(1, 6)} & probe.keys() == {
        f"top{k}_{step}" for k in (1, 4) for step in range(1, most + 1)
    }
    trainer.probes.append({"tokens": 10, **probe})
    draw_curves(trainer, "loss_", "top1", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    trainer.write_head(tmp_path)
    if family is BlockFamily.PASS:
        assert torch.equal(read_look_ahead(tmp_path, 64), trainer.exported()["embeddings"])
        return
    config, tensors = (read_head if isinstance(family, EagleFamily) else read_block)(tmp_path)
    shape = config.shape if isinstance(config, BlockConfig) else config
    check_fits(shape, trainer.target.vocab_size, trainer.target.hidden_size, trainer.target.num_layers)
    assert config == trainer.head.config
    again = make_head(trainer.target, family)
    start_from(again, tmp_path)
    averaged = trainer.averaged_head().state_dict()
    assert all(
        torch.equal(again.state_dict()[name], tensor.to(averaged[name].dtype)) for name, tensor in tensors.items()
    )
    assert tensors.keys() == averaged.keys()
    assert all(torch.equal(tensors[name], tensor.to(tensors[name].dtype)) for name, tensor in averaged.items())
    assert not torch.equal(averaged["fc.weight"], trainer.head.state_dict()["fc.weight"])


@pytest.mark.parametrize(("taps", "vocabulary", "reason"), [
    ((0, 1, 3), 60, "target that has 2"), ((1, 0, 2), 60, "aux_layers"), ((0, 1), 60, "three"), (TAPS, 513, "exceeds"),
])  # fmt: skip
def test_a_head_that_cannot_fit_is_refused(taps: tuple[int, ...], vocabulary: int, reason: str) -> None:
    """Refused only by the hook, or by the loader of the finished head."""
    with pytest.raises((ModelError, ConfigError), match=reason):
        head_config(tiny_target(), EagleFamily.EAGLE3, taps, vocabulary)


def test_a_fresh_eagle3_head_starts_from_the_target() -> None:
    """Rows of the output layer in the wrong order are learnt again from nothing; or taps that a shallow target has not."""
    target, kept = tiny_target(), torch.arange(0, 120, 2)
    head = make_head(target, EagleFamily.EAGLE3).state_dict()
    assert torch.equal(head["d2t"] + torch.arange(60), kept)
    assert torch.equal(head["t2d"].nonzero().flatten(), kept)
    assert torch.equal(head["lm_head.weight"], target.model.lm_head.weight[kept])
    assert (spread_aux_layers(32), spread_aux_layers(6)) == ((2, 16, 29), (2, 4, 6))
    for depth in range(2, 12):
        taps = spread_aux_layers(depth)
        assert list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= depth


def naive_scores(
    head: Any, target: FrozenTarget, text: Encoded, step: int, top_weight: float = 0.0
) -> tuple[Tensor, int, int]:
    """Loss, rows and first hits of one draft step, one row at a time."""
    ids = torch.tensor([text.ids])
    features, last = target.states(ids, head.config.aux_layers)
    logits, vocabulary = target.logits(last)[0].float(), head.draft_token_ids()
    loss, num_rows, top1 = torch.zeros(()), 0, 0
    for pair in range(len(text.ids) - 2 - step):
        if not (text.weights[pair + 2] and text.weights[pair + 2 + step]):
            continue
        state = head.unroll(target.embed(ids), features.float(), torch.tensor([[pair]]), Objective(step + 1))[
            step, 0, 0
        ]
        previous = ids[0, pair + 1 + step]
        guess, wanted = head.logits(state, target.logits, step, previous), logits[pair + 1 + step]
        ours = torch.arange(target.vocab_size) if vocabulary is None else vocabulary
        num_rows, top1 = num_rows + 1, top1 + int(ours[guess.argmax()] == wanted.argmax())
        entropy = torch.nn.functional.cross_entropy(guess, torch.softmax(wanted[ours], -1))
        if isinstance(head, BlockHead):
            always, entropy = block_losses(head, guess, wanted, ids[0, pair + 2 + step])
            loss = loss + always
        if vocabulary is None and isinstance(head, EagleHead):
            probs = torch.softmax(wanted, -1)
            likely = wanted.argsort(descending=True)[:10]
            top = -(probs[likely] * torch.log_softmax(guess, -1)[likely]).sum()
            distance = torch.nn.functional.smooth_l1_loss(state, last[0, pair + 1 + step])
            entropy = 0.1 * entropy + distance + top_weight * top
        if wanted.argmax() in ours:
            loss = loss + entropy
    return loss, num_rows, top1


def block_losses(head: BlockHead, guess: Tensor, wanted: Tensor, token: Tensor) -> Tensor:
    """The losses of DFlash or DSpark for all rows, and for rows whose most probable token can be drafted."""
    ours, q, p = head.draft_token_ids(), torch.softmax(guess, -1), torch.softmax(wanted, -1)
    assert ours is not None
    nll = -torch.log(q[ours == token]).sum()  # none where the token cannot be drafted
    if not head.config.markov_rank:
        return torch.stack([nll, torch.zeros(())])
    return torch.stack([0.1 * nll, 0.9 * (q - p[ours] / p[ours].sum()).abs().sum()])


@pytest.mark.parametrize("family", [*FAMILIES, "hass", "poss"])
def test_losses_equal_one_row_at_a_time(family: str) -> None:
    """A target, a mask or a draft token shifted by one; prompt, padding or tokens that cannot be drafted in the loss."""
    target = tiny_target()
    objective, top_weight = replace(OBJECTIVE, noise=0.0), 0.0
    if family in ("hass", "poss"):
        layers = (2, 1) if family == "poss" else ()
        head = fresh_head(head_config(target, EagleFamily.EAGLE, (), None, *layers), target, None, seed=0)
        top_weight = 0.7
        objective = replace(objective, loss_weights=LossWeights(1.0, 0.1, 0.0, top_weight), is_detached=True)
        with torch.no_grad():  # specialists that differ
            generator = torch.Generator().manual_seed(2)
            for weight in head.parameters():
                weight += torch.randn(weight.shape, generator=generator) / 20
    else:
        kind = EagleFamily(family) if family in list(EagleFamily) else BlockFamily(family)
        head = make_head(target, kind, draft_vocab=250)
    rng = random.Random(5)
    long, short = ([rng.randrange(512) for _ in range(length)] for length in (15, 9))
    answers = [0.0] * 4 + [1.0] * 5
    texts = [Encoded(long, [*answers, 0.0, 0.0, *answers[-4:]]), Encoded(short, answers)]
    scores = batch_scores(head, target, collate(texts), objective)
    for step, score in enumerate(scores):
        naive = [naive_scores(head, target, text, step, top_weight) for text in texts]
        torch.testing.assert_close(score.loss, torch.stack([loss for loss, _, _ in naive]).sum(), rtol=1e-4, atol=1e-4)
        assert score[1:3] == (sum(n for _, n, _ in naive), sum(hits for _, _, hits in naive))


@pytest.mark.slow
def test_guesses_that_an_earlier_head_makes_right_are_left_out(tmp_path: Path) -> None:
    """The second of two heads learned the first one's guesses again, or those of the step beside."""
    trainer = make_trainer(BlockFamily.DSPARK, total_tokens=5_000, peak_lr=3e-3)
    list(trainer.run())
    trainer.write_head(tmp_path)
    target, batch = trainer.target, collate([draw(random.Random(seed)) for seed in range(9)])
    first = trained_head(tmp_path, target)
    alone = batch_scores(first, target, batch, OBJECTIVE)
    assert all(0 < step.top1 < step.num_rows for step in alone)
    left = batch_scores(first, target, batch, OBJECTIVE, earlier=[first])
    assert [(step.num_rows, step.top1) for step in left] == [(step.num_rows - step.top1, 0) for step in alone]
    heads = [make_head(target, EagleFamily.EAGLE3) for _ in range(2)]
    for head, earlier in zip(heads, ([], [first]), strict=True):
        DrafterTrainer(head, target, draw, trainer.plan, earlier=earlier).train_step()
    assert not torch.equal(*(head.fc.weight for head in heads))


def test_taps_are_the_unnormed_residual_stream() -> None:
    """Normed features, or those of the neighbouring layer, train well and fail in every other server."""
    target = tiny_target()
    ids = torch.arange(10, 30)[None]
    features, last = target.states(ids, TAPS)
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    parts = features.split(target.hidden_size, dim=-1)
    torch.testing.assert_close(parts[0], hidden[0])
    torch.testing.assert_close(parts[1], hidden[1])
    torch.testing.assert_close(target.model.model.norm(parts[2]), last)
    torch.testing.assert_close(target.states(ids).features, hidden[2])


def _train_as(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    trainer = make_trainer(EagleFamily.EAGLE3, WorkerGroup(rank, 2))
    trainer.train_step()
    trainer.save(Path(folder) / f"{rank}.safetensors")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # the target's run has the same workers
def test_two_workers_train_one_head(tmp_path: Path) -> None:
    """Gradients that are not summed let workers drift apart; equal data would make the second worker useless."""
    torch.multiprocessing.spawn(_train_as, args=(str(tmp_path),), nprocs=2)
    first, second, alone = (
        make_trainer(EagleFamily.EAGLE3, w) for w in (WorkerGroup(0, 2), WorkerGroup(1, 2), SINGLE_WORKER)
    )
    first.load(tmp_path / "0.safetensors")
    second.load(tmp_path / "1.safetensors")
    alone.train_step()
    assert first.progress == second.progress
    assert first.progress.tokens > 1.5 * alone.progress.tokens
    pairs = list(zip(first.head.parameters(), second.head.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
