"""Teacher forcing: the given tokens come out, whatever the target would have said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ragspec.core import Passage, Request
from ragspec.errors import InputError
from ragspec.evaluation.datasets import Question
from ragspec.evaluation.overrides import ForcedAnswers, ForcedSampler, gold_answers, read_answers
from ragspec.evaluation.peers import _Force
from ragspec.rag.wording import ABSTENTION
from ragspec.verification.sampling import KeyedSampler

QUESTION = Question("q", "When was the bridge built?", ("1874",), "doc")
PASSAGES = [
    Passage("other", 0, "The mill stands. It was built in 1874.", 0, 38),
    Passage("doc", 0, "The mill is old. The bridge was built in 1874. It fell.", 0, 55),
]


def test_forced_tokens_come_whatever_the_logits() -> None:
    """Bug guarded: a sampler that lets the target's opinion through, or runs past the answer's end."""
    sampler = ForcedSampler((5, 7, 1))
    assert [sampler(np.eye(9, dtype=np.float32)[i]) for i in range(5)] == [5, 7, 1, 1, 1]


def test_only_requests_with_an_answer_are_forced() -> None:
    """Bug guarded: other requests of the same engine decoded as something they are not."""
    answers = ForcedAnswers()
    answers.force("a", (3, 4))
    assert isinstance(answers(Request("a", (1,)), 0, 0), ForcedSampler)
    assert isinstance(answers(Request("b", (1,)), 0, 0), KeyedSampler)


def test_gold_answer_quotes_the_retrieved_sentence_with_its_number() -> None:
    """Bug guarded: a quote from the wrong passage, or a number that does not fit the prompt."""
    assert gold_answers([QUESTION], [PASSAGES]) == {"q": '"The bridge was built in 1874." [2] – 1874.'}


def test_gold_answer_abstains_where_the_gold_passage_was_not_retrieved() -> None:
    """Bug guarded: forcing a quote that nobody could copy."""
    assert gold_answers([QUESTION], [PASSAGES[:1]]) == {"q": ABSTENTION}


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"id": "a"}', '{"id": "a", "answer": ""}', '{"id": 3, "answer": "b"}']
)
def test_bad_answer_files_name_the_line(tmp_path: Path, line: str) -> None:
    """Bug guarded: rows skipped in silence, so that other prompts are measured than said."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "z", "answer": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_answers(path)


def test_prompt_lookup_learns_nothing_from_forcing() -> None:
    """Bug guarded: transformers asks processors about made-up logits, and would read the forced future there."""
    force, ids = _Force((5, 7), num_prompt=3), torch.zeros(1, 4, dtype=torch.long)
    assert torch.equal(force(ids, torch.ones(1, 9)), torch.ones(1, 9))
    assert force(ids, torch.randn(1, 9)).argmax().item() == 7
