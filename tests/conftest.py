"""What every test stands on: no network, two threads, the same random numbers, and no Ray left behind.

Owns the environment of the test process; imports nothing heavy, so that collecting a few light tests takes no time.
"""

import gc
import logging
import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
NUM_THREADS = 2
SEED = 20260
_unfreeze = gc.unfreeze
gc.disable()  # Why until all tests are collected: it takes a fifth of the imports, and frees nothing
os.umask(UMASK := os.umask(0o077))
NO_BFLOAT16 = ("bf16 path needs the cpu support", "no packed bfloat16 product")
"""What torch and ragspec say on such a processor."""

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ |= {"RAY_worker_niceness": "0"}  # beside other load, workers of Ray's own niceness start in minutes
os.environ.setdefault("OMP_NUM_THREADS", str(NUM_THREADS))
# Why: waiting threads that spin slow each other down where tests share the cores with anything else.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MPLBACKEND", "agg")
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run on the CPU; Triton reads this when it is imported
# Why: Ray asks for a token by default and would otherwise leave one of its own in the user's home directory.
if "RAY_AUTH_MODE" not in os.environ:
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
# Why: by default an example that takes 200 ms fails, as beside other load any does.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_collection_finish() -> None:
    """Collections of garbage pass over the libraries that the test modules import: half a second each otherwise."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # Why: a test's service would keep its garbage, or thaw them
    gc.enable()


def pytest_sessionfinish() -> None:
    """Libraries in C++ report objects that are still frozen at the end as leaks."""
    _unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu is skipped, with the reason, where torch finds no CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that needs bfloat16 products is skipped on a processor without them (x86 without AVX-512)."""
    try:
        return (yield)
    except Exception as error:
        import torch

        lacks = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if lacks and any(reason in f"{error} {error.__cause__}" for reason in NO_BFLOAT16):
            pytest.skip("this processor has no packed bfloat16 product")
        raise


@pytest.fixture(autouse=True, scope="module")
def _own_umask() -> Iterator[None]:
    """A service keeps its files to itself, by the umask of its process; other modules' tests run there after it."""
    yield
    os.umask(UMASK)


@pytest.fixture(autouse=True)
def _own_log_levels() -> Iterator[None]:
    """Commands and services decide what their process logs, and where; in tests many of them live in one."""
    loggers = [logging.getLogger(name) for name in ("", "ragspec", "services")]
    levels, root = [logger.level for logger in loggers], loggers[0]
    before = list(root.handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    # Why pytest's own stay: it puts them there for each phase of a test
    root.handlers[:] = [h for h in root.handlers if h in before or type(h).__module__.startswith("_pytest")]


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run in asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`tiny(kind, dtype)`: a small target with a fresh pool."""
    from tiny_target import tiny_target

    folder = tmp_path_factory.mktemp("targets")
    return lambda kind="llama", dtype="float32": tiny_target(kind, dtype, folder)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public test data: $RAGSPEC_DATA, or ../shared/data beside the checkout; INDEX.md lists it."""
    named = os.environ.get("RAGSPEC_DATA")
    if named and not Path(named).is_dir():
        pytest.fail(f"RAGSPEC_DATA names {named}, which is not a folder")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the test data: no folder {folder}, and RAGSPEC_DATA is not set")
    return folder


@pytest.fixture(scope="session")
def training_data(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginnings of the files that training reads."""
    from real_data import beginnings

    return beginnings(shared_data, tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def seeded() -> int:
    """The same random numbers in every test, whatever ran before it. Gives the seed.

    Torch is touched only once something has imported it; a torch imported later starts from its own fixed seed.
    """
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)
        torch.set_num_threads(NUM_THREADS)
    return SEED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start Ray come last: one Ray serves all that a process runs. Before that, and among them, files whose tests are
    all slow come first: the light ones then end a run, and no process waits long for the last file of another."""
    with_ray = {item.path for item in items if item.get_closest_marker("ray")}
    num_tests = Counter(item.path for item in items)
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path in with_ray, -num_slow[item.path] / num_tests[item.path]))


@pytest.fixture(scope="module")
def local_ray() -> None:
    """The Ray of this process, on this machine: started by the first module that asks for it. Its CPUs are only numbers."""
    import ray

    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, num_cpus=8, log_to_driver=False)


@pytest.fixture
def without_local_ray() -> None:
    """For tests that connect to a cluster of their own: stops the Ray of the test run."""
    _stop_ray()


@pytest.fixture(autouse=True, scope="module")
def _no_ray_in_other_modules(request: pytest.FixtureRequest) -> None:
    """Modules without a test marked ray find no Ray."""
    if not any(item.get_closest_marker("ray") for item in request.session.items if item.path == request.node.path):
        _stop_ray()


@pytest.fixture(autouse=True)
def _ray_only_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts Ray says so with the marker, or it fails."""
    was_running = _ray_is_running()
    yield
    if not was_running and "ray" not in request.keywords and _stop_ray():
        pytest.fail("this test started Ray in its process; mark it with pytest.mark.ray")


def _ray_is_running() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _stop_ray() -> bool:
    """Shut Ray down in this process; whether it was running."""
    was_running = _ray_is_running()
    if was_running:
        sys.modules["ray"].shutdown()
    return was_running
