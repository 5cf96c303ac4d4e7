"""The training job as a command: what it writes, what it refuses, and several workers through Ray Train."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_target import save_model, tiny_tokenizer

from pipelines import train_drafter
from pipelines.train_drafter import DrafterRun, parser, run_of
from ragspec.config import DEFAULT_TARGET, TargetConfig
from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.eagle.layout import EagleFamily, HeadConfig
from ragspec.drafting.heads.learning import Inputs, LossWeights, Objective
from ragspec.drafting.medusa.checkpoint import read_hydra
from ragspec.drafting.medusa.network import PositionConfig
from ragspec.engine.target import Target
from ragspec.errors import InputError, ModelError
from ragspec.training.conversations import AnswerEncoder, Encoded
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import fresh_head, head_config, start_from, write_trained
from ragspec.training.heads.training_texts import AnswerOrigin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random target of six layers."""
    folder = tmp_path_factory.mktemp("target")
    return str(save_model("llama", folder, num_hidden_layers=6, max_position_embeddings=1024))


@pytest.fixture(scope="module")
def loaded(target: str) -> FrozenTarget:
    return FrozenTarget.load(TargetConfig(model=target))


def run_with(options: str, folder: Path, target: str = DEFAULT_TARGET) -> DrafterRun:
    """The run of these options, with data and output in `folder`."""
    where = ["--data", str(folder), "--out", str(folder), "--target", target]
    return run_of(parser().parse_args(["--family", *options.split(), *where]))


def test_options_reach_the_plan(tmp_path: Path) -> None:
    """An ablation that is silently the default run."""
    ablation = "--inputs feature+unshifted-token --position-decay 0.5 --ttt-steps 6 --step-tokens 99"
    run = run_with(f"eagle3 {ablation} --aux-layers 1 2 3", tmp_path)
    assert (run.family, run.aux_layers) == (EagleFamily.EAGLE3, (1, 2, 3))
    assert run.plan.objective.inputs is Inputs.UNSHIFTED
    assert (run.plan.objective.position_decay, run.plan.objective.num_steps, run.plan.step_tokens) == (0.5, 6, 99)
    steps = {}
    for family in ("eagle", "eagle2"):
        run = run_with(family, tmp_path)
        assert run.family is EagleFamily.EAGLE
        steps[family] = run.plan.objective.num_steps
    assert steps == {"eagle": 1, "eagle2": 3}


def test_hass_and_poss_have_their_papers_losses_and_layers(loaded: FrozenTarget, target: str, tmp_path: Path) -> None:
    """HASS trained as EAGLE-2, or all specialists for one position."""
    cases = {"hass": (3, 1, 0), "poss": (6, 6, 1), "poss --steps 8 --positions-per-layer 3": (8, 3, 3)}
    for options, (steps, *layers) in cases.items():
        run = run_with(options, tmp_path, target)
        config = train_drafter.config_of(run, loaded)
        assert isinstance(config, HeadConfig) and config.family is EagleFamily.EAGLE
        assert [config.num_layers, config.positions_per_layer] == layers
        wanted = Objective(steps, 1.0, noise=0.2, loss_weights=LossWeights(1.0, 0.1, 0.0, 1.0), is_detached=True)
        assert run.plan.objective == wanted
    with pytest.raises(InputError, match="five numbers"):
        run_with("hass --loss-weights 1 2 3 4 5 6", tmp_path)


def test_a_head_to_begin_with_gives_its_weights_to_all_specialists(loaded: FrozenTarget, tmp_path: Path) -> None:
    """Specialists began at random, or a head of another shape was half copied."""
    first = fresh_head(head_config(loaded, EagleFamily.EAGLE), loaded, None, seed=5)
    write_trained(tmp_path / "first", first, first.state_dict(), "target")
    poss = fresh_head(head_config(loaded, EagleFamily.EAGLE, (), None, 3, 2), loaded, None, seed=6)
    start_from(poss, tmp_path / "first")
    given = first.state_dict()
    for name, weight in poss.state_dict().items():
        assert torch.equal(weight, given[re.sub(r"layers\.\d", "layers.0", name)])
    other = fresh_head(head_config(loaded, EagleFamily.EAGLE3, (2, 4, 6), 100), loaded, torch.arange(100), seed=6)
    with pytest.raises(ModelError, match="another shape"):
        start_from(other, tmp_path / "first")


def test_a_narrower_head_begins_with_the_largest_neurons_of_the_target(
    loaded: FrozenTarget, target: str, tmp_path: Path
) -> None:
    """A narrower feed-forward network began at random, or with gates and outputs of different neurons."""
    config = train_drafter.config_of(run_with("eagle3 --intermediate-size 5", tmp_path, target), loaded)
    assert isinstance(config, HeadConfig) and config.intermediate_size == 5
    own, theirs = fresh_head(config, loaded, None, seed=5).layer().mlp, loaded.model.model.layers[-1].mlp
    norms = [
        weight.float().norm(dim=1)
        for weight in (theirs.gate_proj.weight, theirs.up_proj.weight, theirs.down_proj.weight.T)
    ]
    kept = sorted((norms[0] * norms[1] * norms[2]).argsort()[-5:].tolist())
    assert torch.equal(own.gate_proj.weight, theirs.gate_proj.weight[kept])
    assert torch.equal(own.up_proj.weight, theirs.up_proj.weight[kept])
    assert torch.equal(own.down_proj.weight, theirs.down_proj.weight[:, kept])
    with pytest.raises(InputError, match="intermediate-size"):
        run_with("medusa --intermediate-size 5", tmp_path)


def test_options_of_medusa_and_hydra_reach_the_head(loaded: FrozenTarget, target: str, tmp_path: Path) -> None:
    """A network more or less than was asked for, or the loss of another family."""
    cases = {
        "medusa": ("medusa", 4, 1, False, True, 0.8, (0, 0, 1)),
        "medusa --steps 3 --layers 2 --target-output": ("medusa", 3, 2, False, False, 0.8, (0, 0, 1)),
        "hydra": ("hydra", 4, 1, True, True, 1.0, (0, 1, 0)),
        "hydra++ --steps 2": ("hydra", 2, 4, True, True, 1.0, (0, 1, 0)),
        "hydra --not-grounded --loss-weights 0 1 0.5": ("hydra", 4, 1, False, True, 1.0, (0, 1, 0.5)),
    }
    for options, (family, *sizes, decay, weights) in cases.items():
        run = run_with(options, tmp_path, target)
        config = train_drafter.config_of(run, loaded)
        head = train_drafter.make_head(config, run.plan, loaded, lambda rng: Encoded([], []))
        assert isinstance(config, PositionConfig) and config.family.value == family
        assert [config.num_heads, config.num_blocks, config.is_grounded, config.has_output] == sizes
        assert config.has_prefix == options.startswith("hydra++")
        assert run.plan.objective.position_decay == decay and run.plan.objective.noise == 0.0
        assert (run.plan.objective.loss_weights or head.loss_weights) == LossWeights(*weights)


@pytest.mark.parametrize(
    ("options", "families"),
    [
        ("medusa --inputs token", "eagle and eagle2 and eagle3 and hass and poss"),
        ("hydra --draft-vocab 100", "eagle3 and peagle and dflash and dspark"),
        ("hydra --target-output", "medusa"),
        ("medusa --not-grounded", r"hydra and hydra\+\+"),
        ("eagle --layers 2", r"dflash and dspark and medusa and hydra and hydra\+\+"),
        ("hass --positions-per-layer 2", "poss"),
        ("medusa --start .", "eagle and eagle2 and eagle3 and hass and poss and peagle and dflash and dspark"),
    ],
)
def test_an_option_of_another_family_is_refused(options: str, families: str, tmp_path: Path) -> None:
    """The run would be another than its command line says."""
    with pytest.raises(InputError, match=rf"{options.split()[1]} is an option of {families}$"):
        run_with(options, tmp_path)


def test_only_as_many_answers_are_drawn_as_were_asked_for(tmp_path: Path) -> None:
    """A longer cache under the same directory would change every text of a resumed run."""
    run = run_with("eagle --answers target --num-answers 3", tmp_path)
    rows = [AnswerOrigin("target", 0, 320, "texts")._asdict(), *({"ids": [n] * 3, "num_prompt": 1} for n in range(9))]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw = train_drafter.text_sampler(run, AnswerEncoder(tiny_tokenizer()))
    assert {draw(random.Random(seed)).ids[0] for seed in range(60)} == {0, 1, 2}


def test_the_number_of_answers_belongs_to_the_plan_only_where_some_are_drawn(tmp_path: Path) -> None:
    """A run on the data sets' answers that is refused at resume for an option it never read."""
    for kind, count in (("dataset", 0), ("both", 7)):
        plan = run_with(f"eagle --num-answers 7 --answers {kind}", tmp_path).plan
        assert (plan.answers, plan.num_answers) == (kind, count)


@pytest.mark.parametrize(("options", "reason"), [
    (["--aux-layers", "2", "4", "7"], "that has 6"), (["--draft-vocab", "7000"], "exceeds"), (["--target", "."], "config.json"),
])  # fmt: skip
def test_what_cannot_fit_the_target_ends_in_one_line(
    options: list[str], reason: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, or a head that is refused only when it is served."""
    arguments = f"train_drafter --family eagle3 --data {tmp_path} --out {tmp_path}/out --target {target}".split()
    monkeypatch.setattr(sys, "argv", [*arguments, *options])
    with pytest.raises(SystemExit, match=reason):
        train_drafter.main()


def command(out: Path, target: str, data: Path, *options: str) -> None:
    arguments = ["--data", str(data), "--out", str(out), "--target", target, "--seed", "3", *options]
    subprocess.run([sys.executable, "-m", "pipelines.train_drafter", *arguments], cwd=ROOT, check=True, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "probes"),
    [
        (("--family", "eagle3", "--max-tokens", "1000"), {"prose_top1_1", "chat_top4_5", "rag_top1_3"}),
        (("--family", "hydra", "--layers", "2"), {"prose_top1_1", "chat_top4_4"}),
    ],
)
def test_the_command_writes_a_head_from_the_targets_own_answers_and_goes_on(
    target: str, training_data: Path, tmp_path: Path, options: tuple[str, ...], probes: set[str]
) -> None:
    """The job as its first docstring line runs it; probes of five steps over four networks; a folder that no engine loads.

    The little tokenizer makes 750 tokens of a question behind a passage.
    """
    options += ("--answers", "both", "--num-answers", "12", "--checkpoint-minutes", "0.01", "--data-workers", "0")
    command(tmp_path, target, training_data, *options, "--tokens", "2000")
    record = json.loads((tmp_path / "history.json").read_text())
    assert record["history"][-1]["tokens"] >= 2000
    assert probes <= record["probes"][-1].keys()
    assert (tmp_path / "curves.png").stat().st_size > 1000
    if "hydra" in options:
        heads = read_hydra(tmp_path / "head", Target.load(TargetConfig(model=target), 64))
        assert (heads.config.num_heads, heads.config.num_blocks, heads.config.is_grounded) == (4, 2, True)
    else:
        assert read_head(tmp_path / "head").config.aux_layers == (2, 4, 6)
    command(tmp_path, target, training_data, *options, "--tokens", "3000", "--resume")
    history = json.loads((tmp_path / "history.json").read_text())["history"]
    assert history[: len(record["history"])] == record["history"] and history[-1]["tokens"] >= 3000


WRONG = """--tokens -1; --tokens 0; --minutes 0; --minutes nan; --steps 0; --layers 0; --loss-weights 0 -1 nan; --max-tokens 7;
    --num-answers 0; --data-workers -1; --checkpoint-minutes 0"""


def test_lengths_that_cannot_be_meant_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A run without an end, one that looked for texts short enough for ever, a division by nothing, or the option was ignored."""
    for wrong in WRONG.split(";"):
        with pytest.raises(SystemExit):
            parser().parse_args(["--family", "eagle", "--data", "d", "--out", "o", *wrong.split()])
        assert wrong.split()[0] in capsys.readouterr().err
