"""What nvidia-ml-py has of NVML, over devices that a file describes: names, units and errors are its own.

``FAKE_NVML`` names a JSON file: ``{"gpus": [{...}], "hang": false}``. It is read at each call, so that a
test can change what the driver says.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0


class NVMLError(Exception):
    pass


def _state():
    state = json.loads(Path(os.environ["FAKE_NVML"]).read_text(encoding="utf-8"))
    while state.get("hang"):
        time.sleep(3600)
    return state


def _gpu(handle):
    gpu = _state()["gpus"][handle]
    if gpu.get("lost"):
        raise NVMLError("GPU is lost")
    return gpu


def _of(handle, name):
    value = _gpu(handle).get(name)
    if value is None:
        raise NVMLError("Not Supported")
    return value


def nvmlInit():
    if _state().get("no_driver"):
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    _gpu(index)
    return index


def nvmlDeviceGetUUID(handle):
    return _of(handle, "uuid")


def nvmlDeviceGetName(handle):
    return _of(handle, "name")


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_of(handle, "percent"), memory=0)


def nvmlDeviceGetMemoryInfo(handle):
    used, total = _of(handle, "used"), _of(handle, "total")
    return SimpleNamespace(used=used, total=total, free=total - used)


def nvmlDeviceGetTemperature(handle, sensor):
    assert sensor == NVML_TEMPERATURE_GPU
    return _of(handle, "celsius")


def nvmlDeviceGetPowerUsage(handle):
    return _of(handle, "milliwatts")


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return _of(handle, "limit_milliwatts")


def nvmlDeviceGetClockInfo(handle, kind):
    return _of(handle, {NVML_CLOCK_SM: "sm_mhz", NVML_CLOCK_MEM: "memory_mhz"}[kind])


def nvmlDeviceGetMaxClockInfo(handle, kind):
    assert kind == NVML_CLOCK_SM
    return _of(handle, "sm_max_mhz")


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return _of(handle, "reasons")


def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    assert counter == NVML_VOLATILE_ECC
    return _of(handle, "ecc")[kind]


def nvmlDeviceGetRemappedRows(handle):
    return tuple(_of(handle, "rows"))
