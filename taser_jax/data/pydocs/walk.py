"""Walks installed modules in a clean interpreter and prints their docstrings as JSON.

`python -m taser_jax.data.pydocs.walk json optax` imports every public module below the roots and
writes JSON lines: `{"failed": name}` of each that cannot be imported, then `{"object": {...}}` for
every documented object. It runs as a separate process (started by `pydocs.objects`) because
importing hundreds of modules prints, warns, registers handlers and depends on earlier imports. None
of that reaches the caller, and the caller's state does not affect the text. TensorFlow and other
heavy optional packages are hidden.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
import tokenize
import types
import typing
import warnings
from collections.abc import Iterator
from typing import Any, TypedDict

THIRD_PARTY = ("numpy", "jax", "flax", "optax")
_OWNERS = {"jax": {"jax", "jaxlib"}}

# Modules that open windows or browsers, print, are generated data, repeat `os`, or exist only on
# one platform or in some builds of Python (the text must not depend on the build).
# fmt: off
_EXCLUDED = frozenset((
    "antigravity", "this", "test", "idlelib", "turtle", "turtledemo", "tkinter", "lib2to3",
    "pydoc_data", "curses", "readline", "rlcompleter", "genericpath", "sitecustomize",
    "usercustomize", "posix", "nt", "ntpath", "posixpath", "nturl2path", "msilib", "msvcrt",
    "winreg", "winsound", "dbm", "nis", "spwd", "crypt", "ossaudiodev", "asyncio.windows_events",
    "asyncio.windows_utils", "multiprocessing.popen_spawn_win32", "distutils", "encodings.mbcs",
    "encodings.oem", "jax.extend", "jax.tools", "jax.collect_profile", "numpy.distutils",
    "numpy.conftest", "numpy.typing.mypy_plugin", "flax.io", "flax.metrics", "flax.testing",
    "flax.training.checkpoints",
))
# fmt: on
_EXCLUDED_PARTS = frozenset({"tests", "test", "experimental", "contrib", "conftest"})
_HIDDEN = ("tensorflow", "tensorboard", "tensorboardX", "torch", "IPython", "matplotlib", "pandas")
_EXTRA_MODULES = {"os": ("os.path",)}


def standard_library_roots() -> list[str]:
    """Public top-level modules of this Python's standard library, sorted."""
    return sorted(n for n in sys.stdlib_module_names if not n.startswith("_") and _wanted(n))


def package_of(name: str) -> str:
    """The package that a dotted name belongs to: "numpy", ... or "python"."""
    root = name.partition(".")[0]
    return root if root in THIRD_PARTY else "python"


def _wanted(module: str) -> bool:
    parts = module.split(".")
    if any(p.startswith("_") or p in _EXCLUDED_PARTS for p in parts):
        return False
    return not any(".".join(parts[: i + 1]) in _EXCLUDED for i in range(len(parts)))


def module_names(root: str) -> list[str]:
    """A root and its public submodules, found on disk without importing them."""
    spec = importlib.util.find_spec(root)
    if spec is None:
        return [root]  # importing it reports that it is missing
    names = [root, *_EXTRA_MODULES.get(root, ())]
    pending = [(root, list(spec.submodule_search_locations or ()))]
    while pending:
        package, paths = pending.pop()
        for info in pkgutil.iter_modules(paths):
            name = f"{package}.{info.name}"
            if _wanted(name):
                names.append(name)
                if info.ispkg:
                    pending.append((name, [os.path.join(p, info.name) for p in paths]))
    return sorted(set(names))


def _own_doc(value: object) -> str | None:
    """The object's own docstring: not inherited, not its type's, not generated."""
    doc = getattr(value, "__doc__", None)
    if not isinstance(doc, str) or not doc.strip():
        return None
    if inspect.isclass(value):
        if any(getattr(base, "__doc__", None) == doc for base in value.__mro__[1:]):
            return None
        if doc.startswith(f"{value.__name__}("):
            generated = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
            return None if generated and doc.rstrip().endswith(")") else doc
        return doc
    return None if doc == getattr(type(value), "__doc__", None) else doc


def _is_documentable(value: object) -> bool:
    # A metaclass can make any of these attributes raise.
    with contextlib.suppress(Exception):
        if isinstance(value, types.GenericAlias | typing._GenericAlias):  # type: ignore[attr-defined] # private, public nowhere
            return False
        if inspect.isclass(value):
            return True
        return callable(value) and isinstance(getattr(value, "__name__", None), str)
    return False


def _belongs(value: object, root: str) -> bool:
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        return True
    owner = module.partition(".")[0]
    if root in THIRD_PARTY:
        return owner in _OWNERS.get(root, {root})
    return owner in sys.stdlib_module_names


def _member_function(member: Any) -> Any:
    """The function that has the docstring and code of a class attribute, or None."""
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    is_code = isinstance(member, property) or inspect.isroutine(member) or inspect.isclass(member)
    if is_code or inspect.isdatadescriptor(member) or _is_documentable(member):
        return member
    return None


def canonical_order(name: str) -> tuple[int, int, str]:
    """Fewest dots, shortest, first by alphabet."""
    return name.count("."), len(name), name


def _canonical(value: object, names: list[str]) -> str:
    """`__module__.__qualname__` if public, else the first in canonical order."""
    own = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return own if own in names else min(names, key=canonical_order)


def _sorted_members(namespace: types.ModuleType | type) -> Iterator[tuple[str, object]]:
    for name, value in sorted(vars(namespace).items(), key=lambda item: str(item[0])):
        if isinstance(name, str) and not name.startswith("_"):
            yield name, value


class _Walker:
    """Collects objects by identity, so that an object appears once, with all its names."""

    def __init__(self) -> None:
        self.objects: dict[int, tuple[object, list[str]]] = {}

    def add(self, value: object, name: str) -> bool:
        """Records a public name that leads to an object; True if the object is new."""
        is_new = id(value) not in self.objects
        _, names = self.objects.setdefault(id(value), (value, []))
        if name not in names:
            names.append(name)
        return is_new

    def module(self, module: types.ModuleType, name: str) -> None:
        self.add(module, name)
        for member_name, value in _sorted_members(module):
            if inspect.ismodule(value) or not _is_documentable(value):
                continue
            if _belongs(value, name.partition(".")[0]):
                self.add(value, f"{name}.{member_name}")

    def classes(self) -> None:
        """Members of every class found, named after the class's canonical name."""
        pending = [found for found in self.objects.values() if inspect.isclass(found[0])]
        for owner, names in pending:  # grows as nested classes are found
            assert isinstance(owner, type)
            prefix = _canonical(owner, names)
            for member_name, member in _sorted_members(owner):
                value = _member_function(member)
                if value is None or not _belongs(value, prefix.partition(".")[0]):
                    continue
                if self.add(value, f"{prefix}.{member_name}") and inspect.isclass(value):
                    pending.append(self.objects[id(value)])


@functools.cache
def _functions(path: str) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a source file by their first lines, which is parsed once."""
    nodes: dict[int, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes[min([node.lineno, *(d.lineno for d in node.decorator_list)])] = node
    return nodes


def _body(value: object, doc: str) -> str:
    """A function's body without docstrings and comments; empty where there is none."""
    function: Any = value.fget if isinstance(value, property) else value
    with contextlib.suppress(ValueError):  # a cycle of wrappers
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return ""
    node = _functions(code.co_filename).get(code.co_firstlineno)
    # A decorator may have set another docstring: then body and text do not belong together.
    if (
        node is None
        or node.name != code.co_name
        or ast.get_docstring(node) != inspect.cleandoc(doc)
    ):
        return ""
    statements = [s for s in node.body if not _is_string(s)]
    for inner in (n for s in statements for n in ast.walk(s)):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner.body = [s for s in inner.body if not _is_string(s)] or [ast.Pass()]
    return "\n".join(ast.unparse(s) for s in statements)


def _is_string(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


class WalkedObject(TypedDict):
    """A documented object, as the walk prints it."""

    name: str
    names: list[str]
    doc: str
    body: str


def walk(roots: list[str]) -> Iterator[dict[str, object]]:
    """Imports the public modules below the roots and yields their documented objects."""
    for name in _HIDDEN:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # None makes its import fail
    walker = _Walker()
    for name in (name for root in roots for name in module_names(root)):
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit):
            yield {"failed": name}
        else:
            walker.module(module, name)
    walker.classes()
    for value, names in walker.objects.values():
        if (doc := _own_doc(value)) is None:
            continue
        has_body = not inspect.ismodule(value) and not inspect.isclass(value)
        walked: WalkedObject = {
            "name": _canonical(value, names),
            "names": sorted(names),
            "doc": inspect.cleandoc(doc),
            "body": _body(value, doc) if has_body else "",
        }
        yield {"object": walked}


def main(roots: list[str]) -> None:
    """Prints the walk; discards what the imported modules print."""
    warnings.simplefilter("ignore")
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass") as out:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        for record in walk(roots):
            out.write(json.dumps(record) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
    # Skips the exit handlers of the imported modules.
    os._exit(0)
