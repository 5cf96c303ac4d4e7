"""What a service is configured with: everything a pipeline is, and the section `service`.

>>> settings = load_settings(ServiceConfig, "ragspec.yaml", **{"service.port": 8010})
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field

from ragspec.config import ConfigSection, PipelineConfig
from ragspec.rag.chat.config import ChatConfig

DEFAULT_PORT = 8000


class KeyLimits(ConfigSection):
    """What one key may use; None: as much as there is. `concurrency`: requests at once. `tokens_per_minute` are the prompt's and
    those written."""

    requests_per_minute: int | None = Field(None, ge=1)
    concurrency: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


class Limits(ConfigSection):
    """What any request may be. `max_in_flight`: of all keys together; more are refused with a time to come back after.

    `key`: of keys that have no limits of their own.
    """

    body_bytes: int = Field(10 * 2**20, ge=1024)
    header_bytes: int = Field(16 * 2**10, ge=1024)
    json_depth: int = Field(64, ge=8, le=256)
    max_in_flight: int = Field(256, ge=1)
    key: KeyLimits = KeyLimits()


class Timeouts(ConfigSection):
    """How long a client may take to send a request's head, and its body; until an answer is complete; for a client to take
    what it was sent; for the one token that the health check asks for."""

    header_s: float = Field(10.0, gt=0.0)
    upload_s: float = Field(30.0, gt=0.0)
    request_s: float = Field(600.0, gt=0.0)
    slow_client_s: float = Field(30.0, gt=0.0)
    canary_s: float = Field(10.0, gt=0.0)


class TelemetryConfig(ConfigSection):
    """OpenTelemetry. `exporter`: none, lines on the console, or OTLP (the standard variables OTEL_EXPORTER_OTLP_* say where).

    `content`: whether spans hold what users wrote and what was answered.
    """

    exporter: Literal["none", "console", "otlp"] = "none"
    content: bool = False


class ConversationSettings(ConfigSection):
    """What is kept of a conversation: until it was not used for `ttl_s` seconds, and of one tenant at most `max_bytes`."""

    ttl_s: float = Field(7 * 86_400.0, gt=0.0)
    max_bytes: int = Field(64 * 2**20, ge=2**16)


class GrammarSettings(ConfigSection):
    """`timeout_s`: what is not corrected by then stays as it is, and the reply says so. `max_edit_ratio`: of a sentence's
    words, those that a correction may change."""

    max_text_chars: int = Field(100_000, ge=1)
    timeout_s: float = Field(60.0, gt=0.0)
    max_edit_ratio: float = Field(0.5, ge=0.0, le=1.0)


class ServiceSettings(ConfigSection):
    """The service itself.

    `model`: the name it is asked for by; empty: the target's. `keys_file`: who may ask, as `ragspec keys` writes it; empty: one
    key, made at the start, and no other machine. `data_dir`: conversations, dictionaries and, of each index apart, files; empty:
    files are kept beside the index, the rest in memory, for as long as it runs (`ragspec serve` has a folder of its own then).
    `library_dir`: the files of this index elsewhere; of one index alone.
    `allowed_hosts`: names it answers to; empty: those of this machine if it listens to no other, and any otherwise.
    `cors_origins`: pages that may ask from a browser, beside its own. `languagetool_open`: /v2 asks nobody for a key; None:
    where there is no keys file. `drain_s`: how long what runs may go on after the signal to stop. `privacy`: "strict" sends
    answers at a fixed pace, in pieces of one size.
    """

    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    model: str = ""
    keys_file: str = ""
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
        """Whether only this machine can reach it."""
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
    """Everything a service is built from."""

    chat: ChatConfig = ChatConfig()
    service: ServiceSettings = ServiceSettings()

    @property
    def model_name(self) -> str:
        """What clients ask for: the name given, or the last part of the target's."""
        return self.service.model or Path(self.target.model).name
