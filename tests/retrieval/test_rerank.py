"""The reranker: scores that do not depend on their company, and models that are none are refused."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_reranker import save_model

from ragspec.errors import ModelError
from ragspec.retrieval.rerank import Reranker

QUERY = "when did it rain ?"
TEXTS = [
    "rain .",
    "it was rain when the ship came in .",
    "snow .",
    "the harbour was empty , nobody saw the boats leave before dawn . " * 3,
    "",
    "a ship came in when it was snow .",
    "雨が降る",
    "the harbour was empty before dawn . " * 60,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def reranker(folder: str) -> Reranker:
    return Reranker.load(folder)


def test_a_score_is_bitwise_the_same_alone_and_in_any_company(reranker: Reranker) -> None:
    """Padding and batch size change last bits: two equal passages would swap places when a third is found."""
    assert reranker.max_batch_size > 1, "the packed model should pass its self-test on this machine"
    alone = np.concatenate([reranker.scores(QUERY, [text]) for text in TEXTS])
    assert alone.dtype == np.float64 and len(set(alone.tolist())) == len(TEXTS)
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 40):
        order = rng.integers(len(TEXTS), size=size)
        assert np.array_equal(reranker.scores(QUERY, [TEXTS[i] for i in order]), alone[order])
    torch.set_num_threads(1)
    assert np.array_equal(reranker.scores(QUERY, TEXTS), alone)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(reranker.scores, QUERY, TEXTS[n % 3 :]) for n in range(12)]
        assert all(np.array_equal(future.result(), alone[n % 3 :]) for n, future in enumerate(futures))


def test_scores_are_the_logits_of_sentence_transformers(folder: str, reranker: Reranker) -> None:
    """Query and passage exchanged, token types forgotten, or another cut: plausible scores, wrong order."""
    from sentence_transformers import CrossEncoder

    stock = CrossEncoder(folder, device="cpu", local_files_only=True, activation_fn=torch.nn.Identity())
    assert reranker.max_tokens == 128
    assert len(stock.tokenizer(QUERY, TEXTS[-1])["input_ids"]) > 128
    for query in (QUERY, "ship " * 200):
        pairs = [(query, text) for text in TEXTS]
        stock.max_seq_length = 128
        np.testing.assert_allclose(reranker.scores(query, TEXTS), stock.predict(pairs), rtol=1e-4, atol=1e-5)
    assert not np.allclose(reranker.scores("rain", ["snow"]), reranker.scores("snow", ["rain"]))


def test_a_long_passage_leaves_the_query_whole(reranker: Reranker) -> None:
    """A cut at the end of the query scores the passage for another question."""
    short, other = reranker.scores("rain", TEXTS[-1:]), reranker.scores("snow", TEXTS[-1:])
    assert short != other
    assert reranker.scores("rain", [TEXTS[-1] + "snow"]) == short


def test_nothing_to_score_gives_no_scores(reranker: Reranker) -> None:
    """An empty batch stops the tokenizer."""
    assert reranker.scores(QUERY, []).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, "3 scores"),
        ("BertModel", {}, "lacks 2 of the classifier's tensors"),
        ("BertForMaskedLM", {}, "lacks"),
    ],
)
def test_models_that_give_no_score_are_refused(kind: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Transformers fills a missing head with random numbers and only warns: passages would come in random order."""
    with pytest.raises(ModelError, match=reason) as error:
        Reranker.load(save_model(tmp_path, kind, **changes))
    assert "\n" not in str(error.value)


def test_damaged_or_absent_models_are_one_clear_error(folder: str, tmp_path: Path) -> None:
    """A typo in a path gave a traceback of forty lines from three libraries."""
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"damaged")
    unknown = Path(shutil.copytree(folder, tmp_path / "unknown"))
    (unknown / "config.json").write_text(json.dumps({"model_type": "t-rex"}))
    (tmp_path / "empty").mkdir()
    for path in (damaged, unknown, tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(ModelError, match="cannot be loaded as a reranker") as error:
            Reranker.load(str(path))
        assert "\n" not in str(error.value)


def test_a_score_that_is_no_number_is_an_error(folder: str, tmp_path: Path) -> None:
    """Sorting with NaN gives whatever order the sort happens to leave."""
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["classifier.bias"][:] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="finite"):
        Reranker.load(str(broken)).scores(QUERY, TEXTS)


def test_positions_that_roberta_reserves_are_not_used(tmp_path: Path) -> None:
    """A full pair then reads beyond the table of positions: an IndexError, only with long passages."""
    import transformers

    save_model(tmp_path)
    config = transformers.XLMRobertaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=66,
        num_labels=1,
        type_vocab_size=2,
    )
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "tokenizer_class": "BertTokenizer"}))
    roberta = Reranker.load(str(tmp_path))
    assert roberta.max_tokens == 64
    assert np.isfinite(roberta.scores(QUERY, TEXTS)).all()
