"""Makes transformers read a GGUF file quickly: its header once, its tensors on all threads.

Transformers parses the header for the configuration, for the weights and for the tokenizer, each time through slices of a numpy
memmap, which is slow for the 300,000 strings of a vocabulary. It dequantises 16 rows at a time on one thread. Inside `quick_gguf`
transformers gets one parsed header, and `dequantise` in place of gguf's function. Names, shapes and bits of the tensors stay.

>>> with quick_gguf(Path("model.gguf"), log.info):
...     AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.self_test import Say
from ragspec.numerics.threads import num_processors

_PLAIN = {"F32", "F16", "F64", "I8", "I16", "I32", "I64"}
"""Types that gguf converts as whole arrays."""
_CHUNK_BYTES = 2**18
_PERCENT_A_MESSAGE = 10
_ONE_AT_A_TIME = threading.Lock()


class ArrayReader(gguf.GGUFReader):
    """Reads from a plain array over the mapped file."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        return self._array

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._array = mapped.view(np.ndarray)


@contextmanager
def quick_gguf(path: Path, say: Say) -> Iterator[None]:
    """Inside, transformers reads the file at `path`, and no other GGUF file. `say` gets the progress of the tensors."""
    reader = ArrayReader(path)
    num_bytes, done, said = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0, -1

    def dequantised(data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
        nonlocal done, said
        found = dequantise(data, kind)
        done += data.nbytes
        if (percent := 100 * done // max(1, num_bytes) // _PERCENT_A_MESSAGE * _PERCENT_A_MESSAGE) > said:
            say(f"dequantising the weights: {percent} %")
            said = percent
        return found

    # Why a patch: transformers imports both names inside its functions, and takes a path alone.
    with _ONE_AT_A_TIME, patch.multiple(gguf, GGUFReader=lambda _: reader, dequantize=dequantised):
        yield


def dequantise(data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """The bits of `gguf.dequantize`, on all threads. Shapes: rows of blocks [..., bytes] -> float32 [..., inputs]."""
    if kind.name in _PLAIN or data.ndim < 2:
        return np.asarray(gguf.quants.dequantize(data, kind))
    blocks: Any = getattr(gguf.quants, kind.name)
    blocks.init_grid()
    rows = data.reshape(-1, data.shape[-1])
    out = np.empty(gguf.quants.quant_shape_from_byte_shape(rows.shape, kind), np.float32)
    step = max(1, _CHUNK_BYTES // rows.shape[1])

    def fill(first: int) -> None:
        out[first : first + step] = blocks.dequantize_rows(rows[first : first + step])

    with ThreadPoolExecutor(num_processors()) as pool:
        list(pool.map(fill, range(0, len(rows), step)))
    return out.reshape(*data.shape[:-1], out.shape[1])
