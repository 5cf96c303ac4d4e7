"""The configuration of a service: a pipeline's, and the section `service`.

>>> settings = load_settings(ServiceConfig, "ragspec.yaml", **{"service.port": 8010})
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field

from ragspec.config import ChatConfig, ConfigSection, PipelineConfig

DEFAULT_PORT = 8000


class KeyLimits(ConfigSection):
    """Limits of one key; None: no limit. `concurrency`: requests at once; one with several choices or prompts counts them all.
    `tokens_per_minute` count prompts and answers."""

    requests_per_minute: int | None = Field(None, ge=1)
    concurrency: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)

    def over(self, defaults: KeyLimits) -> KeyLimits:
        """These limits, with the defaults for those that were not given."""
        return defaults.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


class Limits(ConfigSection):
    """Limits of any request. `json_items`: lists, objects and items of a body, over all its levels. `connections`: open ones, at
    most as many as the process may open files, less 256; `address_connections`: of one address, or IPv6 network of 64 bits.
    `max_in_flight`: requests at once, over all keys; more are refused with a time to retry after. `key`: a key's limits where its
    own say nothing.
    """

    body_bytes: int = Field(10 * 2**20, ge=1024)
    header_bytes: int = Field(16 * 2**10, ge=1024)
    json_depth: int = Field(64, ge=8, le=256)
    json_items: int = Field(250_000, ge=1024)
    connections: int = Field(4096, ge=1)
    address_connections: int = Field(512, ge=1)
    max_in_flight: int = Field(256, ge=1)
    key: KeyLimits = KeyLimits(concurrency=32)


class Timeouts(ConfigSection):
    """Time limits: `header_s` and `upload_s` for a client to send a request's head and body, `request_s` for the whole answer,
    `slow_client_s` for a client to read what it was sent, `canary_s` for the health check's token."""

    header_s: float = Field(10.0, gt=0.0)
    upload_s: float = Field(30.0, gt=0.0)
    request_s: float = Field(600.0, gt=0.0)
    slow_client_s: float = Field(30.0, gt=0.0)
    canary_s: float = Field(10.0, gt=0.0)


class TelemetryConfig(ConfigSection):
    """OpenTelemetry. `exporter`: none, the console, or OTLP, which the standard variables OTEL_EXPORTER_OTLP_* configure.

    `content`: whether spans hold the texts of users and answers.
    """

    exporter: Literal["none", "console", "otlp"] = "none"
    content: bool = False


class ConversationSettings(ConfigSection):
    """Conversations are deleted after `ttl_s` seconds without use. Each tenant may store `max_bytes`."""

    ttl_s: float = Field(7 * 86_400.0, gt=0.0)
    max_bytes: int = Field(64 * 2**20, ge=2**16)


class GrammarSettings(ConfigSection):
    """`timeout_s`: sentences not corrected by then stay, and the reply says so. `max_edit_ratio`: the share of a sentence's
    words that a correction may change."""

    max_text_chars: int = Field(100_000, ge=1)
    timeout_s: float = Field(60.0, gt=0.0)
    max_edit_ratio: float = Field(0.5, ge=0.0, le=1.0)


class ServiceSettings(ConfigSection):
    """The service itself.

    `model`: the name that clients use; empty: the target's. `keys_file`: the accepted keys, written by `ragspec keys`; empty: one
    key, made at the start, and only this machine is served. `ssl_certfile`, `ssl_keyfile`: PEM
    files, for HTTPS. `data_dir`: the folder of conversations, dictionaries and, separately
    for each index, files; empty: files lie beside the index, the rest in memory (`ragspec serve` then uses the user's data
    folder). `library_dir`: another folder for the files of this index; never share it between indexes. `allowed_hosts`: accepted
    Host headers; empty: names of this machine if only this machine is served, else any. `cors_origins`: sites whose pages may
    call the service from a browser, beside its own pages. `languagetool_open`: /v2 needs no key; None: only without a keys file.
    `drain_s`: time for running requests after the signal to stop. `privacy`: "strict" sends answers at a fixed pace, in chunks of
    one size.
    """

    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    model: str = ""
    keys_file: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    data_dir: str = ""
    library_dir: str = ""
    allowed_hosts: tuple[str, ...] = Field((), strict=False)
    cors_origins: tuple[str, ...] = Field((), strict=False)
    languagetool_open: bool | None = None
    privacy: Literal["normal", "strict"] = "normal"
    drain_s: float = Field(120.0, ge=0.0)
    conversations: ConversationSettings = ConversationSettings()
    grammar: GrammarSettings = GrammarSettings()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_languagetool_open(self) -> bool:
        return self.languagetool_open if self.languagetool_open is not None else self.is_local and not self.keys_file


class ServiceConfig(PipelineConfig):
    """The whole configuration of a service."""

    chat: ChatConfig = ChatConfig()
    service: ServiceSettings = ServiceSettings()

    @property
    def model_name(self) -> str:
        """The model name that clients use."""
        return self.service.model or Path(self.target.model).name
