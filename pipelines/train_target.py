"""Train the adapter of the default target.

    python -m pipelines.train_target --data ../shared/data --out runs/adapter --minutes 600
    python -m pipelines.train_target --data ../shared/data --out runs/adapter --tokens 60000000 --rows 32
    python -m pipelines.train_target --data ../shared/data --out runs/more --continue-from CHECKPOINT_OR_ADAPTER

A GPU is used where there is one; `--rows` sets how many rows of 896 tokens a step has. Writes under `--out`: `chat.jsonl` (the
unadapted model's own answers), `checkpoint.safetensors`, `curves.png`, and `adapter/`, a PEFT folder of the averaged weights. A
run whose `--tokens` are used up writes the adapter at once. Several workers run through Ray Train; on several machines the paths
must be shared. The same seed, length in tokens and number of workers give the same adapter on the same hardware.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.train import training_run
from ragspec.config import DEFAULT_TARGET, TargetConfig
from ragspec.errors import RagspecError
from ragspec.evaluation.suites.target import MAX_NEW_TOKENS, abstention_scores, model_generate, question_scores
from ragspec.evaluation.suites.target_cases import PROBE_ARTICLES, QuestionCase, question_cases
from ragspec.rag.wording import question_messages
from ragspec.training.conversations import AnswerEncoder, Conversation, message
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.reference.lora import write_adapter
from ragspec.training.reference.mixture import LONG, Mixture
from ragspec.training.reference.rows import Row
from ragspec.training.reference.sources import json_lines, question_paragraphs
from ragspec.training.reference.trainer import AdapterPlan, AdapterTrainer
from ragspec.training.trainer import WorkerGroup

PROBE_QUESTIONS = 48
FULL_SHARE, MAX_DRAWS = 0.75, 6
"""A row is done at this share of its length, or after so many draws."""
CHATS = "chat.jsonl"
CHAT_REQUESTS = (
    "Explain {} to a ten-year-old.", "Give me three tips about {}.", "Write a short poem about {}.", "What is {}?",
    "Why do people care about {}?", "Write an e-mail to a friend about {}.", "What should a beginner know about {}?",
    "List five facts about {}.", "Tell me a joke about {}.", "Suggest a title for an essay on {}.",
)  # fmt: skip
CHAT_TOPICS = (
    "photosynthesis", "cooking rice", "the moon", "learning to swim", "chess", "public transport", "bees", "saving money",
    "jazz", "gardening", "electric cars", "sleep",
)  # fmt: skip
CHAT_INSTRUCTIONS = {"roleplay": 120, "codegen-instruct": 120}
NUM_CHAT_QUESTIONS = 200
GREETINGS = ("Hello!", "Who are you?", "Thank you!", "Can you help me?", "What can you do?", "How are you?")


def main() -> None:
    """Parse the command line and train."""
    args = parser().parse_args()
    try:
        run = run_of(args)
        obtain_chats(run)  # before the workers start: none may read a file that another is writing
        training_run.train_with(train, run, args.workers)
    except (RagspecError, FileNotFoundError) as cause:
        sys.exit(f"error: {cause}")


@dataclass(frozen=True, kw_only=True)
class TargetRun(training_run.TrainingRun):
    """The command's options."""

    target: str
    plan: AdapterPlan
    num_probes: int
    continue_from: Path | None = None


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = training_run.training_parser("Train the adapter of the default target.")
    add = parser.add_argument
    add("--target", default=DEFAULT_TARGET, help="the model without adapter: a directory or a GGUF file")
    add("--tokens", type=training_run.positive(int), default=8_000_000, help="length of the run in tokens")
    add("--rows", type=training_run.positive(int), default=2, help="rows of a step and worker; 32 suit a GPU")
    add("--peak-rate", type=training_run.positive(float), default=6e-4, help="peak learning rate")
    add(
        "--probes",
        type=training_run.positive(int, least=0),
        default=8,
        help="how often the run answers questions of its own",
    )
    share = training_run.positive(float, most=1.0)
    add("--decay-share", type=share, default=0.15, help="last part of the run, over which the learning rate falls")
    add(
        "--continue-from", type=Path, help="another run's checkpoint or adapter folder to begin with; it stays as it is"
    )
    return parser


def run_of(args: argparse.Namespace) -> TargetRun:
    """The run of the given options. Raises: InputError."""
    plan = AdapterPlan(
        total_tokens=args.tokens,
        minutes=args.minutes,
        seed=args.seed,
        peak_lr=args.peak_rate,
        decay_share=args.decay_share,
        rows_per_step=args.rows,
    )
    common, start = training_run.common_options(args), args.continue_from.resolve() if args.continue_from else None
    return TargetRun(**common, target=args.target, plan=plan, num_probes=args.probes, continue_from=start)


def train(run: TargetRun, workers: WorkerGroup, device: str) -> None:
    """One run from data to written adapter; the first worker writes."""
    target = FrozenTarget.load(TargetConfig(model=run.target, adapter="none"), device)
    chats = [Conversation(row["messages"], open_ended=row["is_cut"]) for row in json_lines(run.out / CHATS)]
    mixture, encoder = Mixture(run.data_dir, chats), AnswerEncoder(target.tokenizer)

    def draw_row(seed: str) -> Row:
        return mixed_row(mixture, encoder, run.plan.micro_tokens, seed)

    trainer = AdapterTrainer(target.model, draw_row, run.plan, device, workers)
    checkpoint = run.out / "checkpoint.safetensors"
    begin(trainer, run, checkpoint)
    cases = question_cases(run.data_dir, PROBE_QUESTIONS, 0, PROBE_ARTICLES)
    training_run.run_to_end(
        trainer, checkpoint, report, lambda: probe(trainer, target.tokenizer, *cases), run.num_probes
    )
    if workers.is_first:
        training_run.draw_curves(trainer, "loss", "", run.out / "curves.png")
        write_adapter(trainer.averaged_adapter(), run.out / "adapter")


def begin(trainer: AdapterTrainer, run: TargetRun, checkpoint: Path) -> None:
    """Where the run's own checkpoint, another's, or a written adapter says. Raises: ConfigError."""
    if run.resume and checkpoint.exists():
        trainer.load(checkpoint)
    elif run.continue_from and run.continue_from.is_dir():
        trainer.start_from(run.continue_from)
    elif run.continue_from:
        trainer.load(run.continue_from, any_plan=True)


def mixed_row(mixture: Mixture, encoder: AnswerEncoder, row_tokens: int, seed: str) -> Row:
    """A row of one kind of text; a function of the seed."""
    rng = random.Random(seed)
    kind = mixture.kind(rng)
    row = Row(int(row_tokens * LONG.get(kind, 1)))
    for _ in range(MAX_DRAWS):
        row.add(map(encoder.encode, mixture.draw(kind, rng)))
        if len(row.ids) > FULL_SHARE * row.length:
            break
    return row if row.ids else mixed_row(mixture, encoder, row_tokens, seed + "'")


def obtain_chats(run: TargetRun) -> None:
    """The unadapted model's answers to ordinary requests, written once. Raises: ModelError."""
    run.out.mkdir(parents=True, exist_ok=True)
    if (run.out / CHATS).exists():
        return
    target = FrozenTarget.load(
        TargetConfig(model=run.target, adapter="none"), "cuda" if torch.cuda.is_available() else "cpu"
    )
    asked = chat_requests(run.data_dir)
    prompts = [[message("user", text)] for text in asked]
    answers = model_generate(target.model, target.tokenizer)(prompts)
    with (run.out / CHATS).open("w", encoding="utf-8") as file:
        for prompt, answer in zip(prompts, answers, strict=True):
            is_cut = len(target.tokenizer(answer)["input_ids"]) >= MAX_NEW_TOKENS - 2
            row = {"messages": [*prompt, message("assistant", answer.strip())], "is_cut": is_cut}
            file.write(json.dumps(row) + "\n")


def chat_requests(data_dir: Path) -> list[str]:
    """Ordinary requests: greetings, tasks about topics, written instructions, and questions without their passages."""
    asked = [*GREETINGS, *(request.format(topic) for request in CHAT_REQUESTS for topic in CHAT_TOPICS)]
    rng = random.Random(0)
    for name, count in CHAT_INSTRUCTIONS.items():
        rows = json.loads((data_dir / "gpteacher" / f"{name}.json").read_text(encoding="utf-8"))
        asked += rng.sample([row["instruction"] for row in rows if not row["input"]], count)
    questions = [question.text for paragraph in question_paragraphs(data_dir) for question in paragraph.questions]
    return [*asked, *rng.sample(questions, NUM_CHAT_QUESTIONS)]


def probe(
    trainer: AdapterTrainer, tokenizer: Any, answerable: list[QuestionCase], unanswerable: list[QuestionCase]
) -> dict[str, float]:
    """Scores of the averaged adapter on two articles that are neither trained nor evaluated on."""
    cases = answerable + unanswerable
    with trainer.averaged_model() as model:
        outputs = model_generate(model, tokenizer)([question_messages(c.question, c.passages) for c in cases])
    scores = question_scores(answerable, outputs[: len(answerable)]) | abstention_scores(cases, outputs)
    print(f"probe at step {trainer.progress.step}: {scores}", flush=True)
    return scores


def report(records: list[dict[str, float]]) -> str:
    """The latest steps in one line."""
    last, loss = records[-1], sum(record["loss"] for record in records) / len(records)
    rest = f"lr {last['lr']:.2e} norm {last['grad_norm']:.2f} done {last['share']:.3f}"
    return f"{training_run.tokens_and_speed(records)} loss {loss:.3f} {rest}"


if __name__ == "__main__":
    main()
