"""Imports point one way, and stay cheap. Read from the source of every module, not from luck."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import thinwire

SOURCE = Path(thinwire.__file__).parent

# What each room may import from; a room is a module of thinwire or a package of several.
_PURE = {"errors", "dtypes", "schema"}
_TENSORS = {"kernels", "workers", "patch", "casts", "weights", "diff", "digest", "prefetch", "ulp"}
_TOP = {"engines", "trainers", "demo", "cli", "doctor", "verify", "warmup", "machine", "__main__"}
_HEAVY_ROOMS = {"engines", "trainers", "demo"}
_HEAVY = {"transformers", "vllm", "sglang", "trl", "accelerate"}

_BELOW: dict[str, set[str]] = {
    "errors": set(),
    "dtypes": {"errors"},
    "schema": {"errors", "dtypes"},
    **dict.fromkeys(_TENSORS, _PURE | _TENSORS),
    "codec": _PURE | _TENSORS,
    "bucket": {"errors"},
    "log": {"errors", "schema"},
}


def allowed(room: str) -> set[str] | None:
    """Rooms that ``room`` may import from besides itself; None for anything.

    Rooms that are not named above are what the design puts between the pure ones and the top:
    chain, mirror, publisher, replica and what they are made of.
    """
    if room in _BELOW:
        return _BELOW[room]
    if room == "__init__":
        return _ROOMS - _TOP  # lazily
    if room in _TOP or room == "testing":
        return None
    return _ROOMS - _TOP - {"testing", "__init__"}


def module_name(path: Path) -> str:
    parts = ("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


_ROOMS = {room_of(module) for module in MODULES}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs on import: not the bodies of functions, nor what only type checkers see."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or typing_only(node):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def targets(module: str, node: ast.AST) -> Iterator[str]:
    """Modules that an import statement names; ``from a import b`` may name ``a.b`` or ``a``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}: relative import"
        assert node.module is not None
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else node.module


def imports(module: str, *, on_load: bool = False) -> set[str]:
    tree = tree_of(module)
    nodes = statements(tree.body) if on_load else ast.walk(tree)
    return {target for node in nodes for target in targets(module, node)}


@pytest.mark.parametrize("module", list(MODULES))
def test_imports_point_one_way(module: str) -> None:
    room = room_of(module)
    rooms = allowed(room)
    for target in imports(module):
        top = target.split(".")[0]
        if top == "thinwire" and rooms is not None and room_of(target) != room:
            assert room_of(target) in rooms, f"{module} imports {target}"
        if room not in _HEAVY_ROOMS:
            assert top not in _HEAVY, f"{module} imports {target}"


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) not in _HEAVY_ROOMS])
def test_torch_is_imported_where_it_is_used(module: str) -> None:
    on_load = {target.split(".")[0] for target in imports(module, on_load=True)}
    assert "torch" not in on_load


def test_codec_and_bucket_do_not_know_each_other() -> None:
    for room, other in (("codec", "bucket"), ("bucket", "codec")):
        seen: set[str] = set()
        todo = [m for m in MODULES if room_of(m) == room]
        while todo:
            module = todo.pop()
            assert room_of(module) != other
            new = {m for m in imports(module) if m in MODULES} - seen
            seen |= new
            todo += new


def test_no_cycles() -> None:
    """Between modules; a package is loaded before its modules, and is its own matter."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module in done:
            return
        for target in imports(module, on_load=True) & MODULES.keys():
            if target != module:
                visit(target, (*path, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


def declared(module: str) -> list[str] | None:
    for node in statements(tree_of(module).body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


@pytest.mark.parametrize("module", list(MODULES))
def test_all_is_there_sorted_and_true(module: str) -> None:
    names = declared(module)
    public = [
        node.name
        for node in tree_of(module).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    if names is None:
        # the demo is an application: nothing imports from it
        assert not public or room_of(module) == "demo", f"{module} has no __all__"
        return
    # as ruff sorts: constants, classes, then the rest
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert len(set(names)) == len(names)
    optional = room_of(module) in _HEAVY_ROOMS
    loaded = pytest.importorskip(module) if optional else importlib.import_module(module)
    assert [name for name in names if not hasattr(loaded, name)] == []


def test_every_public_name_of_the_package_is_listed() -> None:
    assert set(thinwire.__all__) <= set(dir(thinwire))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        thinwire.nothing  # noqa: B018


def modules_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


HELP = """
try:
    from thinwire.cli import main
    main(["--help"])
except SystemExit as done:
    assert not done.code
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import thinwire",
        pytest.param(HELP, marks=pytest.mark.skipif("cli" not in _ROOMS, reason="no commands yet")),
    ],
    ids=["import", "help"],
)
def test_starting_is_cheap(statement: str) -> None:
    loaded = modules_after(statement)
    assert "thinwire" in loaded
    assert loaded & {"numba", "torch", "transformers"} == set()


def test_the_instrument_sees_numba() -> None:
    assert "numba" in modules_after("import thinwire.diff")
