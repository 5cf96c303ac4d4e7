"""The commands and their exit codes: 0, 1 with one line on stderr, 2 for a wrong call, 130 after Ctrl-C.

Owns the options of the commands whose modules need torch; these import their module when they run, so that `--help` is fast.

    $ ragspec --help
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from ragspec.cli import options
from ragspec.cli.cluster import cluster
from ragspec.cli.doctor import doctor
from ragspec.cli.index import index
from ragspec.cli.keys import keys
from ragspec.cli.models import models
from ragspec.cli.terminal import cache_folder, data_folder, note, one_line, prepare_process, print_error, stderr_console
from ragspec.config import load_config, load_settings
from ragspec.core import SamplingParams, check_text
from ragspec.disk import atomic_writer, saving
from ragspec.engine.checkpoints.target_files import check_target
from ragspec.errors import InputError, RagspecError

app = options.group(
    "ragspec", "Answers from your own documents, several times faster than plain decoding, token for token the same."
)
feedback = options.group("feedback", "What readers said of answers.")
for commands in (index, cluster, keys, models, feedback):
    app.add_typer(commands)
_DEMO_MAX_TOKENS = 96
Iterative = Literal["ralm", "flare", "retgen"]


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit. Never returns."""
    given = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in given  # anywhere on the line, so that it can be added to any call
    prepare_process()
    try:
        code = _run([arg for arg in given if arg != "--debug"], debug)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run(given: list[str], debug: bool) -> int:
    try:
        app(args=given, prog_name="ragspec")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        is_expected, message = isinstance(error, RagspecError), one_line(error)
        print_error(message if is_expected else f"unexpected {type(error).__name__}: {message} (--debug shows where)")
        return 1
    return 0


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"ragspec {version('ragspec')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: options.Debug = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: ragspec demo")
def demo(
    config: options.Config = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    questions: Annotated[int, typer.Option(help="How many of the fixed questions.", min=0, max=8)] = 8,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 7,
    as_json: options.AsJson = False,
) -> None:
    """Questions about Python's standard library, answered with quotes; speculation on against off."""
    from ragspec.training.stdlib_corpus import kept_documents

    params = SamplingParams(max_tokens=_DEMO_MAX_TOKENS, temperature=temperature or 0.0, seed=seed)
    settings = load_config(config, **options.overrides(target=target, adapter=adapter))
    check_target(settings.target)
    corpus = kept_documents(cache_folder())  # Why before torch, which adds functions to the standard library
    from ragspec.cli.demo import run_demo

    raise typer.Exit(run_demo(corpus, settings, questions, params, as_json=as_json))


@app.command(epilog='Example: ragspec ask "When is the mill open?" --index my-index')
def ask(
    question: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    index: options.IndexOrLibrary = None,
    config: options.Config = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    k: Annotated[int | None, typer.Option("--k", "-k", help="Passages to retrieve.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="Search by meaning, by words or both: dense, sparse, hybrid.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Who asks: documents of others are not seen.", show_default=False)] = "",
    filter: Annotated[
        str | None, typer.Option(help='Which documents may answer: {"type": "eq", "key": ..., "value": ...}.')
    ] = None,
    iterative: Annotated[Iterative | None, typer.Option(help="Retrieve again in the course of the answer.")] = None,
    speculation: options.Speculation = True,
    as_json: options.AsJson = False,
) -> None:
    """Ask your documents one question; the answer streams, then come its sources."""
    if question == "-":  # invalid UTF-8 becomes lone surrogates; `check_text` reports their position
        question = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    check_text(question, "the question")
    sampling = options.overrides(temperature=temperature, seed=seed, max_tokens=max_tokens)
    given = options.overrides(index=index, k=k, mode=mode, target=target, adapter=adapter)
    settings = load_config(config, **given, **sampling)
    check_target(settings.target)
    corpus = options.library_corpus([settings])
    from ragspec.cli.ask import run_ask

    given_options = {"speculation": speculation, "tenant": tenant, "filter": filter}
    run_ask(question, settings, given_options, num_passages=k, iterative=iterative, as_json=as_json, corpus=corpus)


@app.command(epilog="Example: ragspec evaluate questions.jsonl --index my-index")
def evaluate(
    files: Annotated[list[Path], typer.Argument(metavar="QUESTIONS", help="JSON lines (ragspec/rag/README.md).")],
    index: options.IndexOrLibrary = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="A YAML configuration; the options win. Twice: two of them side by side.")
    ] = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many lines.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write every answer here, as JSON lines.")] = None,
    check_drafts: Annotated[
        bool, typer.Option("--check-drafts", help="Also answer without speculation; exits with 1 if a token differs.")
    ] = False,
) -> None:
    """Measure your own questions: passages found, answers right, quotes, abstentions, corrections."""
    from ragspec.evaluation.questions import questions_of, read_lines
    from services.settings import ServiceConfig

    if len(config or ()) > 2:
        raise typer.BadParameter("at most two configurations can be compared")
    if not (lines := read_lines(files)[:limit]):
        raise InputError(f"there is no line in {', '.join(map(str, files))}")
    given = options.overrides(index=index, target=target, adapter=adapter, temperature=temperature, seed=seed)
    settings = {str(path or "defaults"): load_settings(ServiceConfig, path, **given) for path in config or (None,)}
    for each in settings.values():
        check_target(each.target)
    corpus = options.library_corpus(settings.values()) if questions_of(lines) else None
    from ragspec.cli.evaluate import run_evaluate

    raise typer.Exit(run_evaluate(lines, settings, out, corpus, check_drafts=check_drafts))


@feedback.callback()
def _feedback() -> None:
    """Why: a group of one command without a callback would be that command."""


@feedback.command(epilog="Example: ragspec feedback export --out rated.jsonl")
def export(
    out: Annotated[Path | None, typer.Option(help="A file for the lines; default: standard output.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant; default: of all.")] = None,
    data: options.Data = None,
    config: options.Config = None,
) -> None:
    """Rated answers of a service, which may be running, as lines that ragspec evaluate reads."""
    from services.settings import ServiceConfig
    from services.stores.rated import rated_questions

    if data is not None and not data.is_dir():
        raise InputError(f"there is no folder {data}")
    folder = data or Path(load_settings(ServiceConfig, config).service.data_dir or data_folder() / "service")
    ratings, text = Counter[str](), ""
    for line in rated_questions(folder / "conversations.sqlite", tenant):
        ratings[line["evidence"]["rating"]] += 1
        text += json.dumps(line, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        with saving(out), atomic_writer(out) as file:
            file.write(text.encode())
    note(stderr_console(), f"{ratings['up']} answers rated up, {ratings['down']} down")


@app.command(epilog="Example: ragspec correct letter.txt --diff")
def correct(
    files: Annotated[list[str], typer.Argument(help="Text, Markdown or HTML in UTF-8; - reads standard input.")],
    diff: Annotated[bool, typer.Option("--diff", help="Show what would change; exits with 1 if anything.")] = False,
    in_place: Annotated[bool, typer.Option("--in-place", "-i", help="Write the corrections into the files.")] = False,
    config: options.Config = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    max_edit_ratio: Annotated[
        float, typer.Option(help="The share of a sentence's words that may change; 1: no limit.", min=0.0, max=1.0)
    ] = 0.5,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A word or phrase that stays as it is; may be repeated.")
    ] = None,
    ignore_file: Annotated[Path | None, typer.Option(help="A file of them, one a line.")] = None,
    speculation: options.Speculation = True,
) -> None:
    """Correct texts: print them, show a diff, or write them back. Names, numbers, code and markup stay, and text in
    another language than English."""
    if diff and in_place:
        raise typer.BadParameter("give --diff or --in-place, not both")
    sampling = options.overrides(temperature=temperature, seed=seed)
    settings = load_config(config, **options.overrides(target=target, adapter=adapter), **sampling)
    check_target(settings.target)
    from ragspec.cli.correct import edit_filter_of, run_correct

    edit_filter = edit_filter_of(max_edit_ratio, ignore or (), ignore_file)
    output: Literal["diff", "file", "text"] = "diff" if diff else "file" if in_place else "text"
    raise typer.Exit(run_correct(files, settings, edit_filter, output, speculation=speculation))


app.command(epilog="Example: ragspec doctor --config ragspec.yaml")(doctor)


@app.command(epilog="Example: ragspec serve --index my-index --port 8001")
def serve(
    config: options.Config = None,
    index: options.IndexOrLibrary = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; default: this machine only.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8000; 0 takes a free one.", min=0, max=65535)] = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    data: options.Data = None,
    keys_file: Annotated[Path | None, typer.Option("--keys", help="Who may ask: a file of ragspec keys.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="A PEM certificate, for HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    on_cluster: Annotated[str | None, typer.Option("--cluster", help="A deployment of ragspec cluster up.")] = None,
    address: options.Address = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every request, also on a terminal.")] = False,
) -> None:
    """Serve chat, grammar and documents over HTTP, as OpenAI's and LanguageTool's clients expect it."""
    from ragspec.cli.serve import run_serve

    given = options.overrides(index=index, target=target, adapter=adapter, host=host, port=port)
    given |= options.overrides(keys_file=keys_file, data_dir=data)
    given |= options.overrides(ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile)
    run_serve(config, given, on_cluster, address, verbose=verbose)


@app.command(epilog="Example: ragspec mcp --index my-index --allow-add")
def mcp(
    config: options.Config = None,
    index: options.IndexOrLibrary = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    data: options.Data = None,
    tenant: Annotated[str, typer.Option(help="Whose documents are searched, beside those of everybody.")] = "",
    allow_add: Annotated[bool, typer.Option("--allow-add", help="The agent may add documents.")] = False,
) -> None:
    """Give an agent tools over MCP's stdio: search, ask, read and list documents. Over HTTP, ragspec serve has /mcp."""
    from ragspec.cli.serve import run_mcp

    given = options.overrides(index=index, target=target, adapter=adapter, data_dir=data)
    run_mcp(config, given, tenant, allow_add=allow_add)


@app.command(context_settings=options.PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure: ragspec bench --suite speculation --quick"""
    options.pass_on("pipelines.benchmark", context.args, "ragspec bench")
