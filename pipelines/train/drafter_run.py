"""The options of `python -m pipelines.train_drafter` and the run they ask for."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from pipelines.train.run import data_dir, options, positive
from ragspec.config import REFERENCE_TARGET
from ragspec.drafting.eagle.checkpoint import EagleFamily
from ragspec.training.heads.eagle_model import Inputs
from ragspec.training.heads.losses import Objective
from ragspec.training.heads.trainer import DrafterPlan

LEAST_TOKENS = 128
"""Of a text: of shorter ones too few prompts leave room for an answer."""
NUM_STEPS = {"eagle": 1, "eagle2": 3, "eagle3": 4}
NOISE = {"eagle": 0.2, "eagle2": 0.2, "eagle3": 0.0}


@dataclass(frozen=True)
class Run:
    """What the command line decides."""

    data_dir: Path
    out: Path
    target: str
    family: EagleFamily
    aux_layers: tuple[int, ...]
    draft_vocab: int | None
    plan: DrafterPlan
    resume: bool
    threads: int | None


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = options("Train an EAGLE head.")
    add = parser.add_argument
    add("--family", choices=sorted(NUM_STEPS), required=True)
    add("--target", default=REFERENCE_TARGET, help="model directory; default: the reference target")
    add("--tokens", type=positive(int), default=20_000_000, help="length of the run in tokens")
    add(
        "--steps", "--ttt-steps", type=positive(int), dest="steps", help="draft steps learnt; default 1, 3, 4 by family"
    )
    add("--position-decay", type=float, default=0.8, help="weight of a draft step against the one before")
    add("--inputs", choices=[i.value for i in Inputs], default=Inputs.SHIFTED.value, help="what a pair is made of")
    add(
        "--noise", type=float, help="width of the uniform noise on features, of a text of 512 tokens; default by family"
    )
    add("--aux-layers", type=int, nargs=3, help="eagle3: taps, low to high")
    add("--draft-vocab", type=positive(int), help="eagle3: tokens the head can draft")
    add("--peak-rate", type=float, default=1e-3, help="peak learning rate")
    add("--max-tokens", type=positive(int, LEAST_TOKENS), default=320, help="texts are cut to this many tokens")
    add("--answers", choices=("dataset", "target", "both"), default="dataset", help="whose answers to learn")
    add("--num-answers", type=positive(int), default=6_000, help="answers that the target gives; kept under --out")
    return parser


def run_of(args: argparse.Namespace) -> Run:
    """The run that the options ask for. Raises: InputError."""
    steps = args.steps or NUM_STEPS[args.family]
    noise = NOISE[args.family] if args.noise is None else args.noise
    objective = Objective(steps, args.position_decay, Inputs(args.inputs), noise)
    plan = DrafterPlan(
        total_tokens=args.tokens,
        objective=objective,
        minutes=args.minutes,
        seed=args.seed,
        max_tokens=args.max_tokens,
        peak_lr=args.peak_rate,
        answers=args.answers,
        num_answers=0 if args.answers == "dataset" else args.num_answers,
    )
    return Run(
        data_dir=data_dir(args),
        out=args.out.resolve(),
        target=str(Path(args.target).resolve()) if Path(args.target).is_dir() else args.target,
        family=EagleFamily.EAGLE3 if args.family == "eagle3" else EagleFamily.EAGLE,
        aux_layers=tuple(args.aux_layers or ()),
        draft_vocab=args.draft_vocab,
        plan=plan,
        resume=args.resume,
        threads=args.threads,
    )
