"""Peaks of GPUs, and what a model needs: what is not known is None."""

from __future__ import annotations

import pytest

from ddp_runner.training.figures.use_figures import arithmetic_of, flops_per_token, peak_flops


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
    ],
)
def test_peaks_are_those_of_dense_matrices(name, arithmetic, tera):
    """By torch's name of the device."""
    assert peak_flops(name, arithmetic) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("NVIDIA GeForce RTX 9090", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # which it only emulates
        ("NVIDIA A10G", "bf16"),  # another device than the A10
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16"),
        ("NVIDIA H100", "bf16"),  # which of three?
        ("", "fp32"),
    ],
)
def test_what_is_not_known_is_never_guessed(name, arithmetic):
    """A wrong peak makes a wrong utilization, which nobody can see."""
    assert peak_flops(name, arithmetic) is None


def test_arithmetic_follows_precision_and_how_torch_multiplies():
    """Float32 matrices are multiplied in TF32 where the run has asked for that."""
    assert arithmetic_of("bf16", "highest") == "bf16"
    assert arithmetic_of("fp32", "highest") == "fp32"
    assert arithmetic_of("fp32", "high") == "tf32"
    assert arithmetic_of("fp32", "medium") is None


def test_a_token_needs_six_flop_a_parameter():
    """Two forward and four backward; one that is frozen needs forward alone."""
    assert flops_per_token(trained=1000, frozen=0) == 6000
    assert flops_per_token(trained=0, frozen=10) == 20
