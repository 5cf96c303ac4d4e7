"""Targets with int8 weights: exact sums, in any company, with any threads; as near to float as the weights allow."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from oracle import fresh_forward
from pydantic import ValidationError
from tiny_target import ARCHITECTURES, save_model, target_config
from transformers import AutoModelForCausalLM

from ragspec.config import TargetConfig
from ragspec.engine.target import FINAL, Target
from ragspec.errors import ModelError
from ragspec.evaluation.target_scores import perplexity
from ragspec.numerics.cpu import int8_weights, thread_pool
from ragspec.numerics.cpu.int8 import Int8Decoder, Int8Linear
from ragspec.numerics.cpu.int8_weights import greatest_activation, pack, quantise
from ragspec.numerics.cpu.llvm_code import has_feature
from ragspec.numerics.cpu.product_code import (
    INSTRUCTION_SETS,
    InstructionSet,
    RoundedRows,
    make_multiply,
    make_quantise,
    room_for_rows,
)
from ragspec.numerics.linear import PackedLinear
from ragspec.numerics.threads import set_num_threads

KINDS = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(params=INSTRUCTION_SETS)
def instructions(request: pytest.FixtureRequest) -> InstructionSet:
    found = INSTRUCTION_SETS[request.param]
    if found.feature is not None and not has_feature(found.feature):
        pytest.skip(f"this processor has no {request.param}")
    return found


@functools.cache
def compiled_quantise(instructions: InstructionSet) -> Any:
    quantise = make_quantise(instructions)

    @numba.njit
    def quantise_all(x: Any, most: Any, rows: Any, scales: Any) -> None:
        spare = np.empty(2 * x.shape[1], np.int16)
        for row in range(len(x)):
            scales[row] = quantise(x.reshape(-1), row * x.shape[1], x.shape[1], most, rows, row, len(x), spare)

    return quantise_all


def quantised(x: np.ndarray, most: int, instructions: InstructionSet) -> tuple[RoundedRows, np.ndarray]:
    rows, scales = room_for_rows(*x.shape, instructions), np.empty(len(x), np.float32)
    compiled_quantise(instructions)(x, np.float32(most), rows, scales)
    return rows, scales


def whole_numbers(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.rint(x * (1 / scales)[:, None]).astype(np.int64)


@functools.cache
def compiled_product(instructions: InstructionSet) -> Any:
    multiply = make_multiply(instructions)

    @numba.njit
    def multiply_blocks(rows: Any, packed: Any, scales: Any, row_scales: Any, out: Any) -> None:
        width = len(packed) // len(scales)
        for block in range(len(scales) // 16):
            multiply(
                rows, len(out), packed, block * 16 * width, width, scales, block * 16, row_scales,
                out.reshape(-1), block * 16, out.shape[1],
            )  # fmt: skip

    return multiply_blocks


def product(
    rows: RoundedRows, row_scales: np.ndarray, weight: np.ndarray, scales: np.ndarray, instructions: InstructionSet
) -> np.ndarray:
    out, packed = np.empty((len(row_scales), len(scales)), np.float32), pack(torch.from_numpy(weight), instructions)
    compiled_product(instructions)(rows, packed.numpy(), scales, row_scales, out)
    return out


def kept_numbers(rows: RoundedRows, width: int, instructions: InstructionSet) -> np.ndarray:
    """What the rows were rounded to, outliers included: their products with the identity."""
    eye = np.eye(width, dtype=np.int8)
    return product(rows, np.ones(len(rows.sums), np.float32), eye, np.ones(width, np.float32), instructions)


@pytest.mark.parametrize("num_rows", [3, 47])
def test_the_product_is_the_integer_sum(num_rows: int, instructions: InstructionSet) -> None:
    """A product that rounds or saturates inside, as 8-bit multiply-adds do on processors without dot products, that loses an
    outlier, or that takes a number of another row."""
    rng = np.random.default_rng(num_rows)
    weight = rng.integers(-128, 128, (48, 2032)).astype(np.int8)
    weight[0] = -127
    most = greatest_activation(int(np.abs(weight.astype(int)).sum(1).max()))
    x = rng.normal(0, 1, (num_rows, 2032)).astype(np.float32)
    x[0] = -1.0  # the greatest byte everywhere; its sums are the greatest of all without an outlier
    x[-1] *= 10.0 ** rng.integers(-3, 4, 2032)  # outliers everywhere
    x[1] = np.abs(x[1] * 1e-6)
    x[1, 3::700] = 1.0, -1.0, 1.0  # the greatest numbers
    rows, row_scales = quantised(x, most, instructions)
    numbers = whole_numbers(x, row_scales)
    assert np.abs(numbers).max() == most and (np.abs(numbers[-1]) > 127).sum() > 50
    sums, scales = numbers @ weight.astype(np.int64).T, rng.random(48, np.float32)
    expected = sums.astype(np.int32).astype(np.float32) * scales * row_scales[:, None]
    assert np.array_equal(product(rows, row_scales, weight, scales, instructions), expected)


def test_no_sum_leaves_32_bits() -> None:
    """The greatest activations against the greatest weights."""
    for width in (16, 512, 30_000, 10_000_000):
        greatest = greatest_activation(127 * width)
        assert 1 <= greatest <= 32_767 and greatest * 127 * width < 2**31


def test_the_greatest_sums_are_exact(instructions: InstructionSet) -> None:
    """A partial sum of bytes plus 128 that leaves 32 bits must come back."""
    weight = np.full((16, 2048), 127, np.int8)
    x = np.full((1, 2048), 1e-7, np.float32)
    x[0, ::9] = 1.0
    rows, row_scales = quantised(x, greatest_activation(127 * 2048), instructions)
    numbers = whole_numbers(x, row_scales)
    out = product(rows, row_scales, weight, np.ones(16, np.float32), instructions)
    assert (out == np.float32(127 * numbers.sum()) * row_scales[0]).all() and numbers.max() > 127


@pytest.mark.parametrize("outlier", [1.0, 100.0, 1e6])
def test_a_row_is_rounded_to_the_nearest(outlier: float, instructions: InstructionSet) -> None:
    """Six times the mean fits a byte; a greater number is kept whole up to the greatest one. Padding counts nowhere."""
    x = np.random.default_rng(1).normal(0, 3, (1, 96)).astype(np.float32)
    x[0, 80:] = 0.0
    x[0, 5] = outlier
    rows, scales = quantised(x, 1000, instructions)
    numbers = kept_numbers(rows, x.shape[1], instructions)
    step = max(6 * np.abs(x[0, :80]).mean() / 127, np.abs(x).max() / 1000)
    assert scales[0] == pytest.approx(step, rel=1e-5)
    assert np.abs(numbers - x[0] / scales[0]).max() < 0.502
    assert np.abs(numbers).max() <= 1000 and (np.abs(numbers).max() > 127) == (outlier > 50)


@pytest.mark.parametrize(("bad", "is_nan"), [(np.nan, True), (np.inf, True), (-np.inf, True), (0.0, False)])
def test_a_row_that_is_no_number_stays_so(bad: float, is_nan: bool, instructions: InstructionSet) -> None:
    """A broken weight gave plausible text; a row of zeros gave NaN; every NaN of a row was an outlier, for more of which than
    there was room: the next row's were overwritten."""
    x = np.random.default_rng(2).normal(0, 1, (2, 96)).astype(np.float32)
    x[0], x[1, 7] = bad, 100.0
    rows, scales = quantised(x, 1000, instructions)
    numbers = kept_numbers(rows, 96, instructions)
    assert not numbers[0].any() and np.array_equal(numbers[1:], whole_numbers(x[1:], scales[1:]))
    assert np.isnan(scales[0]) if is_nan else scales[0] == 0.0


def outputs(target: Target, text: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    logits, tapped = fresh_forward(target, text, (0, 1, 2, FINAL))
    return logits, {tap: stream.numpy() for tap, stream in tapped.items()}


def dequantised(folder: Path) -> Any:
    """The float model with the quantised weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                weight, scales = quantise(module.weight)
                module.weight.copy_(weight.float() * scales[:, None])
    return model


def error(found: Any, expected: Any) -> float:
    """Of rounded activations it is 0.02 to 0.06: tiny models have few numbers to average over."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def with_float32_cache(folder: Path) -> TargetConfig:
    """References round no keys."""
    return target_config(str(folder), "int8").model_copy(update={"kv_cache_dtype": "float32"})


@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(k, marks=pytest.mark.slow) for k in ("llama", "qwen2", "mistral"))]
)
def test_a_target_is_the_model_with_its_quantised_weights(kind: str, tmp_path: Path) -> None:
    """A norm, bias or rotation left out; gate and up confused; a tap of another layer."""
    folder = save_model(kind, tmp_path)
    target = Target.load(with_float32_cache(folder), 256)
    assert isinstance(target._model.model, Int8Decoder)
    text = np.random.default_rng(5).integers(0, target.vocab_size, 90).astype(np.int32)
    logits, tapped = outputs(target, text)
    with torch.inference_mode():
        reference = dequantised(folder)
        theirs = reference(torch.from_numpy(text.astype(np.int64))[None], output_hidden_states=True)
    assert error(logits, theirs.logits[0]) < 0.1
    for tap in (0, 1):
        assert error(tapped[tap], theirs.hidden_states[tap][0]) < 0.1
    with torch.inference_mode():
        normed = dequantised(folder).model.norm(torch.from_numpy(tapped[2]))
    assert np.allclose(normed.numpy(), tapped[FINAL], rtol=1e-4, atol=1e-5)
    assert error(tapped[FINAL], theirs.hidden_states[2][0]) < 0.1


def test_threads_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than processors, so that helpers come late and leave in the middle."""
    monkeypatch.setattr(thread_pool, "LEAST_SHARED", 0)
    target = Target.load(target_config(str(save_model("llama", tmp_path)), "int8"), 512)
    text = np.random.default_rng(6).integers(0, target.vocab_size, 70).astype(np.int32)
    set_num_threads(1)
    expected = outputs(target, text)[0]
    for num_threads in (2, 3, 9) * 4:
        torch.set_num_threads(num_threads)
        assert np.array_equal(outputs(target, text)[0], expected)
    set_num_threads(2)


def test_a_helper_that_comes_late_finds_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran chunks of a later step with the numbers of an earlier one."""
    late: list[Callable[[], None]] = []

    def submit(count: int, arguments: tuple[Any, ...]) -> None:
        late.extend(lambda: thread_pool.work(*arguments) for _ in range(count))

    monkeypatch.setattr(thread_pool._POOL, "submit", submit)
    target = Target.load(target_config(str(save_model("llama", tmp_path)), "int8"), 512)
    set_num_threads(2)
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, target.vocab_size, length).astype(np.int32) for length in (3, 60, 1)]
    alone = outputs(target, texts[0])[0]
    assert not late  # three rows of so small a model need no helper
    monkeypatch.setattr(thread_pool, "LEAST_SHARED", 0)
    first = [outputs(target, text)[0] for text in texts]
    assert late and np.array_equal(first[0], alone)
    for text, expected in zip(texts, first, strict=True):
        found = outputs(target, text)[0]
        for call in late:
            call()
        assert np.array_equal(found, expected)
    assert all(np.array_equal(outputs(target, text)[0], expected) for text, expected in zip(texts, first, strict=True))


@pytest.mark.parametrize("kind", [*sorted(ARCHITECTURES.keys() - {*KINDS}), "heads of odd size"])
def test_models_with_a_forward_of_their_own_run_too(kind: str, tmp_path: Path) -> None:
    """Float weights stayed where the table of phases cannot run the decoder."""
    is_odd = kind == "heads of odd size"
    folder = save_model("llama", tmp_path, head_dim=8) if is_odd else save_model(kind, tmp_path)
    target = Target.load(target_config(str(folder), "int8") if is_odd else with_float32_cache(folder), 256)
    kinds = {type(module) for module in target._model.modules()}
    assert PackedLinear not in kinds and (is_odd or Int8Linear in kinds)
    text = np.random.default_rng(8).integers(0, target.vocab_size, 40).astype(np.int32)
    with torch.inference_mode():
        theirs = dequantised(folder)(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
    assert error(outputs(target, text)[0], theirs) < 0.1


def test_quantised_weights_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start quantised again, or served the weights of another model; a damaged file stopped the start."""
    folder = save_model("qwen3", tmp_path / "model", tie_word_embeddings=True)
    config = target_config(str(folder), "int8").model_copy(update={"cache_dir": str(tmp_path / "cache")})
    text = np.arange(40, dtype=np.int32)
    expected = outputs(Target.load(config, 256), text)
    (file,) = (tmp_path / "cache" / "int8").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(int8_weights, "quantise", None)
        mapped = Target.load(config, 256)
        found = outputs(mapped, text)
        assert np.array_equal(found[0], expected[0])
        assert all(np.array_equal(found[1][tap], expected[1][tap]) for tap in expected[1])
        in_float = Target.load(config.model_copy(update={"quantization": "none"}), 16)
        assert mapped.num_parameters == in_float.num_parameters
    file.write_bytes(file.read_bytes()[:1000])
    assert np.array_equal(outputs(Target.load(config, 256), text)[0], expected[0])
    other = target_config(str(save_model("qwen3", tmp_path / "other", std=0.1)), "int8")
    other = other.model_copy(update={"cache_dir": config.cache_dir})
    assert not np.array_equal(outputs(Target.load(other, 256), text)[0], expected[0])
    assert len(list(file.parent.iterdir())) == 2
    no_folder = config.model_copy(update={"cache_dir": str(file)})
    assert np.array_equal(outputs(Target.load(no_folder, 256), text)[0], expected[0]), "a cache that cannot be written"


def streamed(config: TargetConfig, max_weight_bytes: int) -> Target:
    return Target.load(TargetConfig(**config.model_dump() | {"max_weight_bytes": max_weight_bytes}), 256)


def least_bytes(config: TargetConfig) -> int:
    """Weights in memory where as few layers as possible are kept, as the refusal of a single byte says."""
    with pytest.raises(ModelError, match="needs at least") as refused:
        streamed(config, 1)
    return int(str(refused.value).split()[-1])


@pytest.mark.parametrize("num_layers", [pytest.param(6, marks=pytest.mark.slow), 7])
def test_weights_read_from_disk_change_no_bit(num_layers: int, tmp_path: Path) -> None:
    """A layer computed with another's weights: read too late, into a buffer in use, or at another place."""
    config = target_config(str(save_model("qwen2", tmp_path, num_hidden_layers=num_layers)), "int8")
    rng = np.random.default_rng(12)
    whole = Target.load(config, 256)
    texts = [rng.integers(0, whole.vocab_size, length).astype(np.int32) for length in (3, 60, 1, 1)]
    expected = [outputs(whole, text) for text in texts]
    whole_bytes, least = len(whole.backend.arena.arrays[0]), least_bytes(config)
    sizes = set()
    for max_bytes in np.linspace(least, whole_bytes, 5).astype(int).tolist():
        target = streamed(config, max_bytes)
        for text, (logits, tapped) in zip(texts, expected, strict=True):
            found = outputs(target, text)
            assert np.array_equal(found[0], logits)
            assert all(np.array_equal(found[1][tap], stream) for tap, stream in tapped.items())
        sizes.add(len(target.backend.arena.arrays[0]))
        assert max(sizes) <= max_bytes
    assert {least, whole_bytes} < sizes, "something between"


def test_a_file_that_ends_early_fails_the_step_alone(tmp_path: Path) -> None:
    """The forward took what the buffer held before, or every later one failed too."""
    config = target_config(str(save_model("llama", tmp_path / "model", num_hidden_layers=4)), "int8")
    target = streamed(config, least_bytes(config))
    text = np.arange(7, dtype=np.int32)
    expected = outputs(target, text)[0]
    (file,) = (tmp_path / "cache" / "int8").iterdir()
    content = file.read_bytes()
    os.truncate(file, 2000)
    with pytest.raises(ModelError, match=r"weights of layer [0-3] cannot be read: .* ends early"):
        for _ in range(2):
            outputs(target, text)
    with file.open("r+b") as same:
        same.write(content)
    assert np.array_equal(outputs(target, text)[0], expected)
    with target.backend.arena.layer(2):
        os.truncate(file, 2000)
    with pytest.raises(ModelError, match="ends early"), target.backend.arena.layer(3):  # and layer 0, read ahead, fails
        pass
    with file.open("r+b") as same:
        same.write(content)
    assert np.array_equal(outputs(target, text)[0], expected)


def test_a_damaged_file_of_streamed_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target larger than memory was quantised in memory, unasked."""
    config = target_config(str(save_model("llama", tmp_path / "model", num_hidden_layers=4)), "int8")
    least, text = least_bytes(config), np.arange(7, dtype=np.int32)
    expected = outputs(streamed(config, least), text)[0]
    (file,) = (tmp_path / "cache" / "int8").iterdir()
    os.truncate(file, 2000)
    with monkeypatch.context() as patched:
        patched.setattr(int8_weights, "quantise", None)
        with pytest.raises(ModelError, match=f"{file.name} cannot be read: .*; remove it"):
            streamed(config, least)
    file.unlink()
    assert np.array_equal(outputs(streamed(config, least), text)[0], expected)


def test_weights_on_disk_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    """All weights in memory, against the setting."""
    folder = save_model("llama", tmp_path)
    with pytest.raises(ValidationError, match="max_weight_bytes needs int8 weights"):
        TargetConfig(model=str(folder), quantization="none", max_weight_bytes=2**20)
    config = target_config(str(folder), "int8")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="could not be kept there"):
        streamed(config.model_copy(update={"cache_dir": str(tmp_path / "file")}), 2**20)
    other = target_config(str(save_model(sorted(ARCHITECTURES.keys() - {*KINDS})[0], tmp_path / "other")), "int8")
    with pytest.raises(ModelError, match="needs kernels that run the whole decoder"):
        streamed(other, 2**20)


def test_perplexity_is_that_of_the_models_own_logits(tmp_path: Path) -> None:
    """A token predicted from itself, or the first token of a window counted."""
    folder = save_model("llama", tmp_path)
    tokens = np.random.default_rng(9).integers(0, 300, 150).tolist()
    found = perplexity(Target.load(target_config(str(folder), "float32"), 256), tokens, window_tokens=100)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        losses = [
            torch.nn.functional.cross_entropy(model(part[None]).logits[0, :-1], part[1:], reduction="none")
            for part in torch.tensor(tokens).split(100)
        ]
    assert found == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
