"""What the demo looks like. Knows rich and answers, measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ragspec.cli.demo_pairs import Pair, Totals
from ragspec.cli.quotes import answer_text, print_sources
from ragspec.cli.terminal import note, safe
from ragspec.core import SamplingParams
from ragspec.training.stdlib_corpus import is_held_out

_INDENT = (0, 2, 0, 2)


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
        self._console.print()
        self._console.print(Rule(Text(label, "dim"), align="left", style="dim"))
        self._console.print(Padding(Text(safe(question), "bold"), _INDENT, expand=False))

    @contextmanager
    def live_answer(self) -> Iterator[Callable[[str], None]]:
        """Shows pieces of text as they come; takes them away at the end, for the marked answer to stand there."""
        text = Text()
        if not self._console.is_terminal:
            yield lambda _: None
            return
        with Live(Padding(text, _INDENT, expand=False), console=self._console, transient=True, refresh_per_second=30):

            def show(piece: str) -> None:
                text.append(safe(piece))

            yield show

    def pair(self, pair: Pair) -> None:
        fast, stats = pair.fast, pair.fast.stats.generation
        self._console.print(Padding(answer_text(fast), _INDENT, expand=False))
        print_sources(self._console, fast)
        verdict = ("identical tokens", "green") if pair.identical else ("DIFFERENT TOKENS", "bold red")
        line = Text.assemble(
            "  ",
            (f"{stats.num_output_tokens} tokens in {stats.num_steps} steps", "dim"),
            (f" ({fast.stats.acceptance_length:.1f} a step)", "bold"),
            (f" · {_ms(pair.fast_decode_s)}, plain {_ms(pair.plain.stats.generation.decode_s)} · ", "dim"),
            verdict,
        )
        self._console.print(line)
        held_out = sorted({c.document_id for c in fast.citations if is_held_out(c.document_id)})
        if held_out:
            kept_out = Text(f"kept out of the reference target's training: {', '.join(held_out)}", "dim italic")
            self._console.print(Padding(kept_out, _INDENT, expand=False))
        if fast.dropped_passages:
            note(self._console, f"{len(fast.dropped_passages)} retrieved passages did not fit the context")

    def totals(self, totals: Totals, facts: Mapping[str, Any], params: SamplingParams) -> None:
        all_same = totals.num_identical == totals.num_questions
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        fast, plain = totals.tokens_per_s(totals.fast_decode_s), totals.tokens_per_s(totals.plain_decode_s)
        rows = (
            (
                "decode speed-up",
                Text(f"{totals.speedup:.1f}x", "bold green"),
            ),
            (
                "speculative",
                Text(
                    f"{fast:.0f} tokens/s, {totals.fast_decode_s:.2f} s, {totals.acceptance_length:.1f} tokens a step"
                ),
            ),
            ("plain", Text(f"{plain:.0f} tokens/s, {totals.plain_decode_s:.2f} s")),
            (
                "outputs",
                Text(
                    f"{totals.num_identical} of {totals.num_questions} token for token identical",
                    "green" if all_same else "bold red",
                ),
            ),
            ("sampling", Text(f"temperature {params.temperature:g}, seed {params.seed}")),
            ("numerics", Text(f"bitwise self-test passed, fingerprint {facts['system_fingerprint']}")),
            ("index", Text(f"generation {facts['index_generation']}")),
            ("this run", Text(f"{facts['seconds']} s, peak memory {facts['peak_memory_mb']:,} MB")),
        )
        for name, value in rows:
            grid.add_row(name, value)
        self._console.print()
        self._console.print(Rule(Text("measured here and now", "dim"), align="left", style="dim"))
        self._console.print(Padding(grid, _INDENT, expand=False))

    def next_steps(self) -> None:
        grid = Table.grid(padding=(0, 2))
        for command, purpose in (
            ("ragspec index add manual/ --index my-index", "index your own documents"),
            ('ragspec ask "..." --index my-index', "ask them"),
            ("ragspec demo --interactive", "ask this index your own questions"),
            ("ragspec doctor", "what this machine can do"),
        ):
            grid.add_row(Text(command, "cyan"), Text(purpose, "dim"))
        self._console.print()
        self._console.print(Rule(Text("next", "dim"), align="left", style="dim"))
        self._console.print(Padding(grid, _INDENT, expand=False))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
