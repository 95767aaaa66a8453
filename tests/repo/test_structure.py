"""Arguments have names, kernels lie where contracts list them, and every op has a test of its name."""

import ast
import re
from pathlib import Path

import pytest

import tilewright.ops  # noqa: F401 - announces the ops
from tilewright.dispatch import contracts
from tilewright.dispatch.registry import listed_kernels

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tilewright"
TREES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
MOST_PARAMETERS = 12
PUBLIC_FLOORS = ("cli", "compat", "distributed", "nn", "optim")
PUBLIC = {
    ("assistant/loop.py", "optimize"),
    ("bench/suite.py", "run"),
    ("engine/engine.py", "__init__"),
    ("generate/static.py", "generate"),
    ("tuning/model.py", "tune_model"),
    ("tuning/run.py", "tune"),
}
OPS = [name for name in contracts() if not name.startswith("test_")]


def test_arguments_and_buckets_are_read_by_name():
    numbered = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("args", "bucket")
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, int)
        and path.parts[0] == "ops"
    ]
    assert numbered == []


def test_kernel_arguments_are_no_letters():
    letters = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("CudaKernel", "HostKernel")
        and len(node.args) > 2
        and not isinstance(node.args[2], ast.Name)
    ]
    assert letters == []


def _long_signatures():
    """Functions with more parameters than allowed, except device code, public signatures and their references."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            text = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            device = re.search(r"\b(jit|kernel|function)\b", text) and "register_kernel" not in text
            device = device or ("cutile" in path.parts and node.name.startswith("_"))  # compiled by name, undecorated
            public = "dispatch(" in text or node.name == "reference" or path.parts[0] in PUBLIC_FLOORS
            public = public or (str(path), node.name) in PUBLIC
            if len(parameters) > MOST_PARAMETERS and not device and not public:
                yield f"{path}:{node.lineno} {node.name} has {len(parameters)}"


def test_no_signature_is_long():
    assert list(_long_signatures()) == []


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_test_of_its_name(name):
    assert list((ROOT / "tests" / "ops").rglob(f"test_{name}.py"))


@pytest.mark.parametrize("name", OPS)
def test_every_kernel_that_a_contract_lists_is_a_file(name):
    modules = [module for modules in listed_kernels(name).values() for module in modules]
    assert modules or contracts()[name].forward.compose is not None
    for module in modules:
        assert (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").is_file()
