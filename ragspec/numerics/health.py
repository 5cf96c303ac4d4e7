"""Whether a model can still compute, asked after a forward that failed.

A forward may fail because of its own rows, and the next one computes. But after memory ran out, oneDNN never again computes a
shape that it has not computed before, though the memory is back ("could not create a primitive"). Then only a new process helps:
a supervisor starts the service again, or another replica goes on.

    >>> why_lost("the encoder", lambda: model([[0] * 17]))      # "": it computes
    ''
"""

import time
from collections.abc import Callable

_LOST_S, _PAUSE_S = 10.0, 0.5
"""Why not at once: memory that is short for a moment is no reason to end."""


def why_lost(name: str, probe: Callable[[], object]) -> str:
    """Runs `probe`, a forward of the size that failed and of arbitrary content, until it computes or has failed for 10 seconds.

    Returns the reason why the model `name` is lost; empty if it computes. Blocks.
    """
    deadline = time.monotonic() + _LOST_S
    while True:
        try:
            probe()
        except Exception as cause:
            if time.monotonic() >= deadline:
                failure = f"{type(cause).__name__}: {cause}"
                return f"{name} is lost: forwards of a size that failed have failed for {_LOST_S:g} s ({failure})"
        else:
            return ""
        time.sleep(_PAUSE_S)
