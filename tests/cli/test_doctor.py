"""`doctor`: what this machine has."""

import json
import platform

import torch

import tilewright as package
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
