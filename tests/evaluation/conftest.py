"""A small data folder of the real files' shape, an encoder without weights and a random target: suites run in seconds."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from letter_encoder import WordEncoder
from tiny_target import save_model

from pipelines.benchmarks.cases import workloads
from pipelines.benchmarks.harness import Run
from ragspec.config import TargetConfig
from ragspec.retrieval.encoder import Encoder

NUM_ARTICLES, NUM_HELD_OUT = 14, 10


def paragraph(article: int) -> str:
    """Sentences of all lengths the lists choose from."""
    name = f"Town{article}"
    short = [f"The old mill of {name} was built beside river number {i} in {1800 + article}." for i in range(14)]
    long = (
        f"Every spring the water carries sand and small stones from the hills of {name} down to the sea, and the people of "
        "the valley clear the old bridge before the first boats arrive there."
    )
    return " ".join([*short, long])


def _write_lines(path: Path, rows: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    articles, questions, corpus = [], [], []
    for n in range(NUM_ARTICLES):
        answer = f"{1800 + n}"
        asked = {"id": f"q{n}", "question": f"When was the old mill of Town{n} built?", "answers": [{"text": answer}]}
        articles.append({"title": f"Town{n}", "paragraphs": [{"context": paragraph(n), "qas": [asked]}]})
        questions.append({"id": f"q{n}", "question": asked["question"], "answers": [answer], "gold": f"p{n}"})
        corpus.append({"id": f"p{n}", "title": f"Town{n}", "text": paragraph(n), "source": "made up"})
    distractor = {"id": "d0", "title": "Rain", "text": "A mill needs water, and water needs rain.", "source": "made up"}
    _write_lines(folder / "squad/dev-v1.1.json", [{"data": articles}])
    _write_lines(folder / "squad_open/questions_dev.jsonl", questions)
    _write_lines(folder / "squad_open/corpus.jsonl", corpus)
    _write_lines(folder / "squad_open/corpus_distractors.jsonl", [distractor])
    _write_lines(folder / "jfleg/dev.src", ["She see the bridge . ", "A mill need water . ", "He go home . "])
    for name in ("ref0", "ref1", "ref2", "ref3"):
        _write_lines(folder / f"jfleg/dev.{name}", ["She saw the bridge .", "A mill needs water .", "He goes home ."])
    _write_lines(folder / "pie_errorify/verbs.json", [{"carries": ["carry", "carried"]}])
    _write_lines(folder / "pie_errorify/common_replaces.json", [{"people": {"peoples": 9}}])
    turns = ["Where is the mill?", "Who built the mill?"]
    _write_lines(folder / "mt_bench/question.jsonl", [{"question_id": n, "turns": turns} for n in range(2)])
    said = [["USER" if n % 2 == 0 else "SYSTEM", f"The mill has {n} wheels."] for n in range(6)]
    _write_lines(folder / "sgd/test.jsonl", [{"id": f"1_{n}", "turns": said} for n in range(2)])
    asked = [{"question_id": n, "category": "roleplay", "turns": turns} for n in range(2)]
    _write_lines(folder / "spec_bench/question.jsonl", asked)
    return folder


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with room for three passages."""
    return save_model("llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture
def run(small_data: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two prompts of each list, short outputs, one run."""
    for limit in ("RAG_TOKENS", "GRAMMAR_TOKENS", "CHAT_TOKENS", "PROSE_TOKENS", "SPEC_BENCH_TOKENS", "NOTHING_TOKENS"):
        monkeypatch.setattr(workloads, limit, 16)
    monkeypatch.setattr(Encoder, "load", lambda config: WordEncoder())
    target = TargetConfig(model=str(tiny_dir), quantization="none")  # as transformers runs it
    return Run(target, tmp_path / "cache", small_data, quick=True, num_runs=1, num_prompts=2)
