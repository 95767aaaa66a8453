"""`make quick` selects the tests of what changed and of what stands on it, and names what it cannot judge."""

from pathlib import Path

import pytest
from scripts import quick_tests
from scripts.quick_tests import Graph, Selection, commands, expression, select

ROOT = Path(__file__).resolve().parents[2]
OPS = "src/tilewright/ops"
TREE = {
    "src/tilewright/__init__.py": "",
    "src/tilewright/ops/__init__.py": (
        "if TYPE_CHECKING:\n"
        "    from tilewright.ops.norm.rms_norm import rms_norm\n"
        "    from tilewright.ops.norm.add_rms_norm import add_rms_norm\n"
        "    from tilewright.ops.gemm.matmul import matmul\n"
    ),
    f"{OPS}/norm/rms_norm.py": "from tilewright.dispatch import call\nKERNELS = ('triton.rows',)\ndef rms_norm(): ...",
    f"{OPS}/norm/add_rms_norm.py": (
        "KERNELS = ('triton.rows', 'cpu.rows')\ndef add_rms_norm():\n    from tilewright.ops.norm import rms_norm"
    ),
    f"{OPS}/norm/kernels/triton/rows.py": "from tilewright.ops.norm import add_rms_norm, rms_norm\nrms_norm.FORWARD",
    f"{OPS}/norm/kernels/cpu/rows.py": "from tilewright.ops.norm.add_rms_norm import FORWARD",
    f"{OPS}/norm/peers/add_rms_norm.py": "",
    f"{OPS}/gemm/matmul/__init__.py": "KERNELS = ('sm90.matmul',)\ndef matmul(): ...",
    f"{OPS}/gemm/kernels/sm90/matmul.py": "FILE = 'matmul.cuh'",
    f"{OPS}/gemm/kernels/sm90/matmul.cuh": "#include <tilewright/tiles.cuh>",
    "src/tilewright/jit/include/tilewright/tiles.cuh": "",
    "src/tilewright/dispatch/__init__.py": (
        "from tilewright.dispatch.way import call\nfrom tilewright.dispatch.table import read"
    ),
    "src/tilewright/dispatch/way.py": "def call(): ...",
    "src/tilewright/dispatch/table.py": "def read(): ...",
    "src/tilewright/nn/norm.py": (
        "from tilewright import ops\nclass RMSNorm:\n    def forward(self): return ops.rms_norm()"
    ),
    "src/tilewright/models/norms.py": "from tilewright.nn.norm import RMSNorm",
    "src/tilewright/tables/gpu/matmul.json": "{}",
    "tests/ops/norm/test_rms_norm.py": "from tilewright import ops\nops.rms_norm()",
    "tests/ops/gemm/test_matmul.py": "import tilewright\ntilewright.ops.matmul()",
    "tests/ops/gemm/problem.json": "{}",
    "tests/dispatch/test_table.py": "from tilewright.dispatch import read",
    "tests/dispatch/test_way.py": "def test():\n    from tilewright.dispatch.way import call",
    "tests/nn/test_norm.py": "from tilewright.nn.norm import RMSNorm",
    "tests/models/test_norms.py": "from tilewright.models.norms import RMSNorm",
}
CONTRACTS = ("rms_norm", "softmax", "matmul", "fmha")
OF_RMS_NORM = {"ops/norm/test_rms_norm", "nn/test_norm"}


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    for name in ("tests", "scripts", "benchmarks"):
        (tmp_path / name).mkdir()
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Graph(tmp_path)


@pytest.mark.parametrize(
    ("changed", "tests", "ops"),
    [
        # an op: its tests, the ops that import it, what uses it in other rooms; nothing of another family
        (f"{OPS}/norm/rms_norm.py", OF_RMS_NORM, {"rms_norm", "add_rms_norm"}),
        (f"{OPS}/norm/add_rms_norm.py", set(), {"add_rms_norm"}),
        # a kernel: the ops that list it; peers: their op
        (
            f"{OPS}/norm/kernels/triton/rows.py",
            {"ops/norm/test_rms_norm", "nn/test_norm"},
            {"rms_norm", "add_rms_norm"},
        ),
        (f"{OPS}/norm/kernels/cpu/rows.py", set(), {"add_rms_norm"}),
        (f"{OPS}/norm/peers/add_rms_norm.py", set(), {"add_rms_norm"}),
        # device code, through includes
        (f"{OPS}/gemm/kernels/sm90/matmul.cuh", {"ops/gemm/test_matmul"}, {"matmul"}),
        ("src/tilewright/jit/include/tilewright/tiles.cuh", {"ops/gemm/test_matmul"}, {*CONTRACTS}),
        # measurements of an op
        ("src/tilewright/tables/gpu/matmul.json", {"ops/gemm/test_matmul"}, {"matmul"}),
        # below the ops: the room, what imports that very module, and a sample of contracts
        (
            "src/tilewright/dispatch/way.py",
            {"dispatch/test_table", "dispatch/test_way", "ops/norm/test_rms_norm", "nn/test_norm"},
            {*CONTRACTS},
        ),
        ("src/tilewright/dispatch/table.py", {"dispatch/test_table", "dispatch/test_way"}, {*CONTRACTS}),
        # above the ops: the room, and what imports the module
        ("src/tilewright/nn/norm.py", {"nn/test_norm", "models/test_norms"}, set()),
        ("src/tilewright/models/norms.py", {"models/test_norms"}, set()),
        # the index stands for no op: the new op's own files select its tests
        (f"{OPS}/__init__.py", set(), set()),
        # tests and what lies beside them
        ("tests/nn/test_norm.py", {"nn/test_norm"}, set()),
        ("tests/ops/gemm/problem.json", {"ops/gemm/test_matmul"}, set()),
        ("docs/architecture.md", set(), set()),
    ],
    ids=lambda value: value.rpartition("tilewright/")[2] if isinstance(value, str) else None,
)
def test_what_a_change_selects(graph, changed, tests, ops):
    found = select([changed], graph)
    assert {file.removeprefix("tests/").removesuffix(".py") for file in found.files} == tests
    assert set(found.ops) == ops
    assert found.unknown == ()


@pytest.mark.parametrize("changed", ["pyproject.toml", "src/tilewright/gone.py", "examples/run.sh", "scripts/tool.txt"])
def test_what_it_cannot_judge_is_named(graph, changed):
    assert select([changed], graph) == Selection((), (), (changed,))


def test_a_part_of_a_name_selects_no_other_op():
    assert expression(["rms_norm"], ["rms_norm", "add_rms_norm", "softmax"]) == "(rms_norm and not add_rms_norm)"
    both = expression(["rms_norm", "add_rms_norm"], ["rms_norm", "add_rms_norm"])
    assert both == "(add_rms_norm) or (rms_norm)"


def test_each_mode_has_a_process_for_the_files_that_have_such_tests():
    found = Selection(("tests/ops/test_index.py", "tests/ops/rope/test_kernel.py"), ("apply_rope",), ())
    made = [
        (mode, [word for word in command if "/" in word][1:]) for mode, command in commands(found, ["apply_rope"], "0")
    ]
    compiled, contracts = ["tests/ops/rope/test_kernel.py"], quick_tests.BY_CONTRACT
    assert made[:2] == [("", list(found.files)), ("", [contracts[0]])]
    assert ("compile", compiled) in made and ("compile", [contracts[2]]) in made and ("interp", [contracts[1]]) in made


def test_the_real_tree_has_the_edges_that_selection_rests_on():
    graph = Graph(ROOT)
    kernel = select([f"{OPS}/reduction/kernels/triton/softmax.py"], graph)
    assert "tests/ops/reduction/test_softmax.py" in kernel.files
    assert kernel.ops == ("log_softmax", "logsumexp", "softmax")
    assert not [file for file in kernel.files if file.startswith(("tests/ops/attention", "tests/models"))]
    header = next(file for file in graph.uses if file.startswith(f"{OPS}/gemm/") and file.endswith(".cuh"))
    assert "matmul" in select([header], graph).ops
    assert "tests/dispatch/tables/test_table.py" in select(["src/tilewright/dispatch/tables/table.py"], graph).files
    alone = {file for file in graph.uses if file.startswith(f"{OPS}/") and not graph.users({file})} - {
        quick_tests.INDEX
    }
    assert {Path(file).name for file in alone} <= {"__init__.py"}, "a change of these would select nothing"
