"""Dialogues over passages: questions in a row, each with its passages, as the chat shows them.

CANARD's questions follow each other about one page; its answers are taken word for word from the page, and a person made every
question standalone. A pack's questions stand for themselves. Articles for evaluation are left out.

    >>> dialogues = Dialogues(data_dir, questions); dialogues.draw(random.Random(0))
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ragspec.rag import wording
from ragspec.rag.wording import ABSTENTION, quoted_answer
from ragspec.training.conversations import Conversation, Message, message
from ragspec.training.documentation import is_for_evaluation
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.sources import Paragraph, Question
from ragspec.training.sentences import normalise

ALONE_SHARE, PACK_SHARE, BARE_SHARE, SAME_SHARE = 0.3, 0.3, 0.15, 0.7
"""Draws of standalone questions; of dialogues, those over a pack; earlier questions whose passages are left out, as where a
prompt grows too long; dialogues whose passages are the same with every question."""
NUM_TURNS, NUM_OTHERS = (2, 2, 3, 3, 4, 5, 6), (0, 1, 2, 2)
MAX_WORDS, TURN_WORDS = 1250, 45
"""Words of a dialogue, and those of a question with its answer."""
QUOTE_WORDS = range(6, 50)
NO_ANSWER = "CANNOTANSWER"


class Turn(NamedTuple):
    """`alone`: the question as a person made it standalone. `answer`: empty where the page has none."""

    question: str
    alone: str
    answer: str


@dataclass
class FollowUpPage:
    """The questions of a dialogue in order, and all answers that are known of its page."""

    title: str
    turns: list[Turn] = field(default_factory=list)

    def answers(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(turn.answer for turn in self.turns if turn.answer))


class Dialogues:
    """Draws groups of conversations. Raises: OSError."""

    def __init__(self, data_dir: Path, packs: PackStream) -> None:
        self.pages = follow_up_pages(data_dir)
        self._packs = packs
        self._alone = PackStream([_paragraph(page, random.Random(page.title)) for page in self.pages])

    def draw(self, rng: random.Random) -> list[Conversation]:
        """A dialogue, or standalone questions over one reading of their passages."""
        if rng.random() < ALONE_SHARE:
            pack = self._alone.draw(rng)
            prompts = [(wording.question_messages(q, pack.passages), answer) for q, answer in pack.turns]
            return [Conversation([*prompt, message("assistant", answer)]) for prompt, answer in prompts]
        return [self._from_pack(rng) if rng.random() < PACK_SHARE else self._from_page(rng)]

    def _from_pack(self, rng: random.Random) -> Conversation:
        pack = self._packs.draw(rng)
        turns = pack.turns[: rng.choice(NUM_TURNS)]
        return _dialogue(turns, [pack.passages] * len(turns), rng)

    def _from_page(self, rng: random.Random) -> Conversation:
        """Why answers are shuffled: in the dialogue's order, the answer would be whatever stands behind the last quote."""
        page = rng.choice(self.pages)
        start = rng.randrange(len(page.turns) - 1)
        turns = page.turns[start : start + rng.choice(NUM_TURNS)]
        room = MAX_WORDS // len(turns) - TURN_WORDS
        needed = list(dict.fromkeys(turn.answer for turn in turns if turn.answer))
        text = _joined(needed, [each for each in page.answers() if each not in needed], room * 2 // 3, rng)
        others = [other.answers() for other in rng.sample(self.pages, rng.choice(NUM_OTHERS))]
        shown = [text, *(_joined([], answers, room // 4, rng) for answers in others)]
        shown = [each for each in shown if each]
        orders = [rng.sample(shown, len(shown)) for _ in turns]
        orders = orders[:1] * len(turns) if rng.random() < SAME_SHARE else orders
        asked = [(turns[0].alone, turns[0].answer), *((turn.question, turn.answer) for turn in turns[1:])]
        told = [
            (question, quoted_answer(answer, passages.index(text) + 1) if answer else ABSTENTION)
            for (question, answer), passages in zip(asked, orders, strict=True)
        ]
        return _dialogue(told, orders, rng)


def follow_up_pages(data_dir: Path) -> list[FollowUpPage]:
    """CANARD's pages with at least two questions in a row. Raises: OSError."""
    rows: dict[str, dict[int, dict[str, str]]] = {}
    histories: dict[str, list[str]] = {}
    for row in json.loads((data_dir / "canard/dev.json").read_text(encoding="utf-8")):
        name = row["QuAC_dialog_id"]
        rows.setdefault(name, {})[row["Question_no"]] = row
        histories[name] = max(histories.get(name, []), row["History"], key=len)
    pages = []
    for name, (title, _, *texts) in histories.items():
        page = FollowUpPage(title)
        for number, answer in enumerate(map(normalise, texts[1::2]), start=1):
            row = rows[name].get(number)
            is_absent = answer == NO_ANSWER
            if row and (is_absent or len(answer.split()) in QUOTE_WORDS):
                page.turns.append(
                    Turn(normalise(row["Question"]), normalise(row["Rewrite"]), "" if is_absent else answer)
                )
        if len(page.turns) >= 2 and page.answers() and not is_for_evaluation(title):
            pages.append(page)
    return pages


def _paragraph(page: FollowUpPage, rng: random.Random) -> Paragraph:
    answers = page.answers()
    questions = [Question(turn.alone, turn.answer, "") for turn in page.turns if turn.answer]
    absent = [turn.alone for turn in page.turns if not turn.answer]
    text = " ".join(rng.sample(answers, len(answers)))
    return Paragraph(text, "canard", is_whole=True, questions=questions, absent=absent)


def _joined(needed: list[str], more: list[str], max_words: int, rng: random.Random) -> str:
    """The needed texts and as many more as have room, in random order."""
    chosen = list(needed)
    for text in rng.sample(more, len(more)):
        if sum(len(each.split()) for each in (*chosen, text)) <= max_words:
            chosen.append(text)
    return " ".join(rng.sample(chosen, len(chosen)))


def _dialogue(turns: Sequence[tuple[str, str]], shown: Sequence[list[str]], rng: random.Random) -> Conversation:
    """(question, answer) pairs, each with its passages; the last question always has them."""
    messages: list[Message] = [message("system", wording.system_text())]
    for number, ((question, answer), passages) in enumerate(zip(turns, shown, strict=True), start=1):
        is_bare = number < len(turns) and rng.random() < BARE_SHARE
        asked = question if is_bare else wording.user_text(question, wording.numbered(passages))
        messages += [message("user", asked), message("assistant", answer)]
    return Conversation(messages)
