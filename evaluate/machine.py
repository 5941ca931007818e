"""What the figures were measured on: devices, their bandwidth, host and versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_TPU = "https://docs.cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
# device_kind as JAX gives it -> bytes/s of its memory, and the maker's page that says so.
BANDWIDTHS: Mapping[str, tuple[float, str]] = {
    "TPU v4": (1228e9, f"{_TPU}/v4"),
    "TPU v5 lite": (819e9, f"{_TPU}/v5e"),
    "TPU v5e": (819e9, f"{_TPU}/v5e"),
    "TPU v5": (2765e9, f"{_TPU}/v5p"),
    "TPU v5p": (2765e9, f"{_TPU}/v5p"),
    "TPU v6 lite": (1640e9, f"{_TPU}/v6e"),
    "TPU v6e": (1640e9, f"{_TPU}/v6e"),
    "NVIDIA A100-SXM4-40GB": (1555e9, f"{_NVIDIA}/a100"),
    "NVIDIA A100-SXM4-80GB": (2039e9, f"{_NVIDIA}/a100"),
    "NVIDIA H100 80GB HBM3": (3350e9, f"{_NVIDIA}/h100"),
    "NVIDIA H100 PCIe": (2000e9, f"{_NVIDIA}/h100"),
    "NVIDIA H200": (4800e9, f"{_NVIDIA}/h200"),
    "NVIDIA L4": (300e9, f"{_NVIDIA}/l4"),
}


@dataclass(frozen=True)
class Machine:
    """Devices and host. `count`: devices the models were spread over; `device_bytes`: memory of
    one; `bandwidth`: bytes/s of one. None where it is not known."""

    platform: str
    device: str
    count: int
    device_bytes: int | None
    bandwidth: float | None
    bandwidth_source: str | None
    jax: str
    jaxlib: str
    python: str
    system: str
    cpu: str | None
    cores: int | None
    memory_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """As in evaluation.json."""
        return asdict(self)


def read_machine(count: int) -> Machine:
    """This machine, with JAX's default devices, `count` of which are used."""
    device = jax.local_devices()[0]
    bandwidth, source = BANDWIDTHS.get(device.device_kind, (None, None))
    return Machine(
        platform=device.platform,
        device=device.device_kind,
        count=count,
        device_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        bandwidth=bandwidth,
        bandwidth_source=source,
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        cores=os.cpu_count(),
        memory_bytes=_memory(),
    )


def cpu_name() -> str | None:
    """The host's processor, as its maker calls it; None where it is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
