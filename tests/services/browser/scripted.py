"""A real service whose answers are known: its documents are chosen, and what the target says to a known question is forced.

Everything else runs as in production: retrieval, prompts, drafts, citations, streaming, the guard. A question that the script
does not know is answered by the random tiny target itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from forced_sampler import ForcedSampler
from letter_encoder import LetterEncoder
from numpy.typing import NDArray
from service_parts import Service, served
from tiny_target import Free

from ragspec.config import EngineConfig
from ragspec.core import Document, Request
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.retrieval.retriever import build_index
from ragspec.verification.sampling import KeyedSampler, Sampler

CONTEXT, KV_SLOTS = 4096, 16_384
SCRIPT_TAG = "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
DOCUMENTS = (
    Document(
        "mill",
        "The old mill was built in 1874 by the people of the valley. It grinds no corn today. 🌾 Its wheel turns twice a minute.",
        "The old mill",
        "https://example.org/mill",
    ),
    Document(
        "river",
        "🏞️🏞️ The river rises in the northern hills. It flows past the old mill to the sea.",
        "The river",
        "notes/river.md",
    ),
    Document(
        "trap",
        f"{SCRIPT_TAG} The trap was set in 1999 by nobody in particular.",
        f"Trap {SCRIPT_TAG}",
        "javascript:window.hit=3",
    ),
)

MILL = "When was the old mill built?"
MILL_QUOTES = ("The old mill was built in 1874 by the people of the valley.", "It flows past the old mill to the sea.")
MILL_ANSWER = f'It is old: "{MILL_QUOTES[0]}" [1] And of the river: "{MILL_QUOTES[1]}" [2] That is all.'
EMOJI = "Which wheel turns at the mill 🎡?"
EMOJI_QUOTES = ("🌾 Its wheel turns twice a minute.", "It grinds no corn today.")
EMOJI_ANSWER = f'🎉👩‍🌾 Yes: "{EMOJI_QUOTES[0]}" 🎡 and 🎡 "{EMOJI_QUOTES[1]}" 👍'
TRAP = f"Who set the trap in 1999 {SCRIPT_TAG}?"
TRAP_ANSWER = f'{SCRIPT_TAG} "The trap was set in 1999 by nobody in particular." <b>bold</b> &amp;'
LONG = "What is there to say about rain?"
LONG_ANSWER = " ".join(f"Rain {n} falls on the mill and on the sea." for n in range(40))
ROW = "| Saw | 9 |"
PRICE, PRICE_ANSWER = "What does the saw cost?", f'"{ROW}" [1]'
CORRECTIONS = {
    "He go to school 😀 every day.": "He goes to school 😀 every day.",
    "She have a apple and an pear.": "She has an apple and a pear.",
    "Yesterday we was very happy.": "Yesterday we were very happy.",
    "Nothing is wrong here.": "Nothing is wrong here.",
}
_LAYOUT = "{}  {}\n\n{} {}"
MISTAKEN, CORRECTED = _LAYOUT.format(*CORRECTIONS), _LAYOUT.format(*CORRECTIONS.values())
ANSWERS = {
    MILL: MILL_ANSWER,
    EMOJI: EMOJI_ANSWER,
    TRAP: TRAP_ANSWER,
    LONG: LONG_ANSWER,
    PRICE: PRICE_ANSWER,
    **CORRECTIONS,
}


class Script:
    """A sampler factory. What is asked while it is `held` waits after so many tokens until the test lets it go on."""

    def __init__(self, target: Target) -> None:
        self._tokenizer, self._eos = target.tokenizer, target.eos_ids[0]
        self.go = threading.Event()
        self.go.set()
        self._hold_at = 0

    @contextmanager
    def held(self, at: int = 60) -> Iterator[threading.Event]:
        self.go.clear()
        self._hold_at = at
        try:
            yield self.go
        finally:
            self.go.set()

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        prompt = self._tokenizer.decode(request.prompt_ids)
        asked = max(ANSWERS, key=prompt.rfind)
        if asked not in prompt:
            return KeyedSampler(request, seed, choice, (self._eos,), [])
        ids = self._tokenizer(ANSWERS[asked], add_special_tokens=False)["input_ids"]
        return _Held(ForcedSampler([*ids, self._eos]), self.go, self._hold_at)


class _Held:
    def __init__(self, sampler: Sampler, go: threading.Event, at: int) -> None:
        self._sampler, self._go, self._left = sampler, go, at

    def __call__(self, logits: NDArray[np.float32]) -> int:
        self._left -= 1
        if self._left < 0:
            assert self._go.wait(60.0), "the test never let the answer go on"
        return self._sampler(logits)


@contextmanager
def scripted(folder: Path, target: Target, **settings: Any) -> Iterator[tuple[Service, Script]]:
    """A service over `DOCUMENTS`, and who decides its answers."""
    build_index(DOCUMENTS, folder / "index", LetterEncoder())
    target.reset_pool(KV_SLOTS)
    script = Script(target)
    planner = Planner([CopyDrafter(target.tokenizer, target.eos_ids)], Free(), 12, target.vocab_size)
    limits = EngineConfig(max_num_batched_tokens=256, max_kv_tokens=KV_SLOTS)
    engine = Engine(target, planner, Admission(target, "tiny", script), limits)
    with served(engine, folder, folder / "index", **{"service.model": "scripted", **settings}) as service:
        yield service, script
