"""Tokenizers with a chat template, with a template that refuses system messages, and without one."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(special: tuple[str, ...], **settings: Any) -> PreTrainedTokenizerFast:
    """Byte level, so that every text is encoded without loss."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["The question and the passages. It rained."], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


CHAT = tokenizer(("<|im_start|>", "<|im_end|>"), chat_template=CHATML, eos_token="<|im_end|>")


PLAIN = tokenizer(("<s>", "</s>"), bos_token="<s>", eos_token="</s>")


STRICT = tokenizer(
    ("<|im_start|>", "<|im_end|>"),
    chat_template="{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML,
    eos_token="<|im_end|>",
)
"""Its template refuses a system message, as Gemma's does."""


ALL = {"chat": CHAT, "strict": STRICT, "plain": PLAIN}
