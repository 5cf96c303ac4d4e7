"""One object in an actor of its own, for those who have no deployment.

>>> actor = SoleActor(Index, (config,), what="the index")
>>> actor.ask("look_up", queries, timeout_s=30.0)
>>> actor.close()
"""

from __future__ import annotations

from typing import Any

from ragspec.cluster.calls import Patience, ask
from ragspec.cluster.crew import Crew
from ragspec.cluster.own_actors import OwnActors


class SoleActor:
    """An actor of its own for one object that works on one call at a time; another takes its place when it dies or hangs.

    Its class derives from `Alive`, its methods are safe to run twice and build what they need. Safe to call from several threads.
    """

    def __init__(self, kind: type, arguments: tuple[Any, ...], *, what: str) -> None:
        """Needs Ray to be initialised. `what` names the object in errors."""
        self._own = OwnActors("shard", kind, arguments, prefix="sole")
        self._crew = Crew(self._own, "shard", what)

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The method's answer. A call whose actor dies or hangs is made once more.

        Raises: what the actor's code raised; RetrievalError if `timeout_s` pass without an answer.
        """
        orders = {method: tuple(self._crew.names())}
        answers = ask(
            self._crew, orders, lambda actor, _: getattr(actor, method).remote(*arguments), Patience(timeout_s)
        )
        for error in answers.unanswered.values():
            raise error
        return answers.given[0][1]

    def close(self) -> None:
        """End the actor and what it is at; nobody is answered any more."""
        self._crew.close()
        self._own.close()
