"""The house rules that a parser can check: imports go down, Ray and the environment stay at the edge, no pickle.

Each rule takes one file and yields its offences.
"""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = """
    errors old_keys disk database retrieval_config config speculation sampling_params core tenants tree numerics retrieval
    verification drafting engine rag training evaluation cluster cli __init__
""".split()
"""The modules and packages of ragspec/ in DESIGN's order: each imports from itself and from those before it."""

LEAN_LAYERS = ("numerics", "verification", "drafting", "engine", "training")
"""Layers that run where only the engine's packages are installed."""

NOT_THERE = {"faiss", "fastapi", "starlette", "uvicorn", "tantivy", "sentence_transformers"}
EDGES = ("pipelines", "services")
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"}
HOT_PATH = "ragspec/engine/engine.py"
HOT_PATH_LINES = 300


@dataclass(frozen=True)
class Source:
    """One file: its path inside the repository, with slashes, and its text."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the kinds that the rules look at."""
        kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.ExceptHandler, ast.FunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    @functools.cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full dotted name of everything imported, at any depth and also by `import_module("...")`."""
        return list(imports(self))

    @property
    def package(self) -> list[str]:
        """The dotted name of the folder, which relative imports start from."""
        return self.path.split("/")[:-1]

    @property
    def layer(self) -> str:
        """The name below ragspec/; empty outside it."""
        parts = self.path.removesuffix(".py").split("/")
        return parts[1] if parts[0] == "ragspec" else ""


Rule = Callable[[Source], Iterator[str]]


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, at any depth of the file and also by `import_module("...")`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = source.package[: len(source.package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and call_name(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def call_name(call: ast.Call) -> str:
    """The last name of what is called: `load` for `torch.load(...)`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def imports_go_down(source: Source) -> Iterator[str]:
    """A module of ragspec/ imports its own layer and lower ones; only the command line may start a job or a service."""
    if not source.layer:
        return
    if source.layer not in LAYERS:
        yield f"{source.path}: {source.layer} has no place in the layout"
        return
    for line, name in source.imports:
        top, *rest = name.split(".")
        if top in EDGES and source.layer != "cli":
            yield f"{source.path}:{line}: the library imports {name}"
        if top == "ragspec":
            layer = rest[0] if rest and rest[0] in LAYERS else "__init__"
            if LAYERS.index(layer) > LAYERS.index(source.layer):
                yield f"{source.path}:{line}: {source.layer} imports {name}, which is above it"


def the_engine_is_lean(source: Source) -> Iterator[str]:
    """The engine and the layers below it import no search and no web server when they are imported themselves."""
    if source.layer in LEAN_LAYERS:
        for node in source.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                for name in {name.split(".")[0] for name in names} & NOT_THERE:
                    yield f"{source.path}:{node.lineno}: imports {name}"


def ray_at_the_edge(source: Source) -> Iterator[str]:
    """In ragspec/, only cluster/ imports Ray."""
    if source.layer and source.layer != "cluster":
        for line, name in source.imports:
            if name.split(".")[0] == "ray":
                yield f"{source.path}:{line}: imports {name}"


def environment_at_the_edge(source: Source) -> Iterator[str]:
    """In ragspec/, only the command line and `config.load_config` see the environment."""
    if not source.layer or source.layer == "cli":
        return
    allowed: set[ast.AST] = set()
    for node in source.nodes:
        if source.layer == "config" and isinstance(node, ast.FunctionDef) and node.name == "load_config":
            allowed.update(ast.walk(node))
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in source.nodes:
        is_read = isinstance(node, ast.Attribute) and node.attr in names
        is_import = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if (is_read or is_import) and node not in allowed:
            yield f"{source.path}:{node.lineno}: touches the environment"


def no_pickle(source: Source) -> Iterator[str]:
    """No pickle is written or read by name, and none is read through torch or numpy."""
    for line, name in source.imports:
        if PICKLES & set(name.split(".")):
            yield f"{source.path}:{line}: imports {name}"
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        options = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        is_torchs = call_name(node) == "load" and ast.unparse(node.func) == "torch.load"
        if is_torchs and options.get("weights_only") is not True:
            yield f"{source.path}:{node.lineno}: torch.load without weights_only=True"
        if options.get("allow_pickle", False) is not False:
            yield f"{source.path}:{node.lineno}: allow_pickle"


def no_bare_except(source: Source) -> Iterator[str]:
    """An except clause names what it catches."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{source.path}:{node.lineno}: bare except"


def no_print(source: Source) -> Iterator[str]:
    """The library does not print; the command line does."""
    if not source.layer or source.layer == "cli":
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.path}:{node.lineno}: print"


def hot_path_is_short(source: Source) -> Iterator[str]:
    """The decode loop stays on a few screens."""
    num_lines = len(source.text.splitlines())
    if source.path == HOT_PATH and num_lines >= HOT_PATH_LINES:
        yield f"{source.path}: {num_lines} lines, where fewer than {HOT_PATH_LINES} are allowed"


RULES: tuple[Rule, ...] = (
    imports_go_down,
    the_engine_is_lean,
    ray_at_the_edge,
    environment_at_the_edge,
    no_pickle,
    no_bare_except,
    no_print,
    hot_path_is_short,
)


@functools.cache
def sources() -> list[Source]:
    """Every Python file of the product, tests left out."""
    paths = (path for folder in ("ragspec", *EDGES) for path in sorted((ROOT / folder).rglob("*.py")))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def named(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_the_product_obeys(rule: Rule) -> None:
    """An upward import, Ray in the engine, a hidden setting or a pickle came in unseen."""
    offences = [offence for source in sources() for offence in rule(source)]
    assert not offences, "\n" + "\n".join(offences)


REFUSED: dict[Rule, tuple[str, str]] = {
    imports_go_down: ("ragspec/core.py", "def f():\n    from .engine import engine"),
    the_engine_is_lean: ("ragspec/engine/engine.py", "import faiss.contrib"),
    ray_at_the_edge: ("ragspec/engine/engine.py", "from ray import serve"),
    environment_at_the_edge: ("ragspec/config.py", "import os\nHOME = os.environ['HOME']"),
    no_pickle: ("ragspec/engine/target.py", "import torch\ntorch.load('x')"),
    no_bare_except: ("pipelines/batch_rag.py", "try:\n    f()\nexcept:\n    pass"),
    no_print: ("ragspec/engine/engine.py", "print('x')"),
    hot_path_is_short: (HOT_PATH, "x = 1\n" * HOT_PATH_LINES),
}


def test_every_rule_can_fail() -> None:
    """A check that cannot fail."""
    assert set(REFUSED) == set(RULES)
    assert all(list(rule(Source(*source))) for rule, source in REFUSED.items())


def test_the_files_are_found() -> None:
    """A moved folder would leave every rule with nothing to check."""
    paths = {source.path for source in sources()}
    assert {"ragspec/__init__.py", "ragspec/core.py", "ragspec/numerics/linear.py"} <= paths
    assert {path.split("/")[0] for path in paths} == {"ragspec", *EDGES}
