"""Train EAGLE, HASS, PosS, P-EAGLE, DFlash, DSpark, Medusa, Hydra or Hydra++ heads for a target, in the published formats.

    python -m pipelines.train_drafter --family eagle3 --data ../shared/data --out runs/eagle3 --minutes 60
    python -m pipelines.train_drafter --family eagle2 --data ../shared/data --out runs/eagle2 --steps 3
    python -m pipelines.train_drafter --family poss --data ../shared/data --out runs/poss --start runs/eagle2/head
    python -m pipelines.train_drafter --family hydra --data ../shared/data --out runs/hydra --loss-weights 0 1 0.5
    python -m pipelines.train_drafter --family eagle3 --target PATH --data ../shared/data --out runs/own --workers 4

`eagle` learns one draft step, `eagle2` the same head over several, `eagle3` reads three of the target's layers and has its own
output layer. `hass` adds to `eagle2` a term on the target's ten most probable tokens, and no gradient flows between draft steps;
`poss` has HASS's loss and a layer of its own for every `--positions-per-layer` draft steps. `peagle`, `dflash` and `dspark` guess
`--steps` tokens in one forward; `dflash` and `dspark` have `--layers` layers, `dspark` a bias by the previous token. `pass` has
`--steps` look-ahead embeddings and nothing else. `medusa` learns the text's own tokens, position k with the weight 0.8^k, `hydra`
the target's distribution, and `hydra++` reads the states through a decoder layer; they have `--steps` networks of `--layers`
blocks.

`--answers target` generates the target's answers first and trains on them; `both` mixes them with the data sets' answers.
`--inputs`, `--position-decay` and `--loss-weights` are the papers' ablations. `--start` begins with a trained head: of PosS, all
layers that it lacks with a copy of its last. `--after` leaves out the guesses that earlier heads make right, so that the head
learns what these miss (Col-BT). On a busy machine, set `OMP_WAIT_POLICY=PASSIVE`: waiting threads then do not spin.
Several workers run through Ray Train; on several machines the paths must be shared.

Writes under `--out`: `answers.jsonl`, `checkpoint.safetensors`, `curves.png`, `history.json` and `head/`.
"""

import argparse
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from pipelines.train import training_run
from ragspec.config import DEFAULT_TARGET, DraftingConfig, EngineConfig, TargetConfig
from ragspec.drafting.block.checkpoint import BlockFamily
from ragspec.drafting.block.network import BlockConfig, BlockHead
from ragspec.drafting.eagle.layout import EagleFamily, HeadConfig
from ragspec.drafting.eagle.network import EagleHead
from ragspec.drafting.heads.learning import Head, Inputs, LossWeights, MicroBatch, Objective
from ragspec.drafting.medusa.network import PositionConfig, PositionFamily
from ragspec.engine.checkpoints.model_config import eos_ids
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError
from ragspec.training.conversations import AnswerEncoder
from ragspec.training.heads import initialisation
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.trainer import DrafterPlan, DrafterTrainer
from ragspec.training.heads.training_texts import (
    PromptSource,
    TextSampler,
    TextSource,
    answer_sampler,
    dataset_sampler,
    draft_vocabulary,
    mixed_sampler,
    probe_batches,
    read_answers,
    texts_fingerprint,
    write_answers,
)
from ragspec.training.trainer import WorkerGroup

SMALL_VOCABULARY, SMALL_DRAFT_VOCABULARY, DRAFT_VOCABULARY = 16_384, 3_072, 32_000
VOCABULARY_TEXTS = 4_000
MARKOV_RANK = 32
ANSWERS = "answers.jsonl"
NUM_PROBES, PROBE_TEXTS, PROBE_STEPS = 10, 16, 5
LOSS_WEIGHTS = """STATE TEACHER TOKEN TOP DIFFERENCE: of the distance to the target's state, of the cross-entropy with the
target's distribution, of that with the text's token, of that with the target's ten most probable tokens, and of the absolute
difference of both distributions; default: eagle and eagle2 1 0.1, hass and poss 1 0.1 0 1, eagle3, peagle, pass, hydra and
hydra++ 0 1, dflash and medusa 0 0 1, dspark 0 0 0.1 0 0.9"""
LEAST_TOKENS = 128
"""Of a text: shorter limits leave too few prompts with room for an answer."""


class FamilyDefaults(NamedTuple):
    """Defaults of the options. `loss_weights` None: those of the head."""

    num_steps: int
    position_decay: float = 0.8
    noise: float = 0.0
    loss_weights: LossWeights | None = None
    is_detached: bool = False
    num_blocks: int = 1


_HASS = LossWeights(state=1.0, teacher=0.1, top=1.0)
FAMILIES = {
    "eagle": FamilyDefaults(1, noise=0.2),
    "eagle2": FamilyDefaults(3, noise=0.2),
    "eagle3": FamilyDefaults(4),
    "hass": FamilyDefaults(3, 1.0, 0.2, _HASS, is_detached=True),
    "poss": FamilyDefaults(6, 1.0, 0.2, _HASS, is_detached=True),
    "peagle": FamilyDefaults(5, 0.7),
    "dflash": FamilyDefaults(5),
    "dspark": FamilyDefaults(5),
    "pass": FamilyDefaults(4),
    "medusa": FamilyDefaults(4),
    "hydra": FamilyDefaults(4, 1.0),
    "hydra++": FamilyDefaults(4, 1.0, num_blocks=4),
}
OPTIONS_OF = {
    "eagle eagle2 eagle3 hass poss": ("inputs",), "medusa": ("target_output",), "hydra hydra++": ("not_grounded",),
    "eagle eagle2 eagle3 hass poss peagle dflash dspark": ("start", "intermediate_size"),
    "eagle3 peagle dflash dspark": ("aux_layers", "draft_vocab"), "dspark": ("markov_rank",),
    "dflash dspark medusa hydra hydra++": ("layers",), "poss": ("positions_per_layer",),
}  # fmt: skip
"""Families, and the options that only they read."""


@dataclass(frozen=True, kw_only=True)
class DrafterRun(training_run.TrainingRun):
    """The command's options. `draft_vocab` None: the default of the target's vocabulary size. `start`: a head to begin with.
    `after`: earlier heads. `num_blocks`: blocks of a network, or layers of a head that drafts blocks. The last three are of
    Medusa and Hydra: whether networks read the tokens in between, have output layers of their own, and read through a decoder
    layer.
    """

    target: str
    family: EagleFamily | BlockFamily | PositionFamily
    aux_layers: tuple[int, ...]
    draft_vocab: int | None
    plan: DrafterPlan
    start: Path | None = None
    after: tuple[Path, ...] = ()
    intermediate_size: int | None = None
    positions_per_layer: int = 0
    markov_rank: int = 0
    num_blocks: int = 1
    is_grounded: bool = False
    has_output: bool = True
    has_prefix: bool = False

    def prepare(self) -> None:
        """Generate the target's missing answers. Raises: ModelError, InputError."""
        if self.plan.answers == "dataset":
            return
        self.out.mkdir(parents=True, exist_ok=True)
        target = TargetConfig(model=self.target)
        with load_engine(target, EngineConfig(num_threads=self.threads), DraftingConfig()) as engine:
            encoder = AnswerEncoder(engine.target.tokenizer, engine.target.eos_ids)
            prompts = PromptSource(TextSource(self.data_dir), encoder, self.plan.max_tokens, self.plan.seed)
            origin = prompts.origin(texts_fingerprint(engine.target))
            for done in write_answers(self.out / ANSWERS, origin, self.plan.num_answers, prompts, engine):
                print(f"{done} of {self.plan.num_answers} answers of the target", flush=True)


def main() -> None:
    """Train as the command line says."""
    training_run.run_command(parser(), run_of, train)


def parser() -> argparse.ArgumentParser:
    """The command's options; those of the run and of its plan by their names."""
    parser = training_run.training_parser("Train a drafter head.")
    add, count, plan = parser.add_argument, training_run.positive(int), DrafterPlan
    add("--family", choices=sorted(FAMILIES), required=True)
    add("--target", default=DEFAULT_TARGET, help="model directory; default: the shipped target")
    add("--tokens", dest="total_tokens", type=count, default=20_000_000, help="length of the run in tokens")
    add("--steps", "--ttt-steps", dest="steps", type=count, help=f"draft steps learnt, or networks; {_defaults(0)}")
    add("--position-decay", type=float, help=f"weight of a draft step against the one before; {_defaults(1)}")
    add("--noise", type=float, help=f"width of the noise on features, of a text of 512 tokens; {_defaults(2)}")
    add("--loss-weights", type=_weight, nargs="+", metavar="WEIGHT", help=LOSS_WEIGHTS)
    add("--inputs", choices=[i.value for i in Inputs], help="EAGLE families: the parts of a pair")
    add("--aux-layers", type=int, nargs=3, help="eagle3, peagle, dflash, dspark: taps, low to high")
    add("--draft-vocab", type=count, help="eagle3, peagle, dflash, dspark: tokens the head can draft")
    add("--intermediate-size", type=count, help="all but medusa and hydra; default: the target's")
    add("--start", type=Path, help="all but medusa and hydra: directory of a head to begin with")
    add("--after", type=Path, nargs="+", default=(), metavar="HEAD", help="heads trained before; not medusa or hydra")
    add("--markov-rank", type=count, help=f"dspark: width of the bias by the previous token; default {MARKOV_RANK}")
    add("--positions-per-layer", type=count, help="poss: draft steps of a specialist; default 1")
    add("--layers", type=count, help=f"layers of dflash and dspark, blocks of a network; {_defaults(5)}")
    add("--target-output", action="store_true", help="medusa: networks read the target's output layer and have none")
    add("--not-grounded", action="store_true", help="hydra, hydra++: networks do not read the tokens in between")
    add("--peak-rate", dest="peak_lr", type=float, default=plan.peak_lr, help="peak learning rate")
    add("--step-tokens", type=count, default=plan.step_tokens, help="tokens of an optimizer step of each worker")
    at_least = training_run.positive(int, LEAST_TOKENS)
    add("--max-tokens", type=at_least, default=plan.max_tokens, help="texts are cut to this many tokens")
    add("--answers", choices=("dataset", "target", "both"), default="dataset", help="source of the answers")
    add("--num-answers", type=count, default=6_000, help="number of answers of the target; kept under --out")
    return parser


def _defaults(field: int) -> str:
    return "default: " + ", ".join(f"{name} {values[field]}" for name, values in FAMILIES.items())


def _weight(text: str) -> float:
    weight = float(text)
    if not 0.0 <= weight < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return weight


def run_of(args: argparse.Namespace) -> DrafterRun:
    """The run of the given options. Raises: InputError for an option that the family does not read."""
    for families, names in OPTIONS_OF.items():
        for name in names:
            if getattr(args, name) and args.family not in families.split():
                raise InputError(f"--{name.replace('_', '-')} is an option of {' and '.join(families.split())}")
    default = FAMILIES[args.family]
    if len(args.loss_weights or ()) > len(fields(LossWeights)):
        raise InputError("--loss-weights has at most five numbers")
    noise = default.noise if args.noise is None else args.noise
    decay = default.position_decay if args.position_decay is None else args.position_decay
    weights = LossWeights(*args.loss_weights) if args.loss_weights else default.loss_weights
    inputs = Inputs(args.inputs or Inputs.SHIFTED)
    objective = Objective(args.steps or default.num_steps, decay, inputs, noise, weights, default.is_detached)
    given = training_run.values_of(DrafterPlan, args)
    if args.answers == "dataset":
        given["num_answers"] = 0
    own = {
        "target": str(Path(args.target).resolve()) if Path(args.target).is_dir() else args.target,
        "family": _family(args.family),
        "aux_layers": tuple(args.aux_layers or ()),
        "plan": DrafterPlan(**given, objective=objective),
        "positions_per_layer": (args.positions_per_layer or 1) if args.family == "poss" else 0,
        "num_blocks": args.layers or default.num_blocks,
        "markov_rank": args.markov_rank or MARKOV_RANK,
        "is_grounded": args.family.startswith("hydra") and not args.not_grounded,
        "has_output": not args.target_output,
        "has_prefix": args.family == "hydra++",
    }
    return DrafterRun(**training_run.values_of(DrafterRun, args) | own)


def _family(name: str) -> EagleFamily | BlockFamily | PositionFamily:
    if name in list(BlockFamily):
        return BlockFamily(name)
    if name.removesuffix("++") in list(PositionFamily):
        return PositionFamily(name.removesuffix("++"))
    return EagleFamily.EAGLE3 if name == "eagle3" else EagleFamily.EAGLE


def text_sampler(run: DrafterRun, encoder: AnswerEncoder) -> TextSampler:
    """The source of training texts."""
    if run.plan.answers == "dataset":
        return dataset_sampler(TextSource(run.data_dir), encoder)
    own = answer_sampler(read_answers(run.out / ANSWERS, run.plan.num_answers))
    if run.plan.answers == "target":
        return own
    return mixed_sampler(own, dataset_sampler(TextSource(run.data_dir), encoder))


def train(run: DrafterRun, workers: WorkerGroup, device: str) -> None:
    """One run from data to written head; the first worker writes. Raises: ModelError, ConfigError, InputError."""
    target = FrozenTarget.load(TargetConfig(model=run.target), device)
    run.out.mkdir(parents=True, exist_ok=True)
    config = config_of(run, target)
    encoder = AnswerEncoder(target.tokenizer, eos_ids(target.model, target.tokenizer))
    sample_text = text_sampler(run, encoder)
    head = make_head(config, run.plan, target, sample_text)
    if run.start is not None and isinstance(head, EagleHead | BlockHead):
        initialisation.start_from(head, run.start)
    earlier = [initialisation.trained_head(directory, target) for directory in run.after]
    trainer = DrafterTrainer(head, target, sample_text, run.plan, workers, run.data_workers, earlier)
    training_run.resumes(trainer, run)
    probes = probe_batches(run.data_dir, encoder, PROBE_TEXTS, run.plan.max_tokens, run.plan.seed)
    shown = ("loss_1", "top1_1", f"top1_{run.plan.objective.num_steps}")
    training_run.run_to_end(trainer, run, shown, lambda: probe(trainer, probes), NUM_PROBES)
    if workers.is_first:
        training_run.draw_curves(trainer, "loss_", "top1", run.out / "curves.png")
        record = {"history": trainer.history, "probes": trainer.probes}
        (run.out / "history.json").write_text(json.dumps(record))
        trainer.write_head(run.out / "head")


def config_of(run: DrafterRun, target: FrozenTarget) -> HeadConfig | BlockConfig | PositionConfig | None:
    """The head's shape, by the options and by the target; None: it has none. Raises: ModelError, ConfigError."""
    if run.family is BlockFamily.PASS:
        return None
    if isinstance(run.family, PositionFamily):
        num_heads = run.plan.objective.num_steps
        others = (run.num_blocks, run.is_grounded, run.has_output, run.has_prefix, run.has_prefix)
        return PositionConfig(run.family, target.hidden_size, target.vocab_size, num_heads, *others)
    default = SMALL_DRAFT_VOCABULARY if target.vocab_size <= SMALL_VOCABULARY else DRAFT_VOCABULARY
    draft_vocab = run.draft_vocab or min(target.vocab_size, default)
    aux_layers = run.aux_layers or initialisation.spread_aux_layers(target.num_layers)
    num_steps, a_layer = run.plan.objective.num_steps, run.positions_per_layer
    num_layers = -(-num_steps // a_layer) if a_layer else run.num_blocks
    sizes = num_layers, a_layer, run.intermediate_size
    if isinstance(run.family, EagleFamily):
        return initialisation.head_config(target, run.family, aux_layers, draft_vocab, *sizes)
    shape = initialisation.head_config(target, EagleFamily.EAGLE3, aux_layers, draft_vocab, *sizes)
    return initialisation.block_config(shape, run.family, num_steps, run.markov_rank)


def make_head(
    config: HeadConfig | BlockConfig | PositionConfig | None,
    plan: DrafterPlan,
    target: FrozenTarget,
    sample_text: TextSampler,
) -> Head:
    """A head ready for training."""
    if config is None:
        return initialisation.fresh_look_ahead(plan.objective.num_steps, target, plan.seed)
    if isinstance(config, PositionConfig):
        return initialisation.fresh_position_head(config, target, plan.seed)
    shape = config.shape if isinstance(config, BlockConfig) else config
    vocabulary = None
    if shape.draft_vocab_size < shape.vocab_size:
        vocabulary = draft_vocabulary(
            sample_text, plan.seed, shape.draft_vocab_size, shape.vocab_size, VOCABULARY_TEXTS
        )
    return initialisation.fresh_head(config, target, vocabulary, plan.seed)


def probe(trainer: DrafterTrainer, probes: dict[str, list[MicroBatch]]) -> dict[str, float]:
    """The share of the target's tokens that the averaged head drafts, by kind of held-out text and by draft step."""
    return {
        f"{kind}_{name}": value
        for kind, batches in probes.items()
        for name, value in trainer.probe(batches, PROBE_STEPS).items()
        if not name.startswith("loss")
    }


if __name__ == "__main__":
    main()
