"""EAGLE heads on disk: the files that are read, and the published layout that is written."""

import json
from pathlib import Path

import pytest
import torch
from drafting.eagle_heads import random_head, same
from safetensors.torch import load_file, save_file

from ragspec.drafting.eagle.checkpoint import read_head, write_head
from ragspec.drafting.eagle.layout import HeadCheckpoint, check_fits, default_aux_layers
from ragspec.errors import ModelError, SaveError


def test_the_written_layout_is_the_published_one(tmp_path: Path) -> None:
    """A head that only we can read: renamed keys, ids in place of offsets, maps of another type."""
    made = random_head("eagle3", dtype=torch.bfloat16)
    write_head(tmp_path, made)
    stored = load_file(tmp_path / "model.safetensors")
    layer = (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
    )
    norms = "hidden_norm input_layernorm post_attention_layernorm"
    in_layer = {f"midlayer.{name}.weight" for name in (layer + " " + norms).split()}
    assert stored.keys() == in_layer | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    dtypes = [stored[name].dtype for name in ("d2t", "t2d", "fc.weight")]
    assert dtypes == [torch.int64, torch.bool, torch.bfloat16]
    assert stored["t2d"].nonzero()[:, 0].tolist() == [row + offset for row, offset in enumerate(stored["d2t"].tolist())]
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": 40,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "norm_before_residual": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "target_hidden_size": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 64,
    }


def test_shards_and_bin_files_hold_the_same_head(tmp_path: Path) -> None:
    """A head in the older file, or in shards, that is only half read."""
    made = random_head("eagle3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same(read_head(tmp_path), made)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "head.pt")
    torch.save({"epoch": 1}, tmp_path / "training_args.bin")
    assert same(read_head(tmp_path), made)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(read_head(tmp_path), made)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        read_head(tmp_path)


def test_a_head_for_another_target_is_refused() -> None:
    """A head of another vocabulary, width or depth drafts nonsense or reads past the target's layers."""
    eagle3 = random_head("eagle3", aux_layers=(2, 4, 6)).config
    check_fits(eagle3, vocab_size=64, hidden_size=32, num_layers=6)
    with pytest.raises(ModelError, match="vocabulary of 64 tokens, the target has 65"):
        check_fits(eagle3, 65, 32, 6)
    with pytest.raises(ModelError, match="hidden states of 32, the target's have 48"):
        check_fits(eagle3, 64, 48, 6)
    with pytest.raises(ModelError, match=r"\(2, 4, 6\) are no layers of a target that has 5"):
        check_fits(eagle3, 64, 32, 5)
    by_default = random_head("eagle3").config
    assert default_aux_layers(32) == (2, 16, 29)
    check_fits(by_default, 64, 32, 7)
    with pytest.raises(ModelError, match=r"default aux_layers \(2, 3, 3\)"):
        check_fits(by_default, 64, 32, 6)
    check_fits(random_head("eagle").config, 64, 32, 1)
    own_width = random_head("eagle3", target_hidden_size=48, own_embedding=True).config
    check_fits(own_width, 64, 48, 32)
    with pytest.raises(ModelError):
        check_fits(own_width, 64, 32, 32)


def test_a_head_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A run that diverged replaced a good head; tensors that share memory, such as rows of the target's embedding, were refused;
    or an error left a half-written file that the next start takes for the head."""
    good = random_head("eagle3", draft_vocab=64, own_embedding=True)
    shared = {**good.tensors, "lm_head.weight": good.tensors["embed_tokens.weight"], "d2t": torch.zeros(64).long()}
    shared["t2d"] = torch.ones(1, dtype=torch.bool).expand(64)
    made = HeadCheckpoint(good.config, shared)
    write_head(tmp_path / "good", made)
    diverged = {**good.tensors, "fc.weight": good.tensors["fc.weight"] * torch.nan}
    with pytest.raises(ModelError, match=r"fc\.weight"):
        write_head(tmp_path / "good", HeadCheckpoint(good.config, diverged))
    assert same(read_head(tmp_path / "good"), made)
    (tmp_path / "file").write_text("")
    (tmp_path / "head" / "config.json").mkdir(parents=True)
    for folder in ("file", "head"):
        with pytest.raises(SaveError):
            write_head(tmp_path / folder, random_head("eagle"))
    assert not list((tmp_path / "head").glob(".*"))
