"""A user's own questions: what lines may say, how answers are judged, how they are asked and counted, and what is printed.

The target is random; where an answer must say something, its tokens are forced.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import Ended, Run, exit_code
from letter_encoder import WordEncoder
from small_parts import CONTEXT, DOCUMENTS, QUESTION, QUOTE, Switch, copying_engine
from tiny_target import save_model

from ragspec.config import GenerationConfig, IndexConfig, PipelineConfig, TargetConfig
from ragspec.core import Citation, FinishReason, GenerationStats, Passage, Request
from ragspec.engine.target import Target
from ragspec.errors import InputError
from ragspec.evaluation.asking import Asker
from ragspec.evaluation.questions import (
    AnsweredQuestion,
    AskedQuestion,
    CheckedSentence,
    CorrectedSentence,
    Dialogue,
    Line,
    judge,
    only_right,
    p50_s,
    proposed_threshold,
    read_lines,
    shares,
    wilson,
)
from ragspec.rag.answer import Answer, AnswerSentence, AnswerStats
from ragspec.rag.chat.chat import Chat
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION, abstains, nothing_close
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.verification.sampling import Sampler

EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
WRONG_LINES = [row.split("\t") for row in Path(__file__).with_name("wrong_lines.tsv").read_text().splitlines()]
MILL = Passage("docs/mill.txt", 0, "The old mill was\nbuilt in 1874. It grinds no corn.", 0, 49, "Built in 1874")


def answer(text: str, *cited: Citation, sentences: tuple[AnswerSentence, ...] = ()) -> Answer:
    stats = AnswerStats(0, 0, "1-a", GenerationStats())
    return Answer("q", text, cited, (MILL,), (), FinishReason.STOP, (1,), (), stats, sentences)


def question(**fields: Any) -> AskedQuestion:
    return AskedQuestion(question="When was it built?", **fields)


# -- the lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "words"), WRONG_LINES)
def test_a_wrong_line_is_refused_by_file_line_and_reason(tmp_path: Path, line: str, words: str) -> None:
    """A misspelt "fact" left the question without one: nothing was measured, and nothing said so."""
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"question": "fine?"}}\n\n{line}\n')
    with pytest.raises(InputError) as refused:
        read_lines([path])
    assert str(refused.value).startswith(f"{path}, line 3: ") and words in str(refused.value)


def test_lines_have_ids_that_name_them(tmp_path: Path) -> None:
    """Two answers under one id cannot be told apart; a number counted without the blank lines is another line's in the editor."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('\ufeff{"id": "x", "question": "a?"}\n\n{"question": "b\u2028?", "fact": null}\n')
    second.write_text('{"text": "He go", "route": "chat"}\n{"id": 7, "question": "c?", "evidence": {"page": 3}}')
    assert [line.id for line in read_lines([first])] == ["x", "3"]
    assert [line.id for line in read_lines([first, second])] == ["x", "a:3", "b:1", "7"]
    second.write_text('{"id": "x", "question": "d?"}')
    with pytest.raises(InputError, match=r"b\.jsonl, line 1: an earlier line has the id 'x'"):
        read_lines([first, second])
    with pytest.raises(InputError, match=r"none\.jsonl: No such file"):
        read_lines([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(("fields", "text", "is_right"), EXAMPLES["a fact, an answer, and whether it is right"])
def test_facts_are_found_whatever_the_case_and_white_space(fields: Any, text: str, is_right: bool) -> None:
    """A right answer that counted as wrong for a line break, and "no" that was found in "know"."""
    assert judge(question(**fields), answer(text)).right is is_right


# -- the judgement --------------------------------------------------------------------------------------------------------


def test_only_exact_quotes_with_the_fact_count_as_quoted() -> None:
    """An answer that quotes something else, or whose unsupported sentence has the fact, passed for one with a quote."""
    asked, text = question(fact="built in 1874"), '"It grinds no corn." [1] – It was built in 1874.'
    elsewhere = Citation(1, 19, MILL.id, 32, 50, MILL.document_id, 32, 50)
    unsupported = AnswerSentence(27, 49, "unsupported")
    supported = AnswerSentence(27, 49, "supported", MILL.id, 0, 31)
    assert judge(asked, answer(text, elsewhere, sentences=(unsupported,))).quoted is False
    judged = judge(asked, answer(text, elsewhere, sentences=(supported,)))
    assert judged.quoted is judged.right is judged.shown is True
    assert judged.labels == {"supported": 1}
    assert judge(asked, answer("x", Citation(0, 1, MILL.id, 0, 31, MILL.document_id, 0, 31))).quoted is True


def test_an_abstention_is_right_only_where_there_is_no_answer() -> None:
    """The text "Nothing is close ... The nearest: Built in 1874" held the fact of the question that it does not answer."""
    far, silent = nothing_close([MILL.title]), f" {ABSTENTION} Sorry."
    assert abstains(far) and abstains(silent) and not abstains(f"In 1874. {ABSTENTION}")
    for text in (far, silent):
        judged = judge(question(fact="1874"), answer(text))
        assert judged.abstained and judged.right is False and judged.shown is True
        assert judge(question(answerable=False), answer(text)).right is True
    assert judge(question(answerable=False), answer("In 1874.")).right is False
    assert judge(question(answerable=False), None).right is False


@pytest.mark.parametrize(("document", "is_shown"), EXAMPLES["a name, and whether it is that of docs/mill.txt"])
def test_a_document_is_named_by_the_end_of_its_path(document: str, is_shown: bool | None) -> None:
    """mill.txt was found in windmill.txt; a question without fact and document counted as one whose passage is missing."""
    judged = judge(question(document=document), answer("In 1874."))
    assert judged.shown is is_shown and judged.right is judged.quoted is None


def test_corrections_lose_the_mistake_and_right_sentences_stay() -> None:
    """A correction that only adds the right form, and one that touches a right sentence's last space."""
    mistake = CheckedSentence(text="He go.", wrong=r"\bgo\b", corrected=r"\bgoes\b", answer="He goes.")
    assert mistake.passes("He goes.")
    assert not any(mistake.passes(text) for text in ("He go.", "He goes, I go.", "He went."))
    right = CheckedSentence(text="He goes. ", right=True)
    assert right.passes("He goes. ") and not right.passes("He goes.")


# -- the counts -----------------------------------------------------------------------------------------------------------


def result(right: bool | None = None, *, late: bool = False, text: str = "In 1874.", **fields: Any) -> AnsweredQuestion:
    asked = question(**({"fact": "1874" if right else "1999"} if right is not None else {}), **fields)
    given = answer(text)
    return AnsweredQuestion("1", asked, late, given, judge(asked, given), 1.0)


def test_each_share_counts_its_own_cases() -> None:
    """Follow-ups in the share of questions, and questions without a fact or an answer in those that an answer is right for."""
    sentence = CheckedSentence(text="He go.", wrong="go", corrected="goes")
    results = [
        result(True),
        result(False),
        result(),
        result(True, late=True),
        result(answerable=False),
        result(answerable=False, text=ABSTENTION),
        result(text=ABSTENTION),
        CorrectedSentence("2", sentence, None, 0.1, "too long"),
        CorrectedSentence("3", CheckedSentence(text="Yes.", right=True), "No.", 0.1),
    ]
    counts = {share.key: (share.num, share.of) for share in shares(results)}
    assert counts == {
        "shown": (1, 2),
        "right": (1, 2),
        "follow_up_shown": (1, 1),
        "follow_up_right": (1, 1),
        "right_quoted": (0, 2),
        "abstained": (1, 2),
        "wrongly_abstained": (1, 5),
        "corrected": (0, 1),
        "changed": (1, 1),
        "refused": (1, 9),
    }
    assert p50_s(results) == 1.0 and p50_s(results[7:]) is None
    assert shares([]) == []


def test_sentences_are_counted_by_their_labels() -> None:
    """An answer with one invented sentence among three counted as supported."""
    labels = [Counter(quoted=1), Counter(quoted=1, unsupported=2), Counter[str]()]
    results = [result(True) for _ in labels]
    for each, own in zip(results, labels, strict=True):
        each.verdict.labels.update(own)
    counts = {share.key: (share.num, share.of) for share in shares(results)}
    assert counts["sentences_quoted"] == (2, 4) and counts["sentences_unsupported"] == (2, 4)
    assert counts["all_supported"] == (1, 2)


def test_intervals_are_wilsons() -> None:
    """Ten of ten that was told as certain."""
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    low, high = wilson(10, 10)
    assert low == pytest.approx(0.7225, abs=1e-4) and high == pytest.approx(1.0)
    assert wilson(0, 10) == pytest.approx((0.0, 1 - low)) and wilson(0, 0) == (0.0, 1.0)


def test_two_configurations_are_compared_question_by_question() -> None:
    """Two equal shares of different questions looked like no difference."""
    first, second = [result(True), result(True), result(False)], [result(False), result(True), result(True)]
    assert only_right(first, second) == (1, 1)


# -- asking ---------------------------------------------------------------------------------------------------------------


class PlainLiar(Switch):
    """Forces its answer only where nothing is drafted: a drafter that changes the text."""

    lies = False

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        forced, self.answer = self.answer, self.answer if not self.lies or not request.speculation else ""
        try:
            return super().__call__(request, seed, choice)
        finally:
            self.answer = forced


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions") / "index"
    build_index(DOCUMENTS, folder, WordEncoder(), IndexConfig())
    return folder


class Opened(NamedTuple):
    asker: Asker
    switch: PlainLiar


@pytest.fixture
def opened(model: Path, index: Path) -> Iterator[Opened]:
    target = Target.load(TargetConfig(model=str(model)), num_kv_slots=4096)
    switch = PlainLiar(target)
    retriever = Retriever(WordEncoder(), Store.open(index))
    config = PipelineConfig(generation=GenerationConfig(max_tokens=48))
    with Asker(retriever, copying_engine(target, switch), PromptBuilder(target.tokenizer, CONTEXT), config) as asker:
        yield Opened(asker, switch)


def test_questions_and_conversations_are_asked_as_they_are_served(opened: Opened) -> None:
    """Follow-ups that were asked alone; a question too long for the context that ended the whole run."""
    opened.switch.answer = QUOTE
    lines: list[Line] = [
        AskedQuestion(id="1", question=QUESTION, fact="1874", document="mill"),
        AskedQuestion(id="2", question="why " * 2000, fact="1874"),
        Dialogue(id="3", turns=(question(fact="1874"), AskedQuestion(question="And who built it?", fact="the valley"))),
        CheckedSentence(id="4", text="He go home.", wrong="go", corrected="goes"),
    ]
    results = list(opened.asker.results(lines))
    assert [each.id for each in results] == ["1", "2", "3.1", "3.2", "4"]
    first, long, opening, later, sentence = results
    assert isinstance(first, AnsweredQuestion) and first.verdict.shown and first.is_right and first.verdict.quoted
    assert isinstance(long, AnsweredQuestion) and "fit the context" in long.refused and long.verdict.right is False
    assert isinstance(opening, AnsweredQuestion) and isinstance(later, AnsweredQuestion)
    assert (opening.is_follow_up, later.is_follow_up) == (False, True) and later.is_right
    assert isinstance(sentence, CorrectedSentence) and sentence.output is not None and not sentence.is_right
    for each in results:
        json.dumps(each.to_dict())


def test_a_follow_up_sees_the_turns_before_it(opened: Opened, monkeypatch: Any) -> None:
    """A conversation whose turns did not know each other measured single questions."""
    turns: list[Any] = []
    prepare = Chat.prepare
    monkeypatch.setattr(Chat, "prepare", lambda self, turn: turns.append(prepare(self, turn)) or turns[-1])
    opened.switch.answer = QUOTE
    list(opened.asker.results([Dialogue(id="d", turns=(question(), question()))]))
    assert [len(turn.history.pairs) for turn in turns] == [0, 1]
    assert turns[1].history.pairs[0].answer == QUOTE


def test_drafts_that_change_a_token_are_counted(opened: Opened) -> None:
    """A check that cannot fail."""
    lines: list[Line] = [AskedQuestion(id="1", question=QUESTION), Dialogue(id="2", turns=(question(),))]
    ticks: list[tuple[str, int, int]] = []
    check = opened.asker.num_changed_by_drafts
    results = list(opened.asker.results(lines))
    assert check(results, lambda *ticked: ticks.append(ticked)) == {0.0: 0, 1.0: 0}
    assert ticks[-1][1:] == (4, 4)
    opened.switch.answer, opened.switch.lies = "Never.", True
    assert check(results) == {0.0: 2, 1.0: 2}
    refused = replace(results[0], answer=None, refused="too long")
    assert check([refused, results[1]]) == {0.0: 1, 1.0: 1}


# -- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(Encoder, "load", lambda config: WordEncoder())
    monkeypatch.setattr("ragspec.cli.app.prepare_process", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")

    return lambda *args: Ended(exit_code(*args), *capsys.readouterr())


def test_a_threshold_of_retrieval_is_proposed_from_the_users_own_questions() -> None:
    """A threshold from other people's documents loses answers, or catches nothing."""

    def asked(closeness: float, answerable: bool, shown: bool = True) -> AnsweredQuestion:
        given = question(answerable=answerable, **({"fact": "1874" if shown else "1999"} if answerable else {}))
        replied = replace(answer("It was built in 1874."), closeness=closeness)
        return AnsweredQuestion("a", given, False, replied, judge(given, replied), 0.1)

    right = [asked(0.5 + number / 100, True) for number in range(20)]
    missed = [asked(0.01, True, shown=False)] * 20
    far = [asked(0.1 * number, False) for number in range(5)]
    assert proposed_threshold([*right, *missed, *far]) == 0.51  # one of 20 is lost
    assert proposed_threshold([*right, *far[:4]]) is None
    assert proposed_threshold([*right, *[asked(0.9, False)] * 5]) is None


def test_two_configurations_stand_side_by_side(run: Run, model: Path, index: Path, tmp_path: Path) -> None:
    """A second configuration that is not asked, answers that are kept nowhere, and lines that the terminal breaks."""
    asked, out = tmp_path / "q.jsonl", tmp_path / "answers" / "out.jsonl"
    rows: list[dict[str, Any]] = [
        {"question": f"When was the old mill built?\x1b[2J {'and why ' * 9}", "fact": "1874"},
        {
            "id": "talk",
            "turns": [{"question": "Is there a bridge?"}, {"question": "Who may cross it?", "fact": "carts"}],
        },
        {"text": "The mill is old.", "right": True},
        {"text": "Where is it?", "route": "search"},
    ]
    asked.write_text("\n".join(map(json.dumps, rows)))
    for name, k in (("one", 1), ("two", 2)):
        settings = (
            f"{{retriever: {{num_passages: {k}}}, generation: {{max_tokens: 64, seed: 5}}, chat: {{rewriter: rules}}}}"
        )
        (tmp_path / f"{name}.yaml").write_text(settings)
    configurations = ("--config", tmp_path / "one.yaml", "--config", tmp_path / "two.yaml")
    call = ("evaluate", asked, "--index", index, "--target", model, "--out", out)
    ended = run(*call, *configurations, "--check-drafts")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["num_questions"] == 3 and found["num_follow_ups"] == found["num_routes"] == found["num_sentences"] == 1
    assert found["shown_of"] == found["shown_of_second"] == found["follow_up_right_of"] == 1
    assert found["seed"] == 5 and found["commit"] and found["peak_pss_mb"] > 0 and found["p50_s"] > 0
    assert not any(found[f"changed_by_drafts_t{t}{end}"] for t in (0, 1) for end in ("", "_second"))
    assert not any(isinstance(value, dict | list) for value in found.values())
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in kept] == 2 * ["1", "talk.1", "talk.2", "3", "4"]
    assert [len(row["passages"]) for row in kept if row["id"] == "1"] == [1, 2]
    assert found["routed"] == found["routed_of"] == 1 and "searched" in ended.err
    assert "\x1b" not in ended.err and max(map(len, ended.err.replace(str(tmp_path), "").splitlines())) <= 100
    alone = run(*call, "--limit", 1)
    assert alone.code == 0 and json.loads(alone.out)["num_questions"] == 1 and "config_second" not in alone.out


def test_drafts_that_change_an_answer_end_the_command_with_1(
    run: Run, model: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken promise that a script took for success."""
    monkeypatch.setattr(Asker, "num_changed_by_drafts", lambda *_: {0.0: 0, 1.0: 1})
    (tmp_path / "q.jsonl").write_text('{"question": "Why?"}')
    ended = run("evaluate", tmp_path / "q.jsonl", "--index", index, "--target", model, "--check-drafts", "--limit", 1)
    assert ended.code == 1 and json.loads(ended.out)["changed_by_drafts_t1"] == 1


def test_sentences_alone_need_no_index(run: Run, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A file of corrections for which the standard library was encoded."""
    monkeypatch.setattr("ragspec.training.stdlib_corpus.kept_documents", lambda folder: pytest.fail("not needed"))
    (tmp_path / "q.jsonl").write_text('{"text": "He goes.", "right": true}')
    ended = run("evaluate", tmp_path / "q.jsonl", "--target", model)
    assert ended.code == 0 and json.loads(ended.out)["changed_of"] == 1 and json.loads(ended.out)["index"] == ""


def test_a_wrong_call_ends_before_anything_loads(run: Run, tmp_path: Path) -> None:
    """A minute of loading before the file turns out to be misspelt."""
    (tmp_path / "q.jsonl").write_text('{"qestion": "Why?"}')
    ended = run("evaluate", tmp_path / "q.jsonl", "--index", tmp_path / "none")
    assert ended.code == 1 and ended.out == "" and "q.jsonl, line 1: " in " ".join(ended.err.split())
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "there is no line in" in run("evaluate", tmp_path / "empty.jsonl", "--index", tmp_path / "none").err
    thrice = [part for name in "abc" for part in ("--config", tmp_path / name)]
    assert run("evaluate", tmp_path / "q.jsonl", *thrice).code == 2
