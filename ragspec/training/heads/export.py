"""The picture of a head's training; the head itself is written by `write_head`."""

from pathlib import Path

import torch

SMOOTHING_STEPS = 50


def draw_drafter_curves(history: list[dict[str, float]], probes: list[dict[str, float]], path: Path) -> None:
    """Loss per draft step, hits of the probes per draft step, and learning rate over tokens, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [record["tokens"] / 1e6 for record in history]
    width = min(SMOOTHING_STEPS, len(history))
    figure, (upper, middle, lower) = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True)
    for name in sorted(key for key in (history[0] if history else {}) if key.startswith("loss_")):
        values = torch.tensor([record[name] for record in history])
        upper.plot(tokens[width - 1 :], values.unfold(0, width, 1).mean(1), label="draft step " + name[5:])
    upper.set(ylabel=f"loss (nats, mean of {width} steps)")
    for name in sorted(key for key in (probes[0] if probes else {}) if "top1" in key):
        middle.plot([p["tokens"] / 1e6 for p in probes], [p[name] for p in probes], marker=".", label=name)
    middle.set(ylabel="share of the target's tokens drafted first", ylim=(0, 1))
    for axes in (upper, middle):
        if axes.get_lines():
            axes.legend(fontsize=7, ncols=3)
    lower.plot(tokens, [record["lr"] for record in history])
    lower.set(ylabel="learning rate", xlabel="tokens (millions)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
