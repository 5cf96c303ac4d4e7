"""The copy drafter: each way to a place to copy from, provenance, learning, and what it keeps of earlier answers."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
from drafters import add_node
from planner_parts import Running
from tiny_target import SENTENCES, tiny_tokenizer

from ragspec.core import CopySource, SourceKind
from ragspec.drafting.copy import CopyDrafter, _propose
from ragspec.drafting.drafter import Budget
from ragspec.drafting.references import ReferenceReader
from ragspec.tree import DraftTree, Proposal, Proposals

EOS = 1
PASSAGE = "The mill needs water. The bridge was built in 1874 — by 12 people. Rain is water, too."
INPUT = "She have said that the river rise in the hills every spring of the year."


@functools.cache
def tokenizer() -> Any:
    return tiny_tokenizer()


def ids(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False).input_ids)


@dataclass
class Writing(Running):
    """A sequence whose output is written by the test."""

    tokens: list[int] = field(default_factory=lambda: [300])
    num_prompt: int = 1
    most_tokens: int = 5000

    def begin(self, drafter: CopyDrafter) -> None:
        self.prepared = {drafter.name: drafter.prepare(self.request)}
        drafter.start(self)

    def write(self, drafter: CopyDrafter, text: str) -> None:
        """Token by token, with a draft after each, as without speculation."""
        for token in ids(text):
            self.tokens.append(token)
            proposals(drafter, self)


def source(text: str, kind: SourceKind = SourceKind.PASSAGE, name: str = "p") -> CopySource:
    return CopySource(kind, text, name)


def drafting(*sources: CopySource, eos_ids: tuple[int, ...] = (EOS,), **options: Any) -> tuple[CopyDrafter, Writing]:
    drafter, sequence = CopyDrafter(tokenizer(), eos_ids, **{"least_prob": 1e-3, **options}), Writing(sources=sources)
    sequence.begin(drafter)
    return drafter, sequence


def proposals(drafter: CopyDrafter, sequence: Writing, max_nodes: int = 48) -> list[Proposal]:
    (found,) = drafter.propose([sequence], Budget(max_nodes, 0.0, [max_nodes]))
    for i, proposal in enumerate(found):
        assert proposal.parent < i
        above = found[proposal.parent].path_prob if proposal.parent >= 0 else 1.0
        assert 0.0 < proposal.path_prob <= above
    return found


def branches(drafter: CopyDrafter, sequence: Writing) -> list[str]:
    """The drafted texts, one a leaf."""
    found = proposals(drafter, sequence)
    tree, numbers = DraftTree(0), list[int]()
    for each in found:
        parent = numbers[each.parent] if each.parent >= 0 else 0
        numbers.append(add_node(tree, parent, each.token_id))
    leaves = [node for node in range(1, len(tree)) if node not in tree.parents]
    return [tokenizer().decode([tree.token_ids[n] for n in tree.ancestors(leaf)[1:]]) for leaf in leaves]


def drafts(drafter: CopyDrafter, sequence: Writing, text: str) -> bool:
    return any(branch.startswith(text) for branch in branches(drafter, sequence))


def test_nothing_is_proposed_that_is_too_improbable_to_pay() -> None:
    """Whole trees were built of nodes that the planner then cut, in every step of 32 sequences."""
    drafter, sequence = drafting(source("The red fox jumps over the lazy dog. The red cat sleeps."))
    sequence.write(drafter, "The red")
    every = proposals(drafter, sequence)
    (likely,) = drafter.propose([sequence], Budget(48, 0.0, [48], least_prob=0.2))
    assert 0 < len(likely) < len(every)
    assert [p.path_prob for p in likely] == [p.path_prob for p in every if p.path_prob >= 0.2]
    assert list(drafter.propose([sequence], Budget(48, 0.0, [48], least_prob=0.99))[0]) == []


def test_an_empty_source_takes_no_probability_from_others() -> None:
    """Bug guarded: an empty text without an end token came first, and took almost all probability from the other text."""
    text, empty = source("the red fox jumps", SourceKind.INPUT), source("", SourceKind.PREDICTION)
    alone, beside = (proposals(*drafting(*each, eos_ids=(), least_prob=0.02)) for each in ((text,), (empty, text)))
    assert alone[0].token_id in [p.token_id for p in beside]


REPEATED = "red sand 5; blue sand 5; red sand"
FORKED = "red mill stands. blue mill falls. old mill burns."
SIGNED = "mill.turn(wheel): Turns the wheel by water\nAfter that it rests."
EDITED = "She once told everybody in the old town, sand and stones, that the river"
CONTINUED: dict[str, tuple[SourceKind, str, str, list[str]]] = {
    "a passage": (SourceKind.PASSAGE, PASSAGE, "So: The bridge was", [" built in 1874 — by 12 people."]),
    "an input": (SourceKind.INPUT, PASSAGE, "So: The bridge was", [" built in 1874 — by 12 people."]),
    "the conversation": (SourceKind.HISTORY, PASSAGE, "So: The bridge was", [" built in 1874 — by 12 people."]),
    "a prediction": (SourceKind.PREDICTION, PASSAGE, "So: The bridge was", [" built in 1874 — by 12 people."]),
    "the output itself": (SourceKind.HISTORY, "", REPEATED, [" 5; blue sand 5;"]),
    "several places": (SourceKind.PASSAGE, FORKED, "a blue mill", [" falls", " stands", " burns"]),
    "the start of an input": (SourceKind.INPUT, INPUT, "", [INPUT]),
    "the start of a prediction": (SourceKind.PREDICTION, INPUT, "", [INPUT]),
    "an opening quote": (
        SourceKind.PASSAGE, PASSAGE, 'It says: "', ["The mill needs water.", "The bridge was built", "Rain is water, too."]
    ),
    "a quote that has begun": (SourceKind.PASSAGE, PASSAGE, 'It says: "Rain', [" is water, too."]),
    "an input that was edited": (SourceKind.INPUT, INPUT, EDITED, [" rise in the hills"]),
    "quotes inside a sentence": (SourceKind.PASSAGE, SIGNED, '"', ["mill.turn(wheel)", "Turns the wheel"]),
    "the end of a line": (SourceKind.PASSAGE, SIGNED, '"Turns the wheel by water', ['" [1]', "\nAfter that"]),
}  # fmt: skip
"""A source, what is written of the output, and the beginnings of drafts that must be among the branches."""


@pytest.mark.parametrize("name", CONTINUED)
def test_copying_begins_where_a_text_is_repeated(name: str) -> None:
    """A text that is being repeated was not recognised, or one of its places alone; a correction or a quote was drafted only
    when two of its tokens were out; after an edit of many words copying never started again."""
    kind, text, written, expected = CONTINUED[name]
    drafter, sequence = drafting(source(text, kind))
    for part in written.partition('"') if '"' in written else [written]:
        sequence.write(drafter, part)
    assert all(drafts(drafter, sequence, each) for each in expected), branches(drafter, sequence)


def test_the_longest_match_leads_and_the_output_has_no_source() -> None:
    """The last place in the stead of the place that agrees most; or a citation of the output; or the conversation's beginning."""
    drafter, sequence = drafting(source(FORKED))
    sequence.write(drafter, "a blue mill")
    best = max((p for p in proposals(drafter, sequence) if p.parent < 0), key=lambda p: p.path_prob)
    assert best.token_id == ids(" falls")[0]
    drafter, sequence = drafting()
    sequence.write(drafter, REPEATED)
    assert {(p.origin.source, p.origin.offset) for p in proposals(drafter, sequence)} == {(-1, -1)}
    assert branches(*drafting(source("Rain is a", SourceKind.HISTORY))) == []


def test_a_first_answer_compiles_nothing() -> None:
    """The first speculative answer after an installation took four times as long as without speculation."""
    CopyDrafter(tiny_tokenizer())
    compiled = [*_propose.signatures]
    test_copying_begins_where_a_text_is_repeated("a passage")
    test_copying_begins_where_a_text_is_repeated("an input that was edited")
    assert [*_propose.signatures] == compiled


def test_tokens_of_a_failed_draft_are_read_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output had a gap from then on, and later drafts continued another text."""
    text = "The mill grinds corn at dawn. The baker waits. "
    drafter, sequence = drafting(source(text))
    unbroken, beside = drafting(source(text))
    sequence.tokens += ids("The mill grinds")
    beside.tokens += ids("The mill grinds")
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "_copies", lambda *_: [][0])
        with pytest.raises(IndexError):
            proposals(drafter, sequence)
    assert branches(drafter, sequence) == branches(unbroken, beside) != []


def test_the_end_of_a_copied_text_is_drafted_and_has_no_source() -> None:
    """The last step of a copied input was not drafted; the closing mark and number of a quote were attributed to the passage."""
    for text, kind, written in (
        ("A mill.", SourceKind.INPUT, "A mill."),
        ("A mill needs water.", SourceKind.PASSAGE, '"A mill needs water'),
    ):
        drafter, sequence = drafting(source(text, kind))
        sequence.write(drafter, written)
        found = proposals(drafter, sequence)
        tail = [p for p in found if p.token_id == EOS or '"' in tokenizer().decode([p.token_id])]
        assert tail and all((p.origin.source, p.origin.offset) == (-1, -1) for p in tail)
        assert EOS in [p.token_id for p in (found if "needs" in text else [p for p in found if p.parent < 0])]


@pytest.mark.parametrize("at", [4, 9])
@pytest.mark.parametrize("edit", ["none", "replaced", "inserted", "removed"])
def test_copying_goes_on_behind_an_edit(edit: str, at: int) -> None:
    """One corrected token ended the copying until several tokens agreed again."""
    drafter, sequence = drafting(source(INPUT, SourceKind.INPUT))
    given, other = ids(INPUT), ids("Q")[0]
    written, behind = {
        "none": (given[:at], at),
        "replaced": ([*given[:at], other], at + 1),
        "inserted": ([*given[:at], other], at),
        "removed": ([*given[:at], given[at + 1]], at + 2),
    }[edit]
    for token in written:
        sequence.tokens.append(token)
        proposals(drafter, sequence)
    assert drafts(drafter, sequence, tokenizer().decode(given[behind : behind + 5]))


def test_provenance_points_at_the_copied_text() -> None:
    """A citation built on a draft named the wrong passage or the wrong characters."""
    texts = [PASSAGE, *SENTENCES]
    drafter, sequence = drafting(*(source(text, name=str(i)) for i, text in enumerate(texts)))
    checked = 0
    for written in ('"', "The mill", " the bridge was", " water", " 1874"):
        sequence.write(drafter, written)
        for proposal in proposals(drafter, sequence):
            number, offset = proposal.origin.source, proposal.origin.offset
            assert proposal.origin.drafter == "copy"
            if number < 0:
                continue
            word = tokenizer().decode([proposal.token_id])
            if "\ufffd" in word:
                continue
            found = texts[number][offset : offset + len(word)]
            assert word in (found, " " + found[: len(word) - 1])
            checked += 1
    assert checked > 50


def test_a_quote_that_has_begun_goes_on() -> None:
    """One matching token inside an open quotation mark counted as little as one matching token anywhere."""
    drafter, sequence = drafting(source(PASSAGE))
    sequence.write(drafter, "Rain")
    (loose, *_) = [p for p in proposals(drafter, sequence) if p.parent < 0]
    drafter, sequence = drafting(source(PASSAGE))
    sequence.write(drafter, '"')
    sequence.write(drafter, "Rain")
    (quoted, *_) = [p for p in proposals(drafter, sequence) if p.parent < 0]
    assert quoted.token_id == loose.token_id and quoted.path_prob > loose.path_prob


@pytest.mark.parametrize("mark", ["", "("])
def test_quotes_are_tokenised_between_their_marks(mark: str) -> None:
    """The closing mark is one token with the full stop: a draft of the two ended every quote before its last token."""
    merging = tokenizer()
    reader = ReferenceReader(merging, [EOS])
    text = f"{mark}A mill needs water." + " It turns."
    whole, quote, _ = reader.read([source(text)])
    written = merging(f'"{mark}A mill needs water." [1]', add_special_tokens=False)["input_ids"]
    opening = merging('"', add_special_tokens=False)["input_ids"]
    assert merging('."', add_special_tokens=False)["input_ids"] != [*ids("."), *ids('"')]
    assert quote.token_ids == [*written[len(opening) :], EOS]
    assert merging.decode(quote.token_ids[: quote.tail]) in text and len(quote.offsets) == quote.tail
    assert merging.decode(quote.token_ids[:-1]) == f'{mark}A mill needs water." [1]'
    assert whole.tail == len(whole.token_ids)


def test_no_draft_crosses_from_one_text_into_another() -> None:
    """Two passages read as one run, or the separator itself proposed as a token."""
    drafter, sequence = drafting(source("red mill", name="1"), source("blue hill", name="2"))
    sequence.write(drafter, "the red mill")
    assert not any("blue" in branch for branch in branches(drafter, sequence))
    for text in ("", "the", " red", " blue hill"):
        sequence.write(drafter, text)
        assert all(0 <= p.token_id < len(tokenizer()) for p in proposals(drafter, sequence))


def test_learning_moves_the_probabilities() -> None:
    """Acceptance that never reaches the table leaves every draft at its prior."""
    drafter, sequence = drafting(source(PASSAGE))
    sequence.write(drafter, "The bridge was")
    (first, *_) = [p for p in proposals(drafter, sequence) if p.parent < 0]
    for _ in range(50):
        drafter.learn(first.origin.feedback, False)
    (lower, *_) = [p for p in proposals(drafter, sequence) if p.parent < 0]
    for _ in range(400):
        drafter.learn(first.origin.feedback, True)
    (higher, *_) = [p for p in proposals(drafter, sequence) if p.parent < 0]
    assert lower.path_prob < first.path_prob < higher.path_prob
    drafter.learn(None, True)
    drafter.learn("somebody else's note", True)


def finish_one(drafter: CopyDrafter, text: str, salt: str, name: str) -> None:
    sequence = Writing(name, salt=salt)
    sequence.begin(drafter)
    sequence.write(drafter, text)
    drafter.finish(sequence)


def drafts_from_earlier(drafter: CopyDrafter, salt: str) -> bool:
    sequence = Writing("new", salt=salt)
    sequence.begin(drafter)
    sequence.write(drafter, "Now the old mill")
    found = drafts(drafter, sequence, " burned in 1921")
    drafter.finish(Writing("new", salt=salt))
    return found


def test_the_tenant_who_has_written_nothing_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of tenants that never come back filled the memory."""
    monkeypatch.setattr("ragspec.drafting.copy.MAX_TENANTS", 2)
    drafter = CopyDrafter(tokenizer(), (EOS,), earlier_tokens=1000)
    for name, salt in enumerate(("one", "two", "one", "three")):
        finish_one(drafter, "Yes, the old mill burned in 1921.", salt, str(name))
    assert [drafts_from_earlier(drafter, salt) for salt in ("one", "two", "three")] == [True, False, True]


def test_earlier_answers_stay_with_their_tenant_and_can_be_purged() -> None:
    """One tenant's answer drafted for another one, or kept after its deletion."""
    drafter = CopyDrafter(tokenizer(), (EOS,), earlier_tokens=1000)
    finish_one(drafter, "Yes, the old mill burned in 1921.", "one", "x")
    assert drafts_from_earlier(drafter, "one")
    assert not drafts_from_earlier(drafter, "two")
    assert not drafts_from_earlier(drafter, "")
    drafter.purge("two")
    assert drafts_from_earlier(drafter, "one")
    drafter.purge("one")
    assert not drafts_from_earlier(drafter, "one")
    finish_one(drafter, "Yes, the old mill burned in 1921.", "one\0part", "y")
    assert drafts_from_earlier(drafter, "one\0part")
    drafter.purge("one")
    assert not drafts_from_earlier(drafter, "one\0part")


def test_in_a_batch_nothing_is_recalled_for_a_tenant_without_answers_or_a_request_that_failed_to_prepare() -> None:
    """All copies became lists although nothing was recalled; a request whose preparing had failed was drafted for in a batch."""
    drafter = CopyDrafter(tokenizer(), (EOS,), earlier_tokens=1000)
    other = Writing("other", salt="two", sources=(source(PASSAGE),))
    other.begin(drafter)
    budget = Budget(48, 0.0, [16, 16])
    assert isinstance(drafter.propose([other, other], budget), Proposals)
    finish_one(drafter, "Yes, the old mill burned in 1921.", "one", "x")
    failed = Writing("failed", salt="one", tokens=[300, *ids("Now the old mill")])
    _, nothing = drafter.propose([other, failed], budget)
    assert not nothing


def test_the_cache_of_references_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 sources of megabytes each were kept: gigabytes, from one client's predictions."""
    monkeypatch.setattr("ragspec.drafting.references._BYTES_KEPT", 100_000)
    reader = ReferenceReader(tiny_tokenizer(), (1,))
    sources = [CopySource(SourceKind.HISTORY, f"{number} " + "mill " * 100) for number in range(30)]
    first = reader.read([sources[0]], "ann")
    assert reader.read([sources[0]], "ann")[0] is first[0]
    for source in sources:
        reader.read([source], "ann")
    assert reader.read([sources[0]], "ann") == first and reader.read([sources[0]], "ann")[0] is not first[0]
    latest = reader.read([sources[0]], "ann")
    reader.read([CopySource(SourceKind.PREDICTION, "mill " * 20_000)], "ann")
    again = reader.read([sources[0]], "ann")
    assert again == latest and again[0] is not latest[0]
    reader.forget()
    assert reader.read([sources[0]], "ann")[0] is not again[0]


def test_of_earlier_answers_the_most_frequent_continuation_comes_first() -> None:
    """The latest answer was copied although most answers went on in another way."""
    drafter = CopyDrafter(tokenizer(), (EOS,), earlier_tokens=1000)
    for i, year in enumerate((1921, 1921, 1921, 1874)):
        finish_one(drafter, f"Yes, the old mill burned in {year}.", "one", str(i))
    sequence = Writing("new", salt="one")
    sequence.begin(drafter)
    sequence.write(drafter, "So the old mill burned in")
    siblings: dict[int, list[float]] = {}
    for proposal in proposals(drafter, sequence):
        siblings.setdefault(proposal.parent, []).append(proposal.path_prob)
    (fork,) = [probs for probs in siblings.values() if len(probs) > 1]
    assert len(fork) == 2 and fork[0] > 1.5 * fork[1]
    assert drafts(drafter, sequence, " 1921.") and not drafts(drafter, sequence, " 1922")


def test_earlier_answers_are_bounded_and_off_by_default() -> None:
    """Memory that grows with every answer, or text kept that nobody allowed to be kept."""
    silent = CopyDrafter(tokenizer(), (EOS,))
    finish_one(silent, "Yes, the old mill burned in 1921.", "one", "x")
    assert not drafts_from_earlier(silent, "one")
    bounded = CopyDrafter(tokenizer(), (EOS,), earlier_tokens=60)
    finish_one(bounded, "Yes, the old mill burned in 1921.", "one", "first")
    assert drafts_from_earlier(bounded, "one")
    for i in range(12):
        finish_one(bounded, "Rain is water, too, and rivers.", "one", f"x{i}")
    assert not drafts_from_earlier(bounded, "one")


@pytest.mark.parametrize("text", ["", " ", "\n", '"', "\u200d", "é" * 50, "a" * 5000])
def test_odd_sources_and_long_outputs(text: str) -> None:
    """An empty or one-character source broke the index of all the others; the growing array of the output lost tokens when it was
    enlarged; or the text of a request stayed after its end."""
    drafter, sequence = drafting(*(source(text, kind) for kind in SourceKind), source(PASSAGE))
    proposals(drafter, sequence)
    for _ in range(40):
        sequence.write(drafter, "sand and stones and rain and rivers, ")
    assert sequence.num_output > 300
    assert drafts(drafter, sequence, "sand and stones and rain and rivers, ")
    sequence.write(drafter, "The bridge was")
    assert drafts(drafter, sequence, " built in 1874")
    assert len(proposals(drafter, sequence, max_nodes=5)) <= 5 * 20
    drafter.finish(sequence)
    drafter.finish(sequence)
    assert list(drafter.propose([sequence], Budget(48, 0.0, [48]))[0]) == []
