"""Plain decoding: the second, independent definition of the output. Every engine setting must equal it token for token.

One forward of the whole text a token, no cache kept, no draft; noise in Python integers, warps by sorting. It shares the
target's forward with the engine, so that bits are comparable, and nothing of `ragspec.verification` or `ragspec.numerics.noise`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ragspec.core import SamplingParams
from ragspec.engine.target import Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots

MASK, STEP = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def bits(seed: int, choice: int, index: int, num: int) -> list[int]:
    """53 bits for token ids 0 to num - 1."""
    key = 0
    for part in (seed + STEP, STEP * (choice + 1), STEP * (index + 1)):
        key = mix((key + part) & MASK)
    return [mix((key + STEP * (v + 1)) & MASK) >> 11 for v in range(num)]


def gumbel(h: int) -> float:
    """-log(-log u), u = (h + 1/2) / 2**53. Above one half u + 1/2 ulp is no float64, so the way goes through 1 - u."""
    if h < 2**52:
        return float(-np.log(-np.log((h + 0.5) / 2**53)))
    return float(-np.log(-np.log1p(-((2**53 - h) - 0.5) / 2**53)))


def warped(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]
) -> np.ndarray:
    """Penalties (vLLM's and Hugging Face's definition), bias, minimum length, temperature; float32 [V]."""
    x = logits.astype(np.float32)
    repetition, presence, frequency = map(
        np.float32, (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    )
    for v in {*prompt, *output}:
        x[v] = x[v] / repetition if x[v] > 0 else x[v] * repetition
    for v in set(output):
        x[v] -= presence + frequency * np.float32(list(output).count(v))
    biases = dict(params.logit_bias) if output else {**params.logit_bias, **params.first_token_bias}
    for v, bias in params.prefix_bias.get(tuple(output), {}).items():
        biases[v] = biases.get(v, 0.0) + bias
    for v, bias in biases.items():
        x[v] += np.float32(bias)
    if len(output) < params.min_tokens:
        x[list(eos_ids)] = -np.inf
    return x / np.float32(max(params.temperature, 1e-6)) if params.temperature else x


def survivors(x: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids left by top-k, top-p and min-p, by sorting: (greater logit, lower id) first."""
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[: params.top_k] if params.top_k else order
    mass = np.exp(x[order].astype(np.float64) - np.float64(x[order[0]]))
    above = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    kept = np.ones(len(order), bool) if params.top_p >= 1 else above < params.top_p * mass.sum()
    if params.min_p:
        kept &= x[order].astype(np.float64) >= np.float64(x[order[0]]) + math.log(params.min_p)
    return [int(v) for v in order[kept] if x[v] > -np.inf]


def is_ambiguous(logits: np.ndarray, top_k: int, top_p: float) -> bool:
    """Whether a partial sum meets top_p so closely that the order of additions decides."""
    order = np.lexsort((np.arange(len(logits)), -logits))[: top_k or None]
    mass = np.exp(logits[order].astype(np.float64) - logits.max())
    return bool((np.abs(np.cumsum(mass) - top_p * mass.sum()) < 1e-12 * mass.sum()).any()) and top_p < 1


def choose(x: np.ndarray, params: SamplingParams, seed: int, choice: int, index: int) -> int:
    """The definition: argmax over survivors of logit + noise; ties to the lower id."""
    if params.temperature == 0:
        return int(np.flatnonzero(x == x.max())[0])
    noise = [gumbel(h) for h in bits(seed, choice, index, len(x))]
    return max(survivors(x, params), key=lambda v: (float(x[v]) + noise[v], -v))


def fresh_forward(
    target: Target, tokens: Sequence[int], taps: Sequence[int] = (), first: int = 0
) -> tuple[np.ndarray, dict[int, Any]]:
    """One forward of T tokens in a pool of its own: logits float32 [T - first, V], and the hidden states [T, H] by tap."""
    pool, target.pool = target.pool, target.backend.make_pool(target.shapes, len(tokens))
    rows = np.arange(first, len(tokens), dtype=np.int32)
    try:
        batch = Batch([ScheduledSequence(SequenceSlots(target.pool), tokens)])
        logits, tapped = target.forward_tapped(batch.token_ids, batch.metadata, rows, taps)
    finally:
        target.pool = pool
    return np.array(logits), tapped


def next_logits(target: Target, tokens: Sequence[int]) -> np.ndarray:
    """Logits after the last of `tokens`. float32 [V]."""
    return fresh_forward(target, tokens, first=len(tokens) - 1)[0][0]


class Plain(NamedTuple):
    """What plain decoding gives for one choice; `logits` are the unwarped rows the tokens came from."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logits: list[np.ndarray]


def decode(target: Target, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> Plain:
    """Token by token until EOS, a stop string, `max_tokens` or the end of the context."""
    output: list[int] = []
    rows: list[np.ndarray] = []
    tokenizer: Any = target.tokenizer
    most = min(params.max_tokens, target.max_context_tokens - len(prompt))
    least = ""  # what the first `min_tokens` tokens say: a stop string that ends in it does not count
    while True:
        rows.append(next_logits(target, [*prompt, *output]))
        x = warped(rows[-1], prompt, output, params, target.eos_ids)
        output.append(choose(x, params, params.seed or 0, choice, len(output)))
        text = tokenizer.decode(output, skip_special_tokens=True)
        least = text if len(output) <= params.min_tokens else least
        cuts = [at for s in params.stop if (at := text.find(s, max(0, len(least) - len(s) + 1))) >= 0]
        if output[-1] in target.eos_ids and not params.ignore_eos:
            return Plain(tuple(output), text, "stop", rows)
        if cuts:
            return Plain(tuple(output), text[: min(cuts)], "stop", rows)
        if len(output) == most:
            return Plain(tuple(output), text, "length", rows)
