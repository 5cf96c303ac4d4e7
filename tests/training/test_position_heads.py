"""Training of Medusa and Hydra heads: the published losses and names, resume, and heads that draft in the engine."""

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from drafting.medusa_heads import hydra_logits, medusa_logits
from tiny_target import save_model
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss
from training_parts import unbroken_and_resumed
from transformers import LlamaModel

from ragspec.config import DraftingConfig, DraftTreeConfig, EngineConfig, HeadConfig, TargetConfig
from ragspec.core import Completion, Request, SamplingParams
from ragspec.drafting.heads.learning import LossWeights, Objective, collate
from ragspec.drafting.medusa.checkpoint import read_hydra, read_medusa
from ragspec.drafting.medusa.network import PositionConfig, PositionFamily, PositionHead, PrefixLayer
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine.loading import load_engine
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.training.conversations import Encoded
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import fresh_position_head
from ragspec.training.heads.trainer import DrafterPlan, DrafterTrainer, batch_scores

NUM_HEADS, PROMPT = 3, 6
ENGINE = EngineConfig(max_kv_tokens=2048)


MEDUSA_OF_TWO = "medusa, two blocks, the target's output layer"
SHAPES: dict[str, dict[str, int]] = {
    "medusa": {},
    MEDUSA_OF_TWO: {"num_blocks": 2, "has_output": False},
    "hydra": {"is_grounded": True},
    "hydra, three blocks": {"num_blocks": 3, "is_grounded": True},
    "hydra, not grounded": {},
    "hydra++": {"num_blocks": 2, "is_grounded": True, "has_prefix": True, "has_dropout": True},
}
"""Fields of `PositionConfig`."""


def family_of(name: str) -> PositionFamily:
    return PositionFamily.MEDUSA if name.startswith("medusa") else PositionFamily.HYDRA


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder = tmp_path_factory.mktemp("target")
    return TargetConfig(model=str(save_model("llama", folder, std=0.3)), dtype="float32")


@pytest.fixture(scope="module")
def target(model: TargetConfig) -> FrozenTarget:
    return FrozenTarget.load(model, dtype=torch.float32)


def make_head(target: FrozenTarget, name: str) -> PositionHead:
    sizes = target.hidden_size, target.vocab_size, NUM_HEADS
    config = PositionConfig(family_of(name), *sizes, **SHAPES[name])  # type: ignore[arg-type]
    return fresh_position_head(config, target, seed=1)


def shaken(head: PositionHead) -> PositionHead:
    """With random weights everywhere, so that none may be left out."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += torch.randn(weight.shape, generator=generator) / 8
    return head


def prefix_states(head: PositionHead, states: Tensor) -> Tensor:
    """What Hydra++'s networks read: a Llama of one layer over the states of the text, as transformers computes it."""
    prefix = head.get_submodule("prefix_embeding_layer")
    assert isinstance(prefix, PrefixLayer)
    config = copy.deepcopy(prefix.llama)
    config.num_hidden_layers = 1
    model = LlamaModel(config).eval()
    unknown = model.load_state_dict(prefix.state_dict(), strict=False)
    assert not unknown.unexpected_keys and unknown.missing_keys == ["embed_tokens.weight"]
    return model(inputs_embeds=states[None], attention_mask=torch.ones(1, len(states))).last_hidden_state[0]


def expected_losses(head: PositionHead, target: FrozenTarget, text: Encoded, position: int) -> Tensor:
    """Of one network on one text, by the papers' formulas: with the target's states, its distributions, the text's tokens."""
    ids = torch.tensor([text.ids])
    last = target.states(ids).last[0]
    read = prefix_states(head, last) if head.config.has_prefix else last
    tensors, teacher, losses = head.state_dict(), target.logits(last).double(), torch.zeros(3, dtype=torch.float64)
    for t in range(len(text.ids) - 2 - position):
        if not (text.weights[t + 2] and text.weights[t + 2 + position]):
            continue
        if head.config.family is PositionFamily.MEDUSA:
            output = None if head.config.has_output else target.model.lm_head.weight
            logits = medusa_logits(tensors, last[t : t + 1], position, output)
        else:
            embedded = target.embed(ids)[:, t + 1 : t + 2 + position]
            logits = hydra_logits(tensors, read[t : t + 1], embedded, position)
        probs = torch.softmax(teacher[t + 1 + position], -1)
        token = ids[:, t + 2 + position]
        losses[1:] += torch.stack([cross_entropy(logits, probs[None]), cross_entropy(logits, token)])
        state = head.unroll(target.embed(ids), last[None], torch.tensor([[t]]), Objective(NUM_HEADS))[position, 0, 0]
        losses[0] += smooth_l1_loss(state, last[t + 1 + position])
    return losses


@pytest.mark.parametrize("name", SHAPES)
def test_losses_are_the_papers_under_published_names(target: FrozenTarget, name: str) -> None:
    """A token, a state or a prediction shifted by one trains, and fails only when served; so does a wrong name."""
    head, rng = shaken(make_head(target, name)), random.Random(4)
    answer = [0.0] * 4 + [1.0] * 5
    texts = [Encoded([rng.randrange(target.vocab_size) for _ in w], w) for w in ([*answer, 0.0, 1.0, 1.0, 1.0], answer)]
    with torch.no_grad():
        expected = [
            torch.stack([expected_losses(head, target, text, i) for text in texts]).sum(0) for i in range(NUM_HEADS)
        ]
        published = [0.0, 0.0, 1.0] if name.startswith("medusa") else [0.0, 1.0, 0.0]
        for weights, chosen in ((published, None), ([0.5, 0.2, 0.3], LossWeights(0.5, 0.2, 0.3))):
            scores = batch_scores(head, target, collate(texts), Objective(NUM_HEADS, loss_weights=chosen))
            wanted = torch.stack(expected) @ torch.tensor(weights, dtype=torch.float64)
            torch.testing.assert_close(
                torch.stack([score.loss for score in scores]).double(), wanted, rtol=1e-4, atol=1e-4
            )


def trainer_on(texts: Sequence[Encoded], target: FrozenTarget, name: str, num_tokens: int = 12_000) -> DrafterTrainer:
    plan = DrafterPlan(
        total_tokens=num_tokens,
        objective=Objective(NUM_HEADS),
        step_tokens=400,
        micro_tokens=400,
        warmup_steps=4,
        peak_lr=1e-2,
        ema_decay=0.9,
    )
    return DrafterTrainer(make_head(target, name), target, lambda rng: rng.choice(texts), plan)


def some_texts(target: FrozenTarget) -> list[Encoded]:
    rng = random.Random(9)
    return [Encoded([rng.randrange(target.vocab_size) for _ in range(20)], [0.0] * 5 + [1.0] * 15) for _ in range(30)]


@pytest.mark.parametrize("name", [MEDUSA_OF_TWO, "hydra++"])
def test_a_resumed_run_equals_an_unbroken_one(target: FrozenTarget, name: str, tmp_path: Path) -> None:
    """A weight that several blocks share was stored once for each, or its optimizer state was lost."""
    texts = some_texts(target)
    unbroken, resumed = unbroken_and_resumed(lambda: trainer_on(texts, target, name), tmp_path)
    pairs = zip(unbroken.exported().values(), resumed.exported().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in zip(unbroken.head.parameters(), resumed.head.parameters(), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_the_written_folder_is_the_published_layout(
    target: FrozenTarget, model: TargetConfig, name: str, tmp_path: Path
) -> None:
    """Blocks that are one module must be written once for each place, with the averaged weights."""
    trainer = trainer_on(some_texts(target), target, name)
    trainer.train_step()
    trainer.write_head(tmp_path)
    shape, family = SHAPES[name], family_of(name)
    read = read_medusa if family is PositionFamily.MEDUSA else read_hydra
    heads = read(tmp_path, Target.load(model, 64))
    config = heads.config
    expected = NUM_HEADS, shape.get("num_blocks", 1), shape.get("is_grounded", False)
    assert (config.num_heads, config.num_blocks, config.is_grounded) == expected
    exported = trainer.exported()
    assert len(heads.tensors) == len(exported)
    stored = torch.load(tmp_path / f"{family}_lm_head.pt", weights_only=True)
    assert stored.keys() == exported.keys() and all(torch.equal(exported[n], t) for n, t in stored.items())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["base_model_name_or_path"] == model.model and raw[f"{family}_num_heads"] == NUM_HEADS
    with torch.no_grad():
        trainer.average[0].view(-1)[0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        trainer.write_head(tmp_path)


def test_more_heads_than_can_be_served_are_refused() -> None:
    """Found only when the head of a long run was loaded."""
    with pytest.raises(ConfigError, match="at most 64"):
        PositionConfig(PositionFamily.MEDUSA, 64, 320, 65)


def ask(
    model: TargetConfig, drafting: DraftingConfig, temperature: float, prompts: Sequence[tuple[int, ...]]
) -> list[Completion]:
    """Answers of the target. Drafts are all that may be had, whatever they cost."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    with load_engine(model, ENGINE, drafting, planner_class=FixedTreePlanner) as engine:
        completions = engine.generate([Request(str(i), ids, params) for i, ids in enumerate(prompts)])
        assert engine.num_drafter_failures == 0
    return completions


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(3)
    return [tuple(rng.randrange(2, 300) for _ in range(PROMPT)) for _ in range(8)]


@pytest.fixture(scope="module")
def plain(model: TargetConfig, prompts: list[tuple[int, ...]]) -> dict[float, list[list[int]]]:
    """The target's answers without drafts, by temperature."""
    return {t: tokens_of(ask(model, DraftingConfig(speculation=False), t, prompts)) for t in (0.0, 1.0)}


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [list(done.token_ids) for done in completions]


@pytest.mark.parametrize(
    "name", [MEDUSA_OF_TWO, *(pytest.param(name, marks=pytest.mark.slow) for name in ("medusa", "hydra")), "hydra++"]
)
def test_a_trained_head_drafts_better_than_an_untrained_one_and_changes_no_token(
    target: FrozenTarget,
    model: TargetConfig,
    prompts: list[tuple[int, ...]],
    plain: dict[float, list[list[int]]],
    name: str,
    tmp_path: Path,
) -> None:
    """A network that learns another position than it serves lowers its loss and is never accepted."""
    answers = zip(prompts, plain[0.0], strict=True)
    texts = [Encoded([*ids, *answer], [0.0] * PROMPT + [1.0] * 24) for ids, answer in answers]
    trainer = trainer_on(texts, target, name)
    trainer.write_head(tmp_path / "untrained")
    records = list(trainer.run())
    trainer.write_head(tmp_path / "trained")
    for step in range(1, NUM_HEADS + 1):
        assert records[-1][f"loss_{step}"] < 0.7 * records[0][f"loss_{step}"]
    probe = trainer.probe([collate(texts)], num_steps=5)
    assert {f"top1_{step}" for step in (1, 2, 3)} <= probe.keys() and "top1_4" not in probe
    accepted = {}
    for folder, temperature in (("untrained", 0.0), ("trained", 0.0), ("trained", 1.0)):
        family, path = family_of(name).value, str(tmp_path / folder)
        tree = DraftTreeConfig(max_nodes=6)
        drafting = DraftingConfig(drafters=(family,), tree=tree, **{family: HeadConfig(path=path)})
        drafted = ask(model, drafting, temperature, prompts)
        assert tokens_of(drafted) == plain[temperature]
        assert sum(done.stats.num_drafted for done in drafted) > 0
        accepted[folder, temperature] = sum(done.stats.num_accepted for done in drafted)
    assert accepted["trained", 0.0] > 2 * accepted["untrained", 0.0], accepted
