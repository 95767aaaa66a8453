"""`doctor`: what this machine has."""

import json
import platform

import torch

import tilewright as package
from tilewright.dispatch.tables.update import update
from tilewright.hardware import device_info
from tilewright.settings import describe


def test_it_names_versions_devices_backends_and_every_setting(tilewright, place):
    done = tilewright("doctor", "--json", "machine.json")
    found = json.loads((place / "machine.json").read_text())
    assert done.exit_code == 0
    assert (found["tilewright"], found["python"]) == (package.__version__, platform.python_version())
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"]["cpu"]["backends"]["torch"] == "available"
    assert found["devices"]["cpu"]["calibrated"] is False
    for row in describe():
        assert row["names"][0] in done.stdout


def test_settings_in_force_are_shown(tilewright, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "triton")
    rows = json.loads(tilewright("doctor", "--json", "-").stdout)["settings"]
    assert {row["names"][0]: row["value"] for row in rows}["TILEWRIGHT_BACKEND"] == "triton"


def test_it_says_whether_the_machine_was_calibrated(tilewright, calibrated):
    assert json.loads(tilewright("doctor", "--json", "-").stdout)["devices"]["cpu"]["calibrated"] is True


def test_stale_rows_of_the_users_tables_are_counted_with_advice(tilewright, place):
    def measured(versions):
        cpu = device_info("cpu")
        row = {"op": "rms_norm", "direction": "fwd", "bucket": "M=4,N=8,plain=1"}
        row |= {"dtype": "float32", "numerics": "default"}
        row |= {"backend": "torch", "config": None, "us": 1.0, "noise": 0.0, "torch_us": None}
        header = {"gpu": cpu.name, "arch": "cpu", "sm_count": cpu.sm_count, "versions": versions, "date": "2026-11-20"}
        update(place.parent / "cache" / "tables" / "mine", header, [row])
        return tilewright("doctor", "--json", "machine.json").stdout

    assert "! 1 of 1 rows of" in (said := measured({"torch": "1.0"}))
    assert f"torch 1.0 (now {torch.__version__})" in said
    assert "-> run tilewright tune" in said
    (state,) = json.loads((place / "machine.json").read_text())["users_tables"]
    assert (state["rows"], state["stale"]) == (1, 1)
    assert "rows of" not in measured({"torch": torch.__version__})


def test_parts_of_the_toolchain_come_with_advice(tilewright, monkeypatch, place):
    monkeypatch.setenv("CUDA_HOME", str(place / "gone"))
    done = tilewright("doctor", "--json", "doctor.json")
    parts = {part["name"]: part for part in json.loads((place / "doctor.json").read_text())["toolchain"]}
    assert {"driver", "tileiras", "NVRTC", "nvcc", "g++"} <= set(parts)
    assert parts["CUDA_HOME"]["problem"] == "there is no such folder"
    assert "! there is no such folder" in done.stdout
    assert "-> unset CUDA_HOME" in done.stdout


def test_a_selftest_without_a_gpu_is_refused(tilewright, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = tilewright("doctor", "--selftest")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--selftest needs an NVIDIA GPU" in done.stderr


def test_a_failed_proof_exits_with_1(tilewright, monkeypatch):
    proofs = [{"device": "cuda:0", "name": "wgmma", "error": "3 of 9 elements differ", "seconds": 0.5}]
    monkeypatch.setattr("tilewright.cli.doctor.prove", lambda devices: proofs)
    done = tilewright("doctor", "--selftest")
    assert done.exit_code == 1
    assert "cuda:0 wgmma: 3 of 9 elements differ (0.50 s)" in done.stdout
