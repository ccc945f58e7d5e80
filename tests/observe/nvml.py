"""A GPU driver for tests: ``nvidia-ml-py`` as it is, over devices that a test makes up."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "fake_nvml"

H100 = {
    "uuid": "GPU-aaaa0001",
    "name": "NVIDIA H100 80GB HBM3",
    "percent": 93,
    "used": 41_000_000_000,
    "total": 85_000_000_000,
    "celsius": 61,
    "milliwatts": 512_300,
    "limit_milliwatts": 700_000,
    "sm_mhz": 1755,
    "sm_max_mhz": 1980,
    "memory_mhz": 2619,
    "reasons": 0x4 | 0x40,
    "ecc": [3, 0],
    "rows": [0, 0, 0, 0],
}


class Driver:
    """Says what ``write`` says; ``environment`` leads a process to it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "nvml.json"
        self.environment = {"FAKE_NVML": str(self._path), "PYTHONPATH": str(FOLDER)}
        self.write(H100)

    def write(self, *gpus, **state):
        """From now on these devices."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({"gpus": gpus, **state}), encoding="utf-8")
        temporary.replace(self._path)
