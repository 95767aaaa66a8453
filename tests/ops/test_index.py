"""`tilewright.ops` is an index: ops are imported on first use, from any module and in any way."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contracts
from tilewright.ops.torch_ops import _public

ROOT = Path(__file__).resolve().parents[2]


def fresh(program: str, *arguments: object) -> str:
    """Standard output of a new Python that runs `program`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_index_names_every_op():
    ours = {name: c for name, c in contracts().items() if c.function.__module__.startswith("tilewright.")}
    assert list(ours) == ops.__all__ == sorted(ops._MODULES)
    assert all(getattr(ops, name) is contract.function for name, contract in ours.items())


def test_type_checkers_see_the_same_names():
    """The imports under TYPE_CHECKING, which nothing runs, are those of the index."""
    tree = ast.parse(Path(ops.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in typed.body for alias in node.names}
    assert seen == ops._MODULES


def test_import_loads_the_index_alone():
    program = (
        "import sys, time, torch; before, began = set(sys.modules), time.process_time(); import tilewright.ops;"
        "print(time.process_time() - began, *sorted(set(sys.modules) - before));"
        "from tilewright.ops import softmax; print(*sorted(set(sys.modules) - before))"
    )
    first, second = fresh(program).splitlines()
    seconds, *modules = first.split()
    assert modules == [
        "tilewright",
        "tilewright.catalogue",
        "tilewright.ops",
        "tilewright.ops.torch_ops",
        "tilewright.version",
    ]
    assert float(seconds) < 0.1  # of CPU time; 4 ms were measured
    families = {m.split(".")[2] for m in second.split() if m.startswith("tilewright.ops.") and m.count(".") > 2}
    assert families == {"reduction"}, "an op brings no other family"


WAYS = (
    "from tilewright.ops import *; f = rms_norm",
    "from tilewright.ops import rms_norm as f",
    "from tilewright import ops; f = ops.rms_norm",
    "import tilewright; f = tilewright.ops.rms_norm",
    "import pickle, tilewright.ops; f = pickle.loads(pickle.dumps(tilewright.ops.rms_norm))",
    "import pickle; f = pickle.loads(b'ctilewright.ops.norm.rms_norm\\nrms_norm\\n.')",
    "import tilewright.ops; from tilewright.dispatch import contract; f = contract('rms_norm').function",
)


def test_every_way_to_an_op_leads_to_it():
    """Each in a process that has only imported torch before."""
    program = (
        "import os, sys, torch\n"
        "for words in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        names = {}; exec(words, names); x, w = torch.ones(4, 8), torch.ones(8)\n"
        "        os._exit(0 if torch.allclose(names['f'](x, w), x) else 1)\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert fresh(program, *WAYS).split() == ["0"] * len(WAYS)


def test_contracts_dir_and_help_list_what_was_not_used():
    program = (
        "import pydoc, tilewright.ops as o; from tilewright.dispatch import contract, contracts\n"
        "try: contract('rmsnorm')\n"
        "except Exception as error: print(error)\n"
        "print('|', *contracts(), '|', *dir(o), '|', pydoc.plain(pydoc.render_doc(o)))"
    )
    error, listed, named, page = fresh(program).split("|", 3)
    assert all(name in error for name in ops.__all__)
    assert listed.split() == ops.__all__
    assert set(named.split()) >= {*ops.__all__, "norm", "quant"}
    assert all(f"    {name}(" in page for name in ops.__all__)


def test_a_name_that_is_no_op_is_an_error():
    with pytest.raises(AttributeError, match=r"'tilewright\.ops' has no attribute 'rmsnorm'"):
        _ = ops.rmsnorm
    with pytest.raises(ImportError):
        exec("from tilewright.ops import rmsnorm")
    with pytest.raises(AttributeError, match="rmsnorm"):
        _ = torch.ops.tilewright.rmsnorm


def test_every_op_of_torch_is_found_by_the_name_of_its_public_op():
    contracts()
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "tilewright::" in n}
    ours = {name for name in names if not name.removeprefix("_").startswith("test_")}
    assert len(ours) > 2 * len(ops.__all__)
    assert {_public(name) for name in ours} == set(ops.__all__)
    program = (
        "import sys, torch, tilewright.ops\nfor n in sys.argv[1:]: print(getattr(torch.ops.tilewright, n).default)"
    )
    assert len(fresh(program, *sorted(ours)).split()) == len(ours)


def test_an_exported_program_finds_its_op_in_a_process_that_used_none(tmp_path):
    made = (
        "import sys, torch; from tilewright import ops\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x, w): return ops.rms_norm(x, w, backend='cpu')\n"
        "x, w = torch.arange(32.).view(4, 8), torch.ones(8)\n"
        "program = torch.export.export(M(), (x, w))\n"
        "assert any('tilewright' in str(n.target) for n in program.graph.nodes), program\n"
        "torch.export.save(program, sys.argv[1])\n"
    )
    fresh(made, tmp_path / "program.pt2")
    loaded = (
        "import sys, torch, tilewright.ops\n"
        "assert not any(m.startswith('tilewright.ops.norm') for m in sys.modules)\n"
        "x, w = torch.arange(32.).view(4, 8), torch.ones(8)\n"
        "y = torch.export.load(sys.argv[1]).module()(x, w)\n"
        "print(torch.allclose(y, torch.nn.functional.rms_norm(x, (8,), w, 1e-6)))\n"
    )
    assert fresh(loaded, tmp_path / "program.pt2") == "True"


def test_a_compiled_function_may_be_the_first_to_use_an_op():
    program = (
        "import torch; from tilewright import ops\n"
        "f = torch.compile(lambda x, w: ops.rms_norm(x, w) + 1, fullgraph=True, backend='aot_eager')\n"
        "x, w = torch.randn(4, 8), torch.ones(8)\n"
        "print(torch.allclose(f(x, w), ops.rms_norm(x, w) + 1))\n"
    )
    assert fresh(program) == "True"


def test_an_op_may_be_imported_under_any_mode():
    """What a module of an op keeps must not be fake, without memory, or of inference, for good."""
    program = (
        "import gc, torch; from torch._subclasses.fake_tensor import FakeTensorMode; from tilewright import ops\n"
        "before = {id(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}\n"
        "with torch.inference_mode(), torch.device('meta'), FakeTensorMode():\n"
        "    [getattr(ops, name) for name in ops.__all__]\n"
        "new = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and id(o) not in before]\n"
        "print(len(new), {(type(o).__name__, o.device.type, o.is_inference()) for o in new})\n"
    )
    count, kinds = fresh(program).split(maxsplit=1)
    assert int(count) > 0  # or this proves nothing
    assert kinds == "{('Tensor', 'cpu', False)}"


def test_threads_may_use_ops_first_at_once():
    program = (
        "import threading, torch; from tilewright import ops\n"
        "found = []\n"
        "def use(names):\n"
        "    for name in names: found.append(getattr(ops, name))\n"
        "threads = [threading.Thread(target=use, args=(ops.__all__[i:] + ops.__all__[:i],)) for i in range(0, 36, 6)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(found), len(set(found)))\n"
    )
    assert fresh(program).split() == [str(6 * len(ops.__all__)), str(len(ops.__all__))]
