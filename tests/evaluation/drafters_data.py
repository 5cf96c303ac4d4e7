"""A small data folder with dialogues and chat questions, too, and random heads for the small target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from drafting.eagle_heads import random_head
from transformers import AutoTokenizer

HIDDEN = 64


def with_chat(small_data: Path, folder: Path) -> Path:
    """A copy of the small data folder with files of MT-bench's and SGD's shape."""
    shutil.copytree(small_data, folder)
    questions = [{"turns": [f"Who built the bridge number {i}?", "And when?"]} for i in range(5)]
    said = [
        "Is there a mill?",
        "Yes, there is.",
        "By the river?",
        "Past the old bridge.",
        "Since {}?",
        "1874.",
        "Thanks.",
    ]
    who = ["USER", "SYSTEM"]
    dialogues = [{"turns": [[who[n % 2], text.format(i)] for n, text in enumerate(said)]} for i in range(5)]
    short = {"turns": [["USER", "Hello there?"], ["SYSTEM", "Hello."]]}
    for name, rows in (("mt_bench/question.jsonl", questions), ("sgd/test.jsonl", [short, *dialogues])):
        (folder / name).parent.mkdir()
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def save_heads(folder: Path, model_dir: Path) -> Path:
    """`folder/eagle` and `folder/eagle3` for a saved target of two layers."""
    vocab = len(AutoTokenizer.from_pretrained(model_dir))
    random_head("eagle", folder / "eagle", hidden=HIDDEN, vocab=vocab)
    random_head("eagle3", folder / "eagle3", hidden=HIDDEN, vocab=vocab, draft_vocab=200, aux_layers=(0, 1, 2))
    return folder
