"""The engine on a GPU, with plain torch operators and with Triton kernels. Runs where torch finds a CUDA device."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from conversation_turns import NUM_KV_SLOTS, PLENTY, answered, turns
from drafters import Half, Random
from oracle import decode
from oracle_cases import PARAMS, PROMPTS, requests_of
from tiny_target import save_model, tiny_engine

from ragspec.config import TargetConfig
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.loading import check_numerics
from ragspec.engine.target import Target

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["torch", "cuda"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", "float32"), *((kind, "bfloat16") for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2"))],
)
def test_drafts_change_no_token(
    kind: str, backend: Literal["torch", "cuda"], dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    """Bug guarded: a product, norm or softmax of the device whose bits depend on the number of rows."""
    folder = save_model(kind, tmp_path / "model")
    target = Target.load(
        TargetConfig(model=str(folder), device="cuda", backend=backend, dtype=dtype), num_kv_slots=2048
    )
    assert check_numerics(target, 2).passed
    for params in PARAMS.values():
        requests = requests_of(target, params, PROMPTS[:4])
        expected = {(r.id, 0): decode(target, r.prompt_ids, params).token_ids for r in requests}
        for drafter in (None, Half(expected), Random(target.vocab_size), CopyDrafter(target.tokenizer, target.eos_ids)):
            with tiny_engine(target, [drafter] if drafter else []) as engine:
                found = {(c.request_id, c.choice): c.token_ids for c in engine.generate(requests)}
            assert found == expected


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_an_int8_target_never_has_its_floats_on_the_device(backend: Literal["torch", "cuda"], tmp_path: Path) -> None:
    """A model whose int8 weights fit did not load, because all of it was moved before it was quantised."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    folder = save_model("llama", tmp_path / "model", **shape)
    config = TargetConfig(
        model=str(folder),
        device="cuda",
        backend=backend,
        dtype="bfloat16",
        quantization="int8",
        cache_dir=str(tmp_path),
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target = Target.load(config, num_kv_slots=512)
    assert torch.cuda.max_memory_allocated() - before < 0.75 * 2 * target.num_parameters


@pytest.mark.parametrize("backend", ["torch", "cuda"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_offloaded_prefixes_come_back_to_the_device(
    backend: Literal["torch", "cuda"], on_disk: bool, tmp_path: Path
) -> None:
    """A graph replayed over slots whose keys were still on their way, or bytes of another dtype."""
    folder = save_model("llama", tmp_path / "model")
    config = TargetConfig(model=str(folder), device="cuda", backend=backend, dtype="bfloat16")
    target = Target.load(config, num_kv_slots=NUM_KV_SLOTS)
    requests = turns(target, PARAMS["T=1"])
    expected = [  # before the engine, whose prefix cache keeps the pool's pages
        decode(target, request.prompt_ids, request.params).token_ids for request in [*requests[0], *requests[1]]
    ]
    options = {"kv_offload_bytes": PLENTY, "kv_offload_dir": str(tmp_path) if on_disk else ""}
    with tiny_engine(target, [CopyDrafter(target.tokenizer, target.eos_ids)], NUM_KV_SLOTS, **options) as engine:
        found = answered(engine, requests)
    assert [completion.token_ids for completion in [*found[0], *found[1]]] == expected
    assert sum(c.stats.num_restored_tokens for c in found[1]) > 150
