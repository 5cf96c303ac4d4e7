"""The fitted bias on abstention reaches the requests of answers from passages, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest

from ragspec.config import PipelineConfig, PromptConfig
from ragspec.core import Passage, SamplingParams
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION, AnswerFit, TextRules

PASSAGES = (Passage("d", 0, "The mill is old.", 0, 16),)
QUESTION = "How old is the mill?"
PARAMS = SamplingParams(temperature=1.0)


def test_a_distant_passage_makes_abstaining_likelier_and_a_close_one_unlikelier(target: Target) -> None:
    """A bias on another token, or with the wrong sign, makes wrong answers likelier."""
    prompts = PromptBuilder(target.tokenizer, 512, rules=TextRules(fit=AnswerFit(0.5, -2.0)))
    far, near = (prompts.biased(PARAMS, QUESTION, PASSAGES, closeness).first_token_bias for closeness in (0.1, 0.9))
    (first, *_) = target.tokenizer(ABSTENTION, add_special_tokens=False)["input_ids"]
    assert far.keys() == near.keys() == {first} and far[first] > 0 > near[first]
    assert prompts.biased(PARAMS, QUESTION, PASSAGES, 0.0).first_token_bias[first] <= 100


def test_only_answers_from_passages_without_a_bias_of_their_own_are_biased(target: Target) -> None:
    """A chat without passages that abstains, and a request whose own bias is lost."""
    rules = TextRules(fit=AnswerFit(0.5, -2.0))
    prompts = PromptBuilder(target.tokenizer, 512, rules=rules)
    own = replace(PARAMS, first_token_bias={3: 1.0})
    schema = replace(PARAMS, json_schema="{}")
    assert (
        prompts.biased(own, QUESTION, PASSAGES, 0.1) == own
        and prompts.biased(schema, QUESTION, PASSAGES, 0.1) == schema
    )
    assert prompts.biased(PARAMS, QUESTION, (), 0.1) == prompts.biased(PARAMS, QUESTION, PASSAGES, None) == PARAMS
    for other in (
        PromptBuilder(target.tokenizer, 512),
        PromptBuilder(target.tokenizer, 512, PromptConfig(layout="short"), rules),
    ):
        assert other.biased(PARAMS, QUESTION, PASSAGES, 0.1) == PARAMS


def test_a_fit_belongs_to_its_adapter(tmp_path: Path) -> None:
    """Another model was biased by the default adapter's fit."""
    fits = [AnswerFit.beside(PipelineConfig(target=target).target.adapter_dir) for target in (
        {}, {"adapter": "none"}, {"model": "other"}, {"adapter": str(tmp_path)})]  # fmt: skip
    assert any(fits[0]) and not any(map(any, fits[1:]))
    (tmp_path / "answer_fit.json").write_text('{"slope": -1.5}')
    assert AnswerFit.beside(tmp_path) == (0.0, -1.5, 0.0)
    for broken in ("[]", "{", '{"a": 1}'):
        (tmp_path / "answer_fit.json").write_text(broken)
        with pytest.raises(ModelError, match=r"answer_fit\.json"):
            AnswerFit.beside(tmp_path)
