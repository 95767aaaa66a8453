"""Makes .venv ready for `make demo` or `make test`; standard library only.

    python3 scripts/setup_env.py demo|test

Without an NVIDIA GPU the environment is closed and gets the CPU build of torch. On a GPU machine whose Python already
has a CUDA torch, the environment sees the installed packages and adds only what is missing beside them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH = "2.13.0"
VERSION = sys.version.split()[0]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"demo": "hf,report", "test": "hf,report,serve,grammar,cuda,cutile,dev"}

HAS_CUDA_TORCH = "import sys, torch; sys.exit(not torch.cuda.is_available())"
TORCH_VERSION = "import torch; print(torch.__version__)"
INSTALLED = "from importlib.metadata import distributions as d; print(*{x.metadata['Name'].lower() for x in d()})"


def say(line: str) -> None:
    """One line on the terminal, at once."""
    print(f"set-up: {line}", flush=True)


def stop(line: str) -> None:
    """Ends with one readable line."""
    sys.exit(f"set-up: {line}")


def output(*command: str | Path) -> str | None:
    """Standard output of a command, None when it is missing or fails."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_tools() -> None:
    """What cannot be installed by pip: Python 3.11, ensurepip, and for torch.compile on the CPU a C++ compiler."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where an older Python is told so
        stop(f"Python 3.11 or newer is needed, {sys.executable} is {VERSION}. Try: make PYTHON=python3.12 <target>")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop("python3-venv is missing. Install it (sudo apt-get install python3-venv) and run make again.")
    missing = [] if shutil.which(os.environ.get("CXX", "g++")) else ["g++"]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")
    if missing:
        say(f"{' and '.join(missing)} not found: torch.compile on the CPU will be reported as a rejected change.")


def pip(*arguments: str | Path) -> bool:
    """Runs the environment's pip; what pip has to say is shown when it fails."""
    # Bytecode of what is never imported takes longest; Python writes that of a module when it first imports it
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-compile"]
    command = [PYTHON, "-m", "pip", "install", *options, *arguments]
    done = subprocess.run(
        [str(c) for c in command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        print("\n".join(line for line in done.stdout.splitlines() if not line.startswith("WARNING: Location")))
    return done.returncode == 0


def reachable(url: str) -> bool:
    """True when the index answers within five seconds; an unknown host answers no at once."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def make_venv(*, system_packages: bool) -> None:
    """Creates .venv unless a working one with the same view of the system is there."""
    config = VENV / "pyvenv.cfg"
    if config.exists() and output(PYTHON, "-c", "import pip") is not None:
        sees_system = "include-system-site-packages = true" in config.read_text()
        if sees_system == system_packages:
            return
    say(f"creating .venv with Python {VERSION}" + (", which sees the installed CUDA torch" if system_packages else ""))
    flags = ["--clear"] + (["--system-site-packages"] if system_packages else [])
    if subprocess.run([sys.executable, "-m", "venv", *flags, str(VENV)], check=False).returncode:
        stop("python3 -m venv failed. Install python3-venv (sudo apt-get install python3-venv) and run make again.")


def install_torch(*, gpu: bool) -> None:
    """Installs 2.13.0 unless the environment has or sees one: the official CPU build where there is no GPU."""
    found = output(PYTHON, "-c", TORCH_VERSION)
    if found is not None and (gpu or found.startswith(TORCH)):
        say(f"using torch {found}")
        return
    started = time.monotonic()
    if not gpu and sys.platform == "linux" and reachable(f"{CPU_INDEX}/torch/"):
        say(f"installing torch {TORCH}, CPU build (about 200 MB)")
        done = pip("--extra-index-url", CPU_INDEX, f"torch=={TORCH}+cpu") or pip(f"torch=={TORCH}")
    else:
        say(f"installing torch {TORCH} from pip's own index" + ("" if gpu else f" ({CPU_INDEX} does not answer)"))
        done = pip(f"torch=={TORCH}")
    if not done:
        stop(f"torch {TORCH} could not be installed; pip's reason is above.")
    say(f"torch is ready after {time.monotonic() - started:.0f} s")


def constraints(*, gpu: bool) -> Path:
    """The pins of constraints.txt; on a GPU machine without those of packages that came with its torch."""
    if not gpu:
        return ROOT / "constraints.txt"
    installed = set((output(PYTHON, "-c", INSTALLED) or "").replace("_", "-").split())
    pins = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.split("==")[0] not in installed
    ]
    own = VENV / "constraints.txt"
    own.write_text("\n".join(pins) + "\n")
    return own


def main() -> None:
    """Environment, torch, then tilewright itself (editable) with what the target needs."""
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        stop(f"expected one of {', '.join(EXTRAS)}, got {' '.join(sys.argv[1:]) or 'nothing'}")
    target = sys.argv[1]
    started = time.monotonic()
    check_tools()
    gpu = output("nvidia-smi", "-L") is not None
    system_packages = gpu and output(sys.executable, "-c", HAS_CUDA_TORCH) is not None
    make_venv(system_packages=system_packages)
    install_torch(gpu=gpu)
    say(f"installing tilewright with [{EXTRAS[target]}]")
    if not pip("--constraint", constraints(gpu=gpu), "--editable", f".[{EXTRAS[target]}]"):
        stop("tilewright's dependencies could not be installed; pip's reason is above.")
    (VENV / f".ready-{target}").touch()
    say(f"ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
