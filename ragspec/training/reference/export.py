"""Export of a trained target.

Owns the form on disk: bf16 safetensors in shards of at most 15 MB, tokenizer and configuration beside them.
"""

from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_SHARD_SIZE = "15MB"


def export_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model so that plain `AutoModelForCausalLM.from_pretrained` loads it."""
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    model.config._attn_implementation = "sdpa"
    model.bfloat16().save_pretrained(directory, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(str(directory))
