"""One likely chain of hundreds of nodes: texts that are copied verbatim need few steps, and the output stays what it is."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from oracle import decode
from tiny_target import SENTENCES, save_model, target_config, tiny_engine

from ragspec.core import CopySource, Request, SamplingParams, Segment, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

NUM_TOKENS = 150
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    "T=1": SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_model("llama", tmp_path_factory.mktemp("long") / "llama", max_position_embeddings=384)
    return Target.load(target_config(str(folder), "float32"), num_kv_slots=4096)


@pytest.fixture(scope="module")
def prompt(target: Target) -> tuple[int, ...]:
    return tuple(target.tokenizer("Repeat the text: ").input_ids)


@pytest.fixture(scope="module")
def longest(target: Target, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What plain decoding writes up to the end of the context."""
    return tuple(decode(target, prompt, SamplingParams(max_tokens=5000, ignore_eos=True)).token_ids)


def engine_with_copies(target: Target, **config: Any) -> Engine:
    copy = CopyDrafter(target.tokenizer, target.eos_ids)
    return tiny_engine(target, [copy], 4096, max_nodes=12, **{"max_num_batched_tokens": 256, **config})


@pytest.fixture
def rows_of_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of every forward."""
    rows: list[int] = []
    forward = Target.forward_tapped

    def counted(self: Target, token_ids: Any, *rest: Any) -> Any:
        rows.append(len(token_ids))
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(Target, "forward_tapped", counted)
    yield rows


def request(prompt: Sequence[int], text: Sequence[int], params: SamplingParams, name: str = "long") -> Request:
    """`text` is what the target will write: it follows the source."""
    return Request(name, tuple(prompt), params, segment=Segment(draft_ids=tuple(text)))


@pytest.mark.parametrize("params", PARAMS)
def test_a_source_that_is_followed_takes_few_steps(
    params: str, target: Target, prompt: tuple[int, ...], longest: tuple[int, ...]
) -> None:
    """Chains were cut at `max_tree_nodes`, 12: a copy of 150 tokens took 13 steps at least, whatever rows cost."""
    is_greedy = PARAMS[params].greedy
    plain = longest[:NUM_TOKENS] if is_greedy else tuple(decode(target, prompt, PARAMS[params]).token_ids)
    with engine_with_copies(target) as engine:
        (off,) = engine.generate([Request("off", prompt, PARAMS[params], speculation=False)])
        (first,) = engine.generate([request(prompt, plain, PARAMS[params], "first")])
        (again,) = engine.generate([request(prompt, plain, PARAMS[params], "again")])
    assert off.token_ids == first.token_ids == again.token_ids == plain
    assert first.stats.num_steps <= 8
    assert again.stats.num_steps <= 4, "what was learned of the first copy makes the next chain longer"


def test_a_long_chain_beside_other_sequences(target: Target, prompt: tuple[int, ...], longest: tuple[int, ...]) -> None:
    """Rows of a long chain attended to a neighbour's nodes, or the neighbours lost theirs."""
    sources = tuple(CopySource(SourceKind.PASSAGE, text, str(i)) for i, text in enumerate(SENTENCES))
    short = SamplingParams(max_tokens=40, temperature=0.8, seed=5)
    others = [Request(f"r{i}", tuple(target.tokenizer(t).input_ids), short, sources) for i, t in enumerate(SENTENCES)]
    plain = longest[:NUM_TOKENS]
    expected = [plain, *(decode(target, other.prompt_ids, short).token_ids for other in others)]
    with engine_with_copies(target) as engine:
        engine.generate([request(prompt, plain, PARAMS["greedy"], "before")])
        completions = engine.generate([request(prompt, plain, PARAMS["greedy"]), *others])
    assert [completion.token_ids for completion in completions] == expected
    assert completions[0].stats.num_steps <= 10


def test_the_step_and_the_context_bound_a_chain(
    target: Target, prompt: tuple[int, ...], longest: tuple[int, ...], rows_of_steps: list[int]
) -> None:
    """A chain that overran the step's rows, the pool's pages, or the positions that the target has."""
    params = SamplingParams(max_tokens=5000, ignore_eos=True)
    with engine_with_copies(target, max_num_batched_tokens=40) as engine:
        rows_of_steps.clear()
        (found,) = engine.generate([request(prompt, longest + (7,) * 200, params)])
    assert found.token_ids == longest
    assert len(prompt) + len(found.token_ids) == target.max_context_tokens
    assert 12 < max(rows_of_steps) <= 40


def test_a_requests_own_limit_holds(
    target: Target, prompt: tuple[int, ...], longest: tuple[int, ...], rows_of_steps: list[int]
) -> None:
    """`max_nodes` of a request limited what stands beside the chain alone."""
    plain = longest[:NUM_TOKENS]
    limited = Request("a", prompt, PARAMS["greedy"], speculation={"max_nodes": 20},
                      segment=Segment(draft_ids=plain))  # fmt: skip
    with engine_with_copies(target) as engine:
        rows_of_steps.clear()
        (found,) = engine.generate([limited])
    assert found.token_ids == plain
    assert max(rows_of_steps[1:]) == 21


def test_a_chains_metadata_is_as_long_as_the_chain(target: Target) -> None:
    """Every node listed all nodes above it: half a million numbers for a chain of a thousand."""
    target.pool = KvPool(target.shapes, 4096)
    num_nodes, branch = 900, [10, 901, 902]
    parents = [-1, *range(num_nodes), *branch]
    metadata = Batch([ScheduledSequence(SequenceSlots(target.pool), np.arange(len(parents) + 4), parents)]).metadata
    assert len(metadata.path_slots) == 1 + 2 + 3
    assert len(metadata.context_slots) == 5 + num_nodes
    assert metadata.context_end[[4, 5, 4 + num_nodes, 4 + num_nodes + 1]].tolist() == [5, 6, 5 + num_nodes, 15]
    assert metadata.positions[[4, 4 + num_nodes, 4 + num_nodes + 1]].tolist() == [4, 4 + num_nodes, 15]
