"""A device without a model: forwards take no time, count the seconds of a real device, and the next tokens come from a table.

The engine, its scheduler, planner and drafters run on it unchanged, so the processor time of the engine's thread between two
forwards is measured without a GPU and without weights. No configuration names it.

    >>> target = StubTarget(read_devices()["8 B, H200"], copyable=0.9, num_kv_slots=65_536)
    >>> target.clock.clear(num_sequences=len(requests))
    >>> with stub_engine(target, EngineConfig()) as engine: engine.generate(requests)
    >>> target.clock.host_s / target.clock.num_steps

As a program it generates a few tokens, which compiles all that plans, drafts and samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragspec.config import DraftingConfig, EngineConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.loading import make_drafters
from ragspec.engine.target import Target
from ragspec.numerics.attention import AttentionMetadata, Ints
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.ranks import ONE_RANK
from ragspec.speculation import Speculation, SpeculationGiven
from ragspec.verification.sampling import compile_samplers

_NUM_WORDS, _BLOCK = 32_768, 256
"""The lower half of the words stands in sources, a block in each request's; word w + 1 mostly follows word w."""
_DEVICES = Path(__file__).with_name("stub_devices.json")
_NUM_PROMPT = 32
_ROWS, _CONTEXTS = (1, 64, 4096), (128, 8192)
_HASH = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


class StubDevice(NamedTuple):
    """A forward takes `forward_s + row_s * rows + context_s * positions of the longest context` seconds."""

    forward_s: float
    row_s: float
    context_s: float

    def seconds(self, num_rows: int, context: int) -> float:
        return self.forward_s + self.row_s * num_rows + self.context_s * context


def read_devices(path: Path = _DEVICES) -> dict[str, StubDevice]:
    """The devices of a file, by name."""
    return {name: StubDevice(**fields) for name, fields in json.loads(path.read_text(encoding="utf-8")).items()}


class StepClock:
    """Sums over the steps in which `num_sequences` sequences decode, or over all steps. Host time counts where the device waits
    for it.

    Why no other steps: a batch whose sequences all have one length ends at once without drafts, and with drafts one by one.
    `num_tokens`: tokens of these sequences. `host_s`: processor seconds of the engine's thread between two forwards, and of work
    beside a forward if it takes longer.
    """

    def __init__(self) -> None:
        self.clear(0)

    def clear(self, num_sequences: int | None) -> None:
        """Begin anew; None: all steps count."""
        self._num_sequences = num_sequences
        self.num_steps = self.num_tokens = 0
        self.host_s = self.device_s = 0.0
        self._is_counted, self._num_decided = False, 0  # of the last forward
        self._idle_from = self._launched = self._forward_s = self._late_s = 0.0

    def launch(self, metadata: AttentionMetadata, num_logits: int, seconds: float, begun: float) -> None:
        """A forward begins; `begun`: the thread's processor seconds when the engine asked for it."""
        first_rows = metadata.row_start[:-1]
        num_rows, num_decided = len(metadata.slots), int(metadata.positions[first_rows].sum())
        follows, decodes = self._is_counted, num_rows == num_logits
        self._is_counted = self._num_sequences is None or (decodes and len(first_rows) == self._num_sequences)
        if follows and self._is_counted:
            self.host_s += begun - self._idle_from + self._late_s
            self.device_s += self._forward_s
            self.num_steps += 1
            self.num_tokens += num_decided - self._num_decided
        self._num_decided = num_decided
        self._forward_s, self._launched = seconds, time.thread_time()

    def land(self) -> None:
        """The engine wants the forward's tokens."""
        self._idle_from = time.thread_time()
        self._late_s = max(0.0, self._idle_from - self._launched - self._forward_s)


class _StubLogits:
    """Rows whose tokens are known."""

    def __init__(self, tokens: Ints, clock: StepClock) -> None:
        self._tokens, self._clock = tokens, clock

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, rows: slice) -> _StubLogits:
        return _StubLogits(self._tokens[rows], self._clock)

    def sample(self, draws: Sequence[object]) -> list[int]:
        tokens: list[int] = self._tokens.tolist()
        self._clock.land()
        return tokens


class _StubBackend:
    name, runs_ahead = "stub", True

    def wait(self) -> None:
        """Nothing runs beside."""


class StubTarget:
    """Has the parts of a `Target` that an engine with the default drafters uses. `copyable`: the share of tokens that follow the
    request's source; 0: no token stands in a source."""

    eos_ids = ()
    vocab_size = _NUM_WORDS
    max_context_tokens = 8192
    ranks = ONE_RANK
    backend = _StubBackend()

    def __init__(self, device: StubDevice, copyable: float, num_kv_slots: int) -> None:
        self._device, self._copyable, self.clock = device, copyable, StepClock()
        self.pool = KvPool([], num_kv_slots)
        words = {_word(n): n for n in range(_NUM_WORDS)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=_word(_NUM_WORDS - 1)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def forward_tapped(
        self, token_ids: Ints, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int]
    ) -> tuple[_StubLogits, dict[int, Any]]:
        begun = time.thread_time()
        tokens = self._following(token_ids[logit_rows], metadata.positions[logit_rows])
        context = int(metadata.positions.max()) + 1
        seconds = self._device.seconds(len(token_ids), context)
        self.clock.launch(metadata, len(logit_rows), seconds, begun)
        return _StubLogits(tokens, self.clock), {}

    def _following(self, tokens: Ints, positions: Ints) -> Ints:
        """The token after each token at its position. Shapes: int32 [W] each."""
        mixed = (tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64)
        for factor in _HASH:
            mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(factor)
        chance, word = (mixed >> np.uint64(40)) / 2.0**24, (mixed % np.uint64(_NUM_WORDS // 2)).astype(np.int32)
        if not self._copyable:
            return word + _NUM_WORDS // 2
        first = tokens // _BLOCK * _BLOCK
        jumped, step = word % _BLOCK, (tokens - first + 1) % _BLOCK
        return (first + np.where(chance < self._copyable, step, jumped)).astype(np.int32)

    def costs(self) -> CostTable:
        seconds = {c: [self._device.seconds(rows, c) for rows in _ROWS] for c in _CONTEXTS}
        return _KnownCosts(seconds, _ROWS)

    def heartbeat(self) -> None:
        """There are no other ranks."""

    def check_health(self, num_rows: int, num_logits: int) -> None:
        """A table is never lost."""

    def close(self) -> None:
        """Nothing is held."""


class _KnownCosts(CostTable):
    """Seconds that no step teaches, so that every run drafts the same trees."""

    def refine(self, num_rows: int, context: int, seconds: float) -> None:
        """The seconds of the host's clock say nothing about the device."""


def _word(number: int) -> str:
    """A word of three to four letters with a space before it, as the tokenizer writes it."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return f"Ġ{letters}"


def stub_engine(target: StubTarget, config: EngineConfig) -> Engine:
    """An engine with the default drafters and budget of nodes."""
    stub, drafting = cast(Target, target), DraftingConfig()
    planner = Planner(make_drafters(stub, drafting), target.costs(), drafting.tree.max_nodes, target.vocab_size)
    return Engine(stub, planner, Admission(stub, "stub"), config)


def stub_requests(
    count: int, max_tokens: Sequence[int], temperature: float, speculation: SpeculationGiven, salt: str = ""
) -> list[Request]:
    """Requests with two sources each, a passage in order and the same words in another order, which makes branches.

    `max_tokens`: lengths that requests take in turn. `salt`: with it begins the name of each request's own tenant.
    """
    requests, rng = list[Request](), np.random.default_rng(0)
    for number in range(count):
        first = number % (_NUM_WORDS // 2 // _BLOCK) * _BLOCK
        orders = np.arange(_BLOCK), rng.permutation(_BLOCK)
        texts = ["".join(_word(first + n) for n in order).replace("Ġ", " ")[1:] for order in orders]
        sources = tuple(CopySource(SourceKind.PASSAGE, text, f"{n}") for n, text in enumerate(texts))
        prompt = tuple((first + rng.integers(0, _BLOCK, _NUM_PROMPT)).tolist())
        length = max_tokens[number % len(max_tokens)]
        params = SamplingParams(max_tokens=length, temperature=temperature, seed=number)
        requests.append(Request(f"{number}", prompt, params, sources, f"{salt}{number}", Speculation.of(speculation)))
    return requests


if __name__ == "__main__":
    compile_samplers()
    with stub_engine(StubTarget(StubDevice(1e-3, 1e-5, 0.0), 0.9, 4096), EngineConfig()) as engine:
        engine.generate(stub_requests(2, [16], 0.0, speculation=True))
