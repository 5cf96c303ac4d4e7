"""Row-invariant linear layers: a row's result does not depend on how many rows stand beside it.

oneDNN's packed matrix product adds in the same order for any number of rows, except that a single row of wide inputs takes
another path; so one row is padded to two. It is also two to three times faster than the stock product on CPU. The operators are
private to torch, hence `packing_available` and the start-up self-test.

Owns the products of one process; tensor parallelism is in `ragspec.numerics.sharding`.

    >>> replace_linears(model)      # in place, once, after loading
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

_TYPICAL_ROWS = 16
_packed_product = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """`y = x W^T + b` with `W` in oneDNN's blocked layout; not trainable, not saveable.

    Shapes: x [..., in_features] -> y [..., out_features]; dtype float32 or bfloat16, as the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.register_buffer(
            "packed", torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_ROWS)
        )
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        if x.shape[0] == 1:
            return self.forward(x.expand(2, -1).contiguous())[:1]
        return cast(Tensor, _packed_product(x, self.packed, self.bias, "none", [], ""))


def packing_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this torch build has the packed product for `dtype` on this machine."""
    try:
        PackedLinear(torch.zeros(16, 16, dtype=dtype))(torch.zeros(2, 16, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def replace_linears(module: nn.Module, make: Callable[[Tensor, Tensor | None], nn.Module] = PackedLinear) -> None:
    """Replace every `nn.Linear` below `module` by `make(weight, bias)`, in place. The original weights are not changed."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, make(child.weight, child.bias))
        else:
            replace_linears(child, make)
