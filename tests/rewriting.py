"""An engine that writes what a function makes of each sentence, for tests of what becomes of corrections."""

from collections.abc import AsyncIterator, Callable, Sequence

from tiny_target import tiny_tokenizer

from ragspec.core import Completion, Delta, FinishReason, GenerationStats, Request
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.prompt import PromptBuilder

TOKENIZER = tiny_tokenizer()
Rewrite = Callable[[str], str | None]


class Rewriting:
    """`rewrite` gives the correction of a sentence; None: one that has no end."""

    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite, self.requests = rewrite, list[Request]()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        written = self.rewrite(request.sources[0].text)
        reason = FinishReason.LENGTH if written is None else FinishReason.STOP
        return Completion(request.id, 0, (), written or "cut", reason, (), GenerationStats(num_output_tokens=1))

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        (whole,) = self.generate([request])
        yield Delta(request.id, 0, (), whole.text, (), whole.finish_reason, whole.stats)

    def close(self) -> None: ...


def rewriting(rewrite: Rewrite, max_context_tokens: int = 1024) -> tuple[Grammar, Rewriting]:
    engine = Rewriting(rewrite)
    return Grammar(engine, PromptBuilder(TOKENIZER, max_context_tokens)), engine
