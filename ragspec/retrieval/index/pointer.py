"""The file CURRENT of an index: which generation readers use. Imports nothing heavy, so that a mistyped folder costs no time.

>>> pointer = read_pointer(Path("my-index"))
"""

import re
from pathlib import Path

from ragspec.config import RetrieverConfig
from ragspec.errors import ConfigError, StoreCorrupt, StoreMissing

CURRENT = "CURRENT"
POINTER = re.compile(r"(generation-\d{6,}) ([0-9a-f]{64})\n?")
"""Folder of the generation, and the SHA-256 of its manifest."""


def configured_index_dir(config: RetrieverConfig) -> Path:
    """Raises: ConfigError if no folder is configured."""
    if not config.index_dir:
        raise ConfigError("retriever.index_dir is not set: build an index first, then name its folder")
    return Path(config.index_dir)


def read_pointer(index_dir: Path) -> str:
    """The content of CURRENT. Raises: StoreMissing, StoreCorrupt."""
    try:
        return (index_dir / CURRENT).read_text(encoding="ascii")
    except FileNotFoundError as cause:
        if not index_dir.exists():
            raise StoreMissing(f"there is no index at {index_dir}: the folder does not exist") from cause
        raise StoreMissing(f"there is no ragspec index in {index_dir}: it has no file {CURRENT}") from cause
    except NotADirectoryError as cause:
        raise StoreMissing(f"there is no index at {index_dir}: it is a file") from cause
    except UnicodeDecodeError as cause:
        raise StoreCorrupt(f"{index_dir / CURRENT} does not name a generation of a ragspec index") from cause
    except OSError as cause:
        raise StoreMissing(f"the index at {index_dir} cannot be read: {cause.strerror}") from cause
