"""`ragspec serve`: runs the HTTP service in one process, or in front of a deployment on a cluster. `ragspec mcp`: its tools for
agents over stdio.

Owns the start-up and its output. The service itself is the package `services`.

    $ ragspec serve --index my-index
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ragspec.cli.options import library_corpus
from ragspec.cli.terminal import cache_folder, data_folder, stage, stay_offline, stderr_console, stdout_console
from ragspec.config import EncoderConfig, load_settings
from ragspec.core import Say
from ragspec.disk import atomic_writer, keep_private, only_holder, saving
from ragspec.engine.checkpoints.target_files import check_target
from ragspec.errors import ConfigError, EngineError
from services.settings import ServiceConfig

_KEY_FILE = "local.key"
_CLEAR_TEXT = (
    "keys and texts cross the network in clear text: give --ssl-certfile and --ssl-keyfile, or listen on this machine only "
    "and put a reverse proxy with TLS in front (services/README.md)"
)

if TYPE_CHECKING:
    from ragspec.retrieval.encoder import Encoder
    from services.backend import ServiceBackend
    from services.keys import KeyStore


def run_serve(
    config: Path | None, overrides: Mapping[str, Any], cluster: str | None, address: str | None, *, verbose: bool
) -> None:
    """Checks the whole call before it loads a model. Returns after a stop signal, when all requests have ended.

    Raises: RagspecError.
    """
    settings = _checked(load_settings(ServiceConfig, config, **overrides))
    if cluster is None:
        for target in (settings.target, *settings.service.models.values()):
            check_target(target)
    gc.disable()  # Why until all is loaded: collections during imports free nothing and take a tenth of the start
    try:
        _serve(settings, cluster, address, verbose=verbose)
    finally:
        gc.enable()


def run_mcp(config: Path | None, overrides: Mapping[str, Any], tenant: str, *, allow_add: bool) -> None:
    """Serves the tools for agents over stdio until stdin ends. Checks the whole call before it loads a model.

    Raises: RagspecError.
    """
    settings = load_settings(ServiceConfig, config, **overrides)
    for target in (settings.target, *settings.service.models.values()):
        check_target(target)
    folder = settings.service.data_dir or str(data_folder() / "mcp")
    service = settings.service.model_copy(update={"data_dir": folder})
    settings, corpus = settings.model_copy(update={"service": service}), library_corpus([settings])
    try:
        from services.mcp import DocumentTools
    except ModuleNotFoundError as cause:
        raise ConfigError("ragspec mcp needs the package mcp: pip install 'ragspec[mcp]'") from cause
    from services.keys import Caller, read_keys
    from services.logs import start_logging

    if (keys := service.keys_file) and tenant not in {record.tenant for record in read_keys(Path(keys))}:
        raise ConfigError(f"no key of {keys} has the tenant {tenant!r}")
    start_logging(logging.WARNING)
    with _in_process(stderr_console(), settings, corpus) as backend:
        tools = DocumentTools(backend, Caller("mcp", tenant), may_add=allow_add)
        asyncio.run(tools.serve_stdio())


def _serve(settings: ServiceConfig, cluster: str | None, address: str | None, *, verbose: bool) -> None:
    corpus = library_corpus([settings]) if cluster is None else None
    from services.embedded import Server, address_of, check_certificate, exit_in_time, listening
    from services.keys import KeyFile, SingleKey
    from services.logs import start_logging

    check_certificate(settings.service)
    keep_private(settings.service.data_dir)
    start_logging(logging.INFO if verbose or not sys.stderr.isatty() else logging.WARNING)
    console, keys_file = stderr_console(), settings.service.keys_file
    keys: KeyStore = KeyFile(Path(keys_file)) if keys_file else SingleKey()
    with contextlib.ExitStack() as stack:
        if isinstance(keys, SingleKey):
            stack.enter_context(_own_key_file(settings.service.data_dir))
        listener = stack.enter_context(listening(settings.service))
        if cluster is not None:
            backend = stack.enter_context(_on_cluster(console, cluster, address, settings))
        else:
            backend = stack.enter_context(_in_process(console, settings, corpus))
        from services.app import build_app

        app, is_secure = build_app(backend, keys), bool(settings.service.ssl_certfile)
        if not settings.service.is_local and not is_secure:
            console.print(Text(_CLEAR_TEXT, "yellow"))
        key = keys.key if isinstance(keys, SingleKey) else ""
        _show(backend.model, address_of(listener, "https" if is_secure else "http"), key, settings.service.data_dir)
        gc.enable()
        gc.freeze()  # Why: a full collection over everything that was loaded stops all streams for a third of a second
        Server(app, backend, listener, lambda line: console.print(Text(line, "yellow"))).run()
        if backend.lost:
            exit_in_time()
            raise EngineError(backend.lost)
    console.print(Text("stopped", "dim"))


@contextlib.contextmanager
def _own_key_file(data_dir: str) -> Iterator[None]:
    """Raises: ConfigError if another running service has its key in `data_dir`."""
    folder = Path(data_dir)
    with contextlib.ExitStack() as held:
        with saving(folder):
            is_only = held.enter_context(only_holder(folder / f".{_KEY_FILE}.lock"))
        if not is_only:
            raise ConfigError(
                f"another ragspec serve runs on {folder} and keeps its key there: use that one, or give this one a port and a "
                "folder of its own with --port 0 --data FOLDER, or give both the same keys with --keys keys.json"
            )
        yield


def _checked(settings: ServiceConfig) -> ServiceConfig:
    """Fills in `service.data_dir`. Raises: ConfigError if other machines could ask without a key."""
    service = settings.service
    if not service.is_local and not service.keys_file:
        raise ConfigError(
            f"{service.host} can be reached from other machines, and nobody would be asked for a key: make a keys file with "
            "ragspec keys add --file keys.json, and give it with --keys keys.json"
        )
    if not service.data_dir:
        service = service.model_copy(update={"data_dir": str(data_folder() / "service")})
    return settings.model_copy(update={"service": service})


@contextlib.contextmanager
def _in_process(
    console: Console, settings: ServiceConfig, corpus: list[tuple[str, str]] | None
) -> Iterator[ServiceBackend]:
    stay_offline(settings.target, *settings.service.models.values())
    from services.backend import load_models

    with contextlib.ExitStack() as loaded:
        with ThreadPoolExecutor(1, "ragspec-beside") as thread:
            loading = thread.submit(_load_encoder, settings.encoder)
            with stage(console, "target", "loading the target") as done:
                models = load_models(settings, loaded, done, lambda: wait([loading]))
                done.detail = "; ".join(f"{name}, numerics {each.engine.fingerprint}" for name, each in models.items())
            with stage(console, "encoder", "loading the encoder") as done:
                encoder = loading.result()
                done.detail = settings.encoder.model
        from ragspec.retrieval.retriever import Retriever
        from services.backend import ServiceBackend

        with stage(console, "index", "opening the index") as done:
            if corpus is not None:
                settings = _with_standard_library(settings, encoder, corpus, done)
            retriever = Retriever.from_config(settings.retriever, encoder)
            done.detail = "Python's standard library" if corpus else settings.retriever.index_dir
        yield loaded.enter_context(ServiceBackend(models, retriever, settings, loaded.pop_all().close))


def _load_encoder(config: EncoderConfig) -> Encoder:
    """Also imports the modules of the service and the index, while the target's self-test computes. Raises: ModelError."""
    from ragspec.retrieval.encoder import Encoder

    encoder = Encoder.load(config)
    for name in ("services.app", "faiss"):
        importlib.import_module(name)
    return encoder


def _with_standard_library(
    settings: ServiceConfig, encoder: Encoder, corpus: list[tuple[str, str]], say: Say
) -> ServiceConfig:
    from ragspec.cli.standard_library import documents_of, service_library

    home = Path(settings.service.data_dir) / "stdlib"
    folder = service_library(documents_of(corpus), encoder, cache_folder(), home, say)
    retriever = settings.retriever.model_copy(update={"index_dir": str(folder)})
    # Why not a library of this index alone: uploaded files stay when an update of Python changes the library's index
    library = settings.service.library_dir or settings.service.data_dir
    service = settings.service.model_copy(update={"library_dir": library})
    return settings.model_copy(update={"retriever": retriever, "service": service})


@contextlib.contextmanager
def _on_cluster(console: Console, name: str, address: str | None, settings: ServiceConfig) -> Iterator[ServiceBackend]:
    from pipelines.batch.ray_session import ray_session

    with ray_session(address, deployment=name):
        with stage(console, "deployment", f"finding {name}") as done:
            from services.backend import clustered

            stack = contextlib.ExitStack()
            backend = stack.enter_context(clustered(name, settings))
            done.detail = f"{name}: {backend.model}, numerics {backend.target.engine.fingerprint}"
        with stack:
            yield backend


def _show(model: str, url: str, key: str, data_dir: str) -> None:
    """Prints the address and the settings of a client to stdout; the key to a terminal only, else to a file.

    Why: what a container prints is kept in logs that others read.
    """
    console, file = stdout_console(), Path(data_dir) / _KEY_FILE
    console.print(Text.assemble(f"\n{model} is served at ", (f"{url}/v1", "bold")))
    if key:
        with saving(file), atomic_writer(file, mode=0o600) as written:
            written.write(f"{key}\n".encode())
        is_seen = sys.stdout.isatty()
        console.print(Text.assemble(("page  ", "dim"), f"{url}/#key={key}" if is_seen else url), soft_wrap=True)
        shown = key if is_seen else f"$(cat {shlex.quote(str(file))})"
        for line in (f"export OPENAI_BASE_URL={url}/v1", f"export OPENAI_API_KEY={shown}"):
            console.print(Text(f"      {line}"), soft_wrap=True)
    console.print(Text("Ctrl-C stops it.\n", "dim"))
    sys.stdout.flush()
