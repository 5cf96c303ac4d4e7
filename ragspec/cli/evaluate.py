"""`ragspec evaluate`: asks a user's own questions and prints a line for each, a table, and one line of JSON.

Owns the command's output. Asking and judging are `ragspec.evaluation`'s. Lines and table go to stderr, the JSON to stdout. Of two
configurations the first is loaded, asked and closed, then the second; the second's keys end in `_second`.

    $ ragspec evaluate questions.jsonl --index my-index --config small.yaml --config large.yaml
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragspec.cli.ask import with_standard_library
from ragspec.cli.standard_library import NO_INDEX
from ragspec.cli.terminal import loading, note, safe, stay_offline, stderr_console
from ragspec.disk import saving
from ragspec.engine.checkpoints.target_files import return_freed
from ragspec.evaluation.asking import Asker, Evaluation
from ragspec.evaluation.measures import PeakMemory, commit, rounded
from ragspec.evaluation.questions import (
    AnsweredQuestion,
    CheckedSentence,
    CorrectedSentence,
    Dialogue,
    Line,
    LineResult,
    RoutedMessage,
    RoutedText,
    only_right,
    p50_s,
    proposed_threshold,
    questions_of,
    shares,
    wilson,
)
from ragspec.retrieval.encoder import Encoder
from services.settings import ServiceConfig

_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}
_QUESTION_CHARS = 34
_MOST_ID_CHARS = 16


class Measured:
    """The results of one configuration.

    `changed`: answers that drafts changed, by temperature, if that was checked. `peak_mb`: of memory, in 10^6 bytes.
    """

    def __init__(self, name: str, settings: ServiceConfig) -> None:
        self.name, self.settings = name, settings
        self.results: list[LineResult] = []
        self.changed: dict[float, int] = {}
        self.peak_mb = 0.0

    def measure(
        self,
        console: Console,
        lines: Sequence[Line],
        corpus: Sequence[tuple[str, str]] | None,
        write: Callable[[dict[str, Any]], None],
        *,
        check_drafts: bool,
    ) -> None:
        """Asks all questions; shows each result on `console` and gives it to `write`."""
        settings, encoder, memory, asked = self.settings, None, PeakMemory(), questions_of(lines)
        return_freed()  # Why: else the peak counts memory that an earlier configuration left
        stay_offline(settings.target)
        needs_library = bool(asked) and not settings.retriever.index_dir
        if needs_library:
            note(console, NO_INDEX)
        with loading(console, "opening the encoder and the index") as say:
            if needs_library:
                encoder = Encoder.load(settings.encoder)
                settings = self.settings = with_standard_library(settings, encoder, corpus or (), say)
            asker = Asker.from_config(settings, encoder=encoder, retrieves=bool(asked), say=say)
        id_chars = _id_chars(lines)
        num_asked = len(asked) + sum(isinstance(line, CheckedSentence | RoutedText) for line in lines)
        with asker, loading(console, "asking") as say:
            for result in asker.results(lines):
                self.results.append(result)
                say("asking", len(self.results), num_asked)
                memory.look()
                write({"config": self.name} | result.to_dict())
                console.print(result_line(result, id_chars), no_wrap=True, overflow="ellipsis")
            if check_drafts:
                self.changed = asker.num_changed_by_drafts(self.results, say)
                memory.look()
        self.peak_mb = memory.peak_mb

    def to_dict(self) -> dict[str, Any]:
        """Flat keys, for JSON."""
        settings = self.settings
        return {
            "config": self.name,
            "target": Path(settings.target.model).name,
            "index": settings.retriever.index_dir,
            "seed": settings.generation.seed,
            "temperature": settings.generation.temperature,
            **Evaluation(self.results, self.changed).to_dict(),
            "peak_pss_mb": rounded(self.peak_mb),
        }


def run_evaluate(
    lines: Sequence[Line],
    configurations: Mapping[str, ServiceConfig],
    out: Path | None,
    corpus: Sequence[tuple[str, str]] | None,
    *,
    check_drafts: bool,
) -> int:
    """Returns the exit code: 1 if drafts changed an answer. Raises: RagspecError.

    `configurations`: one or two, by name. `out`: a file for every answer. `corpus`: the standard library's docstrings, where no
    index is configured. `check_drafts`: compare with decoding without speculation.
    """
    measured_commit = commit()  # Why now: the checkout may move on before a long run ends
    console = stderr_console()
    runs = []
    with _answer_file(out) as write:
        for name, settings in configurations.items():
            if len(configurations) > 1:
                console.print(Text(f"\n{name}", "bold"))
            run = Measured(name, settings)
            run.measure(console, lines, corpus, write, check_drafts=check_drafts)
            runs.append(run)
    console.print()
    console.print(table_of(runs))
    kinds = Counter(type(line) for line in lines)
    num_turns = sum(len(line.turns) for line in lines if isinstance(line, Dialogue))
    result = {
        "num_questions": len(questions_of(lines)),
        "num_follow_ups": num_turns - kinds[Dialogue],
        "num_sentences": kinds[CheckedSentence],
        "num_routes": kinds[RoutedText],
    }
    result |= runs[0].to_dict()
    if len(runs) > 1:
        result |= {f"{name}_second": value for name, value in runs[1].to_dict().items()}
        result["only_first_right"], result["only_second_right"] = only_right(runs[0].results, runs[1].results)
    print(json.dumps(result | {"commit": measured_commit}), flush=True)
    return int(any(any(run.changed.values()) for run in runs))


def _id_chars(lines: Sequence[Line]) -> int:
    """The width of the column of ids; a turn's id is its conversation's with the number of the turn."""
    return min(_MOST_ID_CHARS, max((len(str(line.id)) + 2 * isinstance(line, Dialogue) for line in lines), default=0))


@contextmanager
def _answer_file(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes each row as a line at once, so that a run that is stopped leaves its answers. Raises: SaveError."""
    if path is None:
        yield lambda row: None
        return
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")

    def write(row: dict[str, Any]) -> None:
        with saving(path):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

    with file:
        yield write


def result_line(result: LineResult, id_chars: int) -> Text:
    """Mark, id, verdict, seconds, the question or sentence, and its answer or correction."""
    right, verdict, given, written = _question_parts(result) if isinstance(result, AnsweredQuestion) else _parts(result)
    mark, style = _MARKS[right]
    return Text.assemble(
        (f"{mark} ", style),
        f"{_cut(result.id, id_chars):<{id_chars}}  ",
        (f"{verdict:<24}", style),
        (f"{result.seconds:5.1f} s  ", "dim"),
        f"{_cut(given, _QUESTION_CHARS):<{_QUESTION_CHARS}}  ",
        (_flat(written), "dim"),
    )


def _question_parts(result: AnsweredQuestion) -> tuple[bool | None, str, str, str]:
    verdict, text = result.verdict, result.question.question
    if result.answer is None:
        return False, "refused", text, result.refused
    if verdict.abstained or verdict.right is None or not result.question.answerable:
        said = "abstained" if verdict.abstained else "answered"
    else:
        said = ("right, quoted" if verdict.quoted else "right") if verdict.right else "wrong"
    return verdict.right, f"{said}, not shown" if verdict.shown is False else said, text, result.answer.text


def _parts(result: CorrectedSentence | RoutedMessage) -> tuple[bool, str, str, str]:
    if isinstance(result, RoutedMessage):
        return result.is_right, "searched" if result.searched else "not searched", result.message.text, ""
    if result.output is None:
        return False, "refused", result.sentence.text, result.refused
    words = ("changed", "unchanged") if result.sentence.right else ("not corrected", "corrected")
    return result.is_right, words[result.is_right], result.sentence.text, result.output


def _cut(text: str, num_chars: int) -> str:
    text = _flat(text)
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def _flat(text: str) -> str:
    return " ".join(safe(text).split())


def table_of(runs: Sequence[Measured]) -> Table:
    """A row for each measure, a column for each configuration."""
    table = Table("95 % intervals in brackets", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for run in runs:
        table.add_column(_cut(run.name, 30), no_wrap=True)
    cells = [dict(_cells(run)) for run in runs]
    for name in dict.fromkeys(name for column in cells for name in column):
        table.add_row(name, *(column.get(name, "") for column in cells))
    if len(runs) > 1:
        only = only_right(runs[0].results, runs[1].results)
        table.add_row("right here, not there", *(f"{num:>4}" for num in only))
    return table


def _cells(run: Measured) -> Iterator[tuple[str, str]]:
    """The measures of one configuration by their names. A share comes with its 95 % interval."""
    for share in shares(run.results):
        low, high = (f"{100 * end:.0f}" for end in wilson(share.num, share.of))
        yield share.meaning, f"{share.num:>4} of {share.of:<4} {100 * share.num / share.of:>3.0f} % ({low} to {high})"
    num_questions = sum(isinstance(result, AnsweredQuestion) for result in run.results)
    for temperature, num in run.changed.items():
        yield f"changed by drafts, temperature {temperature:g}", f"{num:>4} of {num_questions}"
    if threshold := proposed_threshold(run.results):
        yield "proposed abstain_below", f"{threshold:>8.3f}"
    if seconds := p50_s(run.results):
        yield "seconds of a question, median", f"{seconds:>4.1f}"
    yield "peak memory, MB", f"{run.peak_mb:>4,.0f}"
