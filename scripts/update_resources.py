"""Write tests/compile/resources/: compile every form of every kernel for every target and note what it costs.

    python scripts/update_resources.py [-n WORKERS] [-k TESTS]

Run it after a kernel or a configuration changed, and read the difference before committing it.  With -k, pytest's
selection of tests, all other entries stay as they are, those of kernels that are gone too.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER, DRAFTS = ROOT / "tests" / "compile" / "resources", ROOT / "build" / "resources"


def main() -> None:
    """Compile with the tests that compare, in the mode that writes; then put the files together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", dest="workers", default="2", help="processes at once (default 2)")
    parser.add_argument("-k", dest="tests", help='tests to run, such as "softmax or test_cuda" (default: all)')
    given = parser.parse_args()
    shutil.rmtree(DRAFTS, ignore_errors=True)
    environment = os.environ | {"TILEWRIGHT_UPDATE_RESOURCES": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "compile",
        "tests/compile",
        "--exhaustive",
        "-n",
        given.workers,
        "--dist",
        "worksteal",
    ]
    command += ["-k", given.tests] if given.tests else []
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit("the compile tests failed; nothing was written")
    drafts = [json.loads(path.read_text()) for path in sorted(DRAFTS.glob("*.json"))]
    for backend in {draft["backend"] for draft in drafts} if not given.tests else ():
        shutil.rmtree(FOLDER / backend, ignore_errors=True)
    for backend, family in sorted({(draft["backend"], draft["family"]) for draft in drafts}):
        mine = [draft for draft in drafts if (draft["backend"], draft["family"]) == (backend, family)]
        (compiler,) = {draft["compiler"] for draft in mine}
        ledger = FOLDER / backend / f"{family}.json"
        kernels = json.loads(ledger.read_text())["kernels"] if ledger.exists() else {}
        kernels |= {f"{d['key']} {d['arch']}": d["kernels"] for d in mine}
        lines = [f'  "{key}": {json.dumps(kernels[key])}' for key in sorted(kernels)]
        head = json.dumps({"backend": backend, "compiler": compiler, "columns": mine[0]["columns"]})
        ledger.parent.mkdir(parents=True, exist_ok=True)
        ledger.write_text(f'{head[:-1]}, "kernels": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
