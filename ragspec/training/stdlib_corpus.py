"""The documentation of the running Python's standard library, as a corpus.

A document reads `json.dumps(obj, *, ...): Serialize obj to ...`. Never imports a module that opens a window, prints, or starts a
browser.

    >>> dict(stdlib_documents())["math.floor"]
    'math.floor(x, /): Return the floor of x as an Integral.\nThis is the largest integer <= x.'
"""

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ragspec.disk import make_folder, write_atomically
from ragspec.training.sentences import split_sentences

MIN_CHARS, MAX_CHARS = 20, 2000
MAX_SIGNATURE_CHARS = 72
HELD_OUT_SHARE = 10
"""One name in this many is kept out of training, for the evaluation."""

SKIPPED_MODULES = frozenset(
    "antigravity this idlelib test turtle turtledemo tkinter lib2to3 ensurepip distutils pydoc_data msilib curses "
    "cgitb nt winreg winsound msvcrt __main__ tests idle_test".split()
)


def stdlib_documents() -> list[tuple[str, str]]:
    """Every public module, function, class and method with a docstring, as (qualified name, text), sorted by name.

    The text begins with the qualified name and the signature, if there is one, then a colon and the docstring, whose
    wrapped lines are joined. Equal docstrings under several names are kept once, under the first name.
    """
    documents: dict[str, str] = {}
    seen_docs: set[str] = set()
    for name, documented in _documented_objects():
        doc = unwrap(inspect.getdoc(documented) or "")
        if MIN_CHARS <= len(doc) <= MAX_CHARS and doc not in seen_docs and name not in documents:
            seen_docs.add(doc)
            documents[name] = f"{name}{signature_text(documented)}: {doc}"
    return sorted(documents.items())


def kept_documents(folder: Path) -> list[tuple[str, str]]:
    """As `stdlib_documents`, from a file in `folder`, which the first call for this Python writes where it can.

    Why: collecting them imports the whole standard library, three seconds a start.
    """
    library = sysconfig.get_path("stdlib")
    known = (sys.version, library, os.stat(library).st_mtime_ns, inspect.getsource(sys.modules[__name__]))
    path = folder / f"docstrings-{hashlib.sha256(repr(known).encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [(str(name), str(text)) for name, text in json.loads(path.read_bytes())]
    documents = stdlib_documents()
    with contextlib.suppress(OSError):
        make_folder(folder)
        write_atomically(path, json.dumps(documents))
    return documents


def is_held_out(name: str) -> bool:
    """Whether the documentation of this name is kept out of training. Depends on the name alone."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


def first_doc_sentence(name: str, text: str) -> str:
    """The first sentence of a standard-library document, without the name and the signature before it."""
    doc = text[len(name) :]
    _, _, doc = doc[_end_of_parentheses(doc) :].partition(": ")
    sentences = split_sentences(unwrap(doc).split("\n")[0])
    return sentences[0] if sentences else ""


def _end_of_parentheses(text: str) -> int:
    """Where those close that the text begins with; 0 if it begins otherwise. Quoted ones do not count.

    A signature that was shortened may end within quotes: then where it is followed by the documentation.
    """
    depth, quote = 0, ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"" and depth:
            quote = char
        else:
            depth += (char == "(") - (char == ")")
        if depth == 0:
            return at + 1 if char == ")" else 0
    return text.find("): ") + 1


def unwrap(text: str) -> str:
    """Join the wrapped lines of each paragraph; indented lines (code, lists) stay lines of their own."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        joined = re.sub(r"\n(?![ \t>*-])", " ", paragraph)
        paragraphs.append("\n".join(line.rstrip() for line in joined.split("\n")))
    return re.sub(r"(?<=\S)  +", " ", "\n".join(paragraphs))


def signature_text(documented: object) -> str:
    """The call signature, shortened; empty if Python knows none, or if it shows an address or the environment."""
    if not callable(documented):
        return ""
    try:
        text = str(inspect.signature(documented))
    except (TypeError, ValueError):
        return ""
    if " at 0x" in text or "environ({" in text:
        return ""
    text = re.sub(r"\bself(, )?", "", text)
    return text if len(text) <= MAX_SIGNATURE_CHARS else text[: MAX_SIGNATURE_CHARS - 4].rstrip(" ,") + "...)"


def _documented_objects() -> Iterator[tuple[str, object]]:
    for module in _modules():
        yield module.__name__, module
        for name, member in _own_members(module):
            qualified = f"{module.__name__}.{name}"
            yield qualified, member
            if inspect.isclass(member):
                for attribute in sorted(vars(member)):
                    if not attribute.startswith("_"):
                        yield f"{qualified}.{attribute}", getattr(member, attribute, None)


def _own_members(module: ModuleType) -> Iterator[tuple[str, object]]:
    exported = getattr(module, "__all__", None)
    for name, member in sorted(vars(module).items()):
        if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
            continue
        home = getattr(member, "__module__", None) or module.__name__
        is_own = home.lstrip("_").split(".")[0] == module.__name__.split(".")[0] or hasattr(module, "__file__") is False
        is_alias = inspect.isclass(member) and member.__name__ != name
        if not is_alias and (name in exported if exported is not None else is_own):
            yield name, member


def _modules() -> Iterator[ModuleType]:
    for name in sorted(sys.stdlib_module_names):
        module = _import_quietly(name)
        if module is None:
            continue
        yield module
        for part in sorted(pkgutil.iter_modules(getattr(module, "__path__", [])), key=lambda part: part.name):
            child = _import_quietly(f"{name}.{part.name}")
            if child is not None:
                yield child


def _import_quietly(name: str) -> ModuleType | None:
    """The module, or None where it is private, unwanted, or not importable on this platform."""
    if any(part.startswith("_") or part in SKIPPED_MODULES for part in name.split(".")):
        return None
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, AttributeError, SyntaxError):
            return None
