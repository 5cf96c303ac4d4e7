"""The page's own modules, run in the browser: the parser of the stream, and the arithmetic of spans."""

from typing import Any

import pytest
from chat_page import ChatPage

pytestmark = pytest.mark.browser

_PARSE = """async ([bytes, cuts]) => {
  const { eventData } = await import("/web/js/sse.js");
  const whole = Uint8Array.from(bytes);
  const runs = [];
  for (const cut of cuts) {
    const places = [0, ...cut, whole.length];
    const stream = new ReadableStream({ start(controller) {
      for (let i = 1; i < places.length; i++) controller.enqueue(whole.slice(places[i - 1], places[i]));
      controller.close();
    } });
    const found = [];
    for await (const data of eventData(stream)) found.push(data);
    runs.push(found);
  }
  return runs;
}"""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_are_the_same_however_the_bytes_are_cut(chat: ChatPage, end: str) -> None:
    """Half an emoji, half a line end or half a field name at the end of a read: lost or garbled text."""
    lines = [
        "\ufeff: hello",
        'data: {"a": "🎉é"}',
        "",
        "event: x",
        "data:one",
        "data: two ",
        "",
        "data",
        "",
        "id: 7",
        "",
        "data: cut off",
    ]
    content = end.join(lines).encode()
    cuts = (
        [[place] for place in range(len(content))] + [list(range(1, len(content)))] + [list(range(0, len(content), 3))]
    )
    runs: list[Any] = chat.page.evaluate(_PARSE, [list(content), cuts])
    assert all(run == ['{"a": "🎉é"}', "one\ntwo ", ""] for run in runs)
    assert len(runs) == len(cuts)


_SLICES = """async (cases) => {
  const { Characters, firstDifference } = await import("/web/js/points.js");
  return cases.map(([text, start, end, other]) => {
    const characters = new Characters(text);
    const difference = firstDifference(text, other);
    return [characters.length, characters.slice(start, end), characters.holds(start, end), difference];
  });
}"""


def test_spans_and_differences_count_code_points_as_python_does(chat: ChatPage) -> None:
    """JavaScript's own units in a place that should have characters."""
    texts = ["plain", "🎉a🎉b", "é e\u0301 👩‍🌾 end", "日本語🈶", ""]
    cases = [
        [text, start, end, text[:end] + "x" + text[end + 1 :]]
        for text in texts
        for start in range(4)
        for end in range(start, 8)
    ]
    expected = []
    for text, start, end, other in cases:
        differ = next(
            (n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
        )
        expected.append([len(text), text[start:end], start < end <= len(text), -1 if text == other else differ])
    found = chat.page.evaluate(_SLICES, cases)
    for case, got, wanted in zip(cases, found, expected, strict=True):
        if wanted[2]:
            assert got == wanted, case
        assert got[0] == wanted[0] and got[2:] == wanted[2:], case


_PIECES = """async ([answer, passages, citations]) => {
  const { misplaced, piecesOf } = await import("/web/js/spans.js");
  const pieces = piecesOf(answer, passages, citations);
  return [pieces.map((p) => [p.kind, p.text, p.same ?? null]), misplaced(pieces, citations)];
}"""


def test_spans_that_cannot_be_are_counted_and_the_text_stays_whole(chat: ChatPage) -> None:
    """An overlapping or endless span that doubles or drops a part of the answer."""
    passages = [{"number": 1, "text": "one two three", "document_id": "a"}]

    def cited(start: int, end: int, at: int, to: int, passage: int = 1) -> dict[str, int]:
        return {"start": start, "end": end, "passage": passage, "passage_start": at, "passage_end": to}

    answer = "🎉 two three! [1] [7]"
    citations = [
        cited(2, 11, 4, 13),
        cited(6, 11, 8, 13),
        cited(0, 99, 0, 3),
        cited(5, 5, 0, 0),
        cited(12, 13, 0, 3, 2),
    ]
    pieces, lost = chat.page.evaluate(_PIECES, [answer, passages, citations])
    assert "".join(text for _, text, _ in pieces) == answer
    assert ["quote", "two three", True] in pieces and ["marker", "[1]", None] in pieces
    assert [text for kind, text, same in pieces if kind == "quote" and same is False] == [" "]
    assert lost == 3
