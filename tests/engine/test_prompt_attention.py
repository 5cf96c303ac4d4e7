"""A request can show where single heads of the target look; no batch, chunk, cached prefix or draft changes it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_target import Tiny, save_model, tiny_engine
from transformers import AutoModelForCausalLM

from ragspec.config import TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.engine.target import Target
from ragspec.errors import ModelError

PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
HEADS = ((1, 0), (0, 3), (1, 2))
PROMPT = tuple(np.random.default_rng(7).integers(5, 200, 61).tolist())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_attention_is_that_of_transformers(tiny: Tiny, kind: str) -> None:
    """A wrong rotation, KV head, bias or norm; a window that is not one."""
    target = tiny(kind)
    model = AutoModelForCausalLM.from_pretrained(target.config.model, attn_implementation="eager").eval()
    with torch.inference_mode():
        shown = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    with tiny_engine(target, []) as engine:
        (completion,) = engine.generate([Request("a", PROMPT, PARAMS, attention_heads=HEADS)])
    for (layer, head), row in zip(HEADS, completion.attention, strict=True):
        assert np.allclose(row, shown[layer][0, head, -1], atol=1e-5)


@pytest.mark.parametrize("num_tokens", [16, 256])
def test_nothing_beside_the_prompt_changes_attention(tiny: Tiny, num_tokens: int) -> None:
    """A row of another sequence, of a chunk before the last, or of a cached prefix."""
    others = [Request(f"other{n}", PROMPT[n : 40 + n], SamplingParams(max_tokens=8)) for n in range(3)]
    asked = Request("a", PROMPT, PARAMS, attention_heads=HEADS)
    copied = CopySource(SourceKind.PASSAGE, "The river rises in the northern hills.")
    with tiny_engine(tiny(), []) as engine:
        alone = engine.generate([asked])[0].attention
    with tiny_engine(tiny(), max_num_batched_tokens=num_tokens) as engine:
        together = engine.generate([*others, asked])[-1].attention
        again = engine.generate([Request("b", PROMPT, PARAMS, (copied,), attention_heads=HEADS)])[0]
    assert alone == together == again.attention and again.stats.num_cached_tokens > 16
    assert all(len(row) == len(PROMPT) and abs(sum(row) - 1.0) < 1e-9 for row in alone)


def test_only_a_request_that_asks_is_shown_attention_and_of_heads_that_exist(tiny: Tiny) -> None:
    """A fit of another model made every request fail."""
    with tiny_engine(tiny(), []) as engine:
        assert engine.generate([Request("a", PROMPT, PARAMS)])[0].attention == ()
        for place in ((2, 0), (0, 4), (-1, 0)):
            assert not engine.generate([Request("b", PROMPT, PARAMS, attention_heads=(HEADS[0], place))])[0].attention


def test_weights_without_safetensors_show_none_and_lost_weights_refuse_a_request(tmp_path: Path) -> None:
    """Reading the head's weights failed behind the forward, and ended all requests of its step."""
    target = Target.load(TargetConfig(model=str(save_model("llama", tmp_path))), num_kv_slots=2048)
    (file,) = Path(target.config.model).glob("*.safetensors")
    asked = Request("a", PROMPT, PARAMS, attention_heads=HEADS)
    with tiny_engine(target, []) as engine:
        file.unlink()
        with pytest.raises(ModelError, match="has no weights"):
            engine.generate([asked])
        torch.save({"model.norm.weight": torch.ones(64)}, file.with_name("pytorch_model.bin"))
        assert engine.generate([asked])[0].attention == ()


def test_a_target_whose_decoder_is_not_replaced_shows_none(tiny: Tiny) -> None:
    with tiny_engine(tiny("gemma2"), []) as engine:
        assert engine.generate([Request("a", PROMPT, PARAMS, attention_heads=HEADS)])[0].attention == ()
