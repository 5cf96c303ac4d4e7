"""The byte-level BPE tokenizer of the reference target.

Owns the split of text into words and the training of the vocabulary. Why its own split: a sentence must have the same
tokens inside a passage and right after an opening quotation mark, or it cannot be copied token by token. So a space
that follows the end of a sentence, a bracket or a quotation mark stands alone, and so does every quotation mark.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragspec.training.reference.initialisation.model import MAX_POSITIONS
from ragspec.training.reference.text_format import (
    CHAT_TEMPLATE,
    CONTEXT_ROLE_FLAG,
    END,
    PAD,
    SPECIAL_TOKENS,
)

WORD_SPLIT = (
    r"(?<=[.!?:;\])\"\n]) (?=\S)"  # the space between two sentences
    r"|'(?:s|t|re|ve|m|ll|d)\b"
    r"| ?\p{L}+| ?\p{N}{1,4}"
    r"| ?[\"`(\[]"  # opening marks alone, so that what follows them is a word of its own
    r"|[\])\"]"
    r"| ?[^\s\p{L}\p{N}\"`(\[\])]+"
    r"|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on the texts, special tokens first; the same texts give the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (PAD, END)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        **{CONTEXT_ROLE_FLAG: True},
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a directory."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(directory))
    return tokenizer


def token_pieces(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The string of every token, as the vocabulary writes it, by id."""
    by_id: dict[int, str] = {number: piece for piece, number in tokenizer.get_vocab().items()}
    return [by_id[number] for number in range(len(tokenizer))]
