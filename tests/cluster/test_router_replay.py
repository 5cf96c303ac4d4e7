"""A replica is lost at any moment of an output: what is heard is what would have been heard without it, once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import oracle_cases
import pytest
from local_replicas import SETTINGS, LocalReplicas, Losing, Targets, replicas
from oracle import decode
from stand_ins import Heard

from ragspec.cluster.routing.router import Router
from ragspec.core import Completion, CopySource, FinishReason, Request, SamplingParams, Segment, SourceKind
from ragspec.engine.client import completion_of
from ragspec.engine.target import Target

PARAMS = {
    "greedy, logprobs": SamplingParams(max_tokens=12, seed=1, logprobs=2, ignore_eos=True),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12),
    "penalties": replace(oracle_cases.PARAMS["penalties"], max_tokens=12, logprobs=0),
    "three choices": SamplingParams(temperature=1.0, seed=8, n=3, max_tokens=6, logprobs=1),
    "ends by itself": SamplingParams(temperature=1.0, logit_bias={1: 9.0}, min_tokens=3, seed=2, max_tokens=12),
}
PROMPT = 'The report says: "The bridge was'
SENTENCE = 'The report says: "The bridge was built in 1874 and rebuilt in 1921."'


@pytest.fixture(scope="module")
def local(targets: Targets) -> Iterator[LocalReplicas]:
    with replicas(targets(2)) as local:
        yield local


def ask(target: Target, params: SamplingParams, name: str = "a", prompt: str = PROMPT) -> Request:
    sources = (CopySource(SourceKind.PASSAGE, SENTENCE, "p"),)
    return Request(name, tuple(target.tokenizer(prompt).input_ids), params, sources)


def undisturbed(local: LocalReplicas, request: Request) -> list[Completion]:
    return local.engines["engine-0"].generate([request])


def with_losses(
    local: LocalReplicas, request: Request, losses: Sequence[int], silently: bool = False
) -> tuple[list[Completion], int]:
    """What a listener heard, and how many connections were lost on the way."""
    losing = Losing(losses, silently)
    heard = Heard(len(request.choices))
    with Router(local.all, losing, SETTINGS) as router:
        router.submit(request, heard)
        deltas = heard.wait()
    return [completion_of([d for d in deltas if d.choice == choice]) for choice in request.choices], losing.num_lost


def assert_same(heard: Sequence[Completion], truth: Sequence[Completion]) -> None:
    for one, plain in zip(heard, truth, strict=True):
        assert one.token_ids == plain.token_ids
        assert one.text == plain.text
        assert one.logprobs == plain.logprobs
        assert (one.finish_reason, one.choice) == (plain.finish_reason, plain.choice)
        assert one.stats.num_output_tokens == len(one.token_ids)
        assert one.stats.num_output_tokens == one.stats.num_steps + one.stats.num_accepted
        assert (one.stats.seed, one.stats.exactness) == (plain.stats.seed, "path")


@pytest.mark.parametrize("name", PARAMS)
def test_a_loss_at_every_token_changes_nothing(local: LocalReplicas, targets: Targets, name: str) -> None:
    """A token told twice or never, noise or penalties that begin anew, log-probabilities of other tokens, counters lost."""
    request = ask(targets(1)[0], PARAMS[name])
    truth = undisturbed(local, request)
    total = sum(len(one.token_ids) for one in truth)
    places = range(total + 1) if name == "greedy, logprobs" else (0, total // 2, total)
    for after, silently in [*((after, False) for after in places), (total, True)]:
        heard, num_lost = with_losses(local, request, [after], silently)
        assert_same(heard, truth)
        assert (num_lost == 1) == (after < total or silently)
        assert sum(one.stats.num_replays for one in heard) >= num_lost


def test_drafts_are_accepted_on_both_sides_of_a_loss(local: LocalReplicas, targets: Targets) -> None:
    """The sources were left behind: after a loss everything was decoded plainly; or accepted drafts were counted twice."""
    target = targets(1)[0]
    quoted = tuple(target.tokenizer(SENTENCE).input_ids)
    bias = dict.fromkeys(quoted, 30.0)
    request = ask(
        target, SamplingParams(max_tokens=24, seed=1, logit_bias=bias, repetition_penalty=1.2, ignore_eos=True)
    )
    truth = undisturbed(local, request)
    assert truth[0].stats.num_accepted > 0
    for after in (0, 6, 15):
        heard, num_lost = with_losses(local, request, [after])
        assert_same(heard, truth)
        assert num_lost == heard[0].stats.num_replays == 1
        assert heard[0].stats.num_accepted > 0


def test_a_stop_string_across_a_loss_is_seen(local: LocalReplicas, targets: Targets) -> None:
    """The beginning of a stop string stood before the loss: it was told, or its end was not recognised."""
    target = targets(1)[0]
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=16, ignore_eos=True)
    free = undisturbed(local, ask(target, params))
    for start, length in ((3, 1), (9, 4)):
        stop = target.tokenizer.decode(free[0].token_ids[start : start + length]).strip("\ufffd")
        assert stop
        request = ask(target, replace(params, stop=(stop,)))
        truth = undisturbed(local, request)
        assert truth[0].finish_reason is FinishReason.STOP
        total = len(truth[0].token_ids)
        for after, silently in [*((after, False) for after in range(max(0, total - 4), total)), (total, True)]:
            heard, num_lost = with_losses(local, request, [after], silently)
            assert_same(heard, truth)
            assert num_lost == 1


def test_a_character_across_a_loss_is_told_once(local: LocalReplicas, targets: Targets) -> None:
    """Half a character was told as a question mark, dropped or told twice."""
    target = targets(1)[0]
    wanted = target.tokenizer("水🌊é水").input_ids
    assert len(wanted) > 8, "the characters are no longer cut into bytes"
    bias = dict.fromkeys(wanted, 40.0)
    request = ask(
        target, SamplingParams(temperature=1.0, seed=3, max_tokens=24, logit_bias=bias, ignore_eos=True, logprobs=0)
    )
    truth = undisturbed(local, request)
    assert any(ord(character) > 255 for character in truth[0].text)
    for after in range(1, 9):  # every byte of a character
        heard, _ = with_losses(local, request, [after])
        assert_same(heard, truth)


def test_segments_are_taken_up_again(local: LocalReplicas, targets: Targets) -> None:
    """A replay of a segment wrote the whole output, forgot what was given, or told held-back text of the part before."""
    target = targets(1)[0]
    params = SamplingParams(temperature=1.0, seed=6, max_tokens=14, ignore_eos=True, logprobs=1)
    plain = decode(target, ask(target, params).prompt_ids, params).token_ids
    for segment in (
        Segment(plain[:3], 9),
        Segment(plain[:3], 9, plain[3:]),
        Segment(plain[:5], None, (7, 7, *plain[7:])),
        Segment((), 4),
    ):
        request = replace(ask(target, params), segment=segment)
        truth = undisturbed(local, request)
        for after in (0, len(truth[0].token_ids) // 2):
            heard, _ = with_losses(local, request, [after])
            assert_same(heard, truth)


def test_a_seed_that_was_not_given_is_the_same_in_all_parts(local: LocalReplicas, targets: Targets) -> None:
    """Each replica drew a seed of its own: the second half of an answer was another answer's."""
    request = ask(targets(1)[0], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    seeds = set()
    for after in (0, 5):
        (heard,), _ = with_losses(local, request, [after])
        seeded = replace(request, params=replace(request.params, seed=heard.stats.seed))
        assert heard.token_ids == undisturbed(local, seeded)[0].token_ids
        seeds.add(heard.stats.seed)
    assert len(seeds) == 2, "two requests without a seed had the same"
