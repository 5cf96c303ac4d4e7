"""Contrastive training of the packaged encoder: what it learns, its files, and resumed runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from pipelines import train_encoder
from pipelines.train_encoder import EncoderPlan, EncoderTrainer, read_triples
from ragspec.config import EncoderConfig
from ragspec.errors import InputError
from ragspec.retrieval.encoder import Encoder, packaged_folder
from ragspec.training.trainer import SINGLE_WORKER

WORDS = "amber birch cedar delta ember frost grove heron".split()


def write_rows(path: Path) -> Path:
    """Of two passages that share the question's words, the one that says "blue" answers."""
    rows = [
        {
            "question": f"Where is the {word} key?",
            "lead": "Keys\n",
            "passage": f"The {word} key is {colour}.",
            "quote": quote,
        }
        for word in WORDS
        for colour, quote in (("blue", f"The {word} key is blue."), ("red", ""))
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def trainer_on(rows: Path, total_tokens: int = 100_000) -> EncoderTrainer:
    plan = EncoderPlan(total_tokens=total_tokens, questions_per_step=4, peak_lr=5e-4, warmup_steps=2)
    return EncoderTrainer(
        SentenceTransformer(str(packaged_folder()), device="cpu"), read_triples(rows), plan, SINGLE_WORKER
    )


def margin(model: SentenceTransformer) -> float:
    """By how much questions are nearer to the passages that answer than to the others."""
    asked, blue, red = (
        model.encode([text.format(word=word) for word in WORDS], normalize_embeddings=True)
        for text in ("Where is the {word} key?", "Keys\nThe {word} key is blue.", "Keys\nThe {word} key is red.")
    )
    return float((asked * (blue - red)).sum())


def test_a_hard_negative_is_like_the_question_and_does_not_answer(tmp_path: Path) -> None:
    """The question's own passage as its negative; a file without questions that trains nothing."""
    triples = read_triples(write_rows(tmp_path / "rows.jsonl"))
    assert len(triples) == len(WORDS)
    assert all(t.passage != t.negative and t.passage.startswith("Keys\nThe") and "key" in t.negative for t in triples)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(InputError, match="no question"):
        read_triples(tmp_path / "none.jsonl")


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one_and_its_encoder_is_served(tmp_path: Path) -> None:
    """State that is lost at a kill; a merged model that the product's encoder reads as the old one or not at all."""
    rows = write_rows(tmp_path / "rows.jsonl")
    unbroken, first, second = (trainer_on(rows) for _ in range(3))
    before = margin(first.model)
    losses = [unbroken.train_step()["loss"] for _ in range(6)]
    assert margin(unbroken.model) > before
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "checkpoint.safetensors")
    second.load(tmp_path / "checkpoint.safetensors")
    assert [second.train_step()["loss"] for _ in range(3)] == losses[3:]
    second.write(tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir()) < 10 * 2**20
    text = "The amber key is blue."
    served = Encoder.load(EncoderConfig(model=str(tmp_path / "model"))).encode([text])
    np.testing.assert_allclose(served, second.model.encode([text], normalize_embeddings=True), atol=1e-4)
    assert np.abs(served - Encoder.load(EncoderConfig()).encode([text])).max() > 1e-3


def test_a_missing_file_ends_in_one_line(tmp_path: Path) -> None:
    """A traceback after the model was loaded."""
    with pytest.raises(InputError, match="there is no file"):
        train_encoder.train(train_encoder.parser().parse_args(f"--data {tmp_path}/no --out {tmp_path}".split()))
