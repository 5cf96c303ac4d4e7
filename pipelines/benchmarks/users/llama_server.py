"""llama.cpp's own server beside the service: the same prompts as token ids, by the same clients, one program at a time.

The server gets prompts ready, retrieval included, so its time has no retrieval in it. Both types of weights run, and the faster
counts; each slot has room for the longest prompt and its answer, so nothing is cut.

    >>> llama_row(service, bodies, users=8, num_runs=2, folder=cache_dir)["llama_tokens_per_s"]
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.benchmarks.harness import Row
from pipelines.benchmarks.peers import llama_files, load_peer
from pipelines.benchmarks.users.load_curve import Body, measured
from pipelines.benchmarks.users.service import Service, free_port, started, timed_answers
from ragspec.core import Message, SamplingParams
from ragspec.numerics.threads import num_processors
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.steps import parse_scope

_PATH = "/v1/completions"
_START_S = 120.0
_PAGE = 256
"""llama.cpp rounds the room of a slot up to so many tokens."""
_NAME = "llama-server"


def llama_server() -> str | None:
    """The program that `make peers` puts beside Python, or one on the path."""
    beside = Path(sys.executable).with_name(_NAME)
    return str(beside) if beside.is_file() else shutil.which(_NAME)


def llama_row(service: Service, bodies: Sequence[Body], users: int, num_runs: int, folder: Path) -> Row:
    """Tokens a second of the faster type of weights, the median over runs. `folder`: keeps the converted weights.

    Raises: ModelError for a target that is no plain Llama, EngineError.
    """
    backend = service.backend
    prompts = prompts_of(service, bodies)
    room = max(len(prompt["prompt"]) + prompt["max_tokens"] for prompt in prompts)
    speeds = list[float]()
    for path in llama_files(load_peer(backend.config.target), folder, backend.target.prompts.tokenizer).values():
        with serving(path, users, room) as url:
            runs = [measured(timed_answers(url, "", _PATH, prompts, users)) for _ in range(num_runs)]
        speeds.append(median(run["tokens_per_s"] for run in runs))
    return {"users": users, "llama_tokens_per_s": max(speeds)}


def prompts_of(service: Service, bodies: Sequence[Body]) -> list[dict[str, Any]]:
    """Chats as completions of their prompts' token ids: retrieved, rewritten and laid out as the service does it."""
    backend, scope = service.backend, parse_scope(next(iter(service.keys)), None)
    prepared = []
    for number, body in enumerate(bodies):
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body.get("temperature", 0.0), seed=0)
        turn = ChatTurn(
            id=f"prompt-{number}",
            messages=tuple(Message(each["role"], each["content"]) for each in body["messages"]),
            params=params,
            scope=scope,
            num_passages=backend.config.retriever.num_passages,
            when="never" if body.get("retrieval") is False else backend.config.retriever.when,
        )
        prompt = backend.target.chat.prepare(turn).request.prompt_ids
        options = {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
        sampling = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": body["seed"]}
        prepared.append({"model": "llama", "prompt": list(prompt), **sampling, **options})
    return prepared


@contextmanager
def serving(path: Path, users: int, room: int) -> Iterator[str]:
    """The address of a server with a slot of `room` tokens for each user. Raises: EngineError."""
    program = llama_server()
    assert program is not None, "whoever calls this has asked for the program"
    slot_tokens, port, threads = -(-(room + 1) // _PAGE) * _PAGE, str(free_port()), str(num_processors())
    options = ["-np", str(users), "-c", str(users * slot_tokens), "-t", threads, "-tb", threads, "--no-webui"]
    url, command = f"http://127.0.0.1:{port}", [program, "-m", str(path), "--host", "127.0.0.1", "--port", port]
    with started([*command, *options], f"{url}/health", _START_S):
        yield url
