"""The compiled step between two blocks against torch, row by row."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.numerics.norms import ResidualNorm, RootMeanSquareNorm


def make_norm(width: int, dtype: torch.dtype) -> ResidualNorm:
    weight = nn.Parameter(torch.rand(width, dtype=dtype) + 0.5)
    return ResidualNorm(RootMeanSquareNorm(SimpleNamespace(weight=weight, variance_epsilon=1e-5)))


def rows(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x, block = (torch.randn(num_rows, width, generator=generator).to(dtype) for _ in range(2))
    return x, block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 172, 320])
@torch.inference_mode()
def test_it_adds_and_normalises(width: int, dtype: torch.dtype) -> None:
    norm = make_norm(width, dtype)
    x, block = rows(5, width, dtype)
    kept = x.clone()
    total, normalised = norm(x, block)
    assert torch.equal(x, kept), "the stream given is not written to"
    assert torch.equal(total, x + block)
    expected = F.rms_norm(total, (width,), norm.norm.weight, 1e-5)
    torch.testing.assert_close(normalised, expected)
    torch.testing.assert_close(norm.norm(total), expected)
    torch.testing.assert_close(norm.norm(total.t().contiguous().t()), expected)


@torch.inference_mode()
def test_a_row_is_the_same_in_any_company() -> None:
    norm = make_norm(320, torch.float32)
    x, block = rows(70, 320, torch.float32)
    together = norm(x, block)[1]
    for row in (0, 1, 33, 69):
        assert torch.equal(norm(x[row : row + 1], block[row : row + 1])[1][0], together[row])
        assert torch.equal(norm.norm(x[row : row + 1])[0], norm.norm(x)[row])


@torch.inference_mode()
def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(2, 64)
    assert torch.equal(make_norm(64, torch.float32)(zeros, zeros)[1], zeros)
