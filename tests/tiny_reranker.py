"""A cross-encoder with random weights, for tests.

>>> Reranker.load(save_model(folder))
"""

from pathlib import Path
from typing import Any

import torch

WORDS = "when did it rain in the harbour ship came snow was empty before dawn nobody saw boats leave . , ?".split()


def save_model(folder: Path, kind: str = "BertForSequenceClassification", **changes: Any) -> str:
    """A tiny BERT with random weights and a WordPiece vocabulary, in the usual form."""
    import transformers

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        initializer_range=0.3,
        **{"num_labels": 1, **changes},
    )
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return str(folder)
