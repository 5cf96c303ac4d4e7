"""A certificate of a GPU's bits: `infra/gpu/check.sh bits` runs this and prints the numerics id. Needs a CUDA device."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import decode

from pipelines.benchmarks.gpu import SHAPES, engine_over, random_target
from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.engine.target import Target
from ragspec.numerics.self_test import CHUNKS, self_test

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PARAMS = (
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=1),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=2),
)
NUM_PROMPTS = 200


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(SHAPES[0], TargetConfig(device="cuda", dtype="bfloat16"))


def test_every_tile_of_the_table_has_the_same_bits() -> None:
    """Bug guarded: a tile, also of a table that was written for this device, whose order of sums is another."""
    sys.path.insert(0, str(ROOT / "infra" / "gpu"))
    import tune

    from ragspec.numerics.cuda.backend import TritonLinear
    from ragspec.numerics.cuda.kernels import NUM_ARRIVALS
    from ragspec.numerics.cuda.tiles import Tile

    for size in tune.known_weights():
        weight = torch.randn(*size, dtype=torch.bfloat16, device="cuda")
        linear = TritonLinear(weight, None, torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device="cuda"))
        x = torch.randn(max(tune.CHECKED_ROWS), size[1], dtype=torch.bfloat16, device="cuda")
        for product in (linear, linear.gated):
            expected = tune.with_tile(product, x, Tile(16, 16, 4, 3))
            for start, rows in itertools.product((0, 5), tune.CHECKED_ROWS):
                assert torch.equal(product(x[start:][:rows]), expected[start:][:rows]), (size, rows)


def test_rows_in_forwards_of_one_to_two_thousand_rows_have_the_same_bits(target: Target) -> None:
    """Bug guarded: a row that sees its neighbours in a forward of some number of rows, or where its context ends in a chunk."""
    chunks = tuple(sorted({*CHUNKS, 4, 17, 63, 127, 128, 129, 255, 256, 1023, 1024, 1025}))
    tested = self_test(target, 2047, target.config.numerics_dtype, 2, chunks)
    print(f"\nnumerics id: {tested.fingerprint}, {tested.num_rows} rows, {torch.cuda.get_device_name()}")
    assert tested.passed, tested.failures


@pytest.mark.parametrize("params", PARAMS, ids=["T=0", "T=1", "top-p"])
def test_drafts_batches_and_preemption_change_no_token(target: Target, params: SamplingParams) -> None:
    """Bug guarded: a token of 200 prompts that another batch, a draft or a small pool decides otherwise."""
    rng = np.random.default_rng(7)
    texts = [tuple(rng.integers(0, 256, int(rng.integers(20, 200))).tolist()) for _ in range(NUM_PROMPTS)]
    requests = [Request(f"r{i}", ids, params) for i, ids in enumerate(texts)]
    alone = [decode(target, request.prompt_ids, params).token_ids for request in requests]
    copied = [
        Request(r.id, r.prompt_ids, params, (CopySource(SourceKind.PASSAGE, target.tokenizer.decode(ids), "0"),))
        for r, ids in zip(requests, alone, strict=True)
    ]
    answers = {(request.id, 0): ids for request, ids in zip(requests, alone, strict=True)}
    for given, num_slots in ((requests, 4096), (copied, 4096), (copied, 1024)):
        with engine_over(target, EngineConfig(max_kv_tokens=num_slots)) as engine:
            found = {(c.request_id, c.choice): c.token_ids for c in engine.generate(given)}
        assert found == answers
