"""Grammar correction: each sentence is corrected separately, with the sentence itself as the draft.

    >>> with Grammar.from_config(load_config("ragspec.yaml")) as grammar:
    ...     correction = grammar.correct("He go to school.  It rain.")
    >>> correction.corrected, correction.edits

Text between sentences, white space, markup and code never change, and no text in another language than English. A sentence that
is too long for the target is corrected in parts. A sentence without letters is not sent, nor a single word beside sentences. A
correction that reaches no end of the sentence is discarded, and an edit that the edit filter withholds is not applied.
"""

import asyncio
import re
import time
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ragspec.config import PipelineConfig, settings_of
from ragspec.core import Completion, CopySource, Request, SamplingParams, Say, SourceKind, check_text, log_progress
from ragspec.engine.loading import load_engine
from ragspec.numerics.noise import random_seed, row_seed
from ragspec.rag.grammar.correction import (
    DEFAULT_PARAMS,
    Correction,
    CorrectionRequest,
    PreparedCorrection,
    build_correction,
)
from ragspec.rag.grammar.edit_filters import DEFAULT_FILTER, EditFilter
from ragspec.rag.grammar.markup import MarkedText, SentenceSpan, TextPart, one_line, split_sentences
from ragspec.rag.languages import ENGLISH, guess_language
from ragspec.rag.pipeline_stages import PipelineStage, StagedPipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Closeable, EngineLike, collect_completions
from ragspec.speculation import Speculation, SpeculationGiven

_Generated = tuple[PreparedCorrection, list[Completion | None]]
_MAX_SENTENCE_SHARE = 0.75
"""Tokens of a sentence at most, as a share of the tokens its correction may have."""
_SPARE_TOKENS = 16
_MAX_CHARS = 100_000
"""Of a text whose language is guessed."""
_PARAGRAPH = re.compile(r"(?:[^\n]++\n?)++")
KNOWN_MISTAKES = (
    "He go to school every day. She have a old car. They was late for the meeting. This are my books. We has finished the work. "
    "The old man come home at nine. The children plays in the garden. I has two cats."
)
"""Sentences that show whether a target corrects at all."""


class Grammar(Closeable):
    """Accepts any engine that a `Pipeline` accepts. Safe to call from several threads and event loops."""

    def __init__(self, engine: EngineLike, prompts: PromptBuilder, *, max_in_flight: int = 64) -> None:
        """`max_in_flight`: engine requests at a time, over all texts corrected in one event loop."""
        self._engine, self._prompts = engine, prompts
        self._max_in_flight = max_in_flight
        self._semaphores = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        overhead = len(prompts.grammar_prompt("a").prompt_ids)
        self._max_tokens = max(1, (prompts.max_context_tokens - overhead) // 2)  # of a sentence, and of its correction

    @classmethod
    def from_config(cls, config: PipelineConfig | str | Path | None = None, say: Say = log_progress) -> Self:
        """Load the target, test the numerics and measure the costs; no index is opened. `config`: settings, or a YAML file.

        Raises: ConfigError, ModelError.
        """
        config = settings_of(config)
        engine = load_engine(config.target, config.engine, config.drafting, say=say)
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens, config.wording)
        return cls(engine, prompts, max_in_flight=config.engine.max_num_seqs)

    def correct(
        self, text: str | Sequence[TextPart], params: SamplingParams = DEFAULT_PARAMS, **options: Any
    ) -> Correction:
        """One text. Options and errors as in `correct_many`."""
        return self.correct_many([text], params, **options)[0]

    def correct_many(
        self,
        texts: Sequence[str | Sequence[TextPart]],
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        tenant: str = "",
        speculation: SpeculationGiven = True,
        edit_filter: EditFilter = DEFAULT_FILTER,
    ) -> list[Correction]:
        """Correct all texts, their sentences batched in the engine. A text may be given as parts, some of them markup.

        Raises: InputError or PromptTooLong for the first text that cannot be corrected, before any is; EngineError.
        """
        drafting = Speculation.of(speculation)
        prepared = []
        for text in texts:
            parts = None if isinstance(text, str) else tuple(text)
            whole = text if isinstance(text, str) else "".join(part.text for part in text)
            request = CorrectionRequest(uuid.uuid4().hex, whole, params, tenant, drafting, edit_filter, parts)
            prepared.append(self.prepare(request))
        completions = iter(self._engine.generate([request for each in prepared for request in each.requests]))
        return [build_correction(each, [next(completions) for _ in each.requests]) for each in prepared]

    def prepare(self, request: CorrectionRequest) -> PreparedCorrection:
        """Split a text and build its engine requests; blocks. Raises: InputError, PromptTooLong."""
        begin, params = time.perf_counter(), request.params
        if not isinstance(request.text, str) or request.text.strip():
            check_text(request.text, "the text")
        seed = random_seed() if params.seed is None else params.seed
        max_tokens = min(params.max_tokens, self._max_tokens)
        keeps = request.edit_filter.structure
        if request.parts is None:
            whole = MarkedText.read(request.text, has_structure=keeps)
        else:
            whole = MarkedText(request.parts, has_structure=keeps)
        other_language = _other_language(whole.plain) if keeps else ""
        marked = MarkedText([TextPart(request.text, is_markup=True)]) if other_language else whole
        longest = max(1, int(_MAX_SENTENCE_SHARE * max_tokens))
        sentences = split_sentences(marked, self._prompts.plain_ids, longest, single_words=not keeps)
        if keeps:
            sentences = _english(marked.plain, sentences)
        seeded = replace(request, params=replace(params, max_tokens=max_tokens, seed=seed))
        requests = tuple(self._request(seeded, number, marked, each) for number, each in enumerate(sentences))
        prompt_s = time.perf_counter() - begin
        return PreparedCorrection(seeded, marked, tuple(sentences), requests, prompt_s, other_language)

    async def complete(self, prepared: PreparedCorrection, timeout_s: float | None = None) -> Correction:
        """Generate and build the correction of a prepared text; cancelling the call cancels its requests.

        Sentences not corrected within `timeout_s` stay unfinished. Raises: EngineError.
        """
        completions = await self._generate(prepared, timeout_s)
        return await asyncio.to_thread(build_correction, prepared, completions)

    async def corrects(self) -> bool:
        """Whether the target edits at least half of `KNOWN_MISTAKES` at temperature 0. A chat model may repeat a wrong sentence
        unchanged. Raises: EngineError."""
        params = SamplingParams(0.0, max_tokens=DEFAULT_PARAMS.max_tokens, seed=0)
        request = CorrectionRequest(uuid.uuid4().hex, KNOWN_MISTAKES, params)
        found = await self.complete(await asyncio.to_thread(self.prepare, request))
        num_edited = sum(any(a <= edit.start < b for edit in found.edits) for a, b in found.sentences)
        return 2 * num_edited >= len(found.sentences)

    def stages(self, max_batch: int = 16, max_waiting: int = 32) -> StagedPipeline:
        """Stages that turn many `CorrectionRequest`s into `Correction`s or errors, in the order in which they finish."""

        def split(requests: Sequence[CorrectionRequest]) -> list[PreparedCorrection]:
            return [self.prepare(request) for request in requests]

        async def generate(batch: Sequence[PreparedCorrection]) -> list[_Generated]:
            return [(prepared, await self._generate(prepared)) for prepared in batch]

        def edit(generated: Sequence[_Generated]) -> list[Correction]:
            return [build_correction(*each) for each in generated]

        stages = (
            PipelineStage("split", split, max_batch),
            PipelineStage("generate", generate, num_workers=self._max_in_flight),
            PipelineStage("edit", edit, max_batch),
        )
        return StagedPipeline(stages, max_waiting=max_waiting)

    def close(self) -> None:
        """Close the engine. Only for a caller that has no other use for it."""
        self._engine.close()

    def _request(self, request: CorrectionRequest, number: int, marked: MarkedText, span: SentenceSpan) -> Request:
        """Why the token limit: a correction of more than twice the sentence's length has gone wrong."""
        sentence, params = one_line(marked.plain[span.start : span.end]), request.params
        assert params.seed is not None
        max_tokens = min(params.max_tokens, 2 * span.num_tokens + _SPARE_TOKENS)
        return Request(
            f"{request.id}/{number}",
            self._prompts.grammar_prompt(sentence, max_tokens).prompt_ids,
            replace(params, max_tokens=max_tokens, seed=row_seed(params.seed, str(number))),
            (CopySource(SourceKind.INPUT, sentence),),
            request.tenant,
            request.speculation,
        )

    async def _generate(self, prepared: PreparedCorrection, timeout_s: float | None = None) -> list[Completion | None]:
        """One completion per sentence; None: not finished in time. Raises: the first error of any sentence."""
        half = max(1, self._max_in_flight // 2)  # Why half: a long text must not block short ones
        own_limit = asyncio.Semaphore(half)
        tasks = [asyncio.ensure_future(self._completion(request, own_limit)) for request in prepared.requests]
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
            await asyncio.gather(*tasks, return_exceptions=True)  # Why: asyncio logs exceptions that nobody retrieves
        return [None if task.cancelled() else task.result() for task in tasks]

    async def _completion(self, request: Request, own_limit: asyncio.Semaphore) -> Completion:
        loop = asyncio.get_running_loop()
        async with own_limit, self._semaphores.setdefault(loop, asyncio.Semaphore(self._max_in_flight)):
            (completion,) = await collect_completions(self._engine, request)
            return completion


def _english(text: str, spans: Sequence[SentenceSpan]) -> list[SentenceSpan]:
    """The sentences outside paragraphs in another language."""
    others = [match.span() for match in _PARAGRAPH.finditer(text) if _other_language(match.group())]
    before = [bisect_right(others, (span.start, len(text))) - 1 for span in spans]
    return [span for span, at in zip(spans, before, strict=True) if at < 0 or others[at][1] <= span.start]


def _other_language(text: str) -> str:
    """The name of the language that a text is in, if it surely is not English.

    Each word counts once, short ones first, so that neither names nor the first paragraph decide.
    """
    words = dict.fromkeys(word.casefold() for word in re.findall(r"(?<![^\W_])[^\W\d_]{2,}", text[:_MAX_CHARS]))
    found = guess_language(" ".join(sorted(words, key=len)))
    return "" if found.code == ENGLISH else found.name
