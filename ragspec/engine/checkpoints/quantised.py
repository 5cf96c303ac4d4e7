"""Keeps quantised weights on disk: the next start maps them and reads of the model its embedding alone.

A file's name has the digest of the model's files, so other weights or another adapter never meet an old file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ragspec.config import TargetConfig
from ragspec.disk import TEMPORARY
from ragspec.engine.checkpoints.target_files import MAX_UNUSED_DAYS, files_digest
from ragspec.numerics.cpu.int8_weights import FORMAT, WeightArena
from ragspec.numerics.ranks import Ranks

log = logging.getLogger(__name__)


class SavedWeights:
    """One rank's quantised weights in the target's cache. Models by name of a hub have no files to take a digest of."""

    def __init__(self, folder: str, config: TargetConfig, ranks: Ranks) -> None:
        cache, model = Path(config.cache_dir).expanduser(), Path(folder)
        self._path: Path | None = None
        if model.is_dir():
            digest = model.name if model.parent == cache else files_digest(model, config.dtype)[:32]
            self._path = cache / "int8" / f"{digest}-{FORMAT}-{ranks.rank}-of-{ranks.size}.safetensors"

    def load(self) -> WeightArena:
        """The saved arena, or an empty one."""
        if self._path is None or not self._path.is_file():
            return WeightArena()
        try:
            arena = WeightArena(load_file(self._path))
            self._path.touch()
        except (OSError, SafetensorError) as cause:
            log.warning("quantised weights cannot be read and are made anew: %s", cause)
            return WeightArena()
        return arena

    def save(self, arena: WeightArena) -> None:
        """Write a new arena, and remove files that nobody used for MAX_UNUSED_DAYS. A full disk is logged, not raised."""
        if self._path is None or arena.is_saved:
            return
        building = self._path.with_name(f"{TEMPORARY}{os.getpid()}-{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_file(dict(arena.tensors), building)
            os.replace(building, self._path)
            for path in self._path.parent.iterdir():
                if time.time() - path.stat().st_mtime > MAX_UNUSED_DAYS * 86_400:
                    path.unlink()
        except (OSError, SafetensorError) as cause:
            log.warning("quantised weights are not kept: %s", cause)
        finally:
            with contextlib.suppress(OSError):
                building.unlink()
