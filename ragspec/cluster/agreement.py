"""What a deployment runs with, and what those who use it ask for: who names another index must not be answered from this one.

>>> check_agreement(deployment, settings, ("target", "retriever"), free=("retriever.num_passages",))
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import BaseModel

from ragspec.cluster.plans import with_full_paths
from ragspec.config import PipelineConfig
from ragspec.errors import ConfigError


def check_agreement(
    name: str, deployed: PipelineConfig, given: PipelineConfig, sections: Collection[str], free: Collection[str] = ()
) -> None:
    """Raises: ConfigError where what was said of these sections, but for what is `free`, is not so in deployment `name`."""
    full = with_full_paths(given)
    for section in sections:
        said = getattr(given, section)
        check_same(name, said, getattr(full, section), getattr(deployed, section), section, free)


def check_same(
    name: str, said: BaseModel, full: BaseModel, deployed: BaseModel, section: str, free: Collection[str] = ()
) -> None:
    """As `check_agreement`, of one section: `full` is what was `said`, with folders by their full names."""
    for field, theirs, ours in _differences(said, full, deployed, section):
        if field not in free:
            raise ConfigError(
                f"the deployment {name!r} runs with {field} {theirs!r}, not {ours!r}: leave that out, or use another deployment"
            )


def _differences(
    said: BaseModel, full: BaseModel, deployed: BaseModel, path: str
) -> Iterator[tuple[str, object, object]]:
    for field in sorted(said.model_fields_set):
        ours, theirs = getattr(full, field), getattr(deployed, field)
        inner = getattr(said, field)
        if isinstance(inner, BaseModel):
            yield from _differences(inner, ours, theirs, f"{path}.{field}")
        elif ours != theirs:
            yield f"{path}.{field}", theirs, ours
