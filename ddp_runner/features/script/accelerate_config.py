"""Reads the options of ``accelerate launch`` and the file of ``accelerate config``, for ``run``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from ddp_runner.config.sources import parse_yaml
from ddp_runner.kernel.rules.errors import BadInputError

PRECISION = "ACCELERATE_MIXED_PRECISION"  # the variables that accelerate's Accelerator reads
ON_CPU = "ACCELERATE_USE_CPU"
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_WHOLE_MODELS = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU")  # distributed_type
_IMPORTS = re.compile(rb"^\s*(?:from|import)\s+accelerate\b", re.MULTILINE)


def accelerate_variables(
    source: bytes, *, asked: str, is_on_cpu: bool | None, environment: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables for the ranks of a script with this text, and notes for people.

    ``asked`` is the value of ``--mixed-precision``, ``is_on_cpu`` the user's choice of device; None: no choice.
    Raises BadInputError for a precision that accelerate lacks, or that the script does not read.
    """
    if asked and asked not in _PRECISIONS:
        raise BadInputError("--mixed-precision", asked, f"must be {', '.join(_PRECISIONS)}")
    if not _IMPORTS.search(source):
        if asked:
            expected = f"is read by accelerate, which this script does not import: set {PRECISION}"
            raise BadInputError("--mixed-precision", asked, expected)
        return {}, ()
    path = _stored_file(environment)
    stored, notes = _read(path) if path.is_file() else ({}, [])
    found = {PRECISION: asked} if asked else {}
    precision = str(stored.get("mixed_precision") or "no").lower()
    precision = "no" if precision == "false" else precision  # a bare no in YAML
    used = []
    if PRECISION not in {*found, *environment} and precision in _PRECISIONS and precision != "no":
        found[PRECISION] = precision
        used.append(f"mixed_precision={precision}")
    if stored.get("use_cpu") is True and is_on_cpu is None and ON_CPU not in environment:
        found[ON_CPU] = "true"
        used.append("use_cpu=true")
    elif is_on_cpu:
        found[ON_CPU] = "true"
    if used:
        notes.append(f"{path}: {', '.join(used)} is taken; the rest is for accelerate launch")
    kind = str(stored.get("distributed_type") or "NO").upper()
    if kind not in (*_WHOLE_MODELS, "FALSE"):
        notes.append(
            f"{path}: distributed_type={kind} is not taken: run starts ranks as torchrun does"
        )
    return found, tuple(notes)


def _stored_file(environment: Mapping[str, str]) -> Path:
    """Return the file that ``accelerate config`` writes by default."""
    caches = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/"), ".cache"))
    home = environment.get("HF_HOME") or str(Path(caches, "huggingface"))
    folder = Path(home, "accelerate")
    file = folder / "default_config.yaml"
    return file if file.is_file() else folder / "default_config.json"


def _read(path: Path) -> tuple[Mapping[str, object], list[str]]:
    try:
        stored = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}, [f"{path}: cannot be read, so nothing of it is taken"]
    return (stored, []) if isinstance(stored, Mapping) else ({}, [])
