"""Train the reference target and export it.

    python -m pipelines.train_target --data ../shared/data --out runs/target --size cpu --minutes 100
    python -m pipelines.train_target --data ../shared/data --out runs/target --size gpu --workers 4
    python -m pipelines.train_target --data ../shared/data --out runs/more --continue-from ragspec/assets/reference_target

On cores that others use too, `OMP_WAIT_POLICY=PASSIVE` keeps two threads from spinning (several times faster, measured).
Writes under `--out`: `tokenizer/`, `meanings.safetensors`, `checkpoint.safetensors`, `curves.png`, and `model/`, which loads
with plain transformers. Several workers run through Ray Train; on several machines `--data` and `--out` must be shared
folders. The same seed and the same number of workers give the same weights on the same hardware.
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ragspec.errors import ConfigError
from ragspec.evaluation.target_cases import PROBE_ARTICLES, Case, question_cases
from ragspec.evaluation.target_suite import model_generate, question_scores
from ragspec.training import training_attention
from ragspec.training.checkpoint import read_checkpoint, write_checkpoint
from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.meanings import count_meanings
from ragspec.training.stream_layout import stream_layout
from ragspec.training.target_batches import ExampleEncoder
from ragspec.training.target_examples import Lengths
from ragspec.training.target_export import draw_curves, export_target
from ragspec.training.target_format import question_messages
from ragspec.training.target_model import SIZES, build_target
from ragspec.training.target_packs import PackStream
from ragspec.training.target_sources import Sources, load_sources
from ragspec.training.target_tokenizer import load_tokenizer, token_pieces, train_tokenizer
from ragspec.training.target_trainer import TargetTrainer, TrainingPlan, continued
from ragspec.training.workers import ALONE, Workers

DEFAULT_TOKENS = {"tiny": 200_000, "cpu": 40_000_000, "gpu": 2_000_000_000}
REPORT_EVERY_STEPS = 25
NUM_PROBES, PROBE_QUESTIONS = 8, 64


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the reference target.")
    parser.add_argument("--data", type=Path, required=True, help="data directory")
    parser.add_argument("--out", type=Path, required=True, help="run directory")
    parser.add_argument("--size", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--tokens", type=int, help="length of the run in tokens")
    parser.add_argument("--minutes", type=float, help="length of the run in minutes of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--workers", type=int, default=1, help="processes that train together")
    parser.add_argument("--resume", action="store_true", help="continue from the run directory's checkpoint")
    parser.add_argument(
        "--continue-from", type=Path, help="exported model whose weights and tokenizer the run starts with"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    total_tokens = args.tokens or DEFAULT_TOKENS[args.size]
    plan = TrainingPlan(total_tokens=total_tokens, minutes=args.minutes, seed=args.seed)
    if args.continue_from:
        plan = continued(plan)
    run = Run(args.data.resolve(), args.out.resolve(), args.size, plan, args.resume, args.threads, args.continue_from)
    if args.workers == 1:
        train(run, ALONE, "cuda" if torch.cuda.is_available() else "cpu")
    else:
        train_together(run, args.workers)


@dataclass(frozen=True)
class Run:
    """What the command line decides."""

    data_dir: Path
    out: Path
    size: str
    plan: TrainingPlan
    resume: bool = False
    threads: int | None = None
    continue_from: Path | None = None


def train_together(run: Run, num_workers: int) -> None:
    """The same run by several workers, one GPU each where there are any."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with_gpu = torch.cuda.is_available()
    sources = load_sources(run.data_dir)  # before the workers start, so that none reads what another is writing
    obtain_meanings(run, obtain_tokenizer(run, sources), sources)
    TorchTrainer(
        _worker,
        train_loop_config={"run": run},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if with_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=with_gpu),
        run_config=RunConfig(storage_path=str(run.out / "ray")),
    ).fit()


def _worker(config: dict[str, Run]) -> None:
    import ray.train
    from ray.train.torch import get_device

    context = ray.train.get_context()
    train(config["run"], Workers(context.get_world_rank(), context.get_world_size()), str(get_device()))


def train(run: Run, workers: Workers, device: str) -> None:
    """One run from data to exported model; the first worker writes."""
    if run.threads:
        torch.set_num_threads(run.threads)
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
    run_with_progress(trainer, checkpoint, cases)
    if workers.is_first:
        draw_curves(trainer.history, trainer.probes, run.out / "curves.png")
        export_target(trainer.averaged_model(), tokenizer, run.out / "model")


def obtain_tokenizer(run: Run, sources: Sources | None = None) -> PreTrainedTokenizerFast:
    """The run's tokenizer, trained once."""
    directory = run.continue_from or run.out / "tokenizer"
    if not (directory / "tokenizer.json").exists():
        sources = sources or load_sources(run.data_dir)
        texts = itertools.chain(
            (" ".join(p.sentences) for p in sources.prose),
            (q.text for q in sources.squad),
            (text for _, text in sources.stdlib),
            sources.plain_sentences,
            sources.book_paragraphs[::12],
        )
        train_tokenizer(texts, SIZES[run.size].vocab_size).save_pretrained(str(directory))
    return load_tokenizer(directory)


def obtain_meanings(run: Run, tokenizer: PreTrainedTokenizerFast, sources: Sources) -> Tensor | None:
    """What the run's tokens mean, counted once; nothing where trained weights know. Raises: ConfigError for another run's."""
    if run.continue_from:
        return None
    path, columns = run.out / "meanings.safetensors", stream_layout(SIZES[run.size].hidden_size).meaning
    if not path.exists():
        texts = list(sources.texts())
        parts = (texts[at : at + 1_000] for at in range(0, len(texts), 1_000))
        ids = (each for part in parts for each in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
        write_checkpoint(path, {"meanings": count_meanings(ids, len(tokenizer), columns)}, {})
    meanings = read_checkpoint(path)[0]["meanings"]
    if meanings.shape != (len(tokenizer), columns):
        raise ConfigError(f"{path} is of a run of another size: choose an empty folder")
    return meanings


def run_with_progress(trainer: TargetTrainer, checkpoint: Path, probe_cases: list[Case]) -> None:
    """Train to the end of the plan; the first worker shows progress, writes checkpoints and probes in between."""
    if not trainer.workers.is_first:
        for _ in trainer.run():
            pass
        return
    saved_at_s = trainer.progress.elapsed_s
    columns = (BarColumn(), TextColumn("{task.percentage:.1f}%"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("starting", total=1.0)
        bar.update(task, completed=trainer.share_done())
        for record in trainer.run():
            if trainer.progress.step % REPORT_EVERY_STEPS == 0:
                text = report(trainer.history[-REPORT_EVERY_STEPS:])
                bar.update(task, completed=record["share"], description=text)
                if not bar.console.is_terminal:
                    print(text, flush=True)
            if is_probed(record["step"], record["share"], trainer.share_done()):
                trainer.probes.append(probe(trainer, probe_cases))
            if record["elapsed_s"] - saved_at_s > trainer.plan.checkpoint_every_s:
                trainer.save(checkpoint)
                saved_at_s = record["elapsed_s"]
    trainer.save(checkpoint)


def is_probed(step: float, before: float, after: float) -> bool:
    """After the first step, and at even shares of the run."""
    return step == 1 or int(NUM_PROBES * after) > int(NUM_PROBES * before)


def probe(trainer: TargetTrainer, cases: list[Case]) -> dict[str, float]:
    """Quotes of the averaged weights on questions about articles that are neither trained nor evaluated on."""
    generate = model_generate(trainer.averaged_model(), trainer.encoder.tokenizer)
    scores = question_scores(cases, generate([question_messages(case.question, case.passages) for case in cases]))
    shown = {name: scores[name] for name in ("quote_exact", "quote_has_answer", "citation_correct", "em")}
    print(f"probe at step {trainer.progress.step}: {shown}", flush=True)
    return {"tokens": trainer.progress.tokens, **shown}


def report(records: list[dict[str, float]]) -> str:
    """One line about the latest steps."""
    first, last = records[0], records[-1]
    loss = sum(r["answer_loss"] for r in records) / len(records)
    rate = (last["tokens"] - first["tokens"]) / max(1e-9, last["elapsed_s"] - first["elapsed_s"])
    return (
        f"step {last['step']:.0f} {last['tokens'] / 1e6:.2f} M tokens {rate:.0f}/s "
        f"answer loss {loss:.3f} lr {last['lr']:.2e} norm {last['grad_norm']:.2f} done {last['share']:.3f}"
        + "".join(f" {name[6:]} {value:.2f}" for name, value in last.items() if name.startswith("guide_"))
    )


if __name__ == "__main__":
    main()
