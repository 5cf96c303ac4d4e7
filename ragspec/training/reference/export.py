"""Export of a trained target and the picture of its training.

Owns the form on disk: bf16 safetensors in shards of at most 15 MB, tokenizer and configuration beside them.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_SHARD_SIZE = "15MB"
SMOOTHING_STEPS = 50


def export_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model so that plain `AutoModelForCausalLM.from_pretrained` loads it."""
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    model.config._attn_implementation = "sdpa"
    model.bfloat16().save_pretrained(directory, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(str(directory))


def draw_curves(history: list[dict[str, float]], probes: list[dict[str, float]], path: Path) -> None:
    """Loss, scores of the probes and learning rate over tokens, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [record["tokens"] / 1e6 for record in history]
    losses = torch.tensor([record["answer_loss"] for record in history])
    width = min(SMOOTHING_STEPS, len(losses))
    smooth = losses.unfold(0, width, 1).mean(1) if width else losses
    figure, (upper, middle, lower) = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True)
    upper.plot(tokens[width - 1 :], smooth)
    upper.set(ylabel=f"answer loss (nats, mean of {width} steps)", yscale="log")
    for name in sorted({key for probe in probes for key in probe if key != "tokens"}):
        middle.plot([p["tokens"] / 1e6 for p in probes], [p[name] for p in probes], marker=".", label=name)
    middle.set(ylabel="share of probe questions", ylim=(0, 1))
    if probes:
        middle.legend()
    lower.plot(tokens, [record["lr"] for record in history])
    lower.set(ylabel="learning rate", xlabel="tokens (millions)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
