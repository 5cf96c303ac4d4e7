"""Texts without their mistakes: each sentence is corrected by itself, with itself as the draft.

    >>> corrector = GrammarCorrector(engine, PromptBuilder(engine.target.tokenizer, engine.max_context_tokens))
    >>> correction = corrector.correct("He go to school.  It rain.")
    >>> correction.corrected, correction.edits

What stands between sentences stays as it is, character for character. A sentence that is too long for the target is corrected in
parts; what holds no letter is not asked about; a correction that did not come to its end is not made.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ragspec.core import (
    Completion,
    CopySource,
    FinishReason,
    GenerationStats,
    Request,
    SamplingParams,
    SourceKind,
    check_text,
)
from ragspec.numerics.noise import random_seed, row_seed
from ragspec.rag.edits import Edit, word_edits
from ragspec.rag.manuscript import DEFAULTS, Manuscript
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.stages import Stage, Stages
from ragspec.rag.steps import EngineLike, completions
from ragspec.retrieval.chunking import sentences
from ragspec.speculation import Speculation, SpeculationGiven

__all__ = ["DEFAULTS", "Correction", "GrammarCorrector", "Manuscript"]

Span = tuple[int, int]

_LONGEST_SHARE = 0.75
"""A sentence may have this part of the tokens that its correction may have."""

_WHITE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Correction:
    """`applied(text, edits) == corrected`. `unfinished`: spans of `text` left as they are because their correction had no end.

    `stats` add up those of all sentences. Units: characters of `text`.
    """

    id: str
    text: str
    corrected: str
    edits: tuple[Edit, ...]
    unfinished: tuple[Span, ...]
    stats: GenerationStats
    prompt_s: float

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.unfinished else FinishReason.STOP


class _Ready(NamedTuple):
    """A manuscript as the engine is asked about it: one request for each of the spans."""

    manuscript: Manuscript
    spans: tuple[Span, ...]
    requests: tuple[Request, ...]
    prompt_s: float


class GrammarCorrector:
    """Takes any engine that a `Pipeline` takes; does not close it. For any thread; an event loop of its own or a shared one."""

    def __init__(self, engine: EngineLike, prompts: PromptBuilder, *, max_in_flight: int = 64) -> None:
        """`max_in_flight`: sentences that the engine has at once, of all texts corrected in one event loop."""
        self._engine, self._prompts = engine, prompts
        self._max_in_flight = max_in_flight
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        around = len(prompts.grammar_prompt("a").prompt_ids)
        self._most_tokens = max(1, (prompts.max_context_tokens - around) // 2)  # of a sentence and of its correction

    def correct(self, text: str, params: SamplingParams = DEFAULTS, **options: Any) -> Correction:
        """One text. Options and errors as in `correct_many`."""
        return self.correct_many([text], params, **options)[0]

    def correct_many(
        self,
        texts: Sequence[str],
        params: SamplingParams = DEFAULTS,
        *,
        tenant: str = "",
        speculation: SpeculationGiven = True,
    ) -> list[Correction]:
        """All at once, their sentences batched in the engine.

        Raises: InputError or PromptTooLong for the first text that cannot be corrected, and then none is; EngineError.
        """
        drafting = Speculation.of(speculation)
        ready = [self._ready(Manuscript(uuid.uuid4().hex, text, params, tenant, drafting)) for text in texts]
        written = iter(self._engine.generate([request for each in ready for request in each.requests]))
        return [_correction(each, [next(written) for _ in each.requests]) for each in ready]

    async def corrected(self, manuscript: Manuscript) -> Correction:
        """One text, in an event loop; giving up the wait cancels it. Raises: InputError, PromptTooLong, EngineError."""
        ready = await asyncio.to_thread(self._ready, manuscript)
        return await asyncio.to_thread(_correction, ready, await self._written(ready))

    def stages(self, max_batch: int = 16, max_waiting: int = 32) -> Stages:
        """For many texts, as `Manuscript`s: each becomes its `Correction` or its error, as they finish."""
        return Stages(
            (
                Stage("split", lambda manuscripts: [self._ready(each) for each in manuscripts], max_batch),
                Stage("generate", self._write, num_workers=self._max_in_flight),
                Stage("edit", lambda written: [_correction(*each) for each in written], max_batch),
            ),
            max_waiting=max_waiting,
        )

    def _ready(self, manuscript: Manuscript) -> _Ready:
        """Raises: InputError, PromptTooLong."""
        begin, params = time.perf_counter(), manuscript.params
        seed = random_seed() if params.seed is None else params.seed
        most = min(params.max_tokens, self._most_tokens)
        spans = self._spans(check_text(manuscript.text, "the text"), max(1, int(_LONGEST_SHARE * most)))
        seeded = replace(manuscript, params=replace(params, max_tokens=most, seed=seed))
        requests = tuple(self._request(seeded, number, span) for number, span in enumerate(spans))
        return _Ready(seeded, tuple(spans), requests, time.perf_counter() - begin)

    def _request(self, manuscript: Manuscript, number: int, span: Span) -> Request:
        sentence, params = manuscript.text[slice(*span)], manuscript.params
        assert params.seed is not None
        return Request(
            f"{manuscript.id}/{number}",
            self._prompts.grammar_prompt(sentence, params.max_tokens).prompt_ids,
            replace(params, seed=row_seed(params.seed, str(number))),
            (CopySource(SourceKind.INPUT, sentence),),
            manuscript.tenant,
            manuscript.speculation,
        )

    def _spans(self, text: str, most_tokens: int) -> list[Span]:
        """Sentences that hold a letter, in parts of at most `most_tokens` tokens; a single character stays whole."""
        fitting: list[Span] = []
        spans = [span for span in sentences(text) if any(map(str.isalpha, text[slice(*span)]))]
        while spans:
            encoded = self._prompts.tokenizer([text[slice(*span)] for span in spans], add_special_tokens=False)
            fits = [
                len(ids) <= most_tokens or end - start == 1
                for ids, (start, end) in zip(encoded["input_ids"], spans, strict=True)
            ]
            fitting += itertools.compress(spans, fits)
            spans = [half for span, fit in zip(spans, fits, strict=True) if not fit for half in _halves(text, *span)]
        return sorted(fitting)

    async def _write(self, ready: Sequence[_Ready]) -> list[tuple[_Ready, list[Completion]]]:
        return [(each, await self._written(each)) for each in ready]

    async def _written(self, ready: _Ready) -> list[Completion]:
        """Why one fails all: a text with a sentence left out in silence would be wrong."""
        tasks = [asyncio.ensure_future(self._completion(request)) for request in ready.requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _completion(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        async with self._rooms.setdefault(loop, asyncio.Semaphore(self._max_in_flight)):
            (completion,) = await completions(self._engine, request)
            return completion


def _halves(text: str, start: int, end: int) -> Iterator[Span]:
    """Both sides of the white space nearest to the middle, else of the middle itself."""
    middle = (start + end) // 2
    breaks = [match.span() for match in _WHITE.finditer(text, start, end)]
    left, right = min(breaks, key=lambda span: abs(span[0] - middle), default=(middle, middle))
    yield start, left
    yield right, end


def _correction(ready: _Ready, written: Sequence[Completion]) -> Correction:
    text, stats = ready.manuscript.text, GenerationStats()
    parts: list[str] = []
    edits: list[Edit] = []
    unfinished: list[Span] = []
    at = 0
    for (start, end), completion in zip(ready.spans, written, strict=True):
        stats.add(completion.stats)
        sentence, better = text[start:end], completion.text.strip()
        if completion.finish_reason is not FinishReason.STOP or not better:
            unfinished.append((start, end))
            better = sentence
        edits += word_edits(sentence, better, start)
        parts += [text[at:start], better]
        at = end
    stats.seed = ready.manuscript.params.seed or 0
    corrected = "".join([*parts, text[at:]])
    return Correction(ready.manuscript.id, text, corrected, tuple(edits), tuple(unfinished), stats, ready.prompt_s)
