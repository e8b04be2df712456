"""The folder is the diagram: one direction of imports, late dependencies, files and functions of a readable size."""

import ast
import pathlib
import subprocess
import sys

import pytest

import attention_jax

PACKAGE = pathlib.Path(attention_jax.__file__).parent

# A module imports only from its left. Three groups: up to `recurrent` the core; then what needs flax; then the command.
CORE = [
    *(
        "errors",
        "given",
        "expressions",
        "pictures",
        "sides",
        "dropout",
        "mask_algebra",
        "mask_fields",
        "masks",
        "tiles",
        "reference",
        "rotary",
    ),
    *("kernels.axes", "kernels.call", "kernels.junk", "kernels.products", "kernels.softmax", "kernels.dense"),
    *("kernels.slabs", "kernels.rules", "kernels.sweep", "kernels.loops", "kernels.tiled", "kernels"),
    *("plans", "arguments", "dispatch", "multihead", "attention_jax", "cells", "recurrent"),
]
MODELS = ["data", "losses", "recipe", "checkpoints", "drop_in", "layers", "models", "training", "recall"]
CLI = [
    *("names", "console", "folders", "budget", "chains", "devices", "stopping", "display", "memory", "contest"),
    *("plots", "sentences", "report", "verify", "learning", "remembering", "timing", "compare"),
    *("peers", "bench_attention", "bench_rnn", "bench_lm", "bench"),
]
ORDER = [*CORE, *MODELS, *(f"cli.{name}" for name in CLI), "cli", "__main__"]

FRAMEWORKS = {"flax": MODELS, "optax": ["training"], "orbax": ["checkpoints"]}  # and the command may use all
IN_COMMANDS_ONLY = {"matplotlib", "rich", "jinja2", "torch"}


def module_of(path):
    """`kernels/dense.py` is kernels.dense, `kernels/__init__.py` kernels."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "attention_jax"


TREES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
PATHS = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module):
    """(module of ours or root of another package, name) for every import, those inside functions included."""
    package = PATHS[module].parent.relative_to(PACKAGE).parts
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name.removeprefix("attention_jax."), None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module.removeprefix("attention_jax."), alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + tuple((node.module or "").split(".") * bool(node.module))
            for alias in node.names:
                inner = ".".join((*base, alias.name))
                yield (inner, None) if inner in TREES else (".".join(base) or "attention_jax", alias.name)


def test_every_module_has_its_place_in_the_order():
    assert sorted(ORDER) == sorted(TREES)


@pytest.mark.parametrize("module", TREES)
def test_a_module_imports_only_from_its_left_and_no_private_name(module):
    for source, name in imports(module):
        if source in TREES and module != "attention_jax":
            assert ORDER.index(source) < ORDER.index(module), f"{module} imports {source}"
        assert not (name or "").startswith("_") or name == "__version__", f"{module} imports {source}.{name}"


@pytest.mark.parametrize("module", TREES)
def test_no_module_reaches_into_another_for_a_private_name(module):
    ours = {source.split(".")[-1] for source, name in imports(module) if name is None and source in TREES}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            assert not node.attr.startswith("_"), f"{module}: {node.value.id}.{node.attr}"


@pytest.mark.parametrize("module", TREES)
def test_dependencies_come_late(module):
    others = {source.split(".")[0] for source, _ in imports(module) if source not in TREES} - {"attention_jax"}
    others -= sys.stdlib_module_names
    allowed = {"jax", "numpy", "jaxtyping"} | {name for name, users in FRAMEWORKS.items() if module in users}
    if module.split(".")[0] in ("cli", "__main__"):
        allowed |= IN_COMMANDS_ONLY | set(FRAMEWORKS)
    assert others <= allowed


def test_importing_the_package_loads_no_framework():
    late = sorted(IN_COMMANDS_ONLY | set(FRAMEWORKS))
    program = f"import attention_jax, sys; print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def lines_without_docstring(function):
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


@pytest.mark.parametrize("module", TREES)
def test_files_have_at_most_300_lines_and_functions_60(module):
    assert len(PATHS[module].read_text(encoding="utf-8").splitlines()) <= 300
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert lines_without_docstring(node) <= 60, node.name


def test_no_module_is_named_like_a_public_name_or_a_drawer():
    names = {module.split(".")[-1] for module in TREES}
    public = {name for _, name in imports("attention_jax")}
    assert not names & public
    assert not names & {"utils", "util", "common", "types", "misc", "helpers", "core"}


def test_the_package_itself_only_re_exports():
    for node in TREES["attention_jax"].body:
        assert isinstance(node, ast.ImportFrom | ast.Expr) or ast.unparse(node).startswith("__version__ = ")
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names)
