"""Answers that readers rated, as lines of `ragspec.evaluation.questions`.

Owns the form of a line: the questions up to the rated answer, and as `evidence` the answer, its rating and the note. The quote of
an answer rated up is the fact that a right answer holds; an answer rated up that says that the documents do not tell makes the
question one that is not answerable. An answer rated down is a question without a fact, for somebody to add.

    >>> list(rated_questions(Path("service/conversations.sqlite")))
    [{'id': 'conv_5f-0', 'question': 'When was it built?', 'answer': 'The mill was built in 1874.', 'evidence': {...}}]
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragspec.rag.wording import abstains, parse_answer
from services.stores.records import read_only

_RATED = (
    "SELECT tenant, conversation, number, rating, note FROM feedback WHERE ? IS NULL OR tenant=? "
    "ORDER BY tenant, conversation, number"
)
_SAID = "SELECT question, answer FROM said WHERE tenant=? AND conversation=? AND number<=? ORDER BY number"


def rated_questions(database: Path, tenant: str | None = None) -> Iterator[dict[str, Any]]:
    """Of one tenant, or of all. The service may be running. Raises: SaveError."""
    if not database.exists():
        return
    with read_only(database) as db:
        rated = db.execute(_RATED, (tenant, tenant)).fetchall()
        for owner, conversation, number, rating, note in rated:
            *earlier, (question, answer) = db.execute(_SAID, (owner, conversation, number)).fetchall()
            turns = [*({"question": each} for each, _ in earlier), {"question": question} | _judgement(answer, rating)]
            asked = turns[0] if len(turns) == 1 else {"turns": turns}
            evidence = {"tenant": owner, "rating": rating, "note": note, "answer": answer}
            yield {"id": f"{conversation}-{number}", **asked, "evidence": evidence}


def _judgement(answer: str, rating: str) -> dict[str, Any]:
    """Fields of a question that tell a right answer."""
    if rating == "down":
        return {}
    if abstains(answer):
        return {"answerable": False}
    parsed = parse_answer(answer)
    return {"answer": parsed.quote} if parsed else {}
