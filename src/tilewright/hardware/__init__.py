"""What the machine is: architecture, size, datasheet peaks, and the ceilings measured on it."""

from tilewright.hardware.device import DeviceInfo, arch, device_info

__all__ = ["DeviceInfo", "arch", "device_info"]
