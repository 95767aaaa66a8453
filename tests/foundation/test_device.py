"""What a device is: its name, architecture and sizes."""

import os
from dataclasses import FrozenInstanceError

import pytest
import torch

from tilewright import settings
from tilewright.hardware import DeviceInfo, arch, device, device_info


def test_the_cpu():
    found = device_info("cpu")
    assert (found.arch, arch("cpu")) == ("cpu", "cpu")
    assert found.name
    assert 1 <= found.sm_count <= os.cpu_count()
    assert 1 << 16 <= found.l2_bytes <= 1 << 34  # 64 KiB to 16 GiB
    assert found.memory_bytes > 1 << 28


@pytest.mark.parametrize("given", ["cpu", torch.device("cpu"), "cpu:0"])
def test_every_way_to_name_it_finds_the_same(given):
    assert device_info(given) == device_info("cpu")


def test_it_is_read_once():
    assert device_info("cpu") is device_info("cpu")


def test_none_is_the_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_info().arch == "cpu"


def test_without_a_gpu_a_cuda_tensor_is_planned_for_the_named_architecture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device._info.cache_clear()
    assert arch("cuda") == "sm_90"
    monkeypatch.setenv("TILEWRIGHT_ARCH", "gfx942")
    settings.reload()
    assert device_info("cuda") == DeviceInfo("AMD Instinct MI300X", "gfx942", 304, 4 << 20, 192 << 30)


def test_the_cache_size_is_the_largest_that_is_listed(monkeypatch, tmp_path):
    for index, size in enumerate(("48K", "2M", "512")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(device, "Path", lambda folder: tmp_path)
    assert device._last_level_cache() == 2 << 20


def test_a_machine_that_lists_no_cache_counts_as_32_mib(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "Path", lambda folder: tmp_path)
    assert device._last_level_cache() == 32 << 20


def test_a_device_that_does_not_exist_is_refused_by_torch():
    with pytest.raises(RuntimeError):
        device_info("nonsense")


def test_it_does_not_change_under_a_reader():
    with pytest.raises(FrozenInstanceError):
        device_info("cpu").name = "another"


@pytest.mark.gpu
def test_a_gpu():
    found = device_info("cuda")
    properties = torch.cuda.get_device_properties(0)
    assert (found.name, found.sm_count) == (properties.name, properties.multi_processor_count)
    assert found.arch.startswith(("sm_", "gfx"))
    assert found.memory_bytes > found.l2_bytes > 0
