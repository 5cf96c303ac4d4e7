"""Timed runs side by side, and the ratios drawn from them.

Decoders take turns at every prompt (A B A B), so a machine that slows down slows all of them. A ratio is formed inside one
run from total times, and the median over runs is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from ragspec.evaluation.cases import Case
from ragspec.evaluation.decoders import Decoder, Run

SPECULATIVE, PLAIN, GENERATE, PROMPT_LOOKUP = "speculative", "plain", "generate", "prompt_lookup"
_WITHOUT_DRAFT = {SPECULATIVE: PLAIN, PROMPT_LOOKUP: GENERATE}
"""The same program decoding without a draft."""

Tick = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


class Timings:
    """`runs[decoder][run][case]` of the same cases for every decoder."""

    def __init__(self, runs: Mapping[str, Sequence[Sequence[Run]]], prepare_s: Sequence[float]) -> None:
        self.runs = runs
        self._prepare_s = prepare_s

    @classmethod
    def measure(cls, decoders: Mapping[str, Decoder], cases: Sequence[Case], num_runs: int, tick: Tick) -> Timings:
        """Every decoder on every case, `num_runs` times, taking turns."""
        runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(num_runs)] for name in decoders}
        for number in range(num_runs):
            for i, case in enumerate(cases):
                for name, decode in decoders.items():
                    runs[name][number].append(decode(case))
                tick("timed runs", number * len(cases) + i + 1, num_runs * len(cases))
        return cls(runs, [case.prepare_s for case in cases])

    def of(self, chosen: Sequence[int]) -> Timings:
        """Only these cases."""
        runs = {name: [[run[i] for i in chosen] for run in table] for name, table in self.runs.items()}
        return Timings(runs, [self._prepare_s[i] for i in chosen])

    def same_tokens(self, a: str, b: str) -> list[int]:
        """Cases for which two decoders wrote the same tokens, in every run."""
        pairs = [zip(x, y, strict=True) for x, y in zip(self.runs[a], self.runs[b], strict=True)]
        equal = [[x.token_ids == y.token_ids for x, y in pair] for pair in pairs]
        return [i for i, column in enumerate(zip(*equal, strict=True)) if all(column)]

    def decode_s(self, name: str, number: int) -> float:
        """Seconds of decoding in one run: first to last token, plus what the draft added to the prompt's step.

        Why the second part: a draft may already be accepted in the step that ends the prompt. Those tokens come with the
        first one, at no time after it; what their rows cost is the prompt step's excess over the same program without draft.
        """
        decode_s = self.first_to_last_s(name, number)
        without = _WITHOUT_DRAFT.get(name, "")
        if without not in self.runs:
            return decode_s
        return decode_s + max(0.0, self._first_s(name, number) - self._first_s(without, number))

    def first_to_last_s(self, name: str, number: int) -> float:
        """Seconds from first to last token alone; tokens that come with the first one take none."""
        return sum(run.decode_s for run in self.runs[name][number])

    def _first_s(self, name: str, number: int) -> float:
        return sum(run.first_s for run in self.runs[name][number])

    def end_to_end_s(self, name: str, number: int) -> float:
        """Seconds with retrieval, prompt building and prefill."""
        return sum(self._prepare_s) + self._first_s(name, number) + self.first_to_last_s(name, number)

    def ratio(self, slow: str, fast: str, seconds: Callable[[Timings, str, int], float] = decode_s) -> float | None:
        """How many times the seconds of `fast` those of `slow` are, over cases in which both wrote the same tokens.

        None where there is nothing to compare.
        """
        if not {slow, fast} <= self.runs.keys():
            return None
        same = self.of(self.same_tokens(slow, fast))
        pairs = [(seconds(same, slow, n), seconds(same, fast, n)) for n in range(len(self.runs[slow]))]
        return _median(a / b for a, b in pairs if a > 0 and b > 0)

    def agreement(self, a: str, b: str) -> float | None:
        """Share of cases for which two decoders wrote the same tokens."""
        if not {a, b} <= self.runs.keys():
            return None
        return len(self.same_tokens(a, b)) / len(self._prepare_s)

    def tokens_per_s(self, name: str) -> float | None:
        """Tokens after the first, a second of decoding."""
        rates = ((_num_decoded(table), self.decode_s(name, n)) for n, table in enumerate(self.runs[name]))
        return _median(tokens / seconds for tokens, seconds in rates if seconds > 0)

    def step_s(self, name: str) -> float | None:
        """Seconds of one step after the prompt's, of a decoder that decides one token a step."""
        rate = self.tokens_per_s(name)
        return 1.0 / rate if rate else None

    def acceptance_length(self, name: str) -> float:
        """Tokens emitted a step, the bonus token included, the prompt's step counted."""
        runs = [run for table in self.runs[name] for run in table]
        return sum(len(run.token_ids) for run in runs) / max(1, sum(run.num_steps for run in runs))


def _num_decoded(runs: Sequence[Run]) -> int:
    return sum(len(run.token_ids) - 1 for run in runs)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
