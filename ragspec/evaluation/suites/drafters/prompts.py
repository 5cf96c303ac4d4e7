"""Prompts of the suite `drafters` by task: answers with passages, chat, grammar, prose without copy sources, papers' questions.

Every list is fixed; a shorter list is the beginning of a longer list. No target or head of ours was trained on the
texts.

    >>> drafter_cases(data_dir, retriever, PromptBuilder(tokenizer, 2048), count=6)["prose"][0].prompt_ids
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ragspec.core import CopySource, Message, SourceKind
from ragspec.errors import PromptTooLong
from ragspec.evaluation.cases import Case, grammar_cases, rag_cases
from ragspec.evaluation.datasets import (
    CLEAN,
    JFLEG,
    LONG,
    Sentence,
    fixed_sample,
    grammar_list,
    held_out_articles,
    json_rows,
    squad_list,
)
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import RetrieverLike
from ragspec.training.sentences import normalise

T = TypeVar("T")

RAG, CHAT, GRAMMAR, PROSE, MT_BENCH = "rag", "chat", "grammar", "prose", "MT-bench"
TASKS = (RAG, CHAT, GRAMMAR, PROSE)
CHAT_TOKENS = 96
PROSE_TOKENS = 96
PROSE_PROMPT_TOKENS = 64
QUESTIONS = {
    MT_BENCH: "mt_bench/question.jsonl",
    "HumanEval": "eagle_eval/humaneval.jsonl",
    "GSM8K": "eagle_eval/gsm8k.jsonl",
    "Alpaca": "eagle_eval/alpaca.jsonl",
    "CNN/DM": "eagle_eval/sum.jsonl",
    "NQ": "eagle_eval/qa.jsonl",
}
"""The papers' questions by task."""
_FEWEST_TURNS = 5
_ROLES = {"USER": "user", "SYSTEM": "assistant"}

Conversation = list[Message]


def drafter_cases(
    data_dir: Path, retriever: RetrieverLike, prompts: PromptBuilder, count: int
) -> dict[str, list[Case]]:
    """`count` prompts a task. Raises: InputError if files are missing."""
    return {
        RAG: list(rag_cases(squad_list(data_dir, count).questions, retriever, prompts)),
        CHAT: list(chat_cases(chat_list(data_dir, count), prompts)),
        GRAMMAR: list(grammar_cases(mixed_sentences(data_dir, count), prompts)),
        PROSE: list(islice(prose_cases(data_dir, prompts.tokenizer), count)),
    }


def question_cases(data_dir: Path, prompts: PromptBuilder, tasks: Iterable[str], count: int) -> dict[str, list[Case]]:
    """The first questions of each list that fit the target, with nothing to copy from. Raises: InputError."""
    return {task: list(islice(_questions(data_dir / QUESTIONS[task], prompts, task), count)) for task in tasks}


def _questions(path: Path, prompts: PromptBuilder, task: str) -> Iterator[Case]:
    for number, (_, row) in enumerate(json_rows(path)):
        try:
            prompt = prompts.build([Message("user", str(row["turns"][0]))], (), CHAT_TOKENS)
        except PromptTooLong:
            continue
        yield Case(f"{task}-{number}", task, prompt.prompt_ids, (), CHAT_TOKENS)


def chat_list(data_dir: Path, count: int) -> list[Conversation]:
    """Alternately first turns of MT-bench and openings of SGD test dialogues up to a user's turn.

    Raises: InputError if the files are not there.
    """
    questions = json_rows(data_dir / QUESTIONS[MT_BENCH])
    singles = [[Message("user", normalise(question["turns"][0]))] for _, question in questions]
    dialogues = [dialogue["turns"] for _, dialogue in json_rows(data_dir / "sgd" / "test.jsonl")]
    openings = (turns[:_FEWEST_TURNS] for turns in dialogues if len(turns) >= _FEWEST_TURNS)
    longer = [[Message(_ROLES[who], normalise(text)) for who, text in turns] for turns in openings]
    return list(islice(_taking_turns(fixed_sample(singles, count), fixed_sample(longer, count)), count))


def chat_cases(conversations: list[Conversation], prompts: PromptBuilder) -> Iterator[Case]:
    """Each conversation as a prompt, its messages as copy sources."""
    for i, messages in enumerate(conversations):
        prompt = prompts.build(messages, (), CHAT_TOKENS)
        sources = tuple(CopySource(SourceKind.HISTORY, message.content) for message in messages)
        yield Case(f"{CHAT}-{i}", CHAT, prompt.prompt_ids, sources, CHAT_TOKENS)


def mixed_sentences(data_dir: Path, count: int) -> list[Sentence]:
    """The grammar suite's three parts in turns. Raises: InputError if the files are missing."""
    sentences = grammar_list(data_dir, count)
    parts = [[sentence for sentence in sentences if sentence.part == part] for part in (JFLEG, LONG, CLEAN)]
    return list(islice(_taking_turns(*parts), count))


def prose_cases(data_dir: Path, tokenizer: Any) -> Iterator[Case]:
    """The first tokens of the held-out articles' paragraphs, to be continued; no source to copy from.

    Raises: InputError if the file is not there.
    """
    paragraphs = [normalise(p["context"]) for article in held_out_articles(data_dir) for p in article["paragraphs"]]
    for i, text in enumerate(fixed_sample(paragraphs, len(paragraphs))):
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > PROSE_PROMPT_TOKENS:
            yield Case(f"{PROSE}-{i}", PROSE, tuple(ids[:PROSE_PROMPT_TOKENS]), (), PROSE_TOKENS)


def _taking_turns(*lists: list[T]) -> Iterator[T]:
    rounds = chain.from_iterable(zip_longest(*lists))
    return (item for item in rounds if item is not None)
