"""Train the adapter of a target: the default one, or any other by `--target`.

    python -m pipelines.train_target --data ../shared/data --out runs/adapter --minutes 600
    python -m pipelines.train_target --data ../shared/data --out runs/adapter --tokens 60000000 --rows 32
    python -m pipelines.train_target --data ../shared/data --out runs/more --continue-from CHECKPOINT_OR_ADAPTER
    python -m pipelines.train_target --data ../shared/data --out runs/qwen --target qwen2.5-0.5b --documentation rows.jsonl

A GPU is used where there is one; `--rows` sets how many rows of 896 tokens a step has. Writes under `--out`: `chat.jsonl` (the
unadapted model's own answers to ordinary requests, written as they come), `checkpoint.safetensors`, `curves.png`, and
`adapter/`, a PEFT folder of the averaged weights. A run whose `--tokens` are used up writes the adapter at once. Several workers
run through Ray Train; on several machines the paths must be shared. The same seed, length in tokens and number of workers give
the same adapter on the same hardware. `--documentation` adds rows that `pipelines.documentation_rows rebuild` has written.
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipelines.train import training_run
from pipelines.train.training_run import absolute_path, positive
from ragspec.config import DEFAULT_TARGET, DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import Message, Request, SamplingParams
from ragspec.disk import write_atomically
from ragspec.engine.checkpoints.target_files import check_target
from ragspec.engine.loading import load_engine
from ragspec.evaluation.target_scores import MAX_NEW_TOKENS, case_scores, model_answers, question_cases
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.conversations import AnswerEncoder, Conversation
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.reference.mixture import LONG, PROBE_ARTICLES, Mixture, json_lines, question_paragraphs
from ragspec.training.reference.trainer import AdapterPlan, AdapterTrainer, Row
from ragspec.training.trainer import WorkerGroup

PROBE_QUESTIONS = 48
FULL_SHARE, MAX_DRAWS = 0.75, 6
"""A row is done at this share of its length, or after so many draws."""
CHATS = "chat.jsonl"
CHAT_REQUESTS = ("Explain {} to a ten-year-old.", "Give me three tips about {}.", "Write a short poem about {}.", "What is {}?",
    "Why do people care about {}?", "Write an e-mail to a friend about {}.", "What should a beginner know about {}?",
    "List five facts about {}.", "Tell me a joke about {}.", "Suggest a title for an essay on {}.")  # fmt: skip
CHAT_TOPICS = ("photosynthesis", "cooking rice", "the moon", "learning to swim", "chess", "public transport", "bees",
    "saving money", "jazz", "gardening", "electric cars", "sleep")  # fmt: skip
SAMPLING = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
CHAT_INSTRUCTIONS, CHAT_QUESTION_SHARE, CHATS_AT_ONCE = ("roleplay", "codegen-instruct"), 0.35, 64
BASES = {DEFAULT_TARGET: f"HuggingFaceTB/{DEFAULT_TARGET}"}
GREETINGS = ("Hello!", "Who are you?", "Thank you!", "Can you help me?", "What can you do?", "How are you?")


@dataclass(frozen=True, kw_only=True)
class TargetRun(training_run.TrainingRun):
    """The command's options."""

    target: str
    plan: AdapterPlan
    num_probes: int
    num_chats: int = 3000
    continue_from: Path | None = None
    documentation: Path | None = None

    @property
    def target_config(self) -> TargetConfig:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return TargetConfig(model=self.target, adapter="none", device=device)

    def prepare(self) -> None:
        """Write the unadapted model's answers to ordinary requests, or those that are missing. Raises: ModelError, SaveError."""
        check_target(self.target_config)
        self.out.mkdir(parents=True, exist_ok=True)
        done = list(json_lines(self.out / CHATS)) if (self.out / CHATS).exists() else []
        requests = chat_requests(self.data_dir, self.num_chats)[len(done) :]
        if not requests:
            return
        with load_engine(self.target_config, EngineConfig(), DraftingConfig()) as engine:
            prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
            for at in range(0, len(requests), CHATS_AT_ONCE):
                asked = [[Message("user", text)] for text in requests[at : at + CHATS_AT_ONCE]]
                rows = [Request(str(n), prompts.tokens(each), SAMPLING) for n, each in enumerate(asked, start=at)]
                for (question,), answer in zip(asked, engine.generate(rows), strict=True):
                    messages = [asdict(each) for each in (question, Message("assistant", answer.text.strip()))]
                    done.append({"messages": messages, "is_cut": answer.finish_reason == "length"})
                write_atomically(self.out / CHATS, "".join(f"{json.dumps(row)}\n" for row in done))


def main() -> None:
    """Train as the command line says."""
    training_run.run_command(parser(), run_of, train)


def parser() -> argparse.ArgumentParser:
    """The command's options; those of the plan by the plan's names."""
    parser = training_run.training_parser("Train the adapter of a target.")
    add, plan, count, rate = parser.add_argument, AdapterPlan, positive(int), positive(float)
    add(
        "--target",
        default=DEFAULT_TARGET,
        help="the model without adapter: a directory, a GGUF file or a name of the catalogue",
    )
    add("--tokens", dest="total_tokens", type=count, default=8_000_000, help="length of the run in tokens")
    add("--rows", dest="rows_per_step", type=count, default=plan.rows_per_step, help="of a step; 32 suit a GPU")
    add("--peak-rate", dest="peak_lr", type=rate, default=plan.peak_lr, help="peak learning rate")
    add("--decay-share", type=positive(float, most=1.0), default=plan.decay_share, help="last part, of a falling rate")
    add("--probes", dest="num_probes", type=positive(int, least=0), default=8, help="how often it answers questions")
    add(
        "--chats", dest="num_chats", type=count, default=3000, help="ordinary requests that the unadapted model answers"
    )
    add("--documentation", type=absolute_path, help="rows of documentation packages, with their texts")
    add("--continue-from", type=absolute_path, help="another run's checkpoint or adapter folder to begin with")
    return parser


def run_of(args: argparse.Namespace) -> TargetRun:
    """The run of the given options. Raises: InputError."""
    plan = AdapterPlan(**training_run.values_of(AdapterPlan, args))
    return TargetRun(**training_run.values_of(TargetRun, args), plan=plan)


def train(run: TargetRun, workers: WorkerGroup, device: str) -> None:
    """One run from data to written adapter; the first worker writes. Raises: ModelError, SaveError."""
    target = FrozenTarget.load(run.target_config, device)
    rows = json_lines(run.out / CHATS)
    chats = [Conversation([Message(**each) for each in row["messages"]], open_ended=row["is_cut"]) for row in rows]
    mixture = Mixture(run.data_dir, chats, run.documentation)
    draw_row = partial(mixed_row, mixture, AnswerEncoder(target.tokenizer), run.plan.micro_tokens)
    base = BASES.get(run.target, run.target)
    trainer = AdapterTrainer(target.model, draw_row, run.plan, workers, run.data_workers, base)
    if not training_run.resumes(trainer, run) and run.continue_from:
        trainer.start_from(run.continue_from)
    scores = partial(probe, trainer, target.tokenizer, run.data_dir)
    training_run.run_to_end(trainer, run, ("loss",), scores, run.num_probes)
    if workers.is_first:
        training_run.draw_curves(trainer, "loss", "", run.out / "curves.png")
        trainer.write_adapter(run.out / "adapter")


def mixed_row(mixture: Mixture, encoder: AnswerEncoder, row_tokens: int, rng: random.Random) -> Row:
    """A row of one kind of text; a function of the generator."""
    (kind,) = rng.choices(list(mixture.shares), list(mixture.shares.values()))
    row = Row(int(row_tokens * LONG.get(kind, 1)))
    for _ in range(MAX_DRAWS):
        row.add(map(encoder.encode, mixture.draw(kind, rng)))
        if len(row.tokens) > FULL_SHARE * row.length:
            break
    return row if row.tokens else mixed_row(mixture, encoder, row_tokens, rng)


def chat_requests(data_dir: Path, count: int) -> list[str]:
    """Ordinary requests: greetings, tasks about topics, written instructions, and questions without their passages. Fewer than
    `count` if the data have no more."""
    asked = [*GREETINGS, *(request.format(topic) for request in CHAT_REQUESTS for topic in CHAT_TOPICS)]
    rng, instructions = random.Random(0), list[str]()
    for name in CHAT_INSTRUCTIONS:
        rows = json.loads((data_dir / "gpteacher" / f"{name}.json").read_text(encoding="utf-8"))
        instructions += [row["instruction"] for row in rows if not row["input"]]
    questions = [question.text for paragraph in question_paragraphs(data_dir) for question in paragraph.questions]
    num_questions = min(len(questions), int(count * CHAT_QUESTION_SHARE))
    num_instructions = min(len(instructions), max(0, count - len(asked) - num_questions))
    asked += [*rng.sample(instructions, num_instructions), *rng.sample(questions, num_questions)]
    return random.Random(0).sample(asked, len(asked))[:count]


def probe(trainer: AdapterTrainer, tokenizer: Any, data_dir: Path) -> dict[str, float]:
    """Scores of the averaged adapter on two articles that are neither trained nor evaluated on."""
    cases = question_cases(data_dir, PROBE_QUESTIONS, 0, PROBE_ARTICLES)
    with trainer.averaged_model() as model:
        return case_scores(model_answers(model, tokenizer), *cases)


if __name__ == "__main__":
    main()
