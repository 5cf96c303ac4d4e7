"""KNN-LM: the tokens of a brute-force second implementation, whatever is guessed, cached, lied about or interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from tiny_target import SENTENCES, save_model

from ragspec.config import TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.target import FINAL, Target
from ragspec.errors import ConfigError, EncoderMismatch, InputError, PromptTooLong, RetrievalError
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.rag.knnlm import target_reader as knn_reading
from ragspec.rag.knnlm.build import build_datastore, target_identity
from ragspec.rag.knnlm.generation import KnnGenerator, _LearningSchedule
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.knnlm.datastore import Datastore, read_datastore_manifest
from ragspec.retrieval.knnlm.neighbours import KnnConfig, Neighbours, PrefetchRequest
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.retrieval.speculative.stride_costs import StridePlan

CONTEXT_TOKENS = 24
NUM_TOKENS = 20
HALF = "\ufffd"
"""Half a character at the end, which is no text."""
TEXTS = [f"{first} {second}" for first in SENTENCES for second in SENTENCES]

SAMPLING = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5),
    "warped": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={70: 2.0},
        min_tokens=6,
        seed=2**63 + 1,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("knn")


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(TargetConfig(model=str(save_model("llama", folder / "model"))), num_kv_slots=1024)


@pytest.fixture(scope="module")
def store(folder: Path, target: Target) -> Datastore:
    assert build_datastore(TEXTS, target, folder / "store", CONTEXT_TOKENS) > 500
    return Datastore.open(folder / "store", target_identity(target))


class Fixed(StrideScheduler):
    """Always the same stride; what it was told is kept."""

    def __init__(self, stride: int) -> None:
        super().__init__(asynchronous=False)
        self.stride = stride
        self.told: list[tuple[int, int]] = []

    def choose(self) -> StridePlan:
        return StridePlan(self.stride)

    def note_guesses(self, num_right: int, num_wrong: int) -> None:
        self.told.append((num_right, num_wrong))


class Wrapped:
    """A datastore that something happens to."""

    def __init__(self, store: Datastore) -> None:
        self.store = store
        self.num_calls = 0

    @property
    def target(self) -> EncoderIdentity:
        return self.store.target

    def search(self, queries: np.ndarray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        self.num_calls += 1
        return self.store.search(queries, k, wanted)


def generator(target: Target, store: Any, stride: int | None = None, **config: Any) -> KnnGenerator:
    scheduler = Fixed(stride) if stride is not None else None
    return KnnGenerator(target, store, KnnConfig(**config), scheduler=scheduler)


def prompt_of(target: Target, text: str = "The river carries sand down to the") -> tuple[int, ...]:
    return tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def request(target: Target, params: SamplingParams, text: str = "The river carries sand down to the") -> Request:
    return Request("r", prompt_of(target, text), params)


class Plain(NamedTuple):
    token_ids: tuple[int, ...]
    text: str
    reason: str


def state_and_logits(target: Target, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    slots = SequenceSlots(target.pool)
    batch = Batch([ScheduledSequence(slots, tokens)])
    logits, tapped = target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows, (FINAL,))
    slots.release()
    return tapped[FINAL][-1].numpy(), logits[0]


def brute_force(
    target: Target, folder: Path, prompt: Sequence[int], params: SamplingParams, config: KnnConfig
) -> Plain:
    """KNN-LM by the book: a fresh forward and all distances for every token; nothing of `ragspec.retrieval` computes here."""
    manifest = read_datastore_manifest(folder)
    keys = np.load(folder / manifest.keys).astype(np.float64)
    values = np.load(folder / manifest.values)
    output: list[int] = []
    while True:
        state, logits = state_and_logits(target, [*prompt, *output])
        query = (state / np.linalg.norm(state.astype(np.float64))).astype(np.float32)
        cosines = np.round(
            keys @ query.astype(np.float64), 12
        )  # Why rounded: equal keys tie, whatever the order of sums
        nearest = np.lexsort((np.arange(len(keys)), -cosines))[: config.num_neighbours]
        votes = np.exp(-(2 - 2 * cosines[nearest]) / config.temperature)
        neighbours = np.zeros(len(logits))
        np.add.at(neighbours, values[nearest], votes / votes.sum())
        own = np.exp(logits.astype(np.float64) - logits.max())
        mixed = np.log(config.weight * neighbours + (1 - config.weight) * own / own.sum()).astype(np.float32)
        x = oracle.warped(mixed, prompt, output, params, target.eos_ids)
        output.append(oracle.choose(x, params, params.seed or 0, 0, len(output)))
        ended = output[-1] in target.eos_ids and not params.ignore_eos
        text = str(target.tokenizer.decode(output[:-1] if ended else output, skip_special_tokens=True))
        cuts = [text.index(stop) for stop in params.stop if stop in text]
        if ended:
            return Plain(tuple(output), text.rstrip(HALF), "stop")
        if cuts:
            return Plain(tuple(output), text[: min(cuts)], "stop")
        if len(output) == params.max_tokens:
            return Plain(tuple(output), text.rstrip(HALF), "length")


def check_all_strides(target: Target, store: Datastore, folder: Path, params: SamplingParams, **config: Any) -> Plain:
    """Every way to generate gives what brute force gives."""
    asked = request(target, params)
    expected = brute_force(target, folder / "store", asked.prompt_ids, params, KnnConfig(**config))
    for stride in (None, 1, 2, 3, 4, 5, 6, 40):
        made = generator(target, store, stride, **config)
        for speculation in (True, False):
            completion, _ = made.generate(asked, speculation)
            assert Plain(completion.token_ids, completion.text, completion.finish_reason) == expected, stride
    assert target.pool.num_free_pages == target.pool.num_pages
    return expected


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("k", "weight"), [(1, 0.25), (4, 0.9), (16, 0.5)])
def test_every_stride_writes_what_brute_force_writes(
    target: Target, store: Datastore, folder: Path, sampling: str, k: int, weight: float
) -> None:
    """A token decided by a guess, by the noise of another position, or by keys and values of a path that was given up."""
    check_all_strides(target, store, folder, SAMPLING[sampling], num_neighbours=k, weight=weight)


def test_guesses_of_both_kinds_were_judged(target: Target, store: Datastore) -> None:
    """The test above, with guesses that are never right or never wrong, would show nothing."""
    for sampling in ("greedy", "sampled"):
        made = generator(target, store, 4, num_neighbours=4, weight=0.9)
        _, stats = made.generate(request(target, SAMPLING[sampling]))
        assert stats.num_right > 2 and stats.num_wrong > 1
        assert stats.num_verifications < NUM_TOKENS < stats.num_queries


@pytest.mark.parametrize("at", [0, 1, 5, 6, 11])
def test_end_of_text_ends_inside_a_speculated_run(
    target: Target, store: Datastore, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Tokens behind the end, or a guessed end of text that is believed."""
    params = SAMPLING["sampled"]
    whole = brute_force(target, folder / "store", prompt_of(target), params, KnnConfig())
    monkeypatch.setattr(target, "eos_ids", (whole.token_ids[at],))
    ended = check_all_strides(target, store, folder, params)
    assert ended.reason == "stop" and len(ended.token_ids) == whole.token_ids.index(whole.token_ids[at]) + 1
    assert check_all_strides(target, store, folder, replace(params, ignore_eos=True)).reason == "length"


def test_nothing_is_guessed_behind_a_guessed_end(
    target: Target, store: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards for tokens that cannot come."""
    asked = request(target, SAMPLING["greedy"])
    whole, _ = generator(target, store, weight=0.0).generate(asked)
    monkeypatch.setattr(target, "eos_ids", (whole.token_ids[6],))
    completion, stats = generator(target, store, 40, weight=0.0).generate(asked)
    assert stats.num_queries == len(completion.token_ids) <= 7


@pytest.mark.parametrize(("start", "end"), [(1, 4), (7, 8), (9, 15)])
def test_a_stop_string_ends_inside_a_speculated_run(
    target: Target, store: Datastore, folder: Path, start: int, end: int
) -> None:
    """A stop string that spans two rounds, or text behind it."""
    params = SAMPLING["greedy"]
    whole = brute_force(target, folder / "store", prompt_of(target), params, KnnConfig())
    stop = whole.text[start:end]
    ended = check_all_strides(target, store, folder, replace(params, stop=(stop,)))
    assert ended.reason == "stop" and ended.text == whole.text[: whole.text.index(stop)]


def test_logprobs_are_those_of_the_mixture(target: Target, store: Datastore) -> None:
    """Log-probabilities of the target alone, or of rows that were given up."""
    params = replace(SAMPLING["greedy"], logprobs=2)
    plain, _ = generator(target, store).generate(request(target, params), speculation=False)
    guessed, _ = generator(target, store, 5).generate(request(target, params))
    assert guessed.logprobs == plain.logprobs and len(plain.logprobs) == NUM_TOKENS
    unmixed, _ = generator(target, store, weight=0.0).generate(request(target, params))
    assert [each.logprob for each in unmixed.logprobs] != [each.logprob for each in plain.logprobs]


class Lying(Wrapped):
    """Tells the true neighbours, and entries for the cache whose values are made up."""

    def search(self, queries: np.ndarray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        found = super().search(queries, k, wanted)
        if found.entries is None:
            return found
        entries = found.entries
        return found._replace(entries=entries._replace(values=(entries.values + 7) % 300))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_no_token_is_decided_by_the_cache(target: Target, store: Datastore, sampling: str) -> None:
    """A guess that is emitted before, or without, the verdict of the true neighbours."""
    asked = request(target, SAMPLING[sampling])
    expected, _ = generator(target, store, weight=0.9).generate(asked, speculation=False)
    for stride in (2, 6):
        completion, stats = generator(target, Lying(store), stride, weight=0.9).generate(asked)
        assert completion.token_ids == expected.token_ids
        assert stats.num_wrong > 5


class Failing(Wrapped):
    """Lost after some calls."""

    lost_at = 3

    def search(self, queries: np.ndarray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        if self.num_calls == self.lost_at:
            raise RetrievalError("the datastore is lost")
        return super().search(queries, k, wanted)


def test_a_lost_datastore_ends_the_request_and_nothing_else(target: Target, store: Datastore) -> None:
    """A request that hangs, an answer that stops short without a word, slots that stay taken."""
    failing = Failing(store)
    made = generator(target, failing, 3)
    asked = request(target, SAMPLING["greedy"])
    with pytest.raises(RetrievalError, match="lost"):
        made.generate(asked)
    assert target.pool.num_free_pages == target.pool.num_pages
    failing.lost_at = 10_000
    completion, _ = made.generate(asked)
    assert completion.token_ids == generator(target, store).generate(asked)[0].token_ids


def test_without_speculation_every_token_waits_for_its_own_search(target: Target, store: Datastore) -> None:
    """A baseline that profits from the cache, or pays for it."""
    asked = request(target, SAMPLING["greedy"])
    counted = Wrapped(store)
    made = generator(target, counted, 4)
    for off in (lambda: made.generate(asked, False), lambda: made.generate(replace(asked, speculation=False))):
        counted.num_calls = 0
        _, stats = off()
        assert counted.num_calls == stats.num_verifications == stats.num_queries == NUM_TOKENS
        assert stats.num_right + stats.num_wrong == 0
    _, stats = made.generate(asked)
    assert stats.num_verifications < NUM_TOKENS and stats.num_queries > 1.5 * stats.num_verifications
    assert stats.prefill_s + stats.step_s + stats.verification_s <= stats.total_s


def test_the_scheduler_hears_of_every_judged_guess(target: Target, store: Datastore) -> None:
    """Guesses behind a wrong one counted as wrong, which would talk the stride down."""
    made = generator(target, store, 4, num_neighbours=4, weight=0.9)
    _, stats = made.generate(request(target, SAMPLING["greedy"]))
    told = made.scheduler.told  # type: ignore[attr-defined]
    assert (sum(right for right, _ in told), sum(wrong for _, wrong in told)) == (stats.num_right, stats.num_wrong)
    assert all(right <= 3 and wrong <= 1 for right, wrong in told)
    assert sum(right for right, _ in told) + len(told) >= NUM_TOKENS


def test_a_long_prompt_is_read_in_pieces(target: Target, store: Datastore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after the first piece in place of the last."""
    asked = request(target, SAMPLING["sampled"], " ".join(SENTENCES[:3]))
    expected, _ = generator(target, store).generate(asked)
    monkeypatch.setattr(knn_reading, "_PREFILL_ROWS", 7)
    assert generator(target, store, 3).generate(asked)[0].token_ids == expected.token_ids


def test_the_context_ends_the_output(target: Target, store: Datastore) -> None:
    """Rows behind the last position that the target knows."""
    text = " ".join(SENTENCES * 3)
    ids = prompt_of(target, text)[: target.max_context_tokens - 9]
    for stride in (1, 6):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        completion, _ = generator(target, store, stride).generate(Request("r", ids, params))
        assert len(completion.token_ids) == 9 and completion.finish_reason == "length"
    with pytest.raises(PromptTooLong):
        generator(target, store).generate(Request("r", ids * 2, params))


def test_several_choices_are_refused(target: Target, store: Datastore) -> None:
    """One choice in place of the three that were asked for."""
    with pytest.raises(InputError, match="n must be 1"):
        generator(target, store).generate(request(target, SamplingParams(n=3)))


def test_another_targets_datastore_is_refused(folder: Path, store: Datastore) -> None:
    """Neighbours of states that mean something else."""
    other = Target.load(TargetConfig(model=str(save_model("llama", folder / "other", std=0.1))), num_kv_slots=64)
    with pytest.raises(EncoderMismatch, match="other"):
        generator(other, store)
    config = TargetConfig(model=str(folder / "model"), dtype="bfloat16")
    with pytest.raises(EncoderMismatch):
        generator(Target.load(config, num_kv_slots=64), store)


def test_an_identity_is_that_of_weights_and_tokenizer_only(folder: Path, target: Target) -> None:
    """A note beside the weights that makes a datastore worthless, or a changed vocabulary that does not."""
    before = target_identity(target)
    (folder / "model" / "README.md").write_text("hello")
    assert target_identity(target) == before and before.dimension == 64
    path = folder / "model" / "tokenizer.json"
    raw = path.read_bytes()
    try:
        path.write_bytes(raw + b" ")
        assert target_identity(target).fingerprint != before.fingerprint
    finally:
        path.write_bytes(raw)


def test_an_entry_is_the_state_before_each_token_of_its_chunk(folder: Path, target: Target, store: Datastore) -> None:
    """A value one place off, a chunk that reads the one before it, a token without an entry."""
    ids = prompt_of(target, TEXTS[1])
    start = len(prompt_of(target, TEXTS[0])) - 1
    manifest = read_datastore_manifest(folder / "store")
    keys, values = (np.load(folder / "store" / name) for name in (manifest.keys, manifest.values))
    assert values[start : start + len(ids) - 1].tolist() == list(ids[1:])
    for place in (0, 5, CONTEXT_TOKENS - 1, CONTEXT_TOKENS, CONTEXT_TOKENS + 3):
        first = place // CONTEXT_TOKENS * CONTEXT_TOKENS
        state, _ = state_and_logits(target, ids[first : place + 1])
        assert np.allclose(keys[start + place], state / np.linalg.norm(state), atol=1e-6)
    assert len(store) == sum(len(prompt_of(target, text)) - 1 for text in TEXTS)


def test_keys_do_not_depend_on_what_else_is_built(folder: Path, target: Target, store: Datastore) -> None:
    """Bits that depend on the order of texts or the number of threads: two builds would be two datastores."""
    manifest = read_datastore_manifest(folder / "store")
    keys = np.load(folder / "store" / manifest.keys)
    build_datastore(TEXTS[3:], target, folder / "part", CONTEXT_TOKENS, num_threads=1)
    part = read_datastore_manifest(folder / "part")
    assert np.load(folder / "part" / part.keys).tobytes() == keys[len(keys) - part.num_entries :].tobytes()
    assert target.pool.num_free_pages == target.pool.num_pages


@pytest.mark.parametrize("context_tokens", [0, 257])
def test_a_chunk_that_the_target_cannot_read_is_refused(folder: Path, target: Target, context_tokens: int) -> None:
    """The kernel reads its table of positions unchecked."""
    with pytest.raises(ConfigError, match="context_tokens"):
        build_datastore(TEXTS, target, folder / "never", context_tokens)


def test_a_text_without_a_second_token_gives_no_datastore(folder: Path, target: Target) -> None:
    """An empty file that can be opened and never answers."""
    with pytest.raises(InputError):
        build_datastore(["a"], target, folder / "never")
    with pytest.raises(InputError):
        build_datastore([""], target, folder / "never")


def test_learning_costs_ever_less_while_speculation_does_not_pay() -> None:
    """A cache kept up for nothing; or speculation that is never tried again."""
    rhythm = _LearningSchedule()
    learned = [rhythm.next(1) for _ in range(2000)]
    assert learned[0] == learned[1] == (1, True) and {stride for stride, _ in learned} == {1}
    late = [learns for _, learns in learned[1000:]]
    assert 0.02 < sum(late) / len(late) < 0.05
    pairs = [(a, b) for a, b in itertools.pairwise(late) if a]
    assert sum(b for _, b in pairs) == len(pairs) // 2, "a guess needs the entries of the round before"
    strides = [rhythm.next(8) for _ in range(200)]
    assert all(learns for _, learns in strides)
    assert 2 <= sum(stride == 1 for stride, _ in strides) <= 6
