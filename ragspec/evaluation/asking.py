"""Asks a user's own questions of one configuration, one at a time, and measures how long each takes.

A question is asked as `ragspec ask` asks it, the turns of a conversation as the service asks them, and a sentence is corrected as
`ragspec correct` does. A question that cannot be asked is a result of its own; it stops no other.

    >>> evaluate(["questions.jsonl"], "ragspec.yaml").to_dict()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from ragspec.config import PipelineConfig, settings_of
from ragspec.core import Say, log_progress
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError
from ragspec.evaluation.measures import rounded
from ragspec.evaluation.questions import (
    AnsweredQuestion,
    AskedQuestion,
    CheckedSentence,
    CorrectedSentence,
    Dialogue,
    Line,
    LineResult,
    RoutedMessage,
    RoutedText,
    judge,
    p50_s,
    proposed_threshold,
    questions_of,
    read_lines,
    shares,
)
from ragspec.rag.answer import Answer
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.grammar.correction import DEFAULT_PARAMS
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Closeable, RetrieverLike, default_params
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.retriever import Retriever

CHECKED_TEMPERATURES = (0.0, 1.0)
_CHECKED_TOGETHER = 16
"""Questions in a batch of the check, whose progress is shown after each."""
_CHECK_SEED = 7
"""Of the check of drafts where no seed is configured."""


def evaluate(
    files: Iterable[str | Path],
    config: PipelineConfig | str | Path | None = None,
    *,
    check_drafts: bool = False,
    say: Say = log_progress,
) -> Evaluation:
    """Ask the questions of JSON lines (`ragspec.evaluation.questions`) of one configuration, as `ragspec evaluate` does.

    `check_drafts`: also answer without speculation, and count the answers that differ.
    Raises: InputError for a line, ConfigError, StoreError, ModelError, EngineError.
    """
    lines, settings = read_lines([Path(file) for file in files]), settings_of(config)
    with Asker.from_config(settings, retrieves=bool(questions_of(lines)), say=say) as asker:
        results = list(asker.results(lines))
        return Evaluation(results, asker.num_changed_by_drafts(results, say) if check_drafts else {})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A result for each line and turn. `changed`: answers that drafts changed, by temperature, if checked."""

    results: Sequence[LineResult]
    changed: Mapping[float, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The counts of `ragspec evaluate`, by its names; plain values, for JSON."""
        row: dict[str, Any] = {f"changed_by_drafts_t{temperature:g}": num for temperature, num in self.changed.items()}
        for share in shares(self.results):
            row |= {share.key: share.num, f"{share.key}_of": share.of}
        return row | {"proposed_abstain_below": proposed_threshold(self.results), "p50_s": rounded(p50_s(self.results))}


class Asker(Closeable):
    """One configuration, loaded. `retriever` None: there are only sentences to correct."""

    def __init__(
        self, retriever: RetrieverLike | None, engine: Engine, prompts: PromptBuilder, config: PipelineConfig
    ) -> None:
        self._retriever, self._engine, self._prompts, self._config = retriever, engine, prompts, config
        self._params = default_params(config.generation)
        self._grammar = Grammar(engine, prompts)

    @classmethod
    def from_config(
        cls,
        config: PipelineConfig,
        *,
        encoder: TextEncoder | None = None,
        retrieves: bool = True,
        say: Say = log_progress,
    ) -> Self:
        """Load the target and, if it `retrieves`, index and encoder. Raises: ConfigError, StoreError, ModelError."""
        retriever = Retriever.from_config(config.retriever, encoder or config.encoder) if retrieves else None
        engine = load_engine(config.target, config.engine, config.drafting, say=say)
        prompts = PromptBuilder.of(engine.target.tokenizer, engine.max_context_tokens, config)
        return cls(retriever, engine, prompts, config)

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

    def num_changed_by_drafts(self, results: Sequence[LineResult], tick: Say = log_progress) -> dict[float, int]:
        """How many answers have other tokens with speculation than without, by temperature; 0 everywhere unless there is a bug.

        Asks the answered questions of `results` again, the turns of conversations alone. Nothing is withheld.
        """
        answered = [each for each in results if isinstance(each, AnsweredQuestion) and each.answer is not None]
        texts = [each.question.question for each in answered]
        changed = dict.fromkeys(CHECKED_TEMPERATURES, 0)
        seed = _CHECK_SEED if self._params.seed is None else self._params.seed
        words = self._config.wording.model_copy(update={"require_support": False})
        config, prompts = self._config.model_copy(update={"prompts": words}), self._prompts
        pipeline = self._pipeline(PromptBuilder.of(prompts.tokenizer, prompts.max_context_tokens, config))
        num_checked = len(texts) * len(CHECKED_TEMPERATURES)
        for number, temperature in enumerate(CHECKED_TEMPERATURES):
            params = replace(self._params, temperature=temperature, seed=seed)
            for begin in range(0, len(texts), _CHECKED_TOGETHER):
                some = texts[begin : begin + _CHECKED_TOGETHER]
                fast, plain = (pipeline.ask_many(some, params, speculation=given) for given in (True, False))
                changed[temperature] += sum(a.token_ids != b.token_ids for a, b in zip(fast, plain, strict=True))
                tick("comparing with plain decoding", number * len(texts) + begin + len(some), num_checked)
        return changed

    def close(self) -> None:
        self._engine.close()

    def _pipeline(self, prompts: PromptBuilder | None = None) -> Pipeline:
        assert self._retriever is not None, "questions need an index"
        return Pipeline.of(self._retriever, self._engine, prompts or self._prompts, self._config)

    def _converse(self, dialogue: Dialogue) -> Iterator[AnsweredQuestion]:
        with self._pipeline().chat() as chat:
            for number, asked in enumerate(dialogue.turns):
                name = str(asked.id) if asked.id != "" else f"{dialogue.id}.{number + 1}"
                yield _timed(name, asked, number > 0, partial(chat.ask, asked.question))

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
