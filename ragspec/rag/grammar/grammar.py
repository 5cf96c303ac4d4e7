"""Texts without their mistakes: each sentence is corrected by itself, with itself as the draft.

    >>> with Grammar.from_config(load_config("ragspec.yaml")) as grammar:
    ...     correction = grammar.correct("He go to school.  It rain.")
    >>> correction.corrected, correction.edits

What stands between sentences stays as it is, character for character, and so do white space, markup and code inside them. A
sentence that is too long for the target is corrected in parts; what holds no letter is not asked about; a correction that did not
come to its end is not made, nor is one that a guard withholds.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from ragspec.config import PipelineConfig
from ragspec.core import Completion, CopySource, Request, SamplingParams, SourceKind, check_text
from ragspec.engine.loading import load_engine
from ragspec.numerics.noise import random_seed, row_seed
from ragspec.rag.grammar.correction import Correction, Prepared, correction_of
from ragspec.rag.grammar.correction_request import DEFAULTS, Manuscript
from ragspec.rag.grammar.edit_filters import CAREFUL, Guard
from ragspec.rag.grammar.edit_kinds import Classify
from ragspec.rag.grammar.errant_kinds import classifier
from ragspec.rag.grammar.markup import MarkedText, TextPart
from ragspec.rag.grammar.sentence_split import Sentence, cut, one_line
from ragspec.rag.pipeline_stages import Stage, Stages
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, completions
from ragspec.speculation import Speculation, SpeculationGiven

__all__ = ["DEFAULTS", "Correction", "Grammar", "Guard", "Manuscript", "TextPart"]

_LONGEST_SHARE = 0.75
"""A sentence may have this part of the tokens that its correction may have."""
_SPARE_TOKENS = 16


class Grammar:
    """Takes any engine that a `Pipeline` takes. For any thread; an event loop of its own or a shared one."""

    def __init__(
        self,
        engine: EngineLike,
        prompts: PromptBuilder,
        *,
        max_in_flight: int = 64,
        classify: Classify | None = None,
    ) -> None:
        """`max_in_flight`: sentences that the engine has at once, of all texts corrected in one event loop. `classify`: who names
        the kinds of edits; None: ERRANT where it is installed, else words alone."""
        self._engine, self._prompts = engine, prompts
        self._classify = classify or classifier()
        self._max_in_flight = max_in_flight
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        around = len(prompts.grammar_prompt("a").prompt_ids)
        self._most_tokens = max(1, (prompts.max_context_tokens - around) // 2)  # of a sentence and of its correction

    @classmethod
    def from_config(cls, config: PipelineConfig | None = None) -> Self:
        """Load the target, test the numerics, measure the costs; no index is needed. Raises: ConfigError, ModelError."""
        config = config or PipelineConfig()
        engine = load_engine(config.target, config.engine, config.drafting)
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        return cls(engine, prompts, max_in_flight=config.engine.max_running)

    def correct(self, text: str | Sequence[TextPart], params: SamplingParams = DEFAULTS, **options: Any) -> Correction:
        """One text. Options and errors as in `correct_many`."""
        return self.correct_many([text], params, **options)[0]

    def correct_many(
        self,
        texts: Sequence[str | Sequence[TextPart]],
        params: SamplingParams = DEFAULTS,
        *,
        tenant: str = "",
        speculation: SpeculationGiven = True,
        guard: Guard = CAREFUL,
    ) -> list[Correction]:
        """All at once, their sentences batched in the engine. A text may come in parts, some of them markup.

        Raises: InputError or PromptTooLong for the first text that cannot be corrected, and then none is; EngineError.
        """
        drafting = Speculation.of(speculation)
        ready = [self.prepared(_manuscript(text, params, tenant, drafting, guard)) for text in texts]
        written = iter(self._engine.generate([request for each in ready for request in each.requests]))
        return [correction_of(each, [next(written) for _ in each.requests], self._classify) for each in ready]

    async def corrected(self, manuscript: Manuscript, timeout_s: float | None = None) -> Correction:
        """One text, in an event loop; giving up the wait cancels it. What is not written after `timeout_s` is left unfinished.

        Raises: InputError, PromptTooLong, EngineError.
        """
        return await self.completed(await asyncio.to_thread(self.prepared, manuscript), timeout_s)

    def prepared(self, manuscript: Manuscript) -> Prepared:
        """The first step of `corrected`, which computes: for a thread. Raises: InputError, PromptTooLong."""
        begin, params = time.perf_counter(), manuscript.params
        if not isinstance(manuscript.text, str) or manuscript.text.strip():
            check_text(manuscript.text, "the text")
        seed = random_seed() if params.seed is None else params.seed
        most = min(params.max_tokens, self._most_tokens)
        marked = manuscript.marked()
        places = cut(marked, self._prompts.plain_ids, max(1, int(_LONGEST_SHARE * most)))
        seeded = replace(manuscript, params=replace(params, max_tokens=most, seed=seed))
        requests = tuple(self._request(seeded, number, marked, each) for number, each in enumerate(places))
        return Prepared(seeded, marked, tuple(places), requests, time.perf_counter() - begin)

    async def completed(self, ready: Prepared, timeout_s: float | None = None) -> Correction:
        """The other steps. Raises: EngineError."""
        return await asyncio.to_thread(correction_of, ready, await self._written(ready, timeout_s), self._classify)

    def stages(self, max_batch: int = 16, max_waiting: int = 32) -> Stages:
        """For many texts, as `Manuscript`s: each becomes its `Correction` or its error, as they finish."""
        return Stages(
            (
                Stage("split", lambda manuscripts: [self.prepared(each) for each in manuscripts], max_batch),
                Stage("generate", self._write, num_workers=self._max_in_flight),
                Stage(
                    "edit", lambda written: [correction_of(one, own, self._classify) for one, own in written], max_batch
                ),
            ),
            max_waiting=max_waiting,
        )

    def close(self) -> None:
        """Close the engine, for whoever has no other use for it."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, manuscript: Manuscript, number: int, marked: MarkedText, place: Sentence) -> Request:
        """Why fewer tokens than allowed: a correction that goes on for twice its sentence has lost its way."""
        sentence, params = one_line(marked.plain[place.start : place.end]), manuscript.params
        assert params.seed is not None
        most = min(params.max_tokens, 2 * place.num_tokens + _SPARE_TOKENS)
        return Request(
            f"{manuscript.id}/{number}",
            self._prompts.grammar_prompt(sentence, most).prompt_ids,
            replace(params, max_tokens=most, seed=row_seed(params.seed, str(number))),
            (CopySource(SourceKind.INPUT, sentence),),
            manuscript.tenant,
            manuscript.speculation,
        )

    async def _write(self, ready: Sequence[Prepared]) -> list[tuple[Prepared, list[Completion | None]]]:
        return [(each, await self._written(each)) for each in ready]

    async def _written(self, ready: Prepared, timeout_s: float | None = None) -> list[Completion | None]:
        """Why one that fails fails all: a text with a sentence left out in silence would be wrong."""
        share = asyncio.Semaphore(max(1, self._max_in_flight // 2))  # Why: a book leaves room for a line
        tasks = [asyncio.ensure_future(self._completion(request, share)) for request in ready.requests]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # Why all: of several that failed each is heard
        return [None if task.cancelled() else task.result() for task in tasks]

    async def _completion(self, request: Request, share: asyncio.Semaphore) -> Completion:
        loop = asyncio.get_running_loop()
        async with share, self._rooms.setdefault(loop, asyncio.Semaphore(self._max_in_flight)):
            (completion,) = await completions(self._engine, request)
            return completion


def _manuscript(
    text: str | Sequence[TextPart], params: SamplingParams, tenant: str, drafting: Speculation, guard: Guard
) -> Manuscript:
    whole = text if isinstance(text, str) else "".join(part.text for part in text)
    parts = None if isinstance(text, str) else tuple(text)
    return Manuscript(uuid.uuid4().hex, whole, params, tenant, drafting, guard, parts)
