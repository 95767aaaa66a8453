"""What a machine has, told from planted files and programs."""

import ctypes
from pathlib import Path

import pytest

from tilewright.hardware import toolchain
from tilewright.hardware.toolchain import Driver, Machine


class Planted:
    """A machine under `root`, empty at first."""

    def __init__(self, root):
        self.root, self.env, self.driver = root, {"PATH": str(root / "path")}, None

    def program(self, path, version):
        return self.file(path, f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")

    def file(self, path, text=""):
        made = self.root / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text)
        made.chmod(0o755)
        return made

    def package(self, name, version):
        """A pip package's metadata."""
        self.file(f"site/{name.replace('-', '_')}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")

    def with_driver(self, cuda, helpers=("ptxjitcompiler", "gpucomp", "tileiras")):
        self.driver = Driver(self.file("driver/libcuda.so.580.159.03"), cuda)
        for name in helpers:
            self.file(f"driver/libnvidia-{name}.so.580.159.03")

    def with_tileiras(self, ptxas="13.4.92", libnvvm="13.4.92"):
        self.program("site/nvidia/cu13/bin/tileiras", "13.4.92")
        if ptxas:
            self.program("site/nvidia/cu13/bin/ptxas", ptxas)
        if libnvvm:
            self.file("site/nvidia/cu13/lib/libnvvm.so.4")
            self.package("nvidia-nvvm", libnvvm)

    def examine(self):
        wheels = (self.root / "site" / "nvidia",)
        machine = Machine(self.env, wheels, (self.root / "site" / "triton",), self.root / "cuda", self.driver)
        return {finding.name: finding for finding in toolchain.examine(machine)}


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path)


def test_with_nothing_installed_every_part_says_what_it_is_good_for(planted):
    found = planted.examine()
    assert set(found) == {"driver", "tileiras", "NVRTC", "nvcc", "g++"}
    assert all(not part.found and part.problem is None and part.advice for part in found.values())
    assert "pip install 'tilewright[cutile]'" in found["tileiras"].advice
    assert "pip install 'tilewright[cuda]'" in found["NVRTC"].advice
    assert "apt install g++" in found["g++"].advice


def test_a_whole_machine_has_no_problems(planted):
    planted.with_driver((13, 0))
    planted.with_tileiras()
    planted.file("site/nvidia/cu13/lib/libnvrtc.so.13")
    planted.package("nvidia-cuda-nvrtc", "13.0.88")
    planted.program("site/triton/backends/nvidia/bin/ptxas", "12.8.93")
    planted.program("cuda/bin/nvcc", "13.0.88")
    planted.file("path/g++", "#!/bin/sh\necho 'g++ (Debian 12.2.0-14) 12.2.0'\n")
    found = planted.examine()
    assert [part for part in found.values() if part.problem] == []
    versions = {name: part.version for name, part in found.items()}
    assert versions["driver"] == "CUDA 13.0, release 580.159.03"
    assert versions["tileiras"] == versions["ptxas of tileiras"] == versions["libnvvm of tileiras"] == "13.4.92"
    assert versions["NVRTC"] == versions["nvcc"] == "13.0.88"
    assert (versions["ptxas of Triton"], versions["g++"]) == ("12.8.93", "12.2.0")


@pytest.mark.parametrize("part", ["ptxas", "libnvvm"])
def test_tileiras_and_its_neighbours_must_be_of_one_release(planted, part):
    planted.with_tileiras(**{part: "13.0.88"})
    found = planted.examine()[f"{part} of tileiras"]
    assert "tileiras is 13.4.92" in found.problem
    assert "==13.4.*" in found.advice


@pytest.mark.parametrize("part", ["ptxas", "libnvvm"])
def test_a_missing_neighbour_of_tileiras_is_named_with_its_package(planted, part):
    planted.with_tileiras(**{part: None})
    found = planted.examine()[f"{part} of tileiras"]
    assert not found.found
    assert found.problem
    assert found.advice == f"pip install '{'nvidia-cuda-nvcc' if part == 'ptxas' else 'nvidia-nvvm'}==13.4.*'"


def test_an_older_toolkit_in_cuda_home_breaks_a_tileiras_on_path(planted):
    planted.program("newer/bin/tileiras", "13.4.92")
    planted.program("older/bin/ptxas", "13.0.88")
    planted.env = {"PATH": str(planted.root / "newer/bin"), "CUDA_HOME": str(planted.root / "older")}
    found = planted.examine()["CUDA_HOME"]
    assert "takes the ptxas 13.0.88" in found.problem
    assert "unset CUDA_HOME" in found.advice


def test_pips_tileiras_is_spared_that_and_only_advice_remains(planted):
    planted.with_tileiras()
    planted.program("older/bin/ptxas", "13.0.88")
    planted.env["CUDA_HOME"] = str(planted.root / "older")
    found = planted.examine()["CUDA_HOME"]
    assert found.problem is None
    assert "CUDA 13.4" in found.advice


def test_a_cuda_home_that_is_no_folder(planted):
    planted.env["CUDA_PATH"] = str(planted.root / "gone")
    assert "no such folder" in planted.examine()["CUDA_PATH"].problem


def test_an_old_driver_cannot_run_cutile(planted):
    planted.with_driver((12, 8))
    found = planted.examine()["driver"]
    assert "runs CUDA 12.8, and cuTile's kernels need 13.0" in found.problem
    assert "580" in found.advice


@pytest.mark.parametrize("missing", ["ptxjitcompiler", "gpucomp"])
def test_a_driver_without_its_helpers_is_told(planted, missing):
    planted.with_driver((13, 0), {"ptxjitcompiler", "gpucomp"} - {missing})
    found = planted.examine()
    assert [name for name, part in found.items() if part.problem] == [f"libnvidia-{missing}"]
    assert f"mount libnvidia-{missing}.so next to libcuda.so.580.159.03" in found[f"libnvidia-{missing}"].advice


def test_the_driver_compiles_tile_ir_only_where_it_is_new_enough(planted):
    planted.with_driver((13, 0), ("ptxjitcompiler", "gpucomp"))
    assert planted.examine()["libnvidia-tileiras"].problem is None
    planted.with_driver((13, 1), ("ptxjitcompiler", "gpucomp"))
    assert planted.examine()["libnvidia-tileiras"].problem is not None


@pytest.mark.parametrize(
    ("version", "problem", "advice"), [("13.0.88", False, False), ("13.4.92", False, True), ("14.0.1", True, True)]
)
def test_nvrtc_beside_the_driver(planted, version, problem, advice):
    planted.with_driver((13, 0))
    planted.file("site/nvidia/cu13/lib/libnvrtc.so.13")
    planted.package("nvidia-cuda-nvrtc", version)
    found = planted.examine()["NVRTC"]
    assert (found.version, bool(found.problem), bool(found.advice)) == (version, problem, advice)


def test_an_assembler_of_the_users_own_is_checked(planted):
    planted.env["TRITON_PTXAS_PATH"] = str(planted.root / "gone")
    assert "names no program" in planted.examine()["TRITON_PTXAS_PATH"].problem


def test_a_compiler_that_cxx_names_and_that_is_not_there(planted):
    planted.file("path/g++", "#!/bin/sh\necho 'g++ 12.2.0'\n")
    planted.env["CXX"] = "clang++ -O1"
    assert "clang++" in planted.examine()["g++"].problem


def test_a_program_that_hangs_or_fails_has_no_version(planted):
    planted.file("cuda/bin/nvcc", "#!/bin/sh\nexit 1\n")
    assert (planted.examine()["nvcc"].found, planted.examine()["nvcc"].version) == (True, None)


def test_without_libcuda_there_is_no_driver(monkeypatch):
    def fails(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fails)
    assert toolchain.find_driver() is None


def test_this_machine_can_be_examined():
    for part in toolchain.examine():
        assert part.found or part.advice
        assert part.path is None or Path(part.path).exists() or part.problem


@pytest.mark.gpu
def test_the_driver_of_a_machine_with_a_gpu_is_found():
    found = toolchain.find_driver()
    assert found.path.is_file()
    assert found.cuda >= (12, 0)


def test_the_doctor_names_the_nvcc_that_the_compiler_uses(monkeypatch, tmp_path):
    """One in CUDA_HOME and another on PATH: both go by CUDA_HOME."""
    from tilewright.jit.compilers.cuda_build import find_tool

    for place, version in (("home/bin", "13.1.11"), ("path", "12.9.22")):
        program = tmp_path / place / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho 'release, V{version}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    (found,) = [finding for finding in toolchain.examine() if finding.name == "nvcc"]
    assert (found.path, found.version) == (str(find_tool("nvcc")), "13.1.11")
