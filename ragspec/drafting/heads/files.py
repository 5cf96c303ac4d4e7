"""The files of a published head: config.json, the values of its keys, and named tensors.

Runs no code of a checkpoint: reads safetensors, or `.bin` and `.pt` files without pickled code.

    >>> raw, tensors = read_json(directory / CONFIG), read_tensors(directory)
    >>> write_files(directory, raw, WEIGHTS, tensors)
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ragspec.disk import atomic_writer
from ragspec.errors import ModelError, SaveError

Raw = Mapping[str, Any]
"""The content of a config.json, or a section of it."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
STORED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PUBLISHED_WEIGHTS = (WEIGHTS, WEIGHTS + ".index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")


@contextmanager
def errors_of(directory: str | Path) -> Iterator[Path]:
    """The directory, which every ModelError from inside names."""
    try:
        yield Path(directory)
    except ModelError as cause:
        raise ModelError(f"{directory}: {cause}") from cause


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ModelError for anything but a JSON object."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ModelError(f"cannot read {path.name}: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{path.name} is no JSON: {cause}") from cause
    if not isinstance(read, dict):
        raise ModelError(f"{path.name} holds no JSON object")
    return read


def read_tensors(directory: Path, own_names: tuple[str, ...] = (), section: str = "") -> dict[str, Tensor]:
    """The tensors of the first file that exists: of `own_names`, of the usual names, or the only file of tensors.

    `section`: where names begin so, only these are read: a head among its target's weights. Raises: ModelError.
    """
    path = _weights_path(directory, own_names)
    if path.suffix != ".json":
        return _read_file(path, section)
    tensors: dict[str, Tensor] = {}
    for name in _shard_names(read_json(path), path.name, section):
        tensors |= _read_file(directory / name, section)
    return tensors


def write_files(directory: Path, raw: Raw, weights: str, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and the file `weights`, `.safetensors` or `.pt`, each whole or not at all. Raises: SaveError."""
    apart = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_writer(directory / CONFIG) as config_file, atomic_writer(directory / weights) as weights_file:
            config_file.write((json.dumps(dict(raw), indent=2) + "\n").encode())
            if weights.endswith(".pt"):
                torch.save(apart, weights_file)
            else:
                weights_file.write(save(apart, metadata={"format": "pt"}))
    except (OSError, SafetensorError) as cause:
        raise SaveError(f"cannot write the head to {directory}: {cause}") from cause


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = STORED_DTYPES
) -> None:
    """Raises: ModelError naming a tensor of another shape or kind, or with values that are not finite."""
    if tuple(tensor.shape) != shape:
        raise ModelError(f"the head's {name} is {list(tensor.shape)}; its config or its target asks for {list(shape)}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ModelError(f"the head's {name} is no plain dense tensor")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(f"the head's {name} is {str(tensor.dtype).removeprefix('torch.')}, not {names}")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"the head's {name} holds a value that is not finite")


def check_tensors(tensors: Mapping[str, Tensor], needed: Mapping[str, Tensor], optional: Mapping[str, Tensor]) -> None:
    """`needed` and `optional`: tensors of the right shape and kind, without memory.

    Raises: ModelError naming the first tensor that is missing, unknown, of another shape or kind, or not finite.
    """
    for name in needed:
        if name not in tensors:
            raise ModelError(f"the head lacks {name}, which its config or its other tensors ask for")
    for name, tensor in tensors.items():
        wanted = needed.get(name, optional.get(name))
        if wanted is None:
            raise ModelError(f"the head has {name}, which a head of its config has not")
        dtypes = STORED_DTYPES if wanted.is_floating_point() else (wanted.dtype,)
        check_tensor(name, tensor, tuple(wanted.shape), dtypes)


def _weights_path(directory: Path, own_names: tuple[str, ...]) -> Path:
    """The first published name that exists, or else the only file of tensors."""
    for name in (*own_names, *_PUBLISHED_WEIGHTS):
        if (directory / name).is_file():
            return directory / name
    found = [path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in sorted(directory.glob(pattern))]
    found = [path for path in found if not path.name.startswith(_NO_WEIGHTS)]
    if len(found) != 1:
        names, wanted = ", ".join(path.name for path in found), " or ".join(own_names or (WEIGHTS, "pytorch_model.bin"))
        raise ModelError(f"no {wanted}" + (f", and several others: {names}" if found else ""))
    return found[0]


def _shard_names(index: Mapping[str, Any], index_name: str, section: str) -> list[str]:
    weight_map = index.get("weight_map")
    shards = weight_map if isinstance(weight_map, dict) else {}
    if not shards or not all(isinstance(name, str) and Path(name).name == name for name in shards.values()):
        raise ModelError(f"{index_name} has no weight_map of file names")
    return sorted({shards[tensor] for tensor in _in_section(shards, section)})


def _in_section(names: Iterable[str], section: str) -> list[str]:
    """The names that begin with `section`; all, where none does."""
    names = list(names)
    return [name for name in names if name.startswith(section)] or names


def _read_file(path: Path, section: str) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as stored:
                return {name: stored.get_tensor(name) for name in _in_section(stored.keys(), section)}
        read = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as cause:  # safetensors, pickle and torch raise classes of their own for a damaged file
        reason = (str(cause).strip().splitlines() or [""])[0]
        raise ModelError(f"cannot read {path.name}: {type(cause).__name__}: {reason}") from cause
    if not isinstance(read, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in read.items()):
        raise ModelError(f"{path.name} holds something other than named tensors")
    return {name: read[name] for name in _in_section(read, section)}


def section_of(raw: Raw, key: str) -> Raw:
    """Raises: ModelError naming the key, as all functions below do for a value of another kind."""
    section = raw.get(key) or {}
    if not isinstance(section, dict):
        raise ModelError(f"config.json has {key} {section!r}, not a section")
    return section


def _value(section: Raw, key: str, absent: Any, kinds: tuple[type, ...], wanted: str) -> Any:
    value = absent if section.get(key) is None else section[key]
    if type(value) not in kinds:
        raise ModelError(f"config.json has {key} {value!r}, not {wanted}")
    return value


def integer(section: Raw, key: str, absent: int | None = None) -> int:
    if absent is None and section.get(key) is None:
        raise ModelError(f"config.json has no {key}")
    return cast(int, _value(section, key, absent, (int,), "a whole number"))


def number(section: Raw, key: str, absent: float) -> float:
    value = _value(section, key, absent, (int, float), "a number")
    if abs(value) > 1e30:
        raise ModelError(f"config.json has {key} {value!r}, not a number")
    return float(value)


def truth(section: Raw, key: str, absent: bool = False) -> bool:
    return cast(bool, _value(section, key, absent, (bool,), "true or false"))
