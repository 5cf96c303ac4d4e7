"""A case is one prompt of a suite, ready for any decoder: token ids, copy sources, and the longest output."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ragspec.core import CopySource, Message, Passage, SourceKind
from ragspec.evaluation.datasets import Question, Sentence
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import RetrieverLike, copy_sources
from ragspec.retrieval.retriever import PUBLIC_SCOPE

RAG_PASSAGES = 3
RAG_TOKENS = 96
GRAMMAR_TOKENS = 128
NOTHING_TOKENS = 96
_NOTHING_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """`prepare_s`: seconds of retrieval and prompt building, wall clock, for this prompt alone."""

    id: str
    part: str
    prompt_ids: tuple[int, ...]
    sources: tuple[CopySource, ...]
    max_tokens: int
    prepare_s: float = 0.0
    passages: tuple[Passage, ...] = ()


def rag_cases(questions: Sequence[Question], retriever: RetrieverLike, prompts: PromptBuilder) -> Iterator[Case]:
    """Retrieve passages for each question and build its prompt as the pipeline does, one question at a time."""
    retriever.retrieve([q.text for q in questions[:1]], RAG_PASSAGES, PUBLIC_SCOPE)  # Why: the first one warms up
    for question in questions:
        begin = time.perf_counter()
        (found,) = retriever.retrieve([question.text], RAG_PASSAGES, PUBLIC_SCOPE).passages
        prompt = prompts.build(question.text, found, RAG_TOKENS)
        sources = copy_sources(question.text, prompt.passages)
        prepare_s = time.perf_counter() - begin
        yield Case(question.id, "rag", prompt.prompt_ids, sources, RAG_TOKENS, prepare_s, prompt.passages)


def grammar_cases(sentences: Sequence[Sentence], prompts: PromptBuilder) -> Iterator[Case]:
    """Build the grammar prompt of each sentence, with the sentence as its draft."""
    for sentence in sentences:
        begin = time.perf_counter()
        prompt = prompts.grammar_prompt(sentence.text, GRAMMAR_TOKENS)
        sources = (CopySource(SourceKind.INPUT, sentence.text),)
        prepare_s = time.perf_counter() - begin
        yield Case(sentence.id, sentence.part, prompt.prompt_ids, sources, GRAMMAR_TOKENS, prepare_s)


def conversation_cases(
    part: str, conversations: Sequence[Sequence[Mapping[str, str]]], prompts: PromptBuilder, max_tokens: int
) -> Iterator[Case]:
    """The prompt of each conversation, of messages `{"role", "content"}`; every message may be copied from."""
    for i, messages in enumerate(conversations):
        ids = prompts.tokens([Message(m["role"], m["content"]) for m in messages])
        sources = tuple(CopySource(SourceKind.HISTORY, m["content"]) for m in messages)
        yield Case(f"{part}-{i}", part, ids, sources, max_tokens)


def nothing_to_copy_cases(
    vocab_size: int, max_context_tokens: int, count: int, seed: int, sources: Sequence[tuple[CopySource, ...]] = ((),)
) -> list[Case]:
    """Prompts of random tokens with unrelated copy sources: drafters find matches by chance only."""
    rng = np.random.default_rng(seed)
    num_tokens = min(_NOTHING_PROMPT_TOKENS, max_context_tokens // 2)
    max_tokens = min(NOTHING_TOKENS, max_context_tokens - num_tokens - 1)
    prompts = rng.integers(min(16, vocab_size // 2), vocab_size, (count, num_tokens))
    return [
        Case(f"nothing-{i}", "nothing", tuple(ids), sources[i % len(sources)], max_tokens)
        for i, ids in enumerate(prompts.tolist())
    ]
