"""What the tests of pipelines ask, and of which documents; the fixtures are in tests/rag/conftest.py."""

from contextlib import aclosing
from typing import Any

from forced_sampler import ForcedSampler
from tiny_target import tiny_engine

from ragspec.core import Document, Request, SamplingParams
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.verification.sampling import KeyedSampler, Sampler

CONTEXT = 1024
DOCUMENTS = (
    Document(
        "mill", "The old mill was built in 1874 by the people of the valley. It grinds no corn today.", "The mill"
    ),
    Document("river", "The river rises in the northern hills. It flows past the mill to the sea.", "The river"),
    Document("bridge", "A stone bridge was rebuilt after the flood of 1921. Carts may not cross it.", "The bridge"),
)
QUESTION = "When was the old mill built?"
QUOTE = '"The old mill was built in 1874 by the people of the valley." [1]'
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
QUOTING = SamplingParams(max_tokens=64)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)


class Switch:
    """A sampler factory: forces `answer` where one is set, else decides as always."""

    def __init__(self, target: Target) -> None:
        self.target, self.answer = target, ""

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        if self.answer:
            ids = self.target.tokenizer(self.answer, add_special_tokens=False)["input_ids"]
            return ForcedSampler([*ids, self.target.eos_ids[0]])
        return KeyedSampler(request, seed, choice, self.target.eos_ids, [])


def copying_engine(target: Target, switch: Switch) -> Engine:
    """Copies from passages, and decides as the switch says."""
    drafters = [CopyDrafter(target.tokenizer, target.eos_ids)]
    return tiny_engine(target, drafters, 4096, 16, make_sampler=switch, max_num_batched_tokens=128)


class Recording:
    """An engine that keeps what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.requests = engine, list[Request]()

    def generate(self, requests: Any) -> Any:
        self.requests += requests
        return self._engine.generate(requests)

    def stream(self, request: Request) -> Any:
        self.requests.append(request)
        return self._engine.stream(request)

    def purge(self, salt: str) -> None: ...

    def close(self) -> None: ...


class Counting(Recording):
    """An engine that counts the streams that are open at once."""

    most = now = 0

    async def stream(self, request: Request) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        async with aclosing(self._engine.stream(request)) as deltas:
            async for delta in deltas:
                yield delta
        self.now -= 1
