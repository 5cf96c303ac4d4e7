"""One-shot retrieval-augmented generation: retrieve, build the prompt, generate, cite.

    >>> with Pipeline.from_config("ragspec.yaml") as pipeline:
    ...     print(pipeline.ask("What does json.dumps do?").text)
    >>> stream = AsyncPipeline(retriever, engine, prompts, PipelineLimits(max_in_flight=64))
    >>> async for result in stream.run(Question(str(n), text, params) for n, text in enumerate(texts)):
    ...     print(result.id, result.error or result.value[0].text)

Retriever and engine may be local objects or handles to remote ones. `AsyncPipeline` runs the steps of `Pipeline` concurrently for
a stream of questions; the answers are the same. Retrieval runs while the engine generates; questions that wait for the retriever
share a call. The number of questions in the pipeline is bounded: it reads another question when one leaves.
"""

import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, Unpack

from ragspec.config import ChatConfig, GenerationConfig, PipelineConfig, settings_of
from ragspec.core import Completion, Message, Passage, SamplingOptions, SamplingParams, Say, log_progress
from ragspec.engine.loading import load_engine
from ragspec.errors import ConfigError
from ragspec.rag import steps
from ragspec.rag.answer import Answer, AnswerStream
from ragspec.rag.chat.chat import Chat, ChatSession, SavedConversation
from ragspec.rag.chat.conversations import ConversationStore
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.pipeline_stages import ItemResult, PipelineStage, StagedPipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Closeable, EngineLike, PreparedQuestion, Question, RetrievedQuestion, RetrieverLike
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval_config import When
from ragspec.speculation import Speculation, SpeculationGiven

Questions = Iterable[Question] | AsyncIterable[Question]
_GeneratedChoices = tuple[PreparedQuestion, list[Completion]]


class QuestionOptions(SamplingOptions, total=False):
    """`tenant` asks: only the tenant's and public documents and caches are used. `filter` restricts the documents; JSON form
    (`ragspec.retrieval.search.filters`)."""

    num_passages: int | None
    speculation: SpeculationGiven
    tenant: str
    filter: Mapping[str, Any] | None


class Pipeline(Closeable):
    """Questions in, cited answers out."""

    def __init__(
        self,
        retriever: RetrieverLike,
        engine: EngineLike,
        prompts: PromptBuilder,
        *,
        num_passages: int = 3,
        generation: GenerationConfig | None = None,
        abstain_below: float = 0.0,
        when: When = "always",
        chat: ChatConfig | None = None,
    ) -> None:
        """`abstain_below` and, in conversations, `when` as in `RetrieverConfig`, which the retriever must have been made with."""
        self.engine = engine
        self._retriever, self._prompts, self._num_passages = retriever, prompts, num_passages
        self._defaults = steps.default_params(generation or GenerationConfig())
        self._abstain_below, self._when, self._chat = abstain_below, when, chat or ChatConfig()

    @classmethod
    def from_config(
        cls,
        config: PipelineConfig | str | Path | None = None,
        *,
        encoder: TextEncoder | None = None,
        say: Say = log_progress,
    ) -> Self:
        """Open the index, load encoder and target, test the numerics, measure the costs.

        `config`: settings, or a YAML file. `encoder`: the settings' encoder, if it is loaded already. `say` as for `load_engine`.
        Raises: ConfigError, StoreError, ModelError.
        """
        config = settings_of(config)
        retriever = Retriever.from_config(config.retriever, encoder or config.encoder)
        engine = load_engine(config.target, config.engine, config.drafting, say=say)
        prompts = PromptBuilder.of(engine.target.tokenizer, engine.max_context_tokens, config)
        return cls.of(retriever, engine, prompts, config)

    @classmethod
    def of(cls, retriever: RetrieverLike, engine: EngineLike, prompts: PromptBuilder, config: PipelineConfig) -> Self:
        """On parts that run already, with the other settings of the configuration that they were made with."""
        settings = config.retriever
        return cls(
            retriever,
            engine,
            prompts,
            num_passages=settings.num_passages,
            generation=config.generation,
            abstain_below=settings.abstain_below,
            when=settings.when,
            chat=config.chat,
        )

    def ask(self, question: str, params: SamplingParams | None = None, **options: Unpack[QuestionOptions]) -> Answer:
        """One question, one answer: `ask("Who?", temperature=0.5)`. Options as in `ask_many`.

        Raises: InputError, PromptTooLong.
        """
        return self.ask_many([question], params, **options)[0]

    def ask_many(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[QuestionOptions],
    ) -> list[Answer]:
        """Answer all questions in one batch of retriever and engine; with `n` choices, n answers per question, in order.

        Raises: InputError or PromptTooLong for the first question that cannot be asked; no answer is returned then.
        """
        generated = steps.generate_answers(self._prepare(questions, params, **options), self.engine)
        return [steps.build_answer(each, completion) for each, completions in generated for completion in completions]

    def stream(
        self, question: str, params: SamplingParams | None = None, **options: Unpack[QuestionOptions]
    ) -> AnswerStream:
        """Pieces of text as they are decided, then the whole answer; one choice. Options as in `ask_many`.

        The loop raises: InputError, PromptTooLong, EngineError.
        """
        options["n"] = 1
        prepare = partial(self._prepare, [question], params, **options)
        return AnswerStream(steps.stream_answer(self.engine, lambda: prepare()[0], steps.build_answer))

    def retrieve(
        self,
        question: str,
        *,
        num_passages: int | None = None,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
    ) -> list[Passage]:
        """The passages that `ask` would answer from, best first, with their scores. Nothing is generated.

        Raises: InputError, StoreError.
        """
        asked = self._asked([question], num_passages=num_passages, tenant=tenant, filter=filter)
        return list(steps.retrieve_passages(self._retriever, asked)[0].passages)

    def chat(
        self,
        conversation: str = "",
        *,
        store: ConversationStore | str | Path | None = None,
        saved: str | Path | None = None,
        system: str = "",
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> ChatSession:
        """A conversation, new or resumed, with the settings of the section `chat`.

        `store`: where it is kept, a `ConversationStore` or its file, as a service keeps it; None: in memory. `conversation`: the
        id of a conversation of the store to go on with. `saved`: a file of `ChatSession.save` to go on with. `system`: stands
        before the instruction; `tenant`, `filter` as for `ask`; `cache_salt` separates caches within the tenant.
        Raises: InputError, NotFound, SaveError, StoreCorrupt.
        """
        resumed = SavedConversation.load(saved) if saved else SavedConversation((), ())
        system = system or resumed.system
        turn = ChatTurn(
            "",
            (Message("system", system),) if system else (),
            self._defaults,
            steps.parse_scope(tenant, filter),
            conversation,
            self._num_passages,
            when=self._when,
            cache_salt=cache_salt,
            abstain_below=self._abstain_below,
        )
        kept = store if isinstance(store, ConversationStore) else ConversationStore(store or ":memory:")
        chat = Chat(self._retriever, self._prompts, kept, self._chat, self.engine)
        session = ChatSession(chat, self.engine, turn, owns_store=kept is not store)
        session.restore(resumed)
        return session

    def close(self) -> None:
        self.engine.close()

    def _prepare(self, *asked: Any, **options: Any) -> list[PreparedQuestion]:
        retrieved = steps.retrieve_passages(self._retriever, self._asked(*asked, **options))
        return [steps.build_request(each, self._prompts) for each in retrieved]

    def _asked(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_passages: int | None = None,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Question]:
        own = steps.params_of_each(questions, params, self._defaults, sampling)
        k = self._num_passages if num_passages is None else num_passages
        shared = k, steps.parse_scope(tenant, filter), Speculation.of(speculation), self._abstain_below
        each = zip(questions, own, strict=True)
        return [Question(uuid.uuid4().hex, text, own_params, *shared) for text, own_params in each]


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """`max_batch`: questions that share a retrieval; `max_lookups`: retrievals at a time; `max_in_flight`: engine requests
    at a time, at least the engine's `max_num_seqs` to keep it full; `max_waiting`: questions queued before each stage;
    `window`: prompts that wait for the engine at most, those that begin alike one after the other; 1: in the order of arrival.

    Raises: ConfigError.
    """

    max_batch: int = 16
    max_lookups: int = 1
    max_in_flight: int = 64
    max_waiting: int = 32
    window: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            if (limit := getattr(self, each.name)) < 1:
                raise ConfigError(f"{each.name} of a flow must be at least 1, not {limit}")


class AsyncPipeline:
    """Questions in, cited answers out as they finish. An error is the result of its question and affects no other."""

    def __init__(
        self, retriever: RetrieverLike, engine: EngineLike, prompts: PromptBuilder, limits: PipelineLimits | None = None
    ) -> None:
        """Accepts any retriever and engine that a `Pipeline` accepts; closes neither."""
        limits = limits or PipelineLimits()

        def build_requests(batch: Sequence[RetrievedQuestion]) -> list[PreparedQuestion]:
            return [steps.build_request(retrieved, prompts) for retrieved in batch]

        async def generate(batch: Sequence[PreparedQuestion]) -> list[_GeneratedChoices]:
            asked = [await steps.after_first(each, engine) for each in batch]
            return [
                (each, steps.said_completions(each) or await steps.collect_completions(engine, each.request))
                for each in asked
            ]

        def cite(generated: Sequence[_GeneratedChoices]) -> list[tuple[Answer, ...]]:
            return [
                tuple(steps.build_answer(prepared, choice) for choice in choices) for prepared, choices in generated
            ]

        stages = (
            PipelineStage(
                "retrieve",
                partial(steps.retrieve_passages, retriever),
                limits.max_batch,
                limits.max_lookups,
                group=attrgetter("num_passages", "scope"),
            ),
            PipelineStage("prompt", build_requests, limits.max_batch),
            PipelineStage(
                "generate",
                generate,
                num_workers=limits.max_in_flight,
                order=attrgetter("request.prompt_ids") if limits.window > 1 else None,
                window=limits.window,
            ),
            PipelineStage("cite", cite, limits.max_batch),
        )
        self.stages = StagedPipeline(stages, max_waiting=limits.max_waiting)
        """The stages, with metrics over all runs. `stages.run` gives results in lists."""

    async def run(self, questions: Questions) -> AsyncGenerator[ItemResult[tuple[Answer, ...]]]:
        """Each question's answers, one per choice, or its error, in the order in which they finish.

        Leaving the loop early cancels the run. Two questions in flight must not have the same id.
        Raises: only what reading `questions` raises.
        """
        async with aclosing(self.stages.run(questions)) as batches:
            async for batch in batches:
                for result in batch:
                    yield result
