"""The fitted bias on abstention reaches the requests of answers from passages, and no others."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from small_parts import CONTEXT

from pipelines.fit_abstention import Case, counts, doubted_case, fitted
from ragspec.config import PipelineConfig, PromptConfig, TargetConfig
from ragspec.core import Passage, Request, SamplingParams
from ragspec.engine.checkpoints.catalogue import known
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.evaluation.questions import AskedQuestion
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.wording import ABSTENTION, NOTHING_CLOSE, AnswerFit, Doubt, TextRules
from ragspec.retrieval.retriever import Retriever

PASSAGES = [Passage("d", 0, "The mill is old.", 0, 16)]
PROMPT, WITHOUT = (Prompt.of((), passages, (), "rank") for passages in (PASSAGES, []))
QUESTION = "How old is the mill?"
PARAMS = SamplingParams(temperature=1.0)


def test_a_right_answer_that_a_fit_refuses_is_lost(retriever: Retriever, engine: Engine, target: Target) -> None:
    """A fit in place refused the question, whose answer then counted as wrong: no fit seemed to lose a right answer."""
    config = PipelineConfig(target=target.config, prompts=PromptConfig(layout="free"))
    rules = TextRules(fit=AnswerFit(intercept=100.0, doubts="contained"), layout="free")
    asked = AskedQuestion(question="Which mill is old?", fact=r"\S")
    with Pipeline(retriever, engine, PromptBuilder(target.tokenizer, CONTEXT, config.prompts, rules)) as pipeline:
        assert pipeline.ask(asked.question).text == ABSTENTION
        case = doubted_case(pipeline, config, asked)
    assert case and case.is_right
    assert counts([case], AnswerFit(intercept=100.0))["right_lost"] == 1


@pytest.mark.parametrize("is_said", [True, False])
def test_a_search_that_finds_nothing_is_said(
    retriever: Retriever, engine: Engine, target: Target, *, is_said: bool
) -> None:
    """The target answered from memory, and nothing warned. Jobs of earlier versions go on so."""
    prompts = PromptBuilder(target.tokenizer, CONTEXT, rules=TextRules(says_none_found=is_said))
    nowhere = {"type": "eq", "key": "year", "value": 1}
    answer = Pipeline(retriever, engine, prompts).ask(QUESTION, filter=nowhere)
    assert (answer.text == NOTHING_CLOSE) == is_said and not answer.passages


def test_a_distant_passage_makes_abstaining_likelier_and_a_close_one_unlikelier(target: Target) -> None:
    """A bias on another token, or with the wrong sign, makes wrong answers likelier."""
    prompts = PromptBuilder(target.tokenizer, 512, rules=TextRules(fit=AnswerFit(0.5, -2.0)))
    far, near = (prompts.biased(PARAMS, QUESTION, PROMPT, closeness).first_token_bias for closeness in (0.1, 0.9))
    (first, *_) = target.tokenizer(ABSTENTION, add_special_tokens=False)["input_ids"]
    assert far.keys() == near.keys() == {first} and far[first] > 0 > near[first]
    assert prompts.biased(PARAMS, QUESTION, PROMPT, 0.0).first_token_bias[first] <= 100


def test_only_answers_from_passages_without_a_bias_of_their_own_are_biased(target: Target) -> None:
    """A chat without passages that abstains, and a request whose own bias is lost."""
    rules = TextRules(fit=AnswerFit(0.5, -2.0))
    prompts = PromptBuilder(target.tokenizer, 512, rules=rules)
    own = replace(PARAMS, first_token_bias={3: 1.0})
    schema = replace(PARAMS, json_schema="{}")
    assert prompts.biased(own, QUESTION, PROMPT, 0.1) == own and prompts.biased(schema, QUESTION, PROMPT, 0.1) == schema
    assert prompts.biased(PARAMS, QUESTION, WITHOUT, 0.1) == prompts.biased(PARAMS, QUESTION, PROMPT, None) == PARAMS
    for other in (
        PromptBuilder(target.tokenizer, 512),
        PromptBuilder(target.tokenizer, 512, PromptConfig(layout="short"), rules),
    ):
        assert other.biased(PARAMS, QUESTION, PROMPT, 0.1) == PARAMS


@pytest.mark.parametrize(
    ("doubts", "words", "bias"), [("stated", "stated in", 1.0), ("contained", "contain the", 1.0 - math.log(9))]
)
def test_a_doubt_is_in_the_words_of_its_fit(target: Target, doubts: Doubt, words: str, bias: float) -> None:
    """A conversation begun with a doubt went on with another, or with other odds where its passages' closeness is not known."""
    rules = TextRules(fit=AnswerFit(1.0, -1.0, doubts=doubts), layout="free")
    prompts = PromptBuilder(target.tokenizer, CONTEXT, PromptConfig(layout="free"), rules)
    build = partial(prompts.build, QUESTION + prompts.doubt_words, PASSAGES, 1)
    asked = prompts.doubt(build, PROMPT, None, Request("", (), PARAMS))
    assert asked and words in target.tokenizer.decode(asked.prompt_ids)
    assert list(asked.params.first_token_bias.values()) == pytest.approx([bias])


def test_a_fit_belongs_to_its_adapter(tmp_path: Path) -> None:
    """Another model was biased by the default adapter's fit."""
    fits = [AnswerFit.read(PipelineConfig(target=target).target.fit_file) for target in (
        {}, {"adapter": "none"}, {"model": "other"}, {"adapter": str(tmp_path)})]  # fmt: skip
    assert any(fits[0]) and not any(map(any, fits[1:]))
    path = tmp_path / "answer_fit.json"
    path.write_text('{"slope": -1.5, "doubts": true}')
    assert AnswerFit.read(path) == AnswerFit(slope=-1.5, doubts="stated")
    assert TextRules.from_json({"fit": [0.25, -0.5, 0, 0, True, None, 0]}).fit.doubts == "stated"
    for broken in ("[]", "{", '{"a": 1}'):
        path.write_text(broken)
        with pytest.raises(ModelError, match=r"answer_fit\.json"):
            AnswerFit.read(path)


def test_a_measured_model_has_its_own_fit_and_answers_by_quotes(target: Target) -> None:
    """A larger model that quotes another sentence than the likeliest, because it writes the quotation mark with the next word."""
    config = PipelineConfig(target=TargetConfig(model="Qwen2.5-Coder-0.5B-Instruct"))
    prompts = PromptBuilder.of(target.tokenizer, 512, config)
    (mark, *_), (first, *_) = prompts.plain_ids(['"', ABSTENTION])
    far, near = (prompts.biased(PARAMS, QUESTION, PROMPT, closeness).first_token_bias for closeness in (1e-5, 0.9))
    assert far[mark] == near[mark] > near[first] and far[first] > far[mark]
    assert prompts.quotes_first and known("Qwen2.5-Coder-0.5B-Instruct").layout == "quote"
    assert known("Qwen2.5-Coder-1.5B-Instruct").layout == "free"  # whose fit holds no bias on quotes


def test_a_fit_refuses_as_many_right_answers_as_it_may_and_no_more() -> None:
    """A fit that loses a tenth of the right answers, because it catches as many more of the others; or that keeps wrong answers
    to answerable questions, which lost nothing."""
    wrong = [Case(0.0, 0.1, answerable=True, is_right=False)] * 5
    right = [Case(0.0, 0.3 + 0.04 * n, answerable=True, is_right=True) for n in range(10)]
    cases = [*wrong, *right, *(Case(0.0, closeness, answerable=False, is_right=False) for closeness in [0.2, 0.32] * 5)]
    for most, refused, lost in ((0.1, 10, 1), (0.0, 5, 0)):
        found = counts(cases, AnswerFit(*fitted(cases, most)))
        assert (found["not_answerable_abstained"], found["right_lost"]) == (refused, lost)
        assert found["answerable_abstained"] == 5 + lost
