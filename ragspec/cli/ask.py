"""`ragspec ask`: streams the answer to one question, then prints its sources and statistics.

Owns the command's output, which the demo prints too. Retrieval and generation are the pipeline's. Sources are the cited passages
with their quotes in colour, or between « and » without colours; then the sentences that are no quotes, each with the passage's
sentence that supports it.

    $ ragspec ask "When did it rain?" --index my-index
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ragspec.cli.models import better_reader_command
from ragspec.cli.standard_library import NO_INDEX, cached_library, documents_of
from ragspec.cli.terminal import cache_folder, loading, note, safe, stay_offline, stderr_console, stdout_console
from ragspec.config import PipelineConfig, Settings
from ragspec.core import BlockKind, Citation, FinishReason, Passage, SamplingParams, Say
from ragspec.errors import InputError
from ragspec.rag.answer import Answer
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.iterative.policies import POLICIES
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.steps import default_params
from ragspec.retrieval.chunking.chunker import SEPARATOR
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.search.filters import parse_filter

QUOTE = "bold green"
UNSUPPORTED = "bold yellow"
_AROUND_CHARS = 140
"""Characters of the passage shown before and after a quote."""


def run_ask(
    question: str,
    settings: PipelineConfig,
    options: Mapping[str, Any],
    *,
    num_passages: int | None,
    iterative: str | None,
    as_json: bool,
    corpus: Sequence[tuple[str, str]] | None = None,
) -> None:
    """Checks the whole call before it loads a model. `corpus`: the standard library's docstrings, if no index is configured.

    `options` are keyword arguments of `Pipeline.ask`, with the filter as JSON. `num_passages`: what the caller asked for;
    `iterative` names a policy. Raises: RagspecError.
    """
    params = default_params(settings.generation)
    options = {**options, "filter": _filter(options["filter"])}
    arguments = {} if num_passages is None else {"num_passages": num_passages}
    policy = POLICIES[iterative](**arguments) if iterative else None
    stay_offline(settings.target)
    errors, encoder = stderr_console(), None
    if corpus is not None:
        note(errors, NO_INDEX)
    with loading(errors, "opening the encoder and the index") as say:
        if corpus is not None:
            encoder = Encoder.load(settings.encoder)
            settings = with_standard_library(settings, encoder, corpus, say)
        load = partial(IterativePipeline.from_config, policy=policy) if policy else Pipeline.from_config
        pipeline = load(settings, encoder=encoder, say=say)
    if policy:
        options["guessing"] = options["speculation"]
    with pipeline:
        if as_json:
            print(json.dumps(pipeline.ask(question, params, **options).to_dict()))
            return
        answer = stream_answer(pipeline, question, params, _write, **options)
    console = stdout_console()
    console.print()
    print_sources(console, answer)
    if answer.dropped_passages:
        names = ", ".join(passage.id for passage in answer.dropped_passages)
        note(errors, f"{len(answer.dropped_passages)} retrieved passages did not fit the context: {names}")
    errors.print(Text(summary(answer), "dim"))
    if command := better_reader_command(settings.target.model):
        errors.print(Text(f"a larger model answers more questions right: {command}", "dim"))


def with_standard_library(
    settings: Settings, encoder: Encoder, corpus: Sequence[tuple[str, str]], say: Say
) -> Settings:
    """The settings with the index of the whole standard library, which is built once. Raises: SaveError."""
    folder = cached_library(documents_of(corpus), encoder, cache_folder(), say).index_dir
    return settings.model_copy(update={"retriever": settings.retriever.model_copy(update={"index_dir": str(folder)})})


def stream_answer(
    pipeline: Pipeline | IterativePipeline,
    question: str,
    params: SamplingParams,
    show: Callable[[str], object],
    **options: Any,
) -> Answer:
    """Calls `show` with each piece of text and returns the whole answer. `options` are those of `Pipeline.stream`."""
    for piece in pipeline.stream(question, params, **options):
        if isinstance(piece, str):
            show(piece)
        else:
            answer = piece
    return answer


def _filter(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        value: Mapping[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise InputError(f"the filter is not JSON: {cause}") from cause
    parse_filter(value)
    return value


def summary(answer: Answer) -> str:
    stats, rounds = answer.stats, answer.stats.iterative
    guessed = f"{rounds.num_right + rounds.num_wrong} guessed, {rounds.num_wrong} wrong" if rounds else ""
    retrievals = f"{rounds.num_rounds} rounds, {rounds.num_retrievals} retrievals ({guessed}); " if rounds else ""
    cut = " (cut there: generation.max_tokens)" if answer.finish_reason is FinishReason.LENGTH else ""
    return (
        f"{retrievals}{stats.generation.num_output_tokens} tokens{cut}, {stats.acceptance_length:.1f} a step, "
        f"{stats.tokens_per_s:.0f} tokens/s; seed {answer.seed}, index {stats.index_generation}, "
        f"numerics {answer.system_fingerprint}"
    )


def _write(piece: str) -> None:
    """Removes control characters if stdout is a terminal."""
    sys.stdout.write(safe(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def answer_text(answer: Answer) -> Text:
    """The answer with its quotes in the colour of the quoted spans."""
    text = Text(safe(answer.text))
    for citation in answer.citations:
        text.stylize(QUOTE, citation.start, citation.end)
    return text


def print_sources(console: Console, answer: Answer) -> None:
    """Prints every cited passage once, in the order of the prompt, then what is not quoted."""
    numbers = {passage.id: number for number, passage in enumerate(answer.passages)}
    cited = sorted(answer.citations, key=lambda c: (numbers[c.passage_id], c.passage_start))
    for passage_id, group in groupby(cited, key=lambda c: c.passage_id):
        passage = answer.passages[numbers[passage_id]]
        found = f"{answer.found} " if answer.found else ""
        number = f"[{numbers[passage_id] + 1}] "
        quotes = list(group)
        room = console.width - len(f"  {found}{number}")
        name = safe(_name(passage, quotes[0].passage_start, room))
        heading = Text.assemble("  ", (found, "dim"), (number, "bold"), (name, "bold cyan"))
        console.print(heading, overflow="ellipsis", no_wrap=True)
        text = excerpt(passage, quotes, marks=console.no_color or not console.is_terminal)
        for line in text.wrap(console, max(20, console.width - 6)):
            line.rstrip()
            console.print(Text.assemble(("    │ ", "dim"), line), soft_wrap=True)
    for text in support_lines(answer, numbers):
        console.print(Padding(text, (0, 0, 0, 2), expand=False))


def support_lines(answer: Answer, numbers: Mapping[str, int]) -> Iterator[Text]:
    """A line for each sentence that is no quote, and for each invented quotation. `numbers`: indices of passages by id."""
    for start, end in answer.unknown_quotations:
        yield Text.assemble(("in no source, though in quotation marks: ", UNSUPPORTED), _flat(answer.text[start:end]))
    for sentence in answer.sentences:
        text = _flat(answer.text[sentence.start : sentence.end])
        if sentence.label == "unsupported":
            yield Text.assemble(("not found in the passages: ", UNSUPPORTED), text)
        elif sentence.label != "quoted":
            number = numbers[sentence.passage_id]
            source = _flat(answer.passages[number].text[sentence.passage_start : sentence.passage_end])
            verdict = "supported by" if sentence.label == "supported" else "compare with"
            yield Text.assemble((f"{verdict} [{number + 1}]: ", "bold"), text, (f"  ({source})", "dim"))


def excerpt(passage: Passage, citations: Sequence[Citation], *, marks: bool) -> Text:
    """The part of a passage around its quotes, on one line, or the quoted rows of a table below its header; `marks` puts the
    quotes between « and »."""
    spans = _merged((c.passage_start, c.passage_end) for c in citations)
    if (header := _table_header(passage, spans[0][0])) is not None:
        rows = ["\n".join(map(_flat, passage.text[start:end].splitlines())) for start, end in spans]
        quotes = [Text(f"«{each}»" if marks else each, QUOTE) for each in rows]
        return Text("\n").join([Text(header, "dim")] * (header not in rows[0]) + quotes)
    first, last = _window(passage.text, spans[0][0], spans[-1][1])
    text, position = Text("… " if first else "", "dim"), first
    for start, end in spans:
        quote = _flat(passage.text[start:end])
        text.append(_flat(passage.text[position:start]))
        text.append(f"«{quote}»" if marks else quote, f"not dim {QUOTE}")
        position = end
    text.append(_flat(passage.text[position:last]))
    text.append(" …" if last < len(passage.text) else "")
    return text


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted and without overlaps: an answer may quote the same words twice."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _window(text: str, start: int, end: int) -> tuple[int, int]:
    """[start, end) with `_AROUND_CHARS` more on both sides, cut between words if possible."""
    first, last = max(0, start - _AROUND_CHARS), min(len(text), end + _AROUND_CHARS)
    if first:
        first = max(first, text.find(" ", first, start) + 1)
    if last < len(text):
        last = max(text.rfind(" ", end, last), end) if " " in text[end:last] else last
    return first, last


def _name(passage: Passage, start: int, room: int) -> str:
    """Title, headings above a place in a passage, source and page; the headings are cut to `room` characters for all."""
    title = passage.title or passage.document_id
    about = [passage.source] if passage.source and passage.source != title else []
    about += [f"page {passage.page}"] if passage.page else []
    behind = f" ({', '.join(about)})" if about else ""
    name = " > ".join([title, *(each for each in _headings_above(passage, start) if each != title)])
    room = max(len(title), room - len(behind))
    return (name if len(name) <= room else f"{name[: room - 1]}…") + behind


def _headings_above(passage: Passage, start: int) -> Sequence[str]:
    """Those above a passage, or the one within it that is nearest above a place. Why no more of these: none tells its level."""
    blocks = [each for each in passage.blocks if each.kind is BlockKind.HEADING and each.end <= start]
    named = [text for each in blocks if (text := _heading_text(passage.text[each.start : each.end]))]
    return passage.headings if not named or named[-1] in passage.headings[-1:] else [named[-1]]


def _table_header(passage: Passage, start: int) -> str | None:
    """Of the table that a place in a passage is in: the first row, or that of a large table, which each of its passages has as
    the last heading."""
    last = passage.heading.rpartition(SEPARATOR)[2]
    for block in passage.blocks:
        if block.kind is BlockKind.TABLE and block.start <= start < block.end:
            rows = passage.text[block.start : block.end].splitlines()
            is_header = "|" in last and last not in passage.headings
            return _flat(last if is_header else next((each for each in rows if re.search(r"\w", each)), ""))
    return None


def _heading_text(source: str) -> str:
    """Without the marks of Markdown, AsciiDoc and underlines."""
    return " ".join(_flat(line).lstrip("#= ").strip() for line in source.splitlines() if re.search(r"\w", line))


def _flat(text: str) -> str:
    """Makes each run of white space one space. Strips nothing, so that the parts around a quote join again."""
    return re.sub(r"\s+", " ", safe(text))
