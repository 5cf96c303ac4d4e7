"""Questions by rule: each is answered by its quote, and the files of training and evaluation are apart."""

from pathlib import Path

from ragspec.training.documentation import (
    UNANSWERABLE,
    documentation_questions,
    evaluation_questions,
    is_for_evaluation,
)
from ragspec.training.grammar_errors import misspell, tokenised
from ragspec.training.stdlib_corpus import first_doc_sentence

PAGE = """<html><head><title>pump{n} - moves water</title></head><body><h1>pump{n} - moves water</h1>
<p>To stop pump number {n} safely, use the red lever at its side.</p>
<p>Unlike old pumps of kind {n}, modern {n} pumps can run without any oil.</p>
<h2>Options</h2><dl>
<dt>--speed{n} TURNS</dt><dd>Set the speed of the pump. The default is 4{n} turns.</dd>
<dt>--quiet</dt><dd>If the pump is loud.</dd></dl>
<p>To clean pump number {n} run:</p><pre>pump{n} --clean now</pre>
<p>To oil pump number {n} run:</p><p>Nothing announced stands here.</p>
<table><tr><th>Name</th><th>Default</th></tr><tr><td>width{n}</td><td>80 columns</td></tr></table>
</body></html>"""
QUESTIONS = {
    "How do I stop pump number {n} safely?": "To stop pump number {n} safely, use the red lever at its side.",
    "How do modern {n} pumps differ from old pumps of kind {n}?": (
        "Unlike old pumps of kind {n}, modern {n} pumps can run without any oil."
    ),
    "What does the option --speed{n} of pump{n} do?": "--speed{n} TURNS\n\nSet the speed of the pump.",
    "What is the default of the option --speed{n} of pump{n}?": (
        "--speed{n} TURNS\n\nSet the speed of the pump. The default is 4{n} turns."
    ),
    "How do I clean pump number {n}?": "To clean pump number {n} run:\n\npump{n} --clean now",
    "What is the default of width{n} in Options?": "| width{n} | 80 columns |",
}


def write_pages(folder: Path, count: int) -> Path:
    for n in range(count):
        (folder / f"page{n}.html").write_text(PAGE.format(n=n))
    return folder


def test_rules_ask_what_the_quote_answers(tmp_path: Path) -> None:
    """A rule that takes the wrong sentence, a quote without its term or its block, or a colon that announces nothing."""
    write_pages(tmp_path, 20)
    training = list(documentation_questions(tmp_path, evaluation=False))
    assert not any(is_for_evaluation(each.path) for each in training)
    n = training[0].path.removeprefix("page").removesuffix(".html")
    found = {each.question: each.quote for each in training if each.path == training[0].path}
    assert found == {question.format(n=n): quote.format(n=n) for question, quote in QUESTIONS.items()}


def test_evaluation_questions_repeat_and_name_their_distractors(tmp_path: Path) -> None:
    """Distractors that hold the answer, other questions every time, or unanswerable ones that are answered."""
    write_pages(tmp_path, 60)
    chosen = evaluation_questions(tmp_path, 30)
    assert chosen == evaluation_questions(tmp_path, 30)
    assert all(is_for_evaluation(each.path) for each in chosen)
    for each in chosen:
        assert each.quote in each.passage and each.passage not in each.others
        assert each.kind == UNANSWERABLE or not any(each.quote in other for other in each.others)


def test_the_first_sentence_of_a_docstring_begins_behind_its_signature() -> None:
    """A quote that begins inside the signature, or ends at a colon of the text."""
    for signature in ("", "()", "(a: int = 1) -> dict[str, int]", "(sep=')', end='(')", "(purpose=<Purpose: 'se...)"):
        text = f"m.f{signature}: Do it: now (or never): yes. Then rest."
        assert first_doc_sentence("m.f", text) == "Do it: now (or never): yes."


def test_misspelling_and_spacing() -> None:
    """The first letter stays, so that a misspelt word can still be found; spacing must be undone by joining alone."""
    import random

    rng = random.Random(0)
    assert all(misspell("grammar", rng)[0] == "g" for _ in range(50))
    assert tokenised("It was late.") == "It was late ."
