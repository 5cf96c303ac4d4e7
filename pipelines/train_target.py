"""Train the reference target and export it.

    python -m pipelines.train_target --data ../shared/data --out runs/target --size cpu --minutes 100
    python -m pipelines.train_target --data ../shared/data --out runs/target --size gpu --workers 4
    python -m pipelines.train_target --data ../shared/data --out runs/more --continue-from ragspec/assets/reference_target

On a busy machine, set `OMP_WAIT_POLICY=PASSIVE`: waiting threads then do not spin (several times faster, measured).
Writes under `--out`: `tokenizer/`, `meanings.safetensors`, `checkpoint.safetensors`, `curves.png`, and `model/`, which loads
with plain transformers. Several workers run through Ray Train; on several machines `--data` and `--out` must be shared
folders. The same seed, length in tokens and number of workers give the same weights on the same hardware; a length in minutes is
as many tokens as the hardware manages.
"""

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pipelines.train.training_run import (
    TrainingRun,
    common_options,
    draw_curves,
    positive,
    run_to_end,
    tokens_and_speed,
    train_with,
    training_parser,
)
from ragspec.errors import ConfigError, InputError, RagspecError
from ragspec.evaluation.suites.target import model_generate, question_scores
from ragspec.evaluation.suites.target_cases import PROBE_ARTICLES, QuestionCase, question_cases
from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.reference import training_attention
from ragspec.training.reference.batches import ExampleEncoder
from ragspec.training.reference.examples import Lengths
from ragspec.training.reference.export import export_target
from ragspec.training.reference.initialisation.meanings import count_meanings
from ragspec.training.reference.initialisation.model import SIZES, build_target
from ragspec.training.reference.initialisation.stream_layout import stream_layout
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.sources import Sources, load_sources
from ragspec.training.reference.text_format import ASSISTANT, SPECIAL_TOKENS, question_messages
from ragspec.training.reference.tokenizer import load_tokenizer, token_pieces, train_tokenizer
from ragspec.training.reference.trainer import TargetPlan, TargetTrainer, continued
from ragspec.training.trainer import WorkerGroup, read_checkpoint, write_checkpoint

DEFAULT_TOKENS = {"tiny": 200_000, "cpu": 40_000_000, "gpu": 2_000_000_000}
NUM_PROBES, PROBE_QUESTIONS = 8, 64


def main() -> None:
    """Parse the command line and train."""
    args = parser().parse_args()
    try:
        run = run_of(args)
        if args.workers > 1:  # before the workers start, so that none reads what another is writing
            sources = load_sources(run.data_dir)
            obtain_meanings(run, obtain_tokenizer(run, sources), sources)
        train_with(train, run, args.workers)
    except (RagspecError, FileNotFoundError) as cause:
        sys.exit(f"error: {cause}")


@dataclass(frozen=True, kw_only=True)
class TargetRun(TrainingRun):
    """The command's options."""

    size: str
    plan: TargetPlan
    continue_from: Path | None = None


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = training_parser("Train the reference target.")
    parser.add_argument("--size", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--tokens", type=positive(int), help="length of the run in tokens")
    parser.add_argument(
        "--continue-from", type=Path, help="exported model whose weights and tokenizer the run starts with"
    )
    return parser


def run_of(args: argparse.Namespace) -> TargetRun:
    """The run of the given options. Raises: InputError."""
    total_tokens = args.tokens or DEFAULT_TOKENS[args.size]
    plan = TargetPlan(total_tokens=total_tokens, minutes=args.minutes, seed=args.seed)
    continue_from = trained_target(args.continue_from.resolve()) if args.continue_from else None
    if continue_from:
        plan = continued(plan, str(continue_from))
    run = TargetRun(**common_options(args), size=args.size, plan=plan, continue_from=continue_from)
    run.out.mkdir(parents=True, exist_ok=True)
    return run


def trained_target(directory: Path) -> Path:
    """The folder, if it holds a model of this recipe, of any width. Raises: InputError."""
    try:
        config = json.loads((directory / "config.json").read_text())
        tokenizer = load_tokenizer(directory)
    except (OSError, ValueError) as cause:
        raise InputError(f"{directory} holds no exported model: {cause}") from cause
    known = tokenizer.get_vocab()
    if config.get("model_type") != "llama" or not known.keys() >= set(SPECIAL_TOKENS):
        raise InputError(f"{directory} is no model of this recipe: a Llama whose tokenizer knows {ASSISTANT}")
    if len(tokenizer) > config.get("vocab_size", 0):
        raise InputError(f"{directory} has {len(tokenizer)} tokens and embeddings for {config.get('vocab_size', 0)}")
    return directory


def train(run: TargetRun, workers: WorkerGroup, device: str) -> None:
    """One run from data to exported model; the first worker writes."""
    size, plan = SIZES[run.size], run.plan
    sources = load_sources(run.data_dir)
    tokenizer = obtain_tokenizer(run, sources)
    if run.continue_from:
        model = LlamaForCausalLM.from_pretrained(str(run.continue_from), dtype=torch.float32)
    else:
        special = tokenizer.pad_token_id, tokenizer.eos_token_id
        meanings = obtain_meanings(run, tokenizer, sources)
        model = build_target(size, token_pieces(tokenizer), *special, seed=plan.seed, meanings=meanings)
    model.set_attn_implementation(training_attention.register())
    errors = GrammarErrors(run.data_dir)

    def stream_for(lengths: Lengths, seed: int) -> PackStream:
        return PackStream(sources, errors, lengths, seed)

    trainer = TargetTrainer(model, ExampleEncoder(tokenizer), stream_for, plan, device, workers)
    checkpoint = run.out / "checkpoint.safetensors"
    if run.resume and checkpoint.exists():
        trainer.load(checkpoint)
    elif not run.continue_from:
        trainer.centre()
    cases, _ = question_cases(run.data_dir, PROBE_QUESTIONS, plan.seed, PROBE_ARTICLES)
    run_to_end(trainer, checkpoint, report, lambda: probe(trainer, cases), NUM_PROBES)
    if workers.is_first:
        draw_curves(trainer, "answer_loss", "", run.out / "curves.png")
        export_target(trainer.averaged_model(), tokenizer, run.out / "model")


def obtain_tokenizer(run: TargetRun, sources: Sources) -> PreTrainedTokenizerFast:
    """The run's tokenizer, trained once."""
    directory = run.continue_from or run.out / "tokenizer"
    if not run.continue_from and not (directory / "tokenizer.json").exists():
        texts = itertools.chain(
            (" ".join(p.sentences) for p in sources.prose),
            (q.text for q in sources.squad),
            (text for _, text in sources.stdlib),
            sources.plain_sentences,
            sources.book_paragraphs[::12],
        )
        train_tokenizer(texts, SIZES[run.size].vocab_size).save_pretrained(str(directory))
    return load_tokenizer(directory)


def obtain_meanings(run: TargetRun, tokenizer: PreTrainedTokenizerFast, sources: Sources) -> Tensor | None:
    """What the run's tokens mean, counted once; nothing where trained weights know. Raises: ConfigError for another run's."""
    if run.continue_from:
        return None
    path, columns = run.out / "meanings.safetensors", stream_layout(SIZES[run.size].hidden_size).meaning
    if not path.exists():
        texts = list(sources.texts())
        parts = (texts[at : at + 1_000] for at in range(0, len(texts), 1_000))
        ids = (each for part in parts for each in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
        write_checkpoint(path, {"meanings": count_meanings(ids, len(tokenizer), columns)}, {"size": run.size})
    tensors, state = read_checkpoint(path)
    if state.get("size", run.size) != run.size or tensors["meanings"].shape != (len(tokenizer), columns):
        raise ConfigError(f"{path} is of a run of another size: choose an empty folder")
    return tensors["meanings"]


def probe(trainer: TargetTrainer, cases: list[QuestionCase]) -> dict[str, float]:
    """Quotes of the averaged weights on questions about articles that are neither trained nor evaluated on."""
    generate = model_generate(trainer.averaged_model(), trainer.encoder.tokenizer)
    scores = question_scores(cases, generate([question_messages(case.question, case.passages) for case in cases]))
    shown = {name: scores[name] for name in ("quote_exact", "quote_has_answer", "citation_correct", "em")}
    print(f"probe at step {trainer.progress.step}: {shown}", flush=True)
    return shown


def report(records: list[dict[str, float]]) -> str:
    """The latest steps in one line."""
    last, loss = records[-1], sum(record["answer_loss"] for record in records) / len(records)
    guided = "".join(f" {name[6:]} {value:.2f}" for name, value in last.items() if name.startswith("guide_"))
    return (
        f"{tokens_and_speed(records)} answer loss {loss:.3f} lr {last['lr']:.2e} norm {last['grad_norm']:.2f} "
        f"done {last['share']:.3f}{guided}"
    )


if __name__ == "__main__":
    main()
