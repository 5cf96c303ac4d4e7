"""Very many small attacks: damaged files, generated requests, streams that are left. Seeded, and resumed where they stopped.

    python -m pipelines.benchmarks.soak files --count 100000 --state files.json
    python -m pipelines.benchmarks.soak requests --count 1000000 --state requests.json
    python -m pipelines.benchmarks.soak aborts --count 50000 --state aborts.json
    python -m pipelines.benchmarks.soak faults --count 1000 --state faults.json
    python -m pipelines.benchmarks.soak faults --count 100 --state other.json --kinds clock upgrade partition-ns

Item n of a seed, and of its kinds of faults, is always the same. `--state` holds how many are done and what was counted; the
command goes on from there until `--count` are done, or `--seconds` have passed. Exits 1 if anything crashed, answered 5xx, or was
left behind. The service is a small one: a target of random weights, three documents, the real encoder, HTTP over a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from pipelines.benchmarks.clients import chat_body
from ragspec.disk import write_atomically
from ragspec.errors import RagspecError

BATCHES = {"files": 2000, "requests": 200, "aborts": 100, "faults": 10}
BAD = ("crash", "hang", "exception", "5xx", "leaked slots", "left running", "connection lost")
BAD += ("lost", "doubled", "changed", "not recovered", "cut off", "upgrade failed")
_AT_ONCE = 16
_BATCH_S = 600.0
_SETTLE_S = 600.0
"""Why so long: beside other load, thirty seconds were too few for requests that were on their way out."""
_TENANT = "ann"
_TEXT = "The old mill was built in 1874.\n\nIt grinds no corn today, but it is open on Sundays."
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1e300, 2**70, "", "a" * 5000, "\u202e\u0300", [], {}, [[]] * 50, {"a": {"b": 1}}, "null", 0.5, [None],
)  # fmt: skip
_FIELDS = (
    "model messages max_tokens temperature top_p n stop seed stream logprobs top_logprobs logit_bias presence_penalty "
    "response_format retrieval prediction speculation citations conversation stream_options metrics ignore_eos tools user"
).split()


def samples() -> dict[str, bytes]:
    """A small file of each kind that is read."""
    import docx
    from pypdf import PdfWriter

    word, pdf = io.BytesIO(), io.BytesIO()
    document = docx.Document()
    document.add_heading("The mill")
    document.add_paragraph(_TEXT)
    document.save(word)
    writer = PdfWriter()
    writer.add_blank_page(200, 200)
    writer.add_metadata({"/Title": "The mill"})
    writer.write(pdf)
    rows = "".join(json.dumps({"id": str(n), "text": _TEXT, "metadata": {"n": n}}) + "\n" for n in range(3))
    page = f"<html><body><main><h1>The mill</h1><p>{_TEXT}</p><table><tr><td>1</td></tr></table></main></body></html>"
    texts = {".txt": _TEXT, ".md": f"# The mill\n\n{_TEXT}", ".rst": f"The mill\n========\n\n{_TEXT}", ".html": page}
    texts |= {".csv": f'id,text\n1,"{_TEXT}"\n', ".jsonl": rows}
    return {suffix: text.encode() for suffix, text in texts.items()} | {
        ".docx": word.getvalue(),
        ".pdf": pdf.getvalue(),
    }


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """One to four damages: cut, bits turned, bytes added, removed or repeated."""
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(raw) + 1), draw.randint(1, 64)
        kind = draw.randrange(5)
        if kind == 0:
            raw = raw[:at]
        elif kind == 1 and at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :]
        elif kind == 2:
            raw = raw[:at] + draw.randbytes(length) + raw[at:]
        elif kind == 3:
            raw = raw[:at] + raw[at + length :]
        else:
            raw = raw[:at] + raw[at : at + length] * draw.randint(2, 40) + raw[at:]
    return raw


def read_damaged(seed: int, first: int, last: int) -> Counter[str]:
    """Reads the damaged files [first, last): each is read or refused with an error of ragspec's."""
    from ragspec.retrieval.reading.file_reader import read_file

    counts, whole = Counter[str](), samples()
    with tempfile.TemporaryDirectory(prefix="ragspec-") as folder:
        for number in range(first, last):
            draw = random.Random(f"{seed} file {number}")
            suffix = draw.choice(sorted(whole))
            path = Path(folder) / f"file{suffix}"
            path.unlink(missing_ok=True)  # Why: ext4 writes a file at once that replaces its own content
            path.write_bytes(damaged(whole[suffix], draw))
            try:
                counts["read" if list(read_file(path, path.name)) else "empty"] += 1
            except RagspecError:
                counts["refused"] += 1
            except Exception as error:
                counts["exception"] += 1
                print(f"file {number} of seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    return counts


def files_batch(seed: int, first: int, last: int) -> Counter[str]:
    """As `read_damaged`, in a process of its own: its death is a crash."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(read_damaged, seed, first, last).result(_BATCH_S)
        except (BrokenProcessPool, TimeoutError) as error:
            print(f"files {first} to {last} of seed {seed}: {error!r}", file=sys.stderr)
            return Counter({"hang" if isinstance(error, TimeoutError) else "crash": 1})


def generated(model: str, draw: random.Random) -> bytes:
    """The body of a chat request: mostly almost right, sometimes no JSON."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": _TEXT}], "max_tokens": 2}
    body |= {"retrieval": False, "seed": draw.randrange(9)}
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        name = draw.choice(_FIELDS)
        value = draw.choice(_ODD)
        if name == "messages" and draw.random() < 0.5:
            value = [{"role": draw.choice(("user", "system", "assistant", "tool", 1)), "content": value}]
        body[name] = value
    body |= {"max_tokens": 2} if draw.random() < 0.7 else {}
    raw = json.dumps(body).encode()
    return damaged(raw, draw) if draw.random() < 0.1 else raw


class SmallService:
    """What the clients need of the service that runs in this process."""

    def __init__(self, service: Any) -> None:
        self._service, self._url, self._model = service, service.url, service.backend.model
        self._headers = {"Authorization": f"Bearer {service.keys[_TENANT]}", "Content-Type": "application/json"}

    def requests_batch(self, seed: int, first: int, last: int) -> Counter[str]:
        async def one(session: aiohttp.ClientSession, number: int) -> str:
            body = generated(self._model, random.Random(f"{seed} request {number}"))
            async with session.post("/v1/chat/completions", data=body) as answer:
                await answer.read()
            if answer.status >= 500:
                print(f"request {number} of seed {seed}: {answer.status} {body[:200]!r}", file=sys.stderr)
            return "5xx" if answer.status >= 500 else str(answer.status)

        return self._left_behind(asyncio.run(self._all(one, first, last)))

    def aborts_batch(self, seed: int, first: int, last: int) -> Counter[str]:
        """Streams whose client goes away before the answer, in the middle of an event, or after a few."""

        async def one(session: aiohttp.ClientSession, number: int) -> str:
            draw = random.Random(f"{seed} abort {number}")
            body = chat_body(self._model, f"{draw.random()} {_TEXT}", max_tokens=400, n=draw.choice((1, 1, 2)))
            body |= {"retrieval": False} if draw.random() < 0.8 else {}
            try:
                async with asyncio.timeout(draw.choice((0.01, 0.1, 0.5, 2.0, _BATCH_S))):
                    async with session.post("/v1/chat/completions", data=json.dumps(body).encode()) as answer:
                        async for _ in answer.content.iter_chunked(draw.randint(1, 200)):
                            if draw.random() < 0.2:
                                break
                        answer.close()
                        return "left in the middle"
            except TimeoutError:
                return "left early"

        return self._left_behind(asyncio.run(self._all(one, first, last)))

    async def _all(self, one: Callable[..., Any], first: int, last: int) -> Counter[str]:
        counts, waiting = Counter[str](), iter(range(first, last))

        async def client(session: aiohttp.ClientSession) -> None:
            for number in waiting:
                try:
                    counts[await one(session, number)] += 1
                except aiohttp.ClientError as error:
                    counts["connection lost"] += 1
                    print(f"item {number}: {error!r}", file=sys.stderr)

        timeout = aiohttp.ClientTimeout(total=_BATCH_S)
        async with aiohttp.ClientSession(self._url, headers=self._headers, timeout=timeout) as session:
            await asyncio.gather(*(client(session) for _ in range(_AT_ONCE)))
        return counts

    def _left_behind(self, counts: Counter[str]) -> Counter[str]:
        """Looks until nothing is left: requests of clients that have gone may still wait to be read, and are cancelled then."""
        from pipelines.benchmarks.load import leaked_slots

        limiter, deadline = self._service.backend.rate_limiter, time.monotonic() + _SETTLE_S
        while True:
            leaked, left = leaked_slots(self._service.backend.engine, (_TENANT,)), limiter.running
            if not (leaked or left) or time.monotonic() > deadline:
                return counts + Counter({"leaked slots": leaked, "left running": left})
            time.sleep(0.01)


@contextmanager
def small_service() -> Iterator[SmallService]:
    from pipelines.benchmarks.service import service_here
    from pipelines.benchmarks.small_service import small_backend

    with (
        tempfile.TemporaryDirectory(prefix="ragspec-") as folder,
        small_backend(Path(folder)) as backend,
        service_here(backend, (_TENANT,)) as service,
    ):
        yield SmallService(service)


def soak(
    of: Mapping[str, Any], batch: Callable[[int, int, int], Counter[str]], count: int, state: Path, seconds: float
) -> Counter[str]:
    """Runs batches until `count` items are done or time is up; returns the counts over all parts.

    `of`: all that the items follow from, `kind` and `seed` at least.
    """
    kept = json.loads(state.read_text()) if state.is_file() else {**of, "done": 0, "counts": {}}
    if (known := {key: value for key, value in kept.items() if key not in ("done", "counts")}) != of:
        raise SystemExit(f"{state} belongs to {known}")
    begin = time.monotonic()
    while kept["done"] < count and time.monotonic() - begin < seconds:
        last = min(count, kept["done"] + BATCHES[of["kind"]])
        kept["counts"] = dict(Counter(kept["counts"]) + batch(of["seed"], kept["done"], last))
        kept["done"] = last
        write_atomically(state, json.dumps(kept))
    print(json.dumps(kept), flush=True)
    return Counter(kept["counts"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=BATCHES)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--kinds", nargs="+", default=[], help="kinds of faults; default: the ten of earlier runs")
    given = parser.parse_args(arguments)
    of = {"kind": given.kind, "seed": given.seed} | ({"kinds": given.kinds} if given.kinds else {})
    rest = (given.count, given.state, given.seconds)
    if given.kind == "faults":
        from pipelines.benchmarks.chaos.service_faults import KINDS, OTHER_KINDS, faults_batch

        if unknown := set(given.kinds) - {*KINDS, *OTHER_KINDS}:
            parser.error(f"no kinds of faults: {sorted(unknown)}; there are {[*KINDS, *OTHER_KINDS]}")
        counts = soak(of, partial(faults_batch, kinds=given.kinds or KINDS), *rest)
    elif given.kinds:
        parser.error(f"--kinds are kinds of faults, not of {given.kind}")
    elif given.kind == "files":
        counts = soak(of, files_batch, *rest)
    else:
        with small_service() as service:
            batch = service.requests_batch if given.kind == "requests" else service.aborts_batch
            counts = soak(of, batch, *rest)
    return int(any(counts[name] for name in BAD))


if __name__ == "__main__":
    raise SystemExit(main())
