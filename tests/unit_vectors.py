"""Random vectors as encoders give them."""

import numpy as np

from ragspec.retrieval.encoder import FloatArray


def unit(rng: np.random.Generator, rows: int, dimension: int = 64) -> FloatArray:
    vectors = rng.standard_normal((rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
