"""The configuration of a service: a pipeline's, and the section `service`.

>>> settings = load_settings(ServiceConfig, "ragspec.yaml", **{"service.port": 8010})
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ragspec.cluster.local_cluster import is_loopback
from ragspec.config import ConfigSection, DraftingConfig, EngineConfig, PipelineConfig, TargetConfig

DEFAULT_PORT = 8000
MIN_KV_TOKENS = 64
"""KV slots of a model at least, as `EngineConfig.max_kv_tokens` demands."""
CANARY_S = 10.0
"""Time limit of the health check's token."""


class KeyLimits(ConfigSection):
    """Limits of a key whose own say nothing; null: no limit."""

    requests_per_minute: int | None = Field(None, ge=1)
    """Requests in a minute."""
    concurrency: int | None = Field(None, ge=1)
    """Choices at once; a request with several choices or prompts counts them all."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Tokens of prompts and answers in a minute."""


class Limits(ConfigSection):
    """Limits of any request; `services.limits` lists the fixed ones too."""

    body_bytes: int = Field(10 * 2**20, ge=1024)
    """Bytes of a body. More: larger uploads, more memory."""
    connections: int = Field(4096, ge=1)
    """Open connections, at most as many as the process may open files, less 256."""
    address_connections: int = Field(512, ge=1)
    """Open connections of one address, or IPv6 network of 64 bits. Behind a proxy all clients have its address."""
    max_in_flight: int = Field(256, ge=1)
    """Requests at once, over all keys; more are refused with a time to retry after."""
    key: KeyLimits = KeyLimits(concurrency=32)


class Timeouts(ConfigSection):
    """Time limits of a request."""

    request_s: float = Field(600.0, gt=0.0)
    """For the whole answer."""
    client_s: float = Field(30.0, gt=0.0)
    """For a client to send a body, and to read what it was sent. Longer: slow networks, more open connections."""


class TelemetryConfig(ConfigSection):
    """OpenTelemetry."""

    exporter: Literal["none", "console", "otlp"] = "none"
    """Where spans go; the standard variables OTEL_EXPORTER_OTLP_* configure "otlp"."""
    content: bool = False
    """Spans hold the texts of users and answers: easier to debug, private texts leave the service."""


class ConversationSettings(ConfigSection):
    """Stored conversations."""

    ttl_s: float = Field(7 * 86_400.0, gt=0.0)
    """A conversation is deleted after so many seconds without use."""


class GrammarSettings(ConfigSection):
    """Correction of texts."""

    max_text_chars: int = Field(100_000, ge=1)
    """Characters of a text; a longer one is refused."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Sentences not corrected by then stay, and the reply says so."""
    model: str = ""
    """The model of `service.models` that corrects; empty: the target. A small model corrects while a larger one answers."""


class ServiceSettings(ConfigSection):
    """The service itself."""

    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0": reachable from other machines."""
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    """Port to listen on; 0: any free one."""
    served_model_name: str = ""
    """Name of the model in requests and replies; empty: the target's."""
    keys_file: str = ""
    """Accepted keys, written by `ragspec keys`; empty: one key, made at the start, and only this machine is served."""
    ssl_certfile: str = ""
    """PEM file of the certificate, for HTTPS."""
    ssl_keyfile: str = ""
    """PEM file of its key."""
    data_dir: str = ""
    """Folder of conversations, dictionaries and, for each index apart, files; empty: files lie beside the index, the rest in
    memory (`ragspec serve` then uses the user's data folder)."""
    library_dir: str = ""
    """Another folder for the files of this index; never share it between indexes."""
    allowed_hosts: tuple[str, ...] = Field((), strict=False)
    """Accepted Host headers; empty: names of this machine if only this machine is served, else any."""
    allowed_origins: tuple[str, ...] = Field((), strict=False)
    """Sites whose pages may call the service from a browser (CORS), beside its own pages."""
    languagetool_open: bool | None = None
    """/v2 needs no key, as LanguageTool's clients expect; null: only without a keys file, on this machine."""
    privacy: Literal["normal", "strict"] = "normal"
    """"strict" sends answers at a fixed pace in chunks of one size, so that their timing
    tells less; slower."""
    drain_s: float = Field(120.0, ge=0.0)
    """Time for running requests after the signal to stop."""
    models: dict[str, TargetConfig] = Field(default_factory=dict)
    """Further targets by the names that clients use, as `target` is written; on a cluster, each is the deployment of its name.
    Each takes its weights' memory, and an equal share of the KV cache."""
    conversations: ConversationSettings = ConversationSettings()
    grammar: GrammarSettings = GrammarSettings()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)

    @property
    def is_languagetool_open(self) -> bool:
        return self.languagetool_open if self.languagetool_open is not None else self.is_local and not self.keys_file


class ServiceConfig(PipelineConfig):
    """The whole configuration of a service."""

    service: ServiceSettings = ServiceSettings()

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.model_name in self.service.models:
            raise ValueError(f"service.models names {self.model_name!r}, the name of the target")
        if self.service.grammar.model not in ("", self.model_name, *self.service.models):
            name = self.service.grammar.model
            raise ValueError(f"service.grammar.model is {name!r}, which `service.models` does not name")
        return self

    @property
    def engine_share(self) -> EngineConfig:
        """`engine` with one model's share of the KV cache, which all models divide equally."""
        count, engine = 1 + len(self.service.models), self.engine
        bytes_each = None if engine.max_kv_bytes is None else max(1, engine.max_kv_bytes // count)
        tokens_each = max(MIN_KV_TOKENS, engine.max_kv_tokens // count)
        return engine.model_copy(update={"max_kv_tokens": tokens_each, "max_kv_bytes": bytes_each})

    def for_model(self, name: str) -> ServiceConfig:
        """The configuration of the model of this name: its target, its share of the KV cache, and copies as its only drafts,
        because trained heads and draft models belong to `target`."""
        engine = self.engine_share
        if name == self.model_name:
            return self.model_copy(update={"engine": engine})
        kept = {"speculation", "tree", "reuse_earlier_answers"}
        drafting = DraftingConfig(**{name: getattr(self.drafting, name) for name in kept})
        # an offload folder belongs to one target
        engine = engine.model_copy(update={"kv_offload_bytes": 0, "kv_offload_dir": ""})
        own = {"target": self.service.models[name], "engine": engine, "drafting": drafting}
        return self.model_copy(update=own).suit_target()

    @property
    def model_name(self) -> str:
        """The model name that clients use."""
        return self.service.served_model_name or Path(self.target.model).name
