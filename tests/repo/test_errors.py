"""`errors.py` draws one exception tree: what it draws is what it defines, and no error of the library is outside."""

import ast
import re
from pathlib import Path

from tilewright import errors

SOURCE = Path(errors.__file__).parent
CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_the_drawn_tree_is_the_defined_one():
    drawn = {}
    parents = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"((?:[│ ]   )*)(?:[├└]── )?(\w+Error)\b(?: \((\w+)\))?", line)
        if match is None or ("──" not in line and match[2] != "TilewrightError"):
            continue
        depth = len(match[1]) // 4 + ("──" in line)
        parents[depth:] = [match[2]]
        drawn[match[2]] = {*parents[depth - 1 : depth], *filter(None, [match[3]])} or {"Exception"}
    assert drawn == {error.__name__: {base.__name__ for base in error.__bases__} for error in CLASSES}


def test_every_error_of_the_source_is_in_the_tree():
    bases = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.bases:
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def in_tree(name):
        return name == "TilewrightError" or any(in_tree(base) for base in bases.get(name, ()))

    assert [name for name in bases if name.endswith("Error") and not in_tree(name)] == []
