"""Train an EAGLE head for a target and write it in the published format.

    python -m pipelines.train_drafter --family eagle3 --data ../shared/data --out runs/eagle3 --minutes 60
    python -m pipelines.train_drafter --family eagle2 --data ../shared/data --out runs/eagle2 --steps 3
    python -m pipelines.train_drafter --family eagle3 --target PATH --data ../shared/data --out runs/own --workers 4

`eagle` learns one draft step, `eagle2` the same head over several, `eagle3` reads three of the target's layers and has an
output layer of its own. `--answers target` lets the target answer first and trains on that; `both` mixes it with the data
sets' answers. `--inputs` and `--position-decay` are the papers' ablations. On cores that others use too,
`OMP_WAIT_POLICY=PASSIVE` keeps two threads from spinning. Writes under `--out`: `answers.jsonl`, `checkpoint.safetensors`,
`curves.png`, `history.json` and `head/`. Several workers run through Ray Train; on several machines the paths must be shared.
"""

import json
import sys

from torch import Tensor

from pipelines.train.drafter_run import Run, parser, run_of
from pipelines.train.run import run_to_end, spent, train_with
from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.drafting.eagle.checkpoint import HeadConfig, write_head
from ragspec.engine.loading import load_engine
from ragspec.engine.model_config import eos_ids
from ragspec.errors import RagspecError
from ragspec.rag.knnlm.build import target_identity
from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.heads.answers import PromptSource, answer_draw, mixed_draw, read_answers, write_answers
from ragspec.training.heads.examples import (
    AnswerEncoder,
    Draw,
    dataset_draw,
    draft_vocabulary,
    drafter_sources,
    probe_batches,
)
from ragspec.training.heads.export import draw_drafter_curves
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import fresh_head, head_config, spread_aux_layers
from ragspec.training.heads.trainer import DrafterTrainer
from ragspec.training.reference.batches import MicroBatch
from ragspec.training.workers import Workers

SMALL_VOCABULARY, SMALL_DRAFT_VOCABULARY, DRAFT_VOCABULARY = 16_384, 3_072, 32_000
VOCABULARY_TEXTS = 4_000
ANSWERS = "answers.jsonl"
NUM_PROBES, PROBE_TEXTS, PROBE_STEPS = 10, 16, 5


def main() -> None:
    """Parse the command line and train."""
    args = parser().parse_args()
    try:
        run = run_of(args)
        if run.plan.answers != "dataset":
            obtain_answers(run)
        train_with(train, run, args.workers)
    except (RagspecError, FileNotFoundError) as cause:
        sys.exit(f"error: {cause}")


def obtain_answers(run: Run) -> None:
    """The target's own answers, as many as are still lacking. Raises: ModelError, InputError."""
    run.out.mkdir(parents=True, exist_ok=True)
    sources, errors = drafter_sources(run.data_dir), GrammarErrors(run.data_dir)
    target = TargetConfig(model=run.target)
    with load_engine(target, EngineConfig(num_threads=run.threads), DraftingConfig()) as engine:
        encoder = AnswerEncoder(engine.target.tokenizer, engine.target.eos_ids)
        prompts = PromptSource(sources, errors, encoder, run.plan.max_tokens, run.plan.seed)
        origin = prompts.origin(target_identity(engine.target, of_texts=True).fingerprint)
        for done in write_answers(run.out / ANSWERS, origin, run.plan.num_answers, prompts, engine):
            print(f"{done} of {run.plan.num_answers} answers of the target", flush=True)


def draw_of(run: Run, encoder: AnswerEncoder) -> Draw:
    """Where training texts come from."""
    dataset = dataset_draw(drafter_sources(run.data_dir), GrammarErrors(run.data_dir), encoder)
    if run.plan.answers == "dataset":
        return dataset
    own = answer_draw(read_answers(run.out / ANSWERS, run.plan.num_answers))
    return own if run.plan.answers == "target" else mixed_draw(own, dataset)


def train(run: Run, workers: Workers, device: str) -> None:
    """One run from data to written head; the first worker writes. Raises: ModelError, ConfigError, InputError."""
    target = FrozenTarget.load(run.target, device)
    config = config_of(run, target)
    run.out.mkdir(parents=True, exist_ok=True)
    encoder = AnswerEncoder(target.tokenizer, eos_ids(target.model, target.tokenizer))
    draw = draw_of(run, encoder)
    checkpoint = run.out / "checkpoint.safetensors"
    head = fresh_head(config, target, vocabulary_of(config, draw, run.plan.seed), run.plan.seed)
    trainer = DrafterTrainer(head, target, draw, run.plan, workers)
    if run.resume and checkpoint.exists():
        trainer.load(checkpoint)
    probes = probe_batches(run.data_dir, encoder, PROBE_TEXTS, run.plan.max_tokens, run.plan.seed)
    run_to_end(trainer, checkpoint, report, lambda: probe(trainer, probes), NUM_PROBES)
    if workers.is_first:
        draw_drafter_curves(trainer.history, trainer.probes, run.out / "curves.png")
        record = {"history": trainer.history, "probes": trainer.probes}
        (run.out / "history.json").write_text(json.dumps(record))
        write_head(run.out / "head", trainer.exported())


def config_of(run: Run, target: FrozenTarget) -> HeadConfig:
    """The head's shape: what the options say, and what fits the target for the rest."""
    default = SMALL_DRAFT_VOCABULARY if target.vocab_size <= SMALL_VOCABULARY else DRAFT_VOCABULARY
    draft_vocab = run.draft_vocab or min(target.vocab_size, default)
    aux_layers = run.aux_layers or spread_aux_layers(target.num_layers)
    return head_config(target, run.family, aux_layers, draft_vocab)


def vocabulary_of(config: HeadConfig, draw: Draw, seed: int) -> Tensor | None:
    """The draft vocabulary, where it is smaller than the target's."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    return draft_vocabulary(draw, seed, config.draft_vocab_size, config.vocab_size, VOCABULARY_TEXTS)


def probe(trainer: DrafterTrainer, probes: dict[str, list[MicroBatch]]) -> dict[str, float]:
    """Share of the target's tokens that the averaged head drafts, per kind of held-out text and draft step."""
    rates = {
        f"{kind}_{name}": value
        for kind, batches in probes.items()
        for name, value in trainer.probe(batches, PROBE_STEPS).items()
        if not name.startswith("loss")
    }
    shown = {kind: [round(rates[f"{kind}_top1_{i + 1}"], 2) for i in range(PROBE_STEPS)] for kind in probes}
    print(f"probe at step {trainer.progress.step}: top-1 by draft step: {shown}", flush=True)
    return rates


def report(records: list[dict[str, float]]) -> str:
    """One line about the latest steps."""
    last = records[-1]
    num_steps = sum(name.startswith("loss_") for name in last)
    mean = {n: sum(r[n] for r in records) / len(records) for n in ("loss_1", "top1_1", f"top1_{num_steps}")}
    return (
        f"{spent(records)} loss {mean['loss_1']:.3f} "
        f"top-1 {mean['top1_1']:.3f} (step {num_steps}: {mean[f'top1_{num_steps}']:.3f}) lr {last['lr']:.2e} "
        f"norm {last['grad_norm']:.2f} done {last['share']:.3f}"
    )


if __name__ == "__main__":
    main()
