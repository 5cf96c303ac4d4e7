"""Speculation options of a request: its drafters, the size of trees, the acceptance rule.

>>> Speculation.of({"drafters": ["copy"], "max_nodes": 8})
Speculation(drafters=('copy',), max_nodes=8, rule=<AcceptanceRule.KEYED: 'keyed'>, lossy=False)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ragspec.errors import InputError


class AcceptanceRule(enum.StrEnum):
    """How drafted tokens are accepted: by following the target's keyed sample, or by a published rule.

    The sources are named in `ragspec.verification.rejection`.
    """

    KEYED = "keyed"
    CHAIN = "chain"
    IID = "iid"
    WITHOUT_REPLACEMENT = "without_replacement"
    BLOCK = "block"
    TRAVERSAL = "traversal"
    TYPICAL = "typical"
    TOP_BETA = "top_beta"


LOSSY_RULES = (AcceptanceRule.TYPICAL, AcceptanceRule.TOP_BETA)
CHAIN_RULES = (AcceptanceRule.CHAIN, AcceptanceRule.BLOCK)
_OPTIONS = ("drafters", "max_nodes", "rule", "lossy")


@dataclass(frozen=True, slots=True)
class Speculation:
    """`drafters`: names, None for all; empty: plain decoding. `max_nodes`: the most nodes of a tree.

    `rule`: how drafted tokens are accepted; under any rule but "keyed" another draft gives another text. Rules that change the
    distribution of the text need `lossy=True`. False in a boolean context if nothing is drafted.
    """

    drafters: tuple[str, ...] | None = None
    max_nodes: int | None = None
    rule: AcceptanceRule = AcceptanceRule.KEYED
    lossy: bool = False

    def __post_init__(self) -> None:
        if self.rule not in list(AcceptanceRule):
            raise InputError(f"speculation's rule must be one of {', '.join(AcceptanceRule)}, not {self.rule!r}")
        object.__setattr__(self, "rule", AcceptanceRule(self.rule))
        if self.rule in LOSSY_RULES and self.lossy is not True:
            raise InputError(f"{self.rule} changes what the target would say; set lossy=True to accept that")
        if self.max_nodes is not None and (type(self.max_nodes) is not int or self.max_nodes < 0):
            raise InputError(f"speculation's max_nodes must be an integer, 0 or more, not {self.max_nodes!r}")
        if self.drafters is None:
            return
        if not isinstance(self.drafters, list | tuple) or not all(isinstance(name, str) for name in self.drafters):
            raise InputError(f"speculation's drafters must be a list of names, not {self.drafters!r}")
        object.__setattr__(self, "drafters", tuple(self.drafters))

    @classmethod
    def of(cls, given: object) -> Speculation:
        """From user input: true, false, or a mapping like {"drafters": ["copy"], "max_nodes": 8}.

        Raises: InputError.
        """
        if isinstance(given, Speculation):
            return given
        if isinstance(given, bool):
            return ON if given else OFF
        if not isinstance(given, Mapping):
            raise InputError(f"speculation must be true, false or an object, not {given!r}")
        if unknown := sorted(set(map(str, given)) - set(_OPTIONS)):
            raise InputError(f"speculation has no option {unknown[0]!r}; there are: {', '.join(_OPTIONS)}")
        return cls(**given)

    @property
    def exactness(self) -> Literal["path", "distribution", "none"]:
        """What drafts leave unchanged: the tokens ("path"), their distribution, or neither."""
        if self.rule in LOSSY_RULES:
            return "none"
        return "path" if self.rule is AcceptanceRule.KEYED else "distribution"

    def __bool__(self) -> bool:
        return self.drafters != () and self.max_nodes != 0


ON, OFF = Speculation(), Speculation(drafters=())
SpeculationGiven = Speculation | Mapping[str, Any] | bool
"""The argument of `Speculation.of`."""
