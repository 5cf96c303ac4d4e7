"""The command line: how calls end, what bad input says, and what reaches the terminal.

Encoders are vectors drawn from hashes and targets are random, so that every command runs for real in little time.
"""

import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from commands import Ended, Run, exit_code
from letter_encoder import DIMENSION, LetterEncoder
from rich.console import Console
from tiny_target import save_model
from typer.main import get_command

from ragspec.cli import main
from ragspec.cli.app import app
from ragspec.cli.ask import answer_text, excerpt, print_sources
from ragspec.cli.demo import QUESTIONS, AnswerPair, Totals, open_library
from ragspec.cli.standard_library import DEMO_MODULES, cached_library, documents_of, service_library
from ragspec.cli.terminal import cache_folder, safe, stage
from ragspec.config import ChunkingConfig, EncoderConfig, IndexConfig, load_config
from ragspec.core import Block, BlockKind, Citation, Document, FinishReason, GenerationStats, Passage, log_progress
from ragspec.rag.answer import Answer, AnswerSentence, AnswerStats
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.wording import NOTHING_CLOSE
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.analysis import RULES
from ragspec.training import stdlib_corpus
from ragspec.training.stdlib_corpus import is_held_out

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    Document(f"d{n}", f"Fact {n} is told here. It is known to all.", f"Title {n}", f"{n}.txt") for n in range(9)
]


class HashEncoder(LetterEncoder):
    """Also what the demo shows of an encoder."""

    identity = EncoderIdentity(id="hashes", fingerprint="f" * 64, dimension=DIMENSION)
    dimension, max_batch_size = DIMENSION, 32


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """One call of the command in this process, with cheap encoders; `stdin` are bytes."""
    monkeypatch.setattr(Encoder, "load", lambda config: HashEncoder())
    monkeypatch.setattr("ragspec.cli.app.prepare_process", lambda: None)

    def call(*args: object, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        ended = Ended(exit_code(*args), *capsys.readouterr())
        assert "Traceback" not in ended.out + ended.err
        return ended

    return call


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "index"
    build_index(DOCUMENTS, folder, HashEncoder(), IndexConfig())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def pipeline(index: Path, model: Path) -> Iterator[Pipeline]:
    """Loaded once, as `ragspec ask` loads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "load", lambda config: HashEncoder())
        loaded = Pipeline.from_config(load_config(**{"retriever.index_dir": str(index), "target.model": str(model)}))
    with loaded:
        yield loaded


@pytest.fixture
def loaded(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Commands find the pipeline open already, and leave it open."""
    monkeypatch.setattr("ragspec.cli.options.read_pointer", lambda folder: "")
    monkeypatch.setattr("ragspec.training.stdlib_corpus.kept_documents", lambda folder: [])
    monkeypatch.setattr("ragspec.cli.ask.with_standard_library", lambda settings, *others: settings)
    monkeypatch.setattr(Pipeline, "from_config", lambda settings, encoder, say: pipeline)
    monkeypatch.setattr(Pipeline, "close", lambda self: None)
    return pipeline


def one_error(ended: Ended, *words: str) -> None:
    assert ended.code == 1 and ended.out == ""
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    for word in words:
        assert word in ended.err, ended.err


# -- how calls end --------------------------------------------------------------------------------------------------------


def test_help_and_what_is_missing_are_told_before_torch_loads(tmp_path: Path) -> None:
    """Seconds of imports, or an index built first, until a mistyped folder or name is told; `--help` that takes ten seconds."""
    no_model = [
        [*command.split(), "--model", "nobody/nothing"] for command in ("ask why", "demo", "correct a", "serve")
    ]
    calls = [["--help"], ["ask", "why", "--index", "none"], ["serve", "--index", "none"], *no_model]
    code = f"""if True:
        import sys
        from ragspec.cli import main
        for call in {calls}:
            try:
                main(call)
            except SystemExit as end:
                assert end.code == (call != ["--help"]), call
            assert not {{"torch", "transformers", "ray"}} & sys.modules.keys(), call"""
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


LOADING = "ask demo evaluate correct doctor serve".split()


def _commands(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from _commands((*path, name), each)
    if not hasattr(command, "commands"):
        yield path, command


def test_examples_of_help_and_of_all_pages_are_accepted_and_help_fits_80_columns() -> None:
    """An example with an option that is gone, help in columns of one word, and commands that had no --config or --adapter."""
    commands = dict(_commands((), get_command(app)))
    pages = [page.read_text().replace("\\\n", "") for page in (*ROOT.glob("*.md"), *ROOT.glob("[irs]*/**/*.md"))]
    shown = "\n".join(block for page in pages for block in re.findall(r"(?ms)^ *```bash\n(.*?)```", page))
    lines = re.findall(r"(?m)^ *(?:\.venv/bin/)?(ragspec .*?)(?: +[#<>].*)?$", shown)
    own = {path: each for path, each in commands.items() if not each.context_settings.get("ignore_unknown_options")}
    for path, command in own.items():
        help_text = command.get_help(command.context_class(command, terminal_width=80))
        assert max(map(len, help_text.splitlines())) <= 80, path
        assert "--config" in help_text or path in (("cluster", "status"), ("cluster", "env"), ("cluster", "down"))
        assert all(option in help_text for option in ("--target", "--model", "--adapter")) or path[0] not in LOADING
        lines.append(command.epilog.removeprefix("Example: "))
    assert len(lines) > 40 + len(own)
    for line in lines:
        words = shlex.split(line)[1:]
        path = next(path for path in commands if tuple(words[: len(path)]) == path)
        commands[path].make_context(line, words[len(path) :]).close()


@pytest.mark.parametrize(
    "args",
    [["ask", "why", "--seed", "seven"], ["ask", "why", "--colour", "red"], ["demo", "--questions", "9"], ["dance"]],
)
def test_a_wrong_call_exits_2(run: Run, args: list[str]) -> None:
    """A typing error that is taken for a failure, or loads a model first."""
    ended = run(*args)
    assert ended.code == 2 and ended.out == "" and ended.err


def test_ctrl_c_exits_130(run: Run, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback because the user changed their mind."""
    monkeypatch.setattr(Pipeline, "from_config", Mock(side_effect=KeyboardInterrupt))
    assert run("ask", "why", "--index", index) == (130, "", "")


def test_a_closed_pipe_is_silent() -> None:
    """`ragspec ... | head -1` that ends in a traceback."""
    command = f"{sys.executable} -m ragspec.cli --help | true"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stderr == ""


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    """A bug report without a place."""
    with pytest.raises(Exception, match="there is no index"):
        main(["ask", "why", "--index", str(tmp_path / "none"), "--debug"])


def test_an_unforeseen_error_is_one_line_too(run: Run, index: Path, monkeypatch: Any) -> None:
    """Fifty lines of another library's traceback."""
    monkeypatch.setattr(Pipeline, "from_config", Mock(side_effect=ZeroDivisionError("by\nzero")))
    one_error(run("ask", "why", "--index", index), "unexpected ZeroDivisionError: by zero", "--debug")


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stdin", "word"),
    [(b"", "empty"), (b" \n", "empty"), (b"a\0b", "NUL"), (b"a\xffb", "lone surrogate at character 1")],
)
def test_a_bad_question_is_refused_before_anything_loads(run: Run, stdin: bytes, word: str) -> None:
    """Half a minute of loading before the question is found empty."""
    one_error(run("ask", "-", "--index", "none", stdin=stdin), "the question", word)


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--max-tokens", "0", "max_tokens"),
        ("--seed", str(2**64), "seed"),
        ("--temperature", "nan", "temperature"),
        ("--k", "0", "num_passages"),
    ],
)
def test_a_value_out_of_range_is_named(run: Run, index: Path, option: str, value: str, word: str) -> None:
    """A negative length that loops, a NaN temperature that samples noise."""
    one_error(run("ask", "why", "--index", index, option, value), word)


def test_a_configuration_names_its_unknown_key(run: Run, tmp_path: Path) -> None:
    """A misspelt setting that is ignored."""
    (tmp_path / "c.yaml").write_text("retriver: {index_dir: x}\n", encoding="utf-8")
    one_error(run("ask", "why", "--config", tmp_path / "c.yaml"), "retriver", "c.yaml", "did you mean 'retriever'?")
    one_error(run("ask", "why", "--config", tmp_path / "none.yaml"), "none.yaml")


def test_without_an_index_the_standard_library_answers_and_says_so(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first question that ends in a message about a setting; an answer from docstrings that passes for one's own documents.

    The encoder was loaded for the index, and once more for the question.
    """
    loads: list[HashEncoder] = []

    def load(config: EncoderConfig) -> HashEncoder:
        loads.append(HashEncoder())
        return loads[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Encoder, "load", load)
    corpus = [("math.floor", "math.floor(x, /): Return the floor of x as an Integral.")]
    monkeypatch.setattr("ragspec.training.stdlib_corpus.kept_documents", lambda folder: corpus)
    ended = run("ask", "floor?", "--target", model, "--max-tokens", 2, "--json")
    assert ended.code == 0, ended.err
    assert "docstrings of Python's standard library" in ended.err.splitlines()[0]
    assert [passage["document_id"] for passage in json.loads(ended.out)["passages"]] == ["math.floor"]
    assert len(loads) == 1


def test_a_pickled_model_runs_no_code(run: Run, index: Path, model: Path, tmp_path: Path) -> None:
    """Weights that are a program."""
    folder, marker = tmp_path / "evil", tmp_path / "executed"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    one_error(run("ask", "why", "--index", index, "--target", folder), str(folder))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(marker),))

    torch.save({"lm_head.weight": Evil()}, folder / "pytorch_model.bin")
    one_error(run("ask", "why", "--index", index, "--target", folder), str(folder))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    one_error(run("ask", "why", "--index", index, "--target", folder), str(folder))
    assert not marker.exists()


def test_a_question_longer_than_the_context_says_both_numbers(run: Run, loaded: Pipeline) -> None:
    """A question cut in silence."""
    ended = run("ask", "-", "--index", "facts", "--max-tokens", 24, stdin=b"why " * 2000)
    one_error(ended, "the prompt has ", " tokens, but at most 1000 fit the context")
    one_error(run("ask", "-", "--index", "facts", stdin=b"why " * 250_000), "1000000 characters")


# -- ask ------------------------------------------------------------------------------------------------------------------

OPTIONS = ("--max-tokens", 12, "--seed", 5, "--temperature", 1)


def test_ask_gives_the_same_answer_every_way(run: Run, loaded: Pipeline) -> None:
    """JSON, text and plain decoding that differ."""
    fast = json.loads(run("ask", "What is fact 3?", *OPTIONS, "--json").out)
    plain = json.loads(run("ask", "What is fact 3?", *OPTIONS, "--json", "--no-speculation").out)
    text = run("ask", "-", *OPTIONS, stdin=b"What is fact 3?\n")
    assert fast["token_ids"] == plain["token_ids"] and len(fast["token_ids"]) <= 12
    assert plain["stats"]["generation"]["num_drafted"] == 0
    assert text.code == 0 and text.out.startswith(fast["text"])
    assert "seed 5" in text.err and fast["stats"]["index_generation"] in text.err


def test_ask_says_which_passages_were_dropped(run: Run, loaded: Pipeline) -> None:
    """An answer from fewer passages than were asked for, with no word of it."""
    ended = run("ask", "What is fact 3?", "--max-tokens", 900)
    assert ended.code == 0 and "retrieved passages did not fit the context: d" in ended.err


@pytest.mark.parametrize("policy", ["ralm", "flare", "retgen"])
def test_ask_iteratively_gives_the_same_answer_every_way(run: Run, index: Path, model: Path, policy: str) -> None:
    """Guessed retrievals that change the answer, or an option that nothing hears."""
    call = ("--index", index, "--target", model, "--iterative", policy, *OPTIONS)
    fast = json.loads(run("ask", "What is fact 3?", *call, "--json").out)
    plain = json.loads(run("ask", "What is fact 3?", *call, "--json", "--no-speculation").out)
    text = run("ask", "What is fact 3?", *call, "-k", 2)
    assert fast["token_ids"] == plain["token_ids"]
    assert plain["stats"]["iterative"]["num_right"] == plain["stats"]["generation"]["num_drafted"] == 0
    assert text.code == 0 and "retrievals" in text.err


# -- index ----------------------------------------------------------------------------------------------------------------


def test_index_builds_what_ask_can_open(run: Run, tmp_path: Path) -> None:
    """Two commands that do not fit together."""
    (tmp_path / "a.txt").write_text("It rained in the morning.", encoding="utf-8")
    ended = run("index", "add", tmp_path / "a.txt", "--index", tmp_path / "index")
    assert ended.code == 0 and json.loads(ended.out.splitlines()[-1])["passages"] == 1
    found = Retriever(HashEncoder(), Store.open(tmp_path / "index"))
    assert found.retrieve(["rain?"], 1).passages[0][0].text == "It rained in the morning."


def test_documents_are_listed_deleted_and_compacted(run: Run, index: Path, tmp_path: Path) -> None:
    """Commands that disagree about what is in an index, or change it when they were only asked."""
    shutil.copytree(index, tmp_path / "index")
    at = ("--index", tmp_path / "index")
    listed = json.loads(run("index", "list", *at, "--json").out)
    assert [row["id"] for row in listed["list"]] == [f"d{n}" for n in range(9)] and listed["documents"] == 9
    assert all(row["passages"] == 1 for row in listed["list"])
    table = run("index", "list", *at, "--limit", 2)
    assert table.code == 0 and "d0" in table.out and "and 7 more" in table.out and "9 documents" in table.out
    rehearsed = run("index", "delete", "d1", *at, "--dry-run")
    assert json.loads(rehearsed.out)["would"] == {"delete": ["d1"]} and "would delete d1" in rehearsed.err
    one_error(run("index", "delete", "d1", "nobody", *at), "'nobody'", "nothing was deleted")
    one_error(run("index", "delete", "--source", "nowhere.txt", *at), "'nowhere.txt'")
    assert run("index", "delete", *at).code == 2
    deleted = json.loads(run("index", "delete", "d1", "--source", "2.txt", *at).out)
    assert (deleted["deleted"], deleted["documents"]) == (2, 7)
    compacted = json.loads(run("index", "compact", *at).out)
    assert compacted["documents"] == 7 and compacted["bytes"] < compacted["bytes_before"]
    checked = json.loads(run("index", "verify", *at).out)
    assert checked["verified"] is True and checked["word_rules"] == RULES
    one_error(run("index", "compact", *at, "--dense", "annoy"), "dense.kind")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("manual/old", ["manual/a.pdf", "manual/oldest.md"]),
        ("manual/*.pdf", ["manual/old/b.pdf", "manual/old/c[1].md", "manual/oldest.md"]),
        ("manual/**/*.pdf", ["manual/old/c[1].md", "manual/oldest.md"]),
        ("manual/old/c[1].md", ["manual/a.pdf", "manual/old/b.pdf", "manual/oldest.md"]),
        ("files/?.pdf", ["manual/old/b.pdf", "manual/old/c[1].md", "manual/oldest.md"]),
    ],
)
def test_documents_are_deleted_by_folder_and_glob(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, left: list[str]
) -> None:
    """A folder of a thousand documents deleted by a thousand ids, or its neighbour with it."""
    monkeypatch.chdir(tmp_path)
    ids = ["manual/a.pdf", "manual/old/b.pdf", "manual/old/c[1].md", "manual/oldest.md"]
    with IndexWriter(tmp_path / "index", HashEncoder()) as writer:
        for name in ids:
            origin = str(tmp_path / "files" / "a.pdf") if name == ids[0] else ""
            writer.upsert(Document(name, f"The text of {name}.", origin=origin))
        writer.commit()
    assert run("index", "delete", given, "--index", "index").code == 0
    assert [row["id"] for row in json.loads(run("index", "list", "--index", "index", "--json").out)["list"]] == left
    one_error(run("index", "delete", "", "--index", "index"), "nothing was deleted")


def test_ids_are_listed_whole(run: Run, tmp_path: Path) -> None:
    """An id over two lines, which no command takes."""
    with IndexWriter(tmp_path / "index", HashEncoder()) as writer:
        writer.upsert(Document(name := "name/" * 40 + "x.md", "Its text.", title="Its title", source="its source"))
        writer.commit()
    lines = run("index", "list", "--index", tmp_path / "index").out.splitlines()
    assert any(name in line and "Its title" in line for line in lines)


def test_ids_are_in_the_order_of_their_numbers_and_those_not_shown_are_counted(run: Run, tmp_path: Path) -> None:
    """Row 10 above row 2; a deletion of 1,000 documents that looks like one of 20."""
    with IndexWriter(tmp_path / "index", HashEncoder()) as writer:
        for number in range(25):
            writer.upsert(Document(f"t.csv:{number}", f"Row {number}."))
        writer.commit()
    listed = json.loads(run("index", "list", "--index", tmp_path / "index", "--json").out)["list"]
    assert [row["id"] for row in listed] == [f"t.csv:{number}" for number in range(25)]
    assert "and 5 more" in run("index", "delete", "t.csv:*", "--index", tmp_path / "index").err


def test_verify_finds_what_hashes_cannot_tell(run: Run, index: Path, tmp_path: Path) -> None:
    """Files that are what was written, and are wrong."""
    shutil.copytree(index, tmp_path / "index")
    at = ("--index", tmp_path / "index")
    (record,) = Store.open(tmp_path / "index").manifest.segments
    path = tmp_path / "index" / record.name / "vectors.npy"
    vectors = np.load(path)
    vectors[4] *= 2
    np.save(path, vectors)
    one_error(run("index", "verify", *at), "vectors.npy", "sha256")
    raw = json.loads((tmp_path / "index" / "generation-000001" / "manifest.json").read_bytes())
    raw["segments"][0]["files"]["vectors.npy"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "index" / "generation-000001" / "manifest.json").write_text(json.dumps(raw))
    digest = hashlib.sha256(json.dumps(raw).encode()).hexdigest()
    (tmp_path / "index" / "CURRENT").write_text(f"generation-000001 {digest}")
    one_error(run("index", "verify", *at), "d4#0", "length 1")


def test_a_question_can_be_kept_to_some_documents(run: Run, loaded: Pipeline) -> None:
    """Filters that the command line swallows."""
    wanted = json.dumps({"type": "eq", "key": "document.source", "value": "5.txt"})
    answer = json.loads(run("ask", "What is fact 3?", *OPTIONS, "--filter", wanted, "--json").out)
    assert [passage["document_id"] for passage in answer["passages"]] == ["d5"]
    one_error(run("ask", "why", *OPTIONS, "--filter", "{"), "not JSON")
    one_error(run("ask", "why", *OPTIONS, "--filter", '{"type": "eq"}'), "filter", "key")


# -- demo and doctor ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = [(f"json.{document.id}", document.text) for document in DOCUMENTS]
    monkeypatch.setattr("ragspec.training.stdlib_corpus.kept_documents", lambda folder: corpus)


def test_the_demo_shows_equal_outputs_and_a_measured_ratio(
    run: Run, small_demo: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo that claims a speed-up it did not measure, or hides a difference; or that counts what no target wrote."""
    asked = (
        "Fact 3 is told here. It is known to all?",
        "Fact 5 is told here. It is known to all?",
        "Quo vadis, Zygmunt?",
    )
    monkeypatch.setattr("ragspec.cli.demo.QUESTIONS", asked)
    ended = run("demo", "--target", model, "--questions", 3, "--json")
    result = json.loads(ended.out)
    assert ended.code == 0 and result["num_questions"] == result["num_identical"] == 2
    fast, plain = (result[f"num_{name}_tokens"] / result[f"{name}_decode_s"] for name in ("fast", "plain"))
    assert result["speedup"] == pytest.approx(fast / plain, abs=1e-3)
    assert ended.err.count("identical tokens") == 2 and result["system_fingerprint"] in ended.err
    assert ended.err.count("the target was not asked") == 1 and NOTHING_CLOSE in ended.err
    assert all(question in ended.err for question in asked) and "ragspec index" in ended.err


def test_a_difference_between_the_outputs_is_a_failure() -> None:
    """An exit code of 0 for a broken promise."""
    same, other = answer("a b", (1, 2)), answer("a c", (1, 3))
    assert AnswerPair(same, same).identical and not AnswerPair(same, other).identical
    totals = Totals.of([AnswerPair(same, same), AnswerPair(same, other)])
    found = totals.to_dict()
    assert (found["num_questions"], found["num_identical"], found["num_tokens"]) == (2, 1, 4)
    assert found["speedup"] == 1.0 and found["num_fast_tokens"] == found["num_plain_tokens"] == 2


def test_tokens_that_come_with_the_prompt_are_no_decode_speed() -> None:
    """Noise of two prefills in the speed-up, or tokens counted for which no decode time was spent."""
    fast, plain = answer("a b c", (1, 2, 3)), answer("a b c", (1, 2, 3))
    stats = replace(fast.stats.generation, num_first_tokens=2, prefill_s=9.0)
    totals = Totals.of([AnswerPair(replace(fast, stats=replace(fast.stats, generation=stats)), plain)])
    assert totals.speedup == 0.5 and totals.to_dict()["num_fast_tokens"] == 1


def searched(store: Store) -> list[Passage]:
    return Retriever(HashEncoder(), store, follow=False).retrieve(["x"], 9).passages[0]


def test_a_damaged_cache_is_built_again_and_a_whole_one_is_not(tmp_path: Path) -> None:
    """A demo that fails for ever after a killed first run; one that encodes everything every time."""
    encoder = CountingEncoder()
    expected = searched(cached_library(DOCUMENTS, encoder, tmp_path, log_progress))
    num_encoded = encoder.num_texts
    cached_library(DOCUMENTS, encoder, tmp_path, log_progress)
    assert encoder.num_texts == num_encoded > 0
    for name in ("vectors.npy", "documents.arrow", "manifest.json"):
        max(tmp_path.rglob(name)).write_bytes(b"half")
        assert searched(cached_library(DOCUMENTS, encoder, tmp_path, log_progress)) == expected


def test_a_killed_build_goes_on_and_the_whole_library_begins_with_the_demos_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minutes of encoding again after a Ctrl-C, or for passages that the demo has encoded."""
    monkeypatch.setattr("ragspec.cli.standard_library._PASSAGES_PER_ENCODE", 2)
    monkeypatch.setattr("ragspec.cli.standard_library._PASSAGES_PER_COMMIT", 4)
    names = [f"json.{n}" for n in range(4)] + [f"zlib.{n}" for n in range(16)]
    corpus = [(name, f"{name}: Fact {number} is told here.") for number, name in enumerate(names)]
    whole = searched(cached_library(documents_of(corpus), HashEncoder(), tmp_path / "at once", log_progress))
    encoder = CountingEncoder()
    cached_library(documents_of(corpus, DEMO_MODULES), encoder, tmp_path, log_progress)
    assert encoder.num_texts == 4

    def killed(stage: str, done: int = 0, total: int = 0) -> None:
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_library(documents_of(corpus), encoder, tmp_path, killed)
    store = cached_library(documents_of(corpus), encoder, tmp_path, log_progress)
    assert 20 <= encoder.num_texts < 20 + 8, "at most what was not committed is encoded twice"
    assert searched(store) == whole and store.manifest.num_documents == 20
    assert not list(tmp_path.rglob("*.building"))
    service = service_library(documents_of(corpus), encoder, tmp_path, tmp_path / "home", log_progress)
    assert searched(Store.open(service)) == whole and service.parent == tmp_path / "home"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    """A read-only home directory that makes the demo impossible."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    console = Console(file=io.StringIO(), width=200)
    store = open_library(console, DOCUMENTS, HashEncoder(), tmp_path / "file", log_progress)  # type: ignore[arg-type]
    assert len(searched(store)) == 9
    assert "nothing is cached" in console.file.getvalue()  # type: ignore[attr-defined]


class CountingEncoder(HashEncoder):
    num_texts = 0

    def encode(self, texts: Sequence[str], kind: str = "document") -> FloatArray:
        self.num_texts += len(texts) if kind == "document" else 0
        return super().encode(texts, kind)


def test_docstrings_are_collected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of `serve` imported the whole standard library; a torn or read-only cache must not stop one."""
    collected: list[int] = []

    def collect() -> list[tuple[str, str]]:
        collected.append(1)
        return [("math.floor", "math.floor(x, /): the \udcff floor")]

    monkeypatch.setattr(stdlib_corpus, "stdlib_documents", collect)
    first = stdlib_corpus.kept_documents(tmp_path / "cache")
    assert stdlib_corpus.kept_documents(tmp_path / "cache") == first and len(collected) == 1
    (kept,) = (tmp_path / "cache").iterdir()
    for content in ("", "[[1", "[3]"):
        kept.write_text(content)
        assert stdlib_corpus.kept_documents(tmp_path / "cache") == first
    assert len(collected) == 4
    (tmp_path / "file").touch()
    assert stdlib_corpus.kept_documents(tmp_path / "file") == first
    monkeypatch.setattr(sys, "version", "another")
    assert stdlib_corpus.kept_documents(tmp_path / "cache") == first and len(collected) == 6


def test_progress_says_the_stage_the_share_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start of a minute that showed one line from its beginning to its end, and in a container's log nothing."""
    now = 0.0
    monkeypatch.setattr("ragspec.cli.terminal.perf_counter", lambda: now)
    log, screen = io.StringIO(), io.StringIO()
    with stage(Console(file=log, width=100), "target", "loading") as done:
        done("reading the weights")
        for now in (5.0, 10.0, 15.0):
            done("reading the weights", int(now), 30)
        done("testing the numerics")
        done.detail = "all is well"
    lines = [" ".join(line.translate({ord("━"): "", ord("─"): ""}).split()) for line in log.getvalue().splitlines()]
    assert lines == [
        "reading the weights … 0 s",
        "reading the weights … 15 of 30, 15 s, 15 s left",
        "testing the numerics … 15 s",
        "✓ target all is well 15.0 s",
    ]
    with stage(console := Console(file=screen, width=100, force_terminal=True), "target", "loading") as done:
        done("testing the numerics")
        console.print(done)
    assert "testing the numerics … 0 s" in screen.getvalue()


@pytest.mark.slow
def test_the_corpus_depends_on_python_alone() -> None:
    """An index built anew in every shell, with the user's environment inside (some signatures show it)."""
    code = """if True:
        import hashlib, ragspec.cli, ragspec.core
        from ragspec.training.stdlib_corpus import stdlib_documents
        corpus = stdlib_documents()
        from ragspec.cli.standard_library import documents_of
        texts = [document.text for document in documents_of(corpus)]
        assert not any("SECRET" in text for text in texts)
        print(len(texts), hashlib.sha256(repr(texts).encode()).hexdigest())"""
    environments = [{"A_SECRET": "1", "PYTHONHASHSEED": "1"}, {"COLUMNS": "80", "PYTHONHASHSEED": "2"}]
    command = [sys.executable, "-c", code]
    shells = [subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE) for env in environments]
    keys = {shell.communicate()[0] for shell in shells}
    assert [shell.returncode for shell in shells] == [0, 0]
    assert len(keys) == 1 and int(keys.pop().split()[0]) > 1000


def test_some_questions_are_about_what_training_never_saw() -> None:
    """A demo that only shows what was learned by heart."""
    names = {word.strip("?.") for question in QUESTIONS for word in question.split() if "." in word.strip("?.")}
    assert {is_held_out(name) for name in names} == {True, False}


def test_the_doctor_examines_and_reports(run: Run, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A doctor that says all is well when the target cannot be loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    well = json.loads(run("doctor", "--target", model, "--json").out)
    assert well["ok"] and "self-test passed" in well["checks"]["target"]["detail"]
    assert re.search(r"context \d+ tokens, [\d.]+ KiB each", well["checks"]["target"]["detail"])
    ill = run("doctor", "--target", tmp_path / "nothing")
    assert ill.code == 1 and "broken: target" in ill.out


def test_a_models_int8_weights_are_measured_beside_float(
    run: Run, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """A ratio of two different texts, or a warning that never comes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ragspec.cli.models.NUM_TOKENS", 128)
    found = json.loads(run("models", "check", model, "--json").out)
    assert found["num_tokens"] == 128 and found["int8"] != found["float32"]
    assert found["ratio"] == found["int8"] / found["float32"]
    assert 0.9 < found["ratio"] < 1.1
    monkeypatch.setattr("ragspec.cli.models.WARNED_RATIO", 0.5)
    shown = run("models", "check", model)
    assert re.search(r"[\d.]+ in int8, [\d.]+ in float32: ratio \d\.\d{4}, 128 tokens", " ".join(shown.out.split()))
    assert "above 0.5: target.quantization: none" in shown.err


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG: a relative path is to be ignored."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/ragspec")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/u")
    assert cache_folder() == Path("/home/u/.cache/ragspec")


# -- what reaches the terminal --------------------------------------------------------------------------------------------


def answer(
    text: str, token_ids: tuple[int, ...] = (1,), passages: tuple[Passage, ...] = (), *cited: Citation
) -> Answer:
    stats = GenerationStats(num_output_tokens=len(token_ids), num_first_tokens=1, num_steps=1, decode_s=0.5)
    return Answer("q", text, cited, passages, (), FinishReason.STOP, token_ids, (), AnswerStats(0, 0, "1-a", stats))


PASSAGE = Passage("doc", 0, "Before. The quoted\nsentence. \x1b[2JAfter.", 0, 39, "A title", "file.txt")
CITED = Citation(1, 21, "doc#0", 8, 28, "doc", 8, 28)
QUOTING = answer('"The quoted\nsentence." [1] \x1b[31mred', (1,), (PASSAGE,), CITED)


def shown(console: Console, *renderables: Any) -> str:
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
        print_sources(console, QUOTING)
    return capture.get()


def test_documents_cannot_steer_the_terminal() -> None:
    """A document that clears the screen or paints a false answer."""
    plain = shown(Console(width=80, force_terminal=False, color_system=None), answer_text(QUOTING))
    assert "\x1b" not in plain and safe("a\x1b[2J\x07\x9b\r\tb\n") == "a\ufffd[2J\ufffd\ufffd\ufffd\tb\n"


def test_quotes_are_marked_with_and_without_colours() -> None:
    """A citation that only a colour shows; two kinds of marks at once."""
    plain = shown(Console(width=80, force_terminal=False, color_system=None))
    assert "«The quoted sentence.»" in plain and "[1] A title (file.txt)" in plain
    coloured = shown(Console(width=80, force_terminal=True, color_system="standard", no_color=False))
    assert "«" not in coloured and "\x1b[1;32mThe quoted sentence.\x1b[0m" in coloured


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "# Changes\n\n## 1.3.0\n\n### Fixed\n\nThe mill stood.\n\n### Added\n\nIt turns.\n"),
        ("a.rst", "Changes\n=======\n\n1.3.0\n-----\n\nFixed\n~~~~~\n\nThe mill stood.\n\nAdded\n~~~~~\n\nIt turns.\n"),
    ],
)
def test_a_source_is_named_with_the_headings_above_its_quote(tmp_path: Path, name: str, text: str) -> None:
    """The version in which something was fixed, which only the heading above the quote says; marks of Markdown as a name."""
    (tmp_path / name).write_text(text)
    (document,) = read_file(tmp_path / name, name)
    below = next(each for each in chunk(document, ChunkingConfig()) if "The mill stood." in each.text)
    whole = replace(below, text=document.text, start=0, end=len(document.text), blocks=document.blocks)
    for passage, quote, named in (
        (below, "The mill stood.", "[1] Changes > 1.3.0 > Fixed"),
        (whole, "It turns.", "[1] Changes > Added"),
    ):
        at = passage.text.index(quote)
        cited = Citation(1, 1 + len(quote), passage.id, at, at + len(quote), name, at, at + len(quote))
        for width, shown_name in ((80, f"{named} ({name})"), (24, f"{named[: 23 - len(name) - 5]}")):
            console = Console(width=width, force_terminal=False, color_system=None)
            with console.capture() as capture:
                print_sources(console, answer(f'"{quote}" [1]', (1,), (passage,), cited))
            line = capture.get().splitlines()[0].strip()
            assert line.startswith(shown_name) and line.endswith(f" ({name})")


def test_sentences_that_are_no_quotes_are_shown_with_what_supports_them() -> None:
    """A right short answer without a source; an invented sentence that looks like the others."""
    text = 'The quoted sentence stands. It has "wings" [1].'
    labels = (AnswerSentence(0, 27, "supported", "doc#0", 8, 28), AnswerSentence(28, 47, "unsupported"))
    told = replace(answer(text, (1,), (PASSAGE,)), sentences=labels, unknown_quotations=((36, 41),))
    console = Console(width=120, force_terminal=False, color_system=None)
    with console.capture() as capture:
        print_sources(console, told)
    lines = [line.strip() for line in capture.get().splitlines()]
    assert "in no source, though in quotation marks: wings" in lines
    assert "supported by [1]: The quoted sentence stands.  (The quoted sentence.)" in lines
    assert 'not found in the passages: It has "wings" [1].' in lines


@pytest.mark.parametrize("width", [20, 80, 120])
def test_sources_keep_to_the_width(width: int) -> None:
    """Lines that the terminal breaks a second time."""
    plain = shown(Console(width=width, force_terminal=False, color_system=None))
    assert all(len(line) <= max(width, 26) for line in plain.splitlines())


def test_a_long_passage_is_cut_around_its_quote() -> None:
    """A page of text around one quoted sentence."""
    text = "x" * 900 + "quote" + "y" * 900
    cut = excerpt(Passage("d", 0, text, 0, len(text)), [Citation(0, 5, "d#0", 900, 905, "d", 900, 905)], marks=True)
    assert cut.plain.startswith("… x") and cut.plain.endswith("y …") and "x«quote»y" in cut.plain and len(cut) < 320


def test_rows_of_a_table_are_shown_below_its_header() -> None:
    """Numbers without the names of their columns, or rows on one line; or the header twice, or a title for it."""
    text = "Prices\n\n| Part | Price |\n|---|---|\n| Saw | 9 |\n| Nail | 1 |\n| Glue | 4 |"
    passage = Passage(
        "d", 0, text, 0, len(text), blocks=(Block(0, 6, BlockKind.HEADING), Block(8, 71, BlockKind.TABLE))
    )

    def shown_of(*quotes: str, passage: Passage = passage) -> str:
        spans = [(start := passage.text.index(quote), start + len(quote)) for quote in quotes]
        return excerpt(passage, [Citation(0, 1, "d#0", a, b, "d", a, b) for a, b in spans], marks=True).plain

    assert shown_of("| Nail | 1 |") == "| Part | Price |\n«| Nail | 1 |»"
    assert (
        shown_of("| Saw | 9 |\n| Nail | 1 |", "| Glue | 4 |")
        == "| Part | Price |\n«| Saw | 9 |\n| Nail | 1 |»\n«| Glue | 4 |»"
    )
    assert shown_of("| Part | Price |\n|---|---|\n| Saw | 9 |").startswith("«| Part | Price |\n|---")
    rows = "| Saw | 9 |\n| Nail | 1 |"
    later = Passage("d", 1, rows, 0, len(rows), heading="A | B > Part | Price", headings=("A | B",))
    later = replace(later, blocks=(Block(0, len(rows), BlockKind.TABLE),))
    assert shown_of("| Nail | 1 |", passage=later) == "Part | Price\n«| Nail | 1 |»"
    assert shown_of("| Saw | 9 |", passage=replace(later, heading="A | B")) == "«| Saw | 9 |»"


def test_words_quoted_twice_are_shown_once() -> None:
    """A passage on the screen that says what the document does not."""
    passage = Passage("d", 0, "one two three four", 0, 18)
    spans = [(4, 13), (0, 7), (4, 13), (14, 18)]
    shown_passage = excerpt(passage, [Citation(0, 1, "d#0", a, b, "d", a, b) for a, b in spans], marks=True)
    assert shown_passage.plain == "«one two three» «four»"
