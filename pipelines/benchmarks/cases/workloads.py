"""Prompts of the benchmark suites by workload: answers with passages, corrections, chat, prose, and Spec-Bench's tasks.

Every list is fixed, and a shorter list is the beginning of a longer list. No target or head of this project was trained on the
texts.

Sources: SQuAD, JFLEG, MT-bench, Schema-Guided Dialogue, Spec-Bench (Xia et al. 2024, arXiv 2401.07851).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipelines.benchmarks.cases.timing import Case
from ragspec.core import CopySource, Message, SourceKind
from ragspec.evaluation.datasets import (
    CLEAN,
    JFLEG,
    LONG,
    Question,
    Sentence,
    fixed_sample,
    grammar_list,
    held_out_articles,
    json_rows,
)
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import RetrieverLike, copy_sources
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE
from ragspec.training.sentences import normalise

RAG, GRAMMAR, CHAT, PROSE = "rag", "grammar", "chat", "prose"
SPEC_BENCH_TASKS = ("multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag")
RAG_PASSAGES = 3
RAG_TOKENS = PROSE_TOKENS = CHAT_TOKENS = NOTHING_TOKENS = 96
GRAMMAR_TOKENS = SPEC_BENCH_TOKENS = 128
_PROSE_PROMPT_TOKENS, _NOTHING_PROMPT_TOKENS = 64, 256
_FEWEST_TURNS = 5
_ROLES = {"USER": "user", "SYSTEM": "assistant"}

T = TypeVar("T")
Answer = Callable[[Case], str]
"""The target's own answer, which the next turn of a conversation refers to."""


def rag_cases(questions: Sequence[Question], retriever: RetrieverLike, prompts: PromptBuilder) -> Iterator[Case]:
    """Retrieve passages for each question and build its prompt as the product does, one question at a time."""
    retriever.retrieve([question.text for question in questions[:1]], RAG_PASSAGES, PUBLIC_SCOPE)  # warms up
    for question in questions:
        begin = time.perf_counter()
        (found,) = retriever.retrieve([question.text], RAG_PASSAGES, PUBLIC_SCOPE).passages
        prompt = prompts.build(question.text, found, RAG_TOKENS)
        sources = copy_sources(question.text, prompt.passages)
        prepare_s = time.perf_counter() - begin
        yield Case(question.id, prompt.prompt_ids, sources, RAG_TOKENS, prepare_s, prompt.passages)


def grammar_cases(sentences: Sequence[Sentence], prompts: PromptBuilder) -> Iterator[Case]:
    """The correction prompt of each sentence, with the sentence as its copy source."""
    for sentence in sentences:
        begin = time.perf_counter()
        prompt = prompts.grammar_prompt(sentence.text, GRAMMAR_TOKENS)
        sources = (CopySource(SourceKind.INPUT, sentence.text),)
        yield Case(sentence.id, prompt.prompt_ids, sources, GRAMMAR_TOKENS, time.perf_counter() - begin)


def mixed_sentences(data_dir: Path, count: int) -> list[Sentence]:
    """Learners' sentences, corrupted sentences and correct sentences in turns. Raises: InputError."""
    sentences = grammar_list(data_dir, count)
    parts = [[sentence for sentence in sentences if sentence.part == part] for part in (JFLEG, LONG, CLEAN)]
    return list(islice(_in_turns(*parts), count))


def chat_cases(data_dir: Path, prompts: PromptBuilder, count: int) -> list[Case]:
    """First turns of MT-bench and openings of dialogues up to a user's turn, alternately. Raises: InputError."""
    questions = json_rows(data_dir / "mt_bench" / "question.jsonl")
    singles = [[Message("user", normalise(question["turns"][0]))] for _, question in questions]
    dialogues = [dialogue["turns"] for _, dialogue in json_rows(data_dir / "sgd" / "test.jsonl")]
    openings = (turns[:_FEWEST_TURNS] for turns in dialogues if len(turns) >= _FEWEST_TURNS)
    longer = [[Message(_ROLES[who], normalise(text)) for who, text in turns] for turns in openings]
    conversations = islice(_in_turns(fixed_sample(singles, count), fixed_sample(longer, count)), count)
    return [conversation_case(f"{CHAT}-{i}", said, prompts, CHAT_TOKENS) for i, said in enumerate(conversations)]


def prose_cases(data_dir: Path, tokenizer: Any) -> Iterator[Case]:
    """The first tokens of held-out paragraphs, to be continued without any source to copy from. Raises: InputError."""
    paragraphs = [normalise(p["context"]) for article in held_out_articles(data_dir) for p in article["paragraphs"]]
    for i, text in enumerate(fixed_sample(paragraphs, len(paragraphs))):
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > _PROSE_PROMPT_TOKENS:
            yield Case(f"{PROSE}-{i}", tuple(ids[:_PROSE_PROMPT_TOKENS]), (), PROSE_TOKENS)


def spec_bench_cases(path: Path, task: str, count: int, prompts: PromptBuilder, answer: Answer) -> list[Case]:
    """Every turn of the first `count` questions of a task. Raises: InputError."""
    cases: list[Case] = []
    rows = (row for _, row in json_rows(path) if spec_bench_task(row["category"]) == task)
    for row in islice(rows, count):
        said: list[Message] = []
        for number, turn in enumerate(row["turns"]):
            if said:
                said.append(Message("assistant", answer(cases[-1]).strip() or "."))
            said.append(Message("user", turn))
            cases.append(conversation_case(f"{row['question_id']}-{number}", said, prompts, SPEC_BENCH_TOKENS))
    return cases


def spec_bench_task(category: str) -> str:
    """The survey counts all categories of MT-bench as one task."""
    return category if category in SPEC_BENCH_TASKS else SPEC_BENCH_TASKS[0]


def conversation_case(name: str, said: Sequence[Message], prompts: PromptBuilder, max_tokens: int) -> Case:
    """The prompt of a conversation, whose messages may be copied from."""
    sources = tuple(CopySource(SourceKind.HISTORY, message.content) for message in said)
    return Case(name, prompts.build(list(said), (), max_tokens).prompt_ids, sources, max_tokens)


def nothing_to_copy_cases(
    vocab_size: int, max_context_tokens: int, count: int, seed: int, sources: Sequence[tuple[CopySource, ...]] = ((),)
) -> list[Case]:
    """Prompts of random tokens with unrelated copy sources: drafters find matches by chance only."""
    rng = np.random.default_rng(seed)
    num_tokens = min(_NOTHING_PROMPT_TOKENS, max_context_tokens // 2)
    max_tokens = min(NOTHING_TOKENS, max_context_tokens - num_tokens - 1)
    prompts = rng.integers(min(16, vocab_size // 2), vocab_size, (count, num_tokens))
    return [
        Case(f"nothing-{i}", tuple(ids), sources[i % len(sources)], max_tokens)
        for i, ids in enumerate(prompts.tolist())
    ]


def _in_turns(*lists: list[T]) -> Iterator[T]:
    rounds = chain.from_iterable(zip_longest(*lists))
    return (item for item in rounds if item is not None)
