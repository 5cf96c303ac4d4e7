"""The steps from a question to its answer: retrieve passages, build the engine request, build the cited answer.

`Pipeline` and `AsyncPipeline` share these functions. They never start threads or tasks.

    >>> (retrieved,) = retrieve_passages(retriever, [Question("q1", "When did it rain?", params, num_passages=3)])
    >>> prepared = build_request(retrieved, prompts)
    >>> build_answer(prepared, engine.generate([prepared.request])[0])
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol, Self, TypeVar, cast

from ragspec.config import GenerationConfig
from ragspec.core import (
    Completion,
    CopySource,
    Delta,
    FinishReason,
    GenerationStats,
    Message,
    Passage,
    Request,
    SamplingParams,
    SourceKind,
)
from ragspec.engine.client import completion_of
from ragspec.errors import InputError, did_you_mean
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.retrieval_head import Look
from ragspec.rag.support import Support, find_support
from ragspec.rag.wording import ABSTENTION, NOT_SUPPORTED, nothing_close, other_language
from ragspec.retrieval.retriever import FROM_MEMORY, RetrievalResult, RetrievalTimes
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope
from ragspec.speculation import ON, Speculation


class RetrieverLike(Protocol):
    """A local retriever or a handle to a remote one."""

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope) -> RetrievalResult: ...


class EngineLike(Protocol):
    """A local engine or a handle to remote ones. `purge` empties the caches of a salt."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...

    def purge(self, salt: str) -> None: ...

    def close(self) -> None: ...


class Closeable:
    """A `with` statement closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the documents it may be answered from, and the sampling parameters. `id` becomes the engine request's id.
    `abstain_below` as in `RetrieverConfig`. `system`: the caller's system message, which stands before the instruction.

    Raises: InputError for fewer than one passage.
    """

    id: str
    text: str
    params: SamplingParams
    num_passages: int = 3
    scope: SearchScope = PUBLIC_SCOPE
    speculation: Speculation = ON
    abstain_below: float = 0.0
    system: str = ""

    def __post_init__(self) -> None:
        if self.num_passages < 1:
            raise InputError(f"num_passages must be at least 1, not {self.num_passages}")

    @property
    def messages(self) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, Message("user", self.text)]


@dataclass(frozen=True, slots=True)
class RetrievedQuestion:
    """A question with its passages, best first. `generation`: the index generation; `missing`: segments not searched;
    `closeness`: the calibrated score of the best passage, None but in mode hybrid."""

    question: Question
    passages: Sequence[Passage]
    generation: str
    retrieve_s: float
    missing: tuple[str, ...] = ()
    closeness: float | None = None
    times: RetrievalTimes = FROM_MEMORY

    @property
    def found_none(self) -> bool:
        """Whether a search of the whole index found no passage."""
        return bool(self.generation) and not self.missing and not self.passages


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question as asked, with its prompt and engine request. `generation` and `missing` as in `RetrievedQuestion`. `prompts`
    built the prompt. `said`: the answer where no passage is close to the question, which no engine has to write. `doubt`: asks
    the target first whether the passages answer the question; `doubt_stats`: of that request, once it has ended. `look`: shows
    first where the target looks; `look_stats`: of that request."""

    user_question: str
    prompt: Prompt
    request: Request
    generation: str
    missing: tuple[str, ...]
    retrieve_s: float
    prompt_s: float
    prompts: PromptBuilder = field(repr=False)
    said: str
    closeness: float | None
    times: RetrievalTimes = field(default=FROM_MEMORY, kw_only=True)
    doubt: Request | None = field(default=None, kw_only=True)
    doubt_stats: GenerationStats | None = field(default=None, kw_only=True)
    look: Look | None = field(default=None, kw_only=True)
    look_stats: GenerationStats | None = field(default=None, kw_only=True)

    @property
    def require_support(self) -> bool:
        """As in `PromptConfig`. JSON is never withheld: the sentence in its place would not follow its schema."""
        return self.prompts.require_support and not self.request.params.json_schema

    @property
    def first(self) -> Request | None:
        """The request that runs before the answer's, if there is one."""
        return self.doubt or (self.look.request if self.look else None)

    def after(self, first: Completion) -> Self:
        """This question once its first request has ended."""
        if self.doubt is not None:
            said = ABSTENTION if first.text.startswith("N") else ""  # "No": the passages hold no answer
            return replace(self, said=said, doubt=None, doubt_stats=first.stats)
        assert self.look is not None, "there is a first request"
        request = replace(self.request, params=self.look.params(first.attention))
        return replace(self, request=request, look=None, look_stats=first.stats)

    def counted(self, completion: Completion) -> GenerationStats:
        """The counters of a choice with those of the request before it. A look reads the answer's prompt, which the answer then
        finds in the cache: its time is every choice's, its tokens are those of the first."""
        stats, look = replace(completion.stats, doubt=self.doubt_stats), self.look_stats
        if look is None:
            return stats
        stats = replace(
            stats, queue_s=look.queue_s, prefill_s=look.prefill_s + look.decode_s + stats.queue_s + stats.prefill_s
        )
        if completion.choice != self.request.choices[0]:
            return stats
        return replace(
            stats,
            num_cached_tokens=min(look.num_cached_tokens, stats.num_cached_tokens),
            num_restored_tokens=look.num_restored_tokens + stats.num_restored_tokens,
            num_replays=look.num_replays + stats.num_replays,
        )

    @property
    def dropped_passages(self) -> tuple[Passage, ...]:
        """Retrieved passages that did not fit the prompt."""
        return self.prompt.dropped


Prepared = TypeVar("Prepared", bound=PreparedQuestion)
_FIRST_AT_ONCE = 32
"""Questions whose first requests run together."""


def retrieve_passages(retriever: RetrieverLike, questions: Sequence[Question]) -> list[RetrievedQuestion]:
    """Retrieve, in one call, for questions with equal `num_passages` and scope. Raises: as the retriever."""
    if not questions:
        return []
    begin = time.perf_counter()
    texts = [question.text for question in questions]
    found = retriever.retrieve(texts, questions[0].num_passages, questions[0].scope)
    retrieve_s = time.perf_counter() - begin
    closeness = found.closeness or [None] * len(questions)
    return [
        RetrievedQuestion(question, passages, found.generation, retrieve_s, found.missing, close, found.times)
        for question, passages, close in zip(questions, found.passages, closeness, strict=True)
    ]


def build_request(retrieved: RetrievedQuestion, prompts: PromptBuilder) -> PreparedQuestion:
    """Build the prompt, the copy sources and the routing affinity. Raises: as `PromptBuilder.build`."""
    begin, question = time.perf_counter(), retrieved.question
    prompt = prompts.build(question.messages, retrieved.passages, question.params.max_tokens)
    params, passages = question.params, prompt.passages
    grammar = prompts.answer_grammar(params, question.speculation, passages)
    biased = partial(prompts.biased, params, question.text, prompt, retrieved.closeness, holds_quotes=bool(grammar))
    request = Request(
        question.id,
        prompt.prompt_ids,
        params,
        copy_sources(question.text, prompt.passages),
        question.scope.tenant,
        question.speculation,
        grammar=grammar,
        affinity=prompt.passages[0].id if prompt.passages else "",
    )
    language = prompts.unknown_language(question.text)
    found_none = prompts.rules.says_none_found and retrieved.found_none
    said = abstention(params, retrieved.passages, retrieved.closeness, question.abstain_below, language, found_none)
    *before, last = question.messages
    asked = [*before, Message("user", last.content + prompts.doubt_words)]
    build = partial(prompts.build, asked, prompt.passages, 1)
    doubt = None if said else prompts.doubt(build, prompt, retrieved.closeness, request)
    look = None if said else prompts.look(prompt, request, biased)
    request = request if look else replace(request, params=biased())
    index, times = (retrieved.generation, retrieved.missing), (retrieved.retrieve_s, time.perf_counter() - begin)
    built = question.text, prompt, request, *index, *times, prompts, said, retrieved.closeness
    return PreparedQuestion(*built, times=retrieved.times, doubt=doubt, look=look)


def generate_answers(prepared: Sequence[Prepared], engine: EngineLike) -> Iterator[tuple[Prepared, list[Completion]]]:
    """Each question as its answers were asked for, and its choices. Raises: EngineError, InputError.

    Why some at a time: an answer finds the prompt of its first request in the cache, which holds a limited number of prompts.
    Answers run beside the first requests of the next questions.
    """
    size = _FIRST_AT_ONCE if any(each.first for each in prepared) else max(1, len(prepared))
    batches = [prepared[first : first + size] for first in range(0, len(prepared), size)]
    ready: list[Prepared] = []
    for batch in [*batches, ()]:
        requests = [each.request for each in ready if not each.said] + [each.first for each in batch if each.first]
        completions = iter(engine.generate(requests) if requests else ())
        for each in ready:
            yield each, said_completions(each) or list(islice(completions, len(each.request.choices)))
        ready = [each.after(next(completions)) if each.first else each for each in batch]


async def after_first(prepared: Prepared, engine: EngineLike) -> Prepared:
    """The question once its first request, if it has one, has ended; cancelling the wait cancels it. Raises: EngineError."""
    if prepared.first is None:
        return prepared
    (completion,) = await collect_completions(engine, prepared.first)
    return await asyncio.to_thread(prepared.after, completion)  # Why in a thread: as in `stream_answer`


def abstention(
    params: SamplingParams,
    passages: Sequence[Passage],
    closeness: float | None,
    abstain_below: float,
    unknown_language: str = "",
    found_none: bool = False,
) -> str:
    """What is said where the target does not know the question's language, or no passage is close to the question; empty where
    the target answers, as always with a JSON schema, which this sentence would not follow. `found_none`: the search found no
    passage."""
    if params.json_schema:
        return ""
    if unknown_language and passages:
        return other_language(unknown_language)
    is_far = found_none or (closeness is not None and closeness < abstain_below)
    return nothing_close([passage.title for passage in passages]) if is_far else ""


def copy_sources(
    question: str, passages: Sequence[Passage], history: Iterable[str] = (), prediction: str = ""
) -> tuple[CopySource, ...]:
    """Texts that the copy drafter may copy: passages in prompt order, question, earlier turns, the caller's prediction."""
    texts = dict.fromkeys(text for text in (question, *history) if text.strip())
    predicted = (CopySource(SourceKind.PREDICTION, prediction),) if prediction.strip() else ()
    return (
        *(CopySource(SourceKind.PASSAGE, p.text, p.id) for p in passages),
        *(CopySource(SourceKind.HISTORY, text) for text in texts),
        *predicted,
    )


def said_completions(prepared: PreparedQuestion) -> list[Completion]:
    """The choices of a question that no engine has to answer; none for any other question."""
    if not prepared.said:
        return []
    request = prepared.request
    stats = GenerationStats(seed=request.params.seed or 0)
    return [Completion(request.id, n, (), prepared.said, FinishReason.STOP, (), stats) for n in request.choices]


async def collect_completions(engine: EngineLike, request: Request) -> list[Completion]:
    """All choices of a request, in order; cancelling the wait cancels the request. Raises: EngineError, Cancelled, InputError."""
    deltas: dict[int, list[Delta]] = {choice: [] for choice in request.choices}
    # Why the cast: every asynchronous generator has `aclose`, which ends the request when the wait is cancelled
    async with aclosing(cast(Any, engine.stream(request))) as stream:
        async for delta in stream:
            deltas[delta.choice].append(delta)
    return [completion_of(each) for each in deltas.values()]


def build_answer(prepared: PreparedQuestion, completion: Completion) -> Answer:
    """The answer of one choice, with citations of the prompt's passages, by their numbers there."""
    passages, times = prepared.prompt.passages, (prepared.retrieve_s, prepared.prompt_s)
    asked = None if prepared.prompts.quotes_first else prepared.user_question  # free words need evidence
    support = find_support(completion.text, () if prepared.said else passages, asked)
    if prepared.require_support and support.sentences and not support.is_found:
        stop = FinishReason.STOP
        completion = replace(completion, text=NOT_SUPPORTED, token_ids=(), logprobs=(), finish_reason=stop)
        support = Support()
    return Answer(
        prepared.user_question,
        completion.text,
        support.citations,
        passages,
        prepared.dropped_passages,
        completion.finish_reason,
        completion.token_ids,
        completion.logprobs,
        AnswerStats(
            *times,
            prepared.generation,
            prepared.counted(completion),
            missing_segments=prepared.missing,
            encode_s=prepared.times.encode_s,
            search_s=prepared.times.search_s,
        ),
        support.sentences,
        support.unknown_quotations,
        prepared.closeness if passages else None,
        prepared.prompt.ranks,
        prepared.prompt.order,
    )


async def stream_answer(
    engine: EngineLike, prepare: Callable[[], Prepared], finish: Callable[[Prepared, Completion], Answer]
) -> AsyncGenerator[str | Answer]:
    """Pieces of text as they are decided, then the answer that `finish` makes of a question with one choice.

    Both functions run in threads. Why: encoder and tokenizer would stop other streams for milliseconds.
    """
    prepared = await after_first(await asyncio.to_thread(prepare), engine)
    deltas: list[Delta] = []
    if prepared.said:
        yield prepared.said
    else:
        async with aclosing(cast(Any, engine.stream(prepared.request))) as stream:
            async for delta in stream:
                deltas.append(delta)
                if delta.text and not prepared.require_support:
                    yield delta.text
    (completion,) = said_completions(prepared) or [completion_of(deltas)]
    answer = await asyncio.to_thread(finish, prepared, completion)
    if prepared.require_support and not prepared.said:
        yield answer.text
    yield answer


def parse_scope(tenant: str, filter: Mapping[str, Any] | None) -> SearchScope:
    """A tenant and a filter in JSON form as a search scope. Raises: InputError for an invalid filter."""
    return SearchScope(tenant, None if filter is None else parse_filter(filter))


def params_of_each(
    questions: Sequence[str],
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    changes: Mapping[str, Any] | None = None,
) -> Sequence[SamplingParams]:
    """The sampling parameters of each question, with `changes` of single ones.

    Raises: InputError for a single text, or a list of parameters of another length; TypeError for an unknown option.
    """
    if isinstance(questions, str):
        raise InputError(
            f"ask_many takes a list of questions, not the single text {questions[:40]!r}: use ask, or a list"
        )
    names = [parameter.name for parameter in fields(SamplingParams)]
    for name in changes or ():
        if name not in names:
            known = [*names, "num_passages", "speculation", "tenant", "filter", "guessing"]
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, known)}")
    if not isinstance(params, Sequence):
        params = [params or default] * len(questions)
    if len(params) != len(questions):
        raise InputError(f"{len(questions)} questions came with {len(params)} sets of sampling parameters")
    return [replace(each, **changes) for each in params] if changes else params


@functools.lru_cache(8)
def default_params(config: GenerationConfig) -> SamplingParams:
    return SamplingParams(**config.model_dump(exclude={"passage_order"}))
