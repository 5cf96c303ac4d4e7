"""Settings of a router."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragspec.config import ConfigSection


class RoutingConfig(ConfigSection):
    """How requests find a replica, and what happens when one is lost. Units: seconds, tokens, requests.

    Where requests go. One with an affinity goes where that hashes to, unless that replica has more than `load_factor` times the
    mean load. `prefix_tokens`: one without is hashed by this many first tokens of its prompt; 0, or a shorter prompt: it goes to
    the least loaded. At most `max_running` choices are sent to a replica at once; beyond what can be sent, `max_queued` requests
    wait.

    When a replica is lost. It holds a poll for `poll_s` and then has `heartbeat_timeout_s` to answer; one whose step lasts
    longer than `step_timeout_s` hangs. A directory that goes on calling a lost one live is believed again after `retry_s`. A
    request waits `replay_timeout_s` for a replica that can take it; of begun ones that is one with the same numerics. Is there
    none, they end with an error or go on elsewhere, flagged. After `max_vain_replays` losses in a row without a token, a request
    is not tried again: it may be what kills replicas.

    `remembered_s`, `remembered_tokens`: for how long, and how much of, finished requests can be asked for again by id.
    `call_timeout_s`: for a replica to take requests.
    """

    load_factor: float = Field(1.25, ge=1.0)
    prefix_tokens: int = Field(0, ge=0)
    max_running: int = Field(64, ge=1)
    max_queued: int = Field(10_000, ge=0)
    poll_s: float = Field(1.0, gt=0.0, le=30.0)
    heartbeat_timeout_s: float = Field(2.5, gt=0.0)
    step_timeout_s: float = Field(60.0, gt=0.0)
    call_timeout_s: float = Field(30.0, gt=0.0)
    start_timeout_s: float = Field(60.0, gt=0.0)
    replay_timeout_s: float = Field(60.0, ge=0.0)
    retry_s: float = Field(30.0, gt=0.0)
    unequal_numerics: Literal["error", "flag"] = "error"
    max_vain_replays: int = Field(5, ge=0)
    remembered_s: float = Field(120.0, ge=0.0)
    remembered_tokens: int = Field(500_000, ge=0)
