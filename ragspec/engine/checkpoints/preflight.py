"""Looks at a target's files before anything heavy loads: whether they are there, hold weights, and fit into memory.

Reads headers alone, and asks the model hub once. Imports nothing heavy.

>>> check_files("models/Qwen3-0.6B.gguf")
>>> check_memory("models/Qwen3-0.6B.gguf", bytes_per_weight=1)
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from ragspec.engine.checkpoints.catalogue import MODELS
from ragspec.errors import ModelError

_HUB_TIMEOUT_S = 2.0
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of GGUF's scalar values, by the number of their type."""
_STRING, _ARRAY = 8, 9


def check_files(model: str) -> None:
    """`model`: a GGUF file, a folder, or a name of the hub. Raises: ModelError if it cannot be a target."""
    path = Path(model)
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"there is no file {model}{_nearest(model)}")
        if not _num_tensors(path):
            raise ModelError(f"{model} holds a vocabulary alone, without weights: take the model's own file")
    elif path.exists():
        if not (path / "config.json").is_file():
            raise ModelError(f"{model} is not a model directory: it has no config.json")
    elif model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no folder {model}: it is not a model directory, nor OWNER/NAME of the model hub")
    elif not is_in_hub_cache(model):
        _look_at_hub(model)


def check_memory(model: str, bytes_per_weight: int) -> None:
    """Raises: ModelError if the weights of a GGUF file or a folder take more memory than is free, swap included."""
    path = Path(model)
    num_weights = gguf_num_weights(path) if path.is_file() else sum(map(_num_weights, path.glob("*.safetensors")))
    needed, free = num_weights * bytes_per_weight, free_bytes()
    if free is not None and needed > free:
        raise ModelError(
            f"{model} is too large for this machine's memory: its {num_weights:,} weights need {needed:,} bytes, "
            f"{bytes_per_weight} each, and {free:,} bytes are free; ragspec models list shows smaller models"
        )


def free_bytes() -> int | None:
    """Memory that a new process can take, swap included, within the limit of the container. None: unknown."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        free = sum(int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):  # no Linux
        return None
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(cached["inactive_file"]) + int(cached["active_file"]))
    except (OSError, KeyError, ValueError):  # no limit: memory.max is "max"
        return free


def is_in_hub_cache(name: str) -> bool:
    """Whether the hub's cache on this machine holds the model's configuration."""
    from huggingface_hub import try_to_load_from_cache  # Why here: half a second of imports
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def hub_answers(name: str) -> bool:
    """Whether the hub can be reached, within two seconds."""
    from huggingface_hub.errors import HfHubHTTPError

    error = _hub_error(name)
    return error is None or isinstance(error, HfHubHTTPError)


def _hub_error(name: str) -> Exception | None:
    """Why the hub does not give the model's configuration, a file, which mirrors have that know nothing of models."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except (HFValidationError, HTTPError, OSError) as error:
        return error
    return None


def _look_at_hub(name: str) -> None:
    """One short look. Raises: ModelError with everything that was tried, and the nearest known names."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    tried = f"{name!r} is no folder or file here, and not in the catalogue (ragspec models list); "
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{tried}the model hub is switched off (HF_HUB_OFFLINE){_nearest(name)}")
    if (error := _hub_error(name)) is None:
        return
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        reason = "the model hub has no such model, or shows it only with HF_TOKEN"
    else:
        reason = f"the model hub {'refuses it' if isinstance(error, HfHubHTTPError) else 'does not answer'}: {error}"
    raise ModelError(f"{tried}{reason}{_nearest(name)}") from error


def _nearest(name: str) -> str:
    """`; the nearest known names: ...`, or an empty text."""
    last = Path(name).stem if name.endswith(".gguf") else name.rpartition("/")[2]
    names = {model.name.lower(): model.name for model in MODELS}
    near = get_close_matches(last.lower(), names, n=3)
    return f"; the nearest known names: {', '.join(names[each] for each in near)}" if near else ""


def _num_tensors(path: Path) -> int:
    """Tensors of a GGUF file. Raises: ModelError for another kind of file."""
    with path.open("rb") as file:
        head = file.read(24)
    if len(head) < 24 or not head.startswith(b"GGUF"):
        raise ModelError(f"{path} is no GGUF file, or not all of it")
    return int(struct.unpack_from("<Q", head, 8)[0])


def gguf_num_weights(path: Path) -> int:
    """Elements of all tensors of a GGUF file. Raises: ModelError for a damaged file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return sum(_gguf_tensor_sizes(content))
    except (struct.error, KeyError, ValueError) as cause:
        raise ModelError(f"{path} is a damaged GGUF file: its header ends early") from cause


def _gguf_tensor_sizes(content: mmap.mmap) -> Iterator[int]:
    """Source: the GGUF specification, version 3."""
    num_tensors, num_entries = struct.unpack_from("<QQ", content, 8)
    at = 24
    for _ in range(num_entries):
        at = _after_string(content, at)
        at = _after_value(content, at + 4, struct.unpack_from("<I", content, at)[0])
    for _ in range(num_tensors):
        at = _after_string(content, at)
        (num_dimensions,) = struct.unpack_from("<I", content, at)
        yield math.prod(struct.unpack_from(f"<{num_dimensions}Q", content, at + 4))
        at += 4 + 8 * num_dimensions + 4 + 8  # type and offset


def _after_string(content: mmap.mmap, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", content, at)[0])


def _after_value(content: mmap.mmap, at: int, kind: int) -> int:
    """The position behind a value of a GGUF file's metadata."""
    if kind == _STRING:
        return _after_string(content, at)
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if inner in _SIZES:
        return at + int(count) * _SIZES[inner]
    for _ in range(count):
        at = _after_value(content, at, inner)
    return at


def _num_weights(path: Path) -> int:
    """Elements of the tensors of a safetensors file; 0 for a damaged one, whose loading says more."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError, OverflowError):
        return 0
