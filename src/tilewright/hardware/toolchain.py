"""Compilers and driver libraries of a machine: which exist, which fit together, and what to install for the rest.

The search only looks at files and runs programs with `--version`; it imports nothing and touches no GPU.  The compilers
of `jit` search with the same `Machine`, so the doctor reports what they use.
tileiras, ptxas and libnvvm must have the same release (major.minor): tileiras runs ptxas and opens libnvvm.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

_CUTILE = "pip install 'tilewright[cutile]'"
_CUDA = "pip install 'tilewright[cuda]'"
_CUTILE_DRIVER = (13, 0)  # the oldest that runs cuTile's binaries
_TILE_DRIVER = (13, 1)  # the first with libnvidia-tileiras
_HELPERS = {  # libraries that libcuda opens on demand, and that minimal containers lack
    "libnvidia-ptxjitcompiler": "the driver cannot compile PTX without it",
    "libnvidia-gpucomp": "the driver cannot finish binaries that it has to compile without it",
    "libnvidia-tileiras": "the driver cannot compile Tile IR without it",
}


@dataclass(frozen=True)
class Finding:
    """One part.  problem: what is wrong with it, or None.  advice: what to do, or what the part is for."""

    name: str
    found: bool
    version: str | None = None
    path: str | None = None
    problem: str | None = None
    advice: str | None = None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: the file of libcuda, and the newest CUDA version it supports."""

    path: Path
    cuda: tuple[int, int]

    @property
    def release(self) -> str | None:
        """Release of the driver package: "580.159.03"."""
        return _first(r"\.so\.(\d+\.[\d.]+)$", self.path.name)


def find_driver() -> Driver | None:
    """NVIDIA's driver, if libcuda can be loaded.  The query of its version starts no GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    mapped = _first(r"(/\S*/libcuda\.so\S*)$", Path("/proc/self/maps").read_text())
    return Driver(Path(mapped or "libcuda.so.1").resolve(), (version.value // 1000, version.value % 1000 // 10))


def _packages(name: str) -> Iterator[Path]:
    """Folders of a Python package, found without importing it."""
    spec = PathFinder.find_spec(name)
    yield from map(Path, (spec.submodule_search_locations or ()) if spec else ())


@dataclass(frozen=True)
class Machine:
    """The places to search.  wheels: `nvidia` folders of Python packages; toolkit: the default folder of a toolkit."""

    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    wheels: Sequence[Path] = field(default_factory=lambda: tuple(_packages("nvidia")))
    triton: Sequence[Path] = field(default_factory=lambda: tuple(_packages("triton")))
    toolkit: Path = Path("/usr/local/cuda")
    driver: Driver | None = field(default_factory=find_driver)

    @property
    def homes(self) -> dict[str, Path]:
        """The toolkits that environment variables name, by variable."""
        return {name: Path(self.env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if self.env.get(name)}

    def on_path(self, name: str) -> Path | None:
        """A program on PATH."""
        path = shutil.which(name, path=self.env.get("PATH", ""))
        return None if path is None else Path(path)

    def program(self, name: str) -> Path | None:
        """A program of a CUDA toolkit: under CUDA_HOME or CUDA_PATH, on PATH, in the default folder."""
        on_path = self.on_path(name)
        places = [home / "bin" / name for home in self.homes.values()]
        places += [*([on_path] if on_path else []), self.toolkit / "bin" / name]
        return next((place for place in places if runs(place)), None)

    def of_triton(self, name: str) -> Path | None:
        """A program in Triton's package."""
        places = (package / "backends" / "nvidia" / "bin" / name for package in self.triton)
        return next((place for place in places if runs(place)), None)

    @cached_property
    def tileiras(self) -> Path | None:
        """tileiras: from pip, on PATH, under CUDA_HOME or CUDA_PATH, in the default folder."""
        pip = [wheel / "cu13" / "bin" / "tileiras" for wheel in self.wheels]
        toolkits = [home / "bin" / "tileiras" for home in (*self.homes.values(), self.toolkit)]
        on_path = self.on_path("tileiras")
        places = [*pip, *([on_path.resolve()] if on_path else []), *toolkits]
        return next((place for place in places if runs(place)), None)


def examine(machine: Machine | None = None) -> list[Finding]:
    """Examine every part, present or not."""
    machine = machine or Machine()
    return [
        *_driver(machine),
        *_tile(machine),
        *_homes(machine),
        _nvrtc(machine),
        *_toolkit(machine),
        *_ptxas_of_triton(machine),
        _host(machine),
    ]


def _driver(machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    if driver is None:
        yield Finding("driver", False, advice="kernels can be compiled here, and run where NVIDIA's driver is")
        return
    problem: str | None = None
    advice: str | None = None
    if driver.cuda < _CUTILE_DRIVER:
        problem = f"runs CUDA {_text(driver.cuda)}, and cuTile's kernels need {_text(_CUTILE_DRIVER)}"
        advice = "update the driver to 580 or newer"
    version = f"CUDA {_text(driver.cuda)}" + (f", release {driver.release}" if driver.release else "")
    yield Finding("driver", True, version, str(driver.path), problem, advice)
    for name, without in _HELPERS.items():
        path = next(iter(sorted(driver.path.parent.glob(f"{name}.so*"))), None)
        if path is not None:
            yield Finding(name, True, driver.release, str(path))
        elif name == "libnvidia-tileiras" and driver.cuda < _TILE_DRIVER:
            yield Finding(
                name, False, advice=f"comes with drivers of CUDA {_text(_TILE_DRIVER)}; nothing needs it here"
            )
        else:
            advice = (
                f"install the driver's whole package; in a container, mount {name}.so next to {driver.path.name} "
                "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
            yield Finding(name, False, problem=f"not next to libcuda: {without}", advice=advice)


def _tile(machine: Machine) -> Iterator[Finding]:
    """tileiras, and the ptxas and libnvvm next to it."""
    tileiras = machine.tileiras
    if tileiras is None:
        advice = f"{_CUTILE} compiles cuTile kernels; those of an imported bundle run without it"
        yield Finding("tileiras", False, advice=advice)
        return
    version = version_of(tileiras)
    yield Finding("tileiras", True, version, str(tileiras))
    root = tileiras.parent.parent
    ptxas, nvvm = root / "bin" / "ptxas", libnvvm(root)
    for name, path, package, version_found in (
        ("ptxas of tileiras", ptxas if runs(ptxas) else None, "nvidia-cuda-nvcc", version_of(ptxas)),
        ("libnvvm of tileiras", nvvm, "nvidia-nvvm", _library_version(nvvm, "nvidia-nvvm")),
    ):
        same = f"pip install '{package}=={release(version)}.*'"
        if path is None:
            yield Finding(name, False, problem=f"tileiras {version} finds none in {root}", advice=same)
        elif version_found and version and release(version_found) != release(version):
            problem = f"tileiras is {version}; both must be of one release"
            yield Finding(name, True, version_found, str(path), problem, same)
        else:
            yield Finding(name, True, version_found, str(path))


def libnvvm(root: Path) -> Path | None:
    """The libnvvm that a tileiras in `root` opens, in the layout of pip's packages or of toolkits."""
    places = (root / "lib" / "libnvvm.so.4", root / "nvvm" / "lib64" / "libnvvm.so.4")
    return next((path for path in places if path.exists()), None)


def _homes(machine: Machine) -> Iterator[Finding]:
    """CUDA_HOME and CUDA_PATH, which tileiras searches before its own folder.

    cuda.tile hides them from pip's tileiras only; our compilations hide them from any.
    """
    version = version_of(machine.tileiras) if machine.tileiras else None
    from_pip = machine.tileiras is not None and any(machine.tileiras.is_relative_to(wheel) for wheel in machine.wheels)
    for name, home in machine.homes.items():
        other = version_of(home / "bin" / "ptxas")
        problem: str | None = None
        advice: str | None = None
        if not home.is_dir():
            problem, advice = "there is no such folder", f"unset {name}"
        elif version and other and release(version) != release(other):
            advice = f"unset {name}, or point it to CUDA {release(version)}, before tileiras is started by hand"
            if not from_pip:
                problem = f"tileiras {version} takes the ptxas {other} there: «failed to compile Tile IR program»"
                advice = f"unset {name}, or point it to CUDA {release(version)}; tilewright's own calls are spared"
        yield Finding(name, home.is_dir(), other, str(home), problem, advice)


def _nvrtc(machine: Machine) -> Finding:
    places = [
        *(path for wheel in machine.wheels for path in sorted(wheel.glob("c*/lib/libnvrtc.so.*"))),
        *(
            root / lib / "libnvrtc.so"
            for root in (*machine.homes.values(), machine.toolkit)
            for lib in ("lib64", "lib")
        ),
    ]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        needed = f"{_CUDA} compiles CUDA C++ kernels; those of an imported bundle run without it"
        return Finding("NVRTC", False, advice=needed)
    version = _library_version(path, "nvidia-cuda-nvrtc") or _ask_nvrtc(path)
    problem: str | None = None
    advice: str | None = None
    driver = machine.driver
    if driver is not None and version is not None:
        major, minor = (int(part) for part in version.split(".")[:2])
        if major > driver.cuda[0]:
            problem = f"is newer than the driver, which runs CUDA {_text(driver.cuda)} and refuses its binaries"
            advice = f"pip install 'nvidia-cuda-nvrtc=={_text(driver.cuda)}.*', or update the driver"
        elif (major, minor) > driver.cuda:
            advice = f"newer than the driver (CUDA {_text(driver.cuda)}): its binaries run there, its PTX does not"
    return Finding("NVRTC", True, version, str(path), problem, advice)


def _toolkit(machine: Machine) -> Iterator[Finding]:
    """nvcc and ptxas of an installed CUDA toolkit."""
    needs = "only TILEWRIGHT_JIT_COMPILER=nvcc needs it: install a CUDA toolkit"
    for name, title, advice in (("nvcc", "nvcc", needs), ("ptxas", "ptxas of the toolkit", None)):
        path = machine.program(name)
        if path is not None:
            yield Finding(title, True, version_of(path), str(path))
        elif advice:
            yield Finding(title, False, advice=advice)


def _ptxas_of_triton(machine: Machine) -> Iterator[Finding]:
    """The assemblers in Triton's package, and those in TRITON_PTXAS_PATH that replace them."""
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        if named := machine.env.get(variable):
            runnable = runs(Path(named))
            problem = None if runnable else f"{variable} names no program"
            advice = None if runnable else f"unset {variable}"
            yield Finding(variable, runnable, version_of(Path(named)), named, problem, advice)
    for name in ("ptxas", "ptxas-blackwell"):
        if path := machine.of_triton(name):
            yield Finding(f"{name} of Triton", True, version_of(path), str(path))


def _host(machine: Machine) -> Finding:
    command = (machine.env.get("CXX") or "g++").split()[0]
    path = machine.on_path(command)
    if path is None:
        problem = f"CXX names {command}, which is not there" if machine.env.get("CXX") else None
        advice = "apt install g++: the cpu backend, torch.compile on a CPU and Triton's own launcher need it"
        return Finding("g++", False, problem=problem, advice=advice)
    return Finding("g++", True, version_of(path), str(path))


def runs(program: Path) -> bool:
    """Is `program` an executable file?"""
    return program.is_file() and os.access(program, os.X_OK)


def version_of(program: Path) -> str | None:
    """The version that `--version` prints: "V13.0.88" of NVIDIA's programs, else the last number of the first line."""
    if not runs(program):
        return None
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _first(r"\bV(\d+\.\d+\.\d+)", output) or _first(r"(\d+\.\d[\d.]*)\s*$", output.partition("\n")[0])


def _library_version(library: Path | None, package: str) -> str | None:
    """The version of the pip package, or of the toolkit, that `library` belongs to."""
    if library is None:
        return None
    for folder in library.parents:
        if folder.name == "nvidia":
            packages = distributions(name=package, path=[str(folder.parent)])
            return next((each.version for each in packages), None)
        if (folder / "version.json").is_file():
            versions = json.loads((folder / "version.json").read_text())
            return str(versions["cuda"]["version"]) if "cuda" in versions else None
    return None


def _ask_nvrtc(path: Path) -> str | None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None


def release(version: str | None) -> str:
    """major.minor: "13.4" of "13.4.92"."""
    return ".".join((version or "").split(".")[:2])


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
