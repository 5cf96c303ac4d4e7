"""The models that the release knows, by the SHA-256 of their weight file, and the type in which their weights are held.

`quantization: auto` means int8 on backend cpu, except for models that stand here with "none". Imports nothing heavy.

>>> listed("1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32").name
'Qwen2.5-Coder-0.5B-Instruct'
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ragspec.config import DEFAULT_TARGET


class ListedModel(NamedTuple):
    """`sha256`: of the GGUF file, or of a file of weights in a Hugging Face folder. `quantization`: what "auto" means for it on
    backend cpu. `reason`: of "none"."""

    name: str
    sha256: str
    quantization: Literal["int8", "none"] = "int8"
    reason: str = ""


MODELS = (
    ListedModel(DEFAULT_TARGET, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    ListedModel("Qwen2.5-Coder-0.5B-Instruct", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    ListedModel("Qwen2.5-Coder-1.5B-Instruct", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
)


def listed(sha256: str) -> ListedModel | None:
    return next((model for model in MODELS if model.sha256 == sha256), None)


def any_float() -> bool:
    """Whether any model is listed with float weights; without one, no file needs to be hashed."""
    return any(model.quantization == "none" for model in MODELS)


def sha256_of(name: str) -> str:
    """The hash of the listed model of that name."""
    return next(model.sha256 for model in MODELS if model.name == name)
