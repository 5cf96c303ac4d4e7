"""Asks a user's own questions of one configuration, one at a time, and measures how long each takes.

A question is asked as `ragspec ask` asks it, the turns of a conversation as the service asks them, and a sentence is corrected as
`ragspec correct` does. A question that cannot be asked is a result of its own; it stops no other.

    >>> with Asker.from_config(settings, ChatConfig()) as asker:
    ...     results = list(asker.results(lines))
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Self

from ragspec.config import ChatConfig, PipelineConfig
from ragspec.core import Message, Say, log_progress
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError
from ragspec.evaluation.measures import Tick, no_tick
from ragspec.evaluation.question_scores import AnsweredQuestion, CorrectedSentence, LineResult, RoutedMessage
from ragspec.evaluation.questions import AskedQuestion, CheckedSentence, Dialogue, Line, RoutedText, judge
from ragspec.rag.answer import Answer
from ragspec.rag.chat.chat import Chat
from ragspec.rag.chat.conversations import ConversationStore
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.grammar.correction import DEFAULT_PARAMS
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Closeable, RetrieverLike, build_answer, default_params, said_completions
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.retriever import Retriever

CHECKED_TEMPERATURES = (0.0, 1.0)
_CHECKED_TOGETHER = 16
"""Questions in a batch of the check, whose progress is shown after each."""


class Asker(Closeable):
    """One configuration, loaded. `retriever` None: there are only sentences to correct."""

    def __init__(
        self,
        retriever: RetrieverLike | None,
        engine: Engine,
        prompts: PromptBuilder,
        config: PipelineConfig,
        chat: ChatConfig | None = None,
    ) -> None:
        self._retriever, self._engine, self._prompts, self._config = retriever, engine, prompts, config
        self._params, self._chat = default_params(config.generation), chat or ChatConfig()
        self._grammar = Grammar(engine, prompts)

    @classmethod
    def from_config(
        cls,
        config: PipelineConfig,
        chat: ChatConfig | None = None,
        *,
        encoder: TextEncoder | None = None,
        retrieves: bool = True,
        say: Say = log_progress,
    ) -> Self:
        """Load the target and, if it `retrieves`, index and encoder. Raises: ConfigError, StoreError, ModelError."""
        retriever = Retriever.from_config(config.retriever, encoder or config.encoder) if retrieves else None
        engine = load_engine(config.target, config.engine, config.drafting, say=say)
        prompts = PromptBuilder.of(engine.target.tokenizer, engine.max_context_tokens, config)
        return cls(retriever, engine, prompts, config, chat)

    def results(self, lines: Sequence[Line]) -> Iterator[LineResult]:
        """The result of each line and turn, in order, as it is there. Raises: RagspecError, except InputError."""
        for line in lines:
            if isinstance(line, AskedQuestion):
                yield _timed(str(line.id), line, False, partial(self._pipeline().ask, line.question))
            elif isinstance(line, Dialogue):
                yield from self._converse(line)
            elif isinstance(line, CheckedSentence):
                yield self._corrected(line)
            else:
                yield self._routed(line)

    def num_changed_by_drafts(self, results: Sequence[LineResult], seed: int, tick: Tick = no_tick) -> dict[float, int]:
        """How many answers have other tokens with speculation than without, by temperature; 0 everywhere unless there is a bug.

        Asks the answered questions of `results` again, the turns of conversations alone. Nothing is withheld.
        """
        answered = [each for each in results if isinstance(each, AnsweredQuestion) and each.answer is not None]
        texts = [each.question.question for each in answered]
        changed = dict.fromkeys(CHECKED_TEMPERATURES, 0)
        words = self._config.wording.model_copy(update={"require_support": False})
        prompts = self._prompts
        pipeline = self._pipeline(
            PromptBuilder(
                prompts.tokenizer,
                prompts.max_context_tokens,
                words,
                prompts.abstention,
                prompts.languages,
                prompts.passage_order,
            )
        )
        for number, temperature in enumerate(CHECKED_TEMPERATURES):
            params = replace(self._params, temperature=temperature, seed=seed)
            for begin in range(0, len(texts), _CHECKED_TOGETHER):
                some = texts[begin : begin + _CHECKED_TOGETHER]
                fast, plain = (pipeline.ask_many(some, params, speculation=given) for given in (True, False))
                changed[temperature] += sum(a.token_ids != b.token_ids for a, b in zip(fast, plain, strict=True))
                tick(
                    "comparing with plain decoding",
                    number * len(texts) + begin + len(some),
                    len(texts) * len(CHECKED_TEMPERATURES),
                )
        return changed

    def close(self) -> None:
        self._engine.close()

    def _pipeline(self, prompts: PromptBuilder | None = None) -> Pipeline:
        assert self._retriever is not None, "questions need an index"
        settings = self._config.retriever
        return Pipeline(
            self._retriever,
            self._engine,
            prompts or self._prompts,
            num_passages=settings.num_passages,
            generation=self._config.generation,
            abstain_below=settings.abstain_below,
        )

    def _converse(self, dialogue: Dialogue) -> Iterator[AnsweredQuestion]:
        """The turns of one conversation, which a store keeps until they are asked."""
        assert self._retriever is not None, "questions need an index"
        with (
            tempfile.TemporaryDirectory(prefix="ragspec-evaluate-") as folder,
            closing(ConversationStore(Path(folder) / "conversations.sqlite")) as store,
        ):
            chat = Chat(self._retriever, self._prompts, store, self._chat, self._engine)
            conversation = store.create("").id
            for number, asked in enumerate(dialogue.turns):
                name = str(asked.id) if asked.id != "" else f"{dialogue.id}.{number + 1}"
                yield _timed(name, asked, number > 0, partial(self._turn, chat, conversation, asked.question))

    def _turn(self, chat: Chat, conversation: str, question: str) -> Answer:
        settings = self._config.retriever
        turn = ChatTurn(
            uuid.uuid4().hex,
            (Message("user", question),),
            self._params,
            conversation=conversation,
            num_passages=settings.num_passages,
            when=settings.when,
            abstain_below=settings.abstain_below,
        )
        prepared = chat.prepare(turn)
        (completion,) = said_completions(prepared) or self._engine.generate([prepared.request])
        answer = build_answer(prepared, completion)
        chat.remember(prepared, answer)
        return answer

    def _corrected(self, sentence: CheckedSentence) -> CorrectedSentence:
        params, begin = replace(self._params, max_tokens=DEFAULT_PARAMS.max_tokens), perf_counter()
        output, refused = None, ""
        try:
            output = self._grammar.correct(sentence.text, params).corrected
        except InputError as error:
            refused = str(error)
        return CorrectedSentence(str(sentence.id), sentence, output, perf_counter() - begin, refused)

    def _routed(self, line: RoutedText) -> RoutedMessage:
        begin = perf_counter()
        turn = ChatTurn("", (), self._params, when=self._config.retriever.when)
        return RoutedMessage(str(line.id), line, turn.searches(line.text), perf_counter() - begin)


def _timed(name: str, asked: AskedQuestion, is_follow_up: bool, ask: Callable[[], Answer]) -> AnsweredQuestion:
    begin, answer, refused = perf_counter(), None, ""
    try:
        answer = ask()
    except InputError as error:
        refused = str(error)
    seconds = perf_counter() - begin
    return AnsweredQuestion(name, asked, is_follow_up, answer, judge(asked, answer), seconds, refused)
