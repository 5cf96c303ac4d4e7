"""What a deployment runs with, and what those who use it ask for: who names another index must not be answered from this one.

>>> check_agreement("ragspec", deployment.config, settings, ("target", "retriever"), own=("retriever.num_passages",))
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import BaseModel

from ragspec.cluster.plans import with_full_paths
from ragspec.config import PipelineConfig
from ragspec.errors import ConfigError

_NO_PART_OF_IT = ("encoder.batch_size", "retriever.device", "retriever.fail_closed")
"""What decides no text, or is the topology's to say."""


def check_agreement(
    name: str, deployed: PipelineConfig, given: PipelineConfig, sections: Collection[str], own: Collection[str] = ()
) -> None:
    """`sections`: or single settings of one; `own`: what everybody decides for themselves.

    Raises: ConfigError where something else that was said of these sections is not so in deployment `name`.
    """
    full = with_full_paths(given)
    for place in sections:
        section = place.partition(".")[0]
        said, ours, theirs = (getattr(config, section) for config in (given, full, deployed))
        for field, its, wanted in _differences(said, ours, theirs, section):
            if field.startswith(place) and field not in (*own, *_NO_PART_OF_IT):
                raise ConfigError(
                    f"the deployment {name!r} runs with {field} {its!r}, not {wanted!r}: leave that out, or use another "
                    "deployment"
                )


def _differences(
    said: BaseModel, ours: BaseModel, theirs: BaseModel, path: str
) -> Iterator[tuple[str, object, object]]:
    """Of what was said: its name, the deployment's value and the caller's."""
    for field in sorted(said.model_fields_set):
        inner, wanted, its = (getattr(section, field) for section in (said, ours, theirs))
        if isinstance(inner, BaseModel):
            yield from _differences(inner, wanted, its, f"{path}.{field}")
        elif wanted != its:
            yield f"{path}.{field}", its, wanted
