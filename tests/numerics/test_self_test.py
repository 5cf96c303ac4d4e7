"""The start-up self-test: passes on the real kernels, fails on variant ones, and then nothing is promised."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tiny_target import ARCHITECTURES, Tiny

from ragspec.engine.loading import check_numerics
from ragspec.errors import ModelError
from ragspec.numerics.attention import attend
from ragspec.numerics.cpu import backend as cpu_backend
from ragspec.numerics.cpu.int8 import Int8Linear
from ragspec.numerics.linear import PackedLinear, replace_linears
from ragspec.numerics.self_test import QUICK_CHUNKS, QUICK_ROWS, _compare, self_test

DTYPES = ("float32", "bfloat16", "int8", "torch-float32", "torch-bfloat16")
QUICK = {(kind, DTYPES[n % 5]) for n, kind in enumerate(ARCHITECTURES)}
"""Each architecture and each dtype."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product(ARCHITECTURES, DTYPES)
    ],
)
def test_the_real_kernels_pass(tiny: Tiny, kind: str, dtype: str) -> None:
    """Rows that depend on their company; a self-test that leaks slots.

    Why fewer rows on the backend torch, but for one architecture: its threads wait for each other where tests share the cores.
    """
    target = tiny(kind, dtype)
    longest = 130 if dtype.startswith("torch") and kind != "llama" else target.max_context_tokens
    tested = self_test(target, longest, target.config.numerics_dtype, 2)
    assert tested.passed, tested.failures
    again = self_test(target, QUICK_ROWS, target.config.numerics_dtype, 2, QUICK_CHUNKS)
    assert tested.numerics_id == again.numerics_id
    assert target.pool.num_free_pages == target.pool.num_pages


def test_the_numerics_id_tells_targets_apart(tiny: Tiny) -> None:
    """A replay against another model or dtype would be taken for the same numerics."""
    targets = [tiny(kind, dtype) for kind in ("llama", "qwen3") for dtype in ("float32", "int8")]
    types = [(each, each.config.numerics_dtype) for each in targets] + [(targets[0], "float32-kv-bfloat16")]
    assert len({self_test(each, QUICK_ROWS, dtype, 2, QUICK_CHUNKS).numerics_id for each, dtype in types}) == 5


def variant_attention(qkv: Any, *others: Any) -> np.ndarray:
    """The last bit of bfloat16 depends on the number of rows, as in stock kernels."""
    out = attend(qkv, *others)
    return out * np.float32(1 + 2**-8) if len(qkv) > 16 else out


def variant_linear(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """Sums in two halves when there are many rows."""
    identity = torch.eye(self.in_features, dtype=self.dtype)
    weight = REAL_LINEAR(self, identity).T  # [out, in]
    weight = weight if self.bias is None else weight - self.bias[:, None]
    half = self.in_features // 2
    if x.numel() // self.in_features > 4:
        y = x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T
    else:
        y = x @ weight.T
    return y if self.bias is None else y + self.bias


REAL_LINEAR = PackedLinear.forward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", ["attention", "linear"])
def test_a_variant_kernel_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, which: str, dtype: str) -> None:
    """A self-test that cannot fail promises equal text on machines where it does not hold."""
    target = tiny("llama", dtype)
    if which == "attention":
        monkeypatch.setattr(cpu_backend, "attend", variant_attention)
    else:
        monkeypatch.setattr(PackedLinear, "forward", variant_linear)
    tested = self_test(target, 128, dtype, 2)
    assert not tested.passed
    assert tested.failures
    assert 0.0 < tested.failures[0].difference < 1.0
    assert target.pool.num_free_pages == target.pool.num_pages
    with pytest.raises(ModelError, match="self-test failed"):
        check_numerics(target, 2)
    target.config = target.config.model_copy(update={"exactness": "fast"})
    assert not check_numerics(target, 2).passed
    target.config = target.config.model_copy(update={"exactness": "bitwise"})


def test_what_differs_by_almost_nothing_differs() -> None:
    """A difference that a processor rounds to zero would have been served as none."""
    tiny = np.array([[np.nextafter(np.float32(0), np.float32(1)), 1.0]], np.float32)
    (failure,) = _compare("denormal", tiny, np.array([[0.0, 1.0]], np.float32))
    assert failure.difference > 0.0
    (failure,) = _compare("no number", np.array([[np.nan]], np.float32), np.ones((1, 1), np.float32))
    assert failure.difference == np.inf


def test_a_kernel_that_mixes_sequences_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch neighbour whose keys are seen."""

    def leaking(qkv: Any, keys: Any, values: Any, rows: Any, *others: Any) -> np.ndarray:
        out = attend(qkv, keys, values, rows, *others)
        if len(rows.row_start) > 2:
            out[-1] = out[0]
        return out

    target = tiny()
    monkeypatch.setattr(cpu_backend, "attend", leaking)
    assert any("beside" in failure.what for failure in self_test(target, 128, "float32", 2).failures)


@pytest.mark.parametrize(("width", "outputs"), [(64, 64), (172, 512), (1, 1), (7, 33), (300, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packed_rows_are_alike_in_any_number(width: int, outputs: int, dtype: torch.dtype) -> None:
    """One row alone, or a prime number of them, takes another path through the product."""
    is_int8 = dtype == torch.int8
    linear = torch.nn.Linear(width, outputs, bias=width % 2 == 0).to(torch.float32 if is_int8 else dtype)
    packed = (Int8Linear if is_int8 else PackedLinear)(linear.weight, linear.bias)
    x = torch.randn(513, width, dtype=linear.weight.dtype)
    with torch.inference_mode():
        whole = packed(x)
        for num in (1, 2, 3, 5, 6, 7, 11, 16, 64, 65, 257):
            assert torch.equal(packed(x[:num]), whole[:num])
            assert torch.equal(packed(x[-num:]), whole[-num:])
        assert packed(x[:0]).shape == (0, outputs)
        assert packed(x[None, :4]).shape == (1, 4, outputs)
        rtol, atol = {torch.float32: (1e-4, 1e-2), torch.bfloat16: (1e-2, 1e-2), torch.int8: (0.02, 0.08)}[dtype]
        torch.testing.assert_close(whole, linear(x), rtol=rtol, atol=atol)


def test_every_linear_is_packed() -> None:
    """A layer left out keeps a variant product; a subclass replaced loses what it adds."""

    class Special(torch.nn.Linear):
        pass

    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Sequential(torch.nn.Linear(16, 8), Special(8, 8)))
    replace_linears(module)
    kinds = [type(m) for m in module.modules() if not list(m.children())]
    assert kinds == [PackedLinear, PackedLinear, Special]
