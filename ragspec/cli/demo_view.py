"""The demo's screen output, and the two answers to each question that it compares.

Owns `AnswerPair`, their totals and their layout with rich. Never runs a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ragspec.cli.quotes import answer_text, print_sources
from ragspec.cli.terminal import note, safe
from ragspec.core import SamplingParams
from ragspec.rag.answer import Answer
from ragspec.training.stdlib_corpus import is_held_out

_INDENT = (0, 2, 0, 2)
_NEXT_STEPS = {
    "ragspec index add manual/ --index my-index": "index your own documents",
    'ragspec ask "..." --index my-index': "ask them",
    "ragspec demo --interactive": "ask this index your own questions",
    "ragspec doctor": "what this machine can do",
}


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """One question answered with speculation (`fast`) and without (`plain`)."""

    fast: Answer
    plain: Answer

    @property
    def abstained(self) -> bool:
        """Whether no passage was close to the question, so that the target was not asked."""
        return not self.fast.token_ids

    @property
    def identical(self) -> bool:
        return self.fast.token_ids == self.plain.token_ids


class Totals(NamedTuple):
    """Sums over all questions; `acceptance_length` is tokens a step with speculation.

    `num_fast_tokens`, `num_plain_tokens`: tokens decoded in `fast_decode_s` and `plain_decode_s`. Tokens of the prompt's own
    step, more than one where its drafts were right, count in neither.
    """

    num_questions: int
    num_identical: int
    num_tokens: int
    num_fast_tokens: int
    num_plain_tokens: int
    fast_decode_s: float
    plain_decode_s: float
    acceptance_length: float

    @classmethod
    def of(cls, pairs: Sequence[AnswerPair]) -> Totals:
        fast, plain = ([getattr(pair, name).stats.generation for pair in pairs] for name in ("fast", "plain"))
        num_tokens, num_steps = (sum(getattr(s, name) for s in fast) for name in ("num_output_tokens", "num_steps"))
        return cls(
            num_questions=len(pairs),
            num_identical=sum(pair.identical for pair in pairs),
            num_tokens=num_tokens,
            num_fast_tokens=sum(s.num_output_tokens - s.num_first_tokens for s in fast),
            num_plain_tokens=sum(s.num_output_tokens - s.num_first_tokens for s in plain),
            fast_decode_s=sum(s.decode_s for s in fast),
            plain_decode_s=sum(s.decode_s for s in plain),
            acceptance_length=num_tokens / num_steps if num_steps else 0.0,
        )

    @property
    def fast_tokens_per_s(self) -> float:
        return self.num_fast_tokens / self.fast_decode_s if self.fast_decode_s else 0.0

    @property
    def plain_tokens_per_s(self) -> float:
        return self.num_plain_tokens / self.plain_decode_s if self.plain_decode_s else 0.0

    @property
    def speedup(self) -> float:
        return self.fast_tokens_per_s / self.plain_tokens_per_s if self.plain_decode_s else 0.0


class DemoView:
    """Prints to one console, top to bottom."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self) -> None:
        heading = Text.assemble(
            ("ragspec demo", "bold"), ("  answers with quotes, drafted by copying, verified to the bit", "dim")
        )
        self._console.print(heading, Text())

    def question(self, question: str, label: str) -> None:
        self._section(label, Text(safe(question), "bold"))

    @contextmanager
    def live_answer(self) -> Iterator[Callable[[str], object]]:
        """Shows pieces of text as they come. Erases them at the end, so that `pair` can print the marked answer there."""
        text = Text()
        if not self._console.is_terminal:
            yield lambda _: None
            return
        with Live(Padding(text, _INDENT, expand=False), console=self._console, transient=True, refresh_per_second=30):
            yield lambda piece: text.append(safe(piece))

    def pair(self, pair: AnswerPair) -> None:
        fast, stats = pair.fast, pair.fast.stats.generation
        self._console.print(Padding(answer_text(fast), _INDENT, expand=False))
        if pair.abstained:
            self._console.print(Padding(Text("the target was not asked", "dim"), _INDENT, expand=False))
            return
        print_sources(self._console, fast)
        verdict = ("identical tokens", "green") if pair.identical else ("DIFFERENT TOKENS", "bold red")
        line = Text.assemble(
            "  ",
            (f"{stats.num_output_tokens} tokens, ", "dim"),
            (f"{fast.stats.acceptance_length:.1f} a step", "bold"),
            (f" · {fast.stats.tokens_per_s:.0f} tokens/s, plain {pair.plain.stats.tokens_per_s:.0f} · ", "dim"),
            verdict,
        )
        self._console.print(line)
        held_out = sorted({c.document_id for c in fast.citations if is_held_out(c.document_id)})
        if held_out:
            kept_out = Text(f"kept out of the adapter's training: {', '.join(held_out)}", "dim italic")
            self._console.print(Padding(kept_out, _INDENT, expand=False))
        if fast.dropped_passages:
            note(self._console, f"{len(fast.dropped_passages)} retrieved passages did not fit the context")

    def totals(self, totals: Totals, facts: Mapping[str, Any], params: SamplingParams) -> None:
        all_same = totals.num_identical == totals.num_questions
        outputs = f"{totals.num_identical} of {totals.num_questions} token for token identical"
        speed = f"{totals.fast_tokens_per_s:.0f} tokens/s, {totals.fast_decode_s:.2f} s"
        speculative = f"{speed}, {totals.acceptance_length:.1f} tokens a step"
        rows = {
            "decode speed-up": Text(f"{totals.speedup:.1f}x", "bold green"),
            "speculative": Text(speculative),
            "plain": Text(f"{totals.plain_tokens_per_s:.0f} tokens/s, {totals.plain_decode_s:.2f} s"),
            "outputs": Text(outputs, "green" if all_same else "bold red"),
            "sampling": Text(f"temperature {params.temperature:g}, seed {params.seed}"),
            "numerics": Text(f"bitwise self-test passed, fingerprint {facts['system_fingerprint']}"),
            "index": Text(f"generation {facts['index_generation']}"),
            "this run": Text(f"{facts['seconds']} s, peak memory {facts['peak_memory_mb']:,} MB"),
        }
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, value in rows.items():
            grid.add_row(name, value)
        self._section("measured here and now", grid)

    def next_steps(self) -> None:
        grid = Table.grid(padding=(0, 2))
        for command, purpose in _NEXT_STEPS.items():
            grid.add_row(Text(command, "cyan"), Text(purpose, "dim"))
        self._section("next", grid)

    def _section(self, heading: str, content: Text | Table) -> None:
        self._console.print()
        self._console.print(Rule(Text(heading, "dim"), align="left", style="dim"))
        self._console.print(Padding(content, _INDENT, expand=False))
