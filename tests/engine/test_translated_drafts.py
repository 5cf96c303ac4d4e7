"""A draft model of another vocabulary: no output changes, texts come back as the target's tokens, and keys follow the text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.test_draft_model import NotesReads, fresh_state, model_at
from hypothesis import given
from hypothesis import strategies as st
from oracle import decode
from oracle_cases import PARAMS, PROMPTS, assert_equal, generated, requests_of, total, truth
from tiny_target import Free, save_model, tiny_engine, tiny_tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from ragspec.config import DraftModelConfig
from ragspec.core import SamplingParams
from ragspec.drafting.draft_model.translated import TranslatedDrafter, Vocabularies
from ragspec.drafting.growing.shapes import make_shape
from ragspec.engine.loading import make_draft_model
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.target import Target

Tiny = Callable[..., Target]
NUM_BYTES = 258


def byte_tokenizer(folder: Path, is_reversed: bool) -> None:
    """Every byte is a token and nothing else is; in reverse, ids fall from the last."""
    content = json.loads((folder / "tokenizer.json").read_text())
    letters = [token for token, _ in sorted(content["model"]["vocab"].items(), key=lambda each: each[1])][2:NUM_BYTES]
    numbers = range(NUM_BYTES - 1, 1, -1) if is_reversed else range(2, NUM_BYTES)
    specials = {"<s>": 0, "</s>": 1}
    content["model"] |= {"vocab": specials | dict(zip(letters, numbers, strict=True)), "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain` and `reversed`: one model that writes ASCII, under two vocabularies. `small`: another model, larger vocabulary."""
    root = tmp_path_factory.mktemp("models")
    save_model("llama", root / "plain", vocab_size=NUM_BYTES)
    byte_tokenizer(root / "plain", is_reversed=False)
    tokenizer = AutoTokenizer.from_pretrained(root / "plain")
    model = LlamaForCausalLM.from_pretrained(root / "plain")
    readable = [tokenizer.decode([i]).isascii() and tokenizer.decode([i]).isprintable() for i in range(NUM_BYTES)]
    with torch.no_grad():
        model.lm_head.weight[~torch.tensor(readable)] = 0.0
        model.lm_head.weight[:2] = 0.0
        model.save_pretrained(root / "plain")
        turned = torch.tensor([0, 1, *range(NUM_BYTES - 1, 1, -1)])
        for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
            weight.copy_(weight[turned].clone())
    save_model("llama", root / "reversed", vocab_size=NUM_BYTES)
    model.save_pretrained(root / "reversed")
    byte_tokenizer(root / "reversed", is_reversed=True)
    save_model("llama", root / "small", num_hidden_layers=1)
    return root


class Watched(NotesReads, TranslatedDrafter): ...


def drafter_for(target: Target, model: Target, depth: int = 4) -> Watched:
    model.reset_pool(2048)
    shape = make_shape("chain", 1, 1, depth)
    vocabularies = Vocabularies(model.tokenizer, target.tokenizer)
    return Watched(vocabularies, model, model.vocab_size, shape, Free(1e-9), PrefixCache(model.pool), coupled=False)


@pytest.mark.parametrize("name", PARAMS)
def test_no_output_changes(tiny: Tiny, models: Path, name: str) -> None:
    """A translated draft changed a token, alone or in a batch; text that is no UTF-8 ended drafting with an error."""
    for target, model in ((tiny(), "plain"), (model_at(models / "plain", "float32"), "small")):
        requests = requests_of(target, PARAMS[name])
        drafter = drafter_for(target, model_at(models / model, "float32"))
        completions = generated(target, [drafter], [requests, [replace(requests[2], id="r2")]])
        assert_equal(completions, truth(target, requests, name))
        assert total(completions, "num_drafted") > 0
        assert len(drafter.cache) == 0 and not drafter._translated
        assert drafter.cache.pool.num_free_pages == drafter.cache.pool.num_pages


def test_the_same_model_under_other_ids_is_right_nearly_always(models: Path) -> None:
    """Ids taken for the target's, a text that lost or doubled a character, keys of tokens that had changed."""
    target, model = (model_at(models / name, "float32") for name in ("plain", "reversed"))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = requests_of(target, params, [prompt for prompt in PROMPTS if prompt.isascii()])
    drafter = drafter_for(target, model)
    completions = generated(target, [drafter], [requests])
    assert_equal(completions, {(r.id, 0): decode(target, r.prompt_ids, params) for r in requests})
    assert total(completions, "num_accepted") >= 0.9 * total(completions, "num_drafted") > 100
    num_prompt = sum(len(request.prompt_ids) for request in requests)
    assert sum(drafter.num_rows) < num_prompt + 2 * 60 * len(requests), "known text was read again"


def test_states_are_those_of_a_fresh_reading(models: Path) -> None:
    """Keys stayed of tokens that the text is no longer divided into."""
    target, model = model_at(models / "plain", "float32"), model_at(models / "small", "float32")
    drafter = drafter_for(target, model)
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=4, ignore_eos=True)
    with tiny_engine(target, [drafter], fixed_nodes=4) as engine:
        engine.generate(requests_of(target, params))
        assert engine._planner.num_failures == 0
    assert len(drafter.seen) > 100
    for tokens, state in drafter.seen[::9]:
        assert torch.equal(state, fresh_state(model, tokens))


@functools.cache
def pair() -> Vocabularies:
    other = tiny_tokenizer()
    return Vocabularies(other, tiny_tokenizer())


WORDS = st.lists(st.sampled_from("the river mill Every spring . é 水 x".split()), max_size=8).map(" ".join)


@given(WORDS, st.lists(st.sampled_from([" the", " water", "s", " é", ".", "水"]), min_size=1, max_size=6))
def test_pieces_come_back_as_the_tokens_of_the_whole_text(before: str, pieces: Sequence[str]) -> None:
    """A token that does not follow the known ones, or counted for a piece that does not complete it."""
    targets = pair().targets
    known = targets(before, add_special_tokens=False)["input_ids"]
    found = pair().targets_ids(known, pieces)
    whole = targets(before + "".join(pieces), add_special_tokens=False)["input_ids"]
    if whole[: len(known)] == known:
        assert [token for token, _ in found] == whole[len(known) :]
    assert pair().text_of([token for token, _ in found]) == "".join(pieces)
    numbers = [number for _, number in found]
    assert numbers == sorted(numbers) and numbers[-1] == len(pieces) - 1


def test_any_vocabulary_is_asked_for_by_name(tiny: Tiny, models: Path) -> None:
    """A model of another vocabulary drafted though nobody had allowed it, or did not where it was allowed."""
    config = DraftModelConfig(path=str(models / "plain"), vocabulary="any", max_depth=3)
    drafter = make_draft_model(tiny(), config)
    assert isinstance(drafter, TranslatedDrafter) and drafter._settings.shape.max_depth == 3
