"""What GPUs can compute at most, and what a model needs for a token. Guesses nothing: unknown is None.

Peaks are NVIDIA's own figures for dense matrices (half of those "with sparsity"), in FLOP per second:

- A100 datasheet nvidia-a100-datasheet-us-nvidia-1758950; A10: a10-datasheet
- H100 and H200: https://www.nvidia.com/en-us/data-center/h100/ and /h200/
- B200: the DGX B200 datasheet, by its eight GPUs
- L40S: https://www.nvidia.com/en-us/data-center/l40s/
- V100: volta-v100-datasheet-update-us-1165301; T4: t4-tensor-core-datasheet-951643
"""

from __future__ import annotations

from collections.abc import Mapping

FP32, TF32, BF16, FP16 = "fp32", "tf32", "bf16", "fp16"
_TERA = 1e12


def _ampere_on(fp32: float, tf32: float, half: float) -> Mapping[str, float]:
    return {FP32: fp32 * _TERA, TF32: tf32 * _TERA, BF16: half * _TERA, FP16: half * _TERA}


def _before_ampere(fp32: float, half: float) -> Mapping[str, float]:
    return {FP32: fp32 * _TERA, TF32: fp32 * _TERA, FP16: half * _TERA}


# All words must stand in torch's name of the device; the first row that fits counts.
_PEAKS: tuple[tuple[tuple[str, ...], Mapping[str, float]], ...] = (
    (("H100", "NVL"), _ampere_on(60, 417.5, 835.5)),
    (("H100", "PCIe"), _ampere_on(51, 378, 756)),
    (("H100", "HBM3"), _ampere_on(67, 494.7, 989.4)),
    (("H200", "NVL"), _ampere_on(60, 417.5, 835.5)),
    (("H200",), _ampere_on(67, 494.7, 989.4)),
    (("B200",), _ampere_on(75, 1125, 2250)),
    (("A100",), _ampere_on(19.5, 156, 312)),
    (("L40S",), _ampere_on(91.6, 183, 362)),
    (("A10",), _ampere_on(31.2, 62.5, 125)),
    (("V100S", "PCIE"), _before_ampere(16.4, 130)),
    (("V100", "SXM2"), _before_ampere(15.7, 125)),
    (("V100", "PCIE"), _before_ampere(14, 112)),
    (("T4",), _before_ampere(8.1, 65)),
)


def peak_flops(device: str, arithmetic: str) -> float | None:
    """Of a device by torch's name for it, in one of ``fp32``, ``tf32``, ``bf16``, ``fp16``; FLOP per second.

    None for a device that is not in the table, an arithmetic that it is not made for, and a part of a
    GPU (MIG), whose share of it nobody has written down.
    """
    words = device.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next(
        (peaks.get(arithmetic) for named, peaks in _PEAKS if all(one in words for one in named)),
        None,
    )


def arithmetic_of(precision: str, matmul_precision: str) -> str | None:
    """What multiplies matrices: ``precision`` as the run has it, and how torch multiplies float32.

    None for ``medium``, where torch takes what the device has.
    """
    if precision != FP32:
        return precision
    return {"highest": FP32, "high": TF32}.get(matmul_precision)


def flops_per_token(*, trained: int, frozen: int) -> float:
    """What a step needs for a token, by the parameters: 6 for a trained one, 2 for one that is frozen.

    Two in forward, two for the gradient of the weight, two for that of its input: 6N of Kaplan et al.
    (2020, section 2.1). Attention over the sequence and activations that are computed again are left out,
    and gradients that pass through frozen layers: so it is no more than what is really computed.
    """
    return 6.0 * trained + 2.0 * frozen
