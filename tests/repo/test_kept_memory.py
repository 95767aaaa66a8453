"""Device memory that lives between calls has one owner, `hardware.device_cache`; nothing else in src caches tensors."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.harness.kept_values import CASES

SRC = Path(__file__).parents[2] / "src" / "tilewright"
TREES = {path.relative_to(SRC): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}
_TENSORS = {"Tensor", "Cast", "TileTable"}
_COLLECTIONS = {"dict", "OrderedDict", "defaultdict", "WeakKeyDictionary", "WeakValueDictionary", "list", "deque"}
_ALLOWED = {"jit/tape.py", "bench/measure/case.py"}  # of one call while it is recorded, of one measurement


def named(annotation: ast.AST | None) -> set[str]:
    """Names in an annotation, also in one that is a string; not what a callable takes and gives."""
    if annotation is None:
        return set()
    if isinstance(annotation, ast.Name):
        return {annotation.id}
    if isinstance(annotation, ast.Attribute):
        return {annotation.attr}
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return named(ast.parse(annotation.value, mode="eval"))
    if isinstance(annotation, ast.Subscript) and named(annotation.value) == {"Callable"}:
        return {"Callable"}
    return set().union(*map(named, ast.iter_child_nodes(annotation)), set())


def cache_names() -> Iterator[str]:
    """The name of every `DeviceCache(...)` in src: a text, or a constant of the module."""
    for tree in TREES.values():
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DeviceCache":
                (name,) = node.args
                yield constants[name.id] if isinstance(name, ast.Name) else ast.literal_eval(name)


def test_every_cache_of_device_memory_is_walked_by_the_tests_on_a_gpu():
    assert set(cache_names()) == set(CASES)


def test_no_function_caches_a_tensor():
    caching = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(called(d) in ("cache", "lru_cache", "cached_property") for d in node.decorator_list)
        and named(node.returns) & _TENSORS
    ]
    assert caching == []


def called(decorator: ast.expr) -> str:
    """The last name of a decorator."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_no_module_and_no_object_holds_a_collection_of_tensors():
    """A `DeviceCache` holds entries; the annotations of others would name a tensor."""
    holding = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Dict | ast.Call | ast.List)
        and (isinstance(node.target, ast.Attribute) or node in tree.body)
        and named(node.annotation) & _COLLECTIONS
        and named(node.annotation) & _TENSORS
    ]
    assert [place for place in holding if place.partition(":")[0] not in _ALLOWED] == []


def test_the_walk_finds_what_it_looks_for():
    assert any(
        named(n.annotation) >= {"list", "Tensor"}
        for n in ast.walk(TREES[Path("jit/tape.py")])
        if isinstance(n, ast.AnnAssign)
    )
    assert named(ast.parse('dict[str, "weakref.ref[Tensor]"]', mode="eval")) == {"dict", "str", "ref", "Tensor"}
    assert named(ast.parse("dict[str, Callable[[Tensor], Tensor]]", mode="eval")) == {"dict", "str", "Callable"}
