"""Generated pages are those the contracts and the committed results give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_op_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "scripts/op_pages.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
