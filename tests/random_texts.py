"""Texts as they come: emoji, accents, CRLF, tabs, code and addresses, with and without markup; what a target may make of them."""

import random

from rewriting import Rewrite

from ragspec.rag.grammar.markup import TextPart

WORDS = [
    *(
        "The mill grind corn it is old We go to school a an Ann 7 42 twenty teh naïve cafe\u0301 it's don’t 水が流れる "
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd ❤️ a\u0323\u0307 العربية `x = 1` "
        "http://a.org/b?c=d me@x.org $a+b$ \\emph e.g. U.S. e-mail 3.5% [1] <i>so</i> &amp;"
    ).split(),
    *("\U0001f600", "`a b`", "**bold**", "(so)", "\u200b", "\ufeff"),
]
GAPS = (" ", " ", " ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", ", ", ". ", "! ", "? ", ".\n\n", ".\r\n\r\n", "。", "")
MARKUP = (
    TextPart("<b>", True),
    TextPart("</b>", True),
    TextPart("\\section{", True),
    TextPart("<p>\U0001f600", True, "\n\n"),
    TextPart("&nbsp;", True, " "),
    TextPart("$x^2$", True, "Dummy"),
    TextPart("\r\n%% comment\r\n", True, " "),
    TextPart("y", True, "z"),
)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(rng.randint(0, 24))) or rng.choice(GAPS)


def random_parts(rng: random.Random) -> list[TextPart]:
    return [rng.choice(MARKUP) if rng.random() < 0.4 else TextPart(random_text(rng)) for _ in range(rng.randint(1, 9))]


def random_rewrite(rng: random.Random) -> Rewrite:
    """Words taken away, put in, replaced and moved, with marks and spaces; or something else altogether; or nothing."""

    def rewrite(sentence: str) -> str | None:
        roll = rng.random()
        if roll < 0.1:
            return rng.choice([None, sentence, "", " ", random_text(rng), sentence.swapcase()])
        words = sentence.split(" ")
        for _ in range(rng.randint(0, 4)):
            at, way = rng.randrange(len(words) + 1), rng.randrange(6)
            if way == 0:
                words.insert(at, rng.choice(WORDS))
            elif way == 1:
                del words[at : at + rng.randint(1, 2)]
            elif way == 2:
                words[at : at + 1] = [rng.choice(WORDS)]
            elif way == 3:
                words[at : at + 2] = words[at : at + 2][::-1]
            elif way == 4 and at < len(words):
                words[at] += rng.choice([",", ".", "s", "\u0301", "\U0001f600"])
            elif at < len(words):
                words[at] = words[at][:-1]
        return rng.choice(["", "", " "]).join([" ".join(words), ""])

    return rewrite
