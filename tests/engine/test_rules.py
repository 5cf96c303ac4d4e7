"""Requests whose drafts are accepted by a published rule: the law of what they write is the target's."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from head_parts import drafter_for, near
from oracle import next_logits
from oracle_cases import PARAMS, PROMPTS, generated, requests_of, total
from scipy.stats import chi2
from tiny_target import Tiny, tiny_engine

from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.speculation import LOSSY_RULES, AcceptanceRule, Speculation
from ragspec.verification.probabilities import token_probs

RULES = [rule for rule in AcceptanceRule if rule not in LOSSY_RULES]
PROMPT = (60, 61, 62, 63, 64, 300, 61, 62)


def law(target: Target, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The target's probability of every output of `length` tokens."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, prob in texts.items():
            probs = token_probs(next_logits(target, [*PROMPT, *text]), params)
            longer |= {(*text, int(v)): prob * float(probs[v]) for v in np.flatnonzero(probs)}
        texts = longer
    return texts


FAST = (AcceptanceRule.TRAVERSAL,)
BESIDE = [
    pytest.param(rule, name, marks=[] if i % 2 == j else pytest.mark.slow)
    for i, rule in enumerate(rule for rule in AcceptanceRule if rule is not AcceptanceRule.KEYED)
    for j, name in enumerate(("greedy", "penalties"))
]


@pytest.mark.parametrize("rule", [r if r in FAST else pytest.param(r, marks=pytest.mark.slow) for r in RULES])
def test_the_law_of_three_tokens_is_the_targets(tiny: Tiny, rule: AcceptanceRule) -> None:
    """A drawn child left out for what it was, a bonus token from another law, or copies counted as drawn."""
    target = tiny()
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=3, ignore_eos=True, n=50)
    speculation = Speculation(rule=rule)
    sources = (CopySource(SourceKind.PREDICTION, target.tokenizer.decode([60, 61, 62])),)
    drafters = [CopyDrafter(target.tokenizer), near(target)]
    asked = Request("0", PROMPT, params, sources, speculation=speculation)
    batches = [[replace(asked, params=replace(params, seed=seed))] for seed in range(8)]
    completions = generated(target, drafters, batches, fixed_nodes=5, max_num_batched_tokens=512)  # room for 50 drafts
    seen = Counter(completion.token_ids for completion in completions)
    by_name = Counter[str]()
    for completion in completions:
        by_name.update({name: reached for name, ((reached, _), *_) in completion.stats.positions.items()})
    assert min(by_name["copy"], by_name["eagle"]) > 100 and total(completions, "num_accepted") > 50
    assert {completion.stats.exactness for completion in completions} == {speculation.exactness}
    expected = law(target, params, 3)
    assert seen.keys() <= expected.keys()
    num = sum(seen.values())
    common = [text for text, prob in expected.items() if prob * num >= 5]
    rare = sum(prob for text, prob in expected.items() if text not in common)
    pairs = [(seen[text], expected[text] * num) for text in common]
    pairs.append((num - sum(count for count, _ in pairs), rare * num))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs if mean > 0)
    assert statistic < chi2.ppf(1 - 1e-5, len(pairs) - 1), rule


@pytest.mark.parametrize(("rule", "name"), BESIDE)
def test_every_rule_beside_keyed_requests(tiny: Tiny, rule: AcceptanceRule, name: str) -> None:
    """A rule refused the tree that the planner made it, changed its neighbours' output, or another run gave another text."""
    target = tiny()
    plain = requests_of(target, PARAMS[name], PROMPTS[:4])
    other = {"rule": str(rule), "lossy": rule in LOSSY_RULES}
    by_rule = [replace(request, speculation=other) if i % 2 else request for i, request in enumerate(plain)]
    drafters = [CopyDrafter(target.tokenizer, target.eos_ids), drafter_for(target, "eagle3")]
    alone = generated(target, drafters, [plain])
    runs = []
    for _ in range(2):
        drafters = [CopyDrafter(target.tokenizer, target.eos_ids), drafter_for(target, "eagle3")]
        runs.append(generated(target, drafters, [by_rule]))
    assert [c.token_ids for c in runs[0]] == [c.token_ids for c in runs[1]]
    assert [c.token_ids for c in runs[0]][::2] == [c.token_ids for c in alone][::2]
    if PARAMS[name].greedy and rule not in LOSSY_RULES:
        assert [c.token_ids for c in runs[0]] == [c.token_ids for c in alone]


def test_what_a_request_may_say_of_speculation(tiny: Tiny) -> None:
    """A misspelt drafter, rule or option was taken for the default."""
    target = tiny()
    wrong = (
        "copy", {"drafters": "copy"}, {"drafters": [3]}, {"max_nodes": -1}, {"max_nodes": True}, {"rule": "fast"},
        {"rule": "typical"}, {"nodes": 3}, 5, None,
    )  # fmt: skip
    for given in wrong:
        with pytest.raises(InputError):
            Request("a", PROMPT, speculation=given)  # type: ignore[arg-type]
    with tiny_engine(target, [drafter_for(target, "eagle")]) as engine, pytest.raises(InputError, match="copy"):
        engine.generate([Request("a", PROMPT, speculation={"drafters": ["copy"]})])  # type: ignore[arg-type]
    with tiny_engine(target, [CopyDrafter(target.tokenizer), drafter_for(target, "eagle")]) as engine:
        for drafters, most in itertools.product((("copy",), ("eagle",), ()), (0, 2)):
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            wanted = Speculation(drafters, most)
            (done,) = engine.generate([Request("a", PROMPT * 3, params, speculation=wanted)])
            assert set(done.stats.positions) <= set(drafters if most else ())
            assert done.stats.num_drafted <= most * done.stats.num_steps
