"""The description of a checkpoint as a value, and its JSON form. Never touches a disk.

A manifest is published after the file that it names. The same facts, without size and digest, are also
stored inside the file (:meth:`Manifest.facts`), so that a file without its manifest is still known.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING

from ddp_runner.checkpoint.file_hash import BLOCKS, PLAIN, SUMS
from ddp_runner.core.run_stages import StageOfFile
from ddp_runner.kernel.system.run_files import from_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.core.settings import JsonValue

# By how the file is hashed: what versions that do not know that refuse.
FORMATS = {PLAIN: 1, BLOCKS: 2, SUMS: 3}
FORMAT = FORMATS[PLAIN]
_FILE_NAME = re.compile(r"step_(\d{8,})\.(pt|json)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
AMID_SKIPPED = (
    "amid_skipped"  # the reason of one that is kept as the best, shortly after a skipped step
)
NO_DIGEST = "0" * 64
_SEAL = "facts_sha256"
_ABOUT_THE_FILE = ("file", "size_bytes", "sha256", "hashed")


def checkpoint_name(step: int) -> str:
    """The file name of the checkpoint of ``step``."""
    return f"step_{step:08d}.pt"


def manifest_name(step: int) -> str:
    """The file name of the manifest of ``step``."""
    return f"step_{step:08d}.json"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's or manifest's file name; None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The facts about a checkpoint that are known when its state is captured, before any file is there.

    ``step`` is the number of committed steps, ``samples`` the samples they took. ``monitored`` is the value by which
    ``best`` is judged, None if there was none: the value of the figure ``monitor`` (older files name none); lower is
    better, with ``mode`` ``max`` higher. ``meaning`` is the resume key of the run (model, data, global batch, seed): the
    caller refuses to resume under another one. ``created_utc`` is for people; ``order`` is the version of the order in
    which samples are taken. ``recipe`` says how the steps of the launch that wrote the file were computed, ``changes``
    how that differed before; ``data`` holds the facts that its ranks have seen of their data. ``start_sha256`` is the
    digest of the start weights that the file leaves out; empty if it has all. ``about`` is for people and tools, and only
    its ``stage`` decides something, the stage in which a run resumes: ``settings`` (without secrets), ``tokens``,
    ``loss`` of the last step, ``figures`` of the newest evaluation, ``best`` (step and value) so far.
    """

    step: int
    epoch: int
    samples: int
    run_id: str
    monitored: float | None
    meaning: Mapping[str, JsonValue]
    settings_digest: str
    reason: str
    versions: Mapping[str, str] = field(default_factory=dict)
    created_utc: str = ""
    order: int = 1
    recipe: Mapping[str, JsonValue] = field(default_factory=dict)
    changes: Sequence[str] = ()
    data: Mapping[str, JsonValue] = field(default_factory=dict)
    start_sha256: str = ""
    about: Mapping[str, JsonValue] = field(default_factory=dict)
    monitor: str = ""
    mode: str = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(CheckpointFacts):
    """One published checkpoint: its facts and what is known of its file.

    ``sha256`` is the digest of the whole file, ``hashed`` how that was made (``file_hash``).
    """

    file: str
    size_bytes: int
    sha256: str
    hashed: str = PLAIN
    format: int = FORMAT

    @classmethod
    def of(
        cls, facts: CheckpointFacts, *, size_bytes: int = 0, sha256: str = NO_DIGEST
    ) -> Manifest:
        """Return the manifest of a file with these facts; without a size, of one that is not there yet."""
        values = {one.name: getattr(facts, one.name) for one in fields(CheckpointFacts)}
        name = checkpoint_name(facts.step)
        return cls(**values, file=name, size_bytes=size_bytes, sha256=sha256)

    def to_json(self) -> str:
        """A JSON object, one field a line. Raises TypeError or ValueError if a value has no JSON form."""
        values = self._values()
        sealed = {**values, _SEAL: _seal_of(values)}
        return json.dumps(sealed, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def facts(self) -> dict[str, object]:
        """Return the facts without name, size and digest of the file, as plain JSON values."""
        values: dict[str, object] = json.loads(
            json.dumps(self._values(), sort_keys=True, allow_nan=False)
        )
        return {name: value for name, value in values.items() if name not in _ABOUT_THE_FILE}

    def _values(self) -> dict[str, object]:
        """Return what is written of each field; its mappings and sequences are not copied."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["format"] = FORMATS[self.hashed]
        return values

    @classmethod
    def from_facts(
        cls, facts: Mapping[str, object], *, file: str, size_bytes: int, sha256: str
    ) -> Manifest:
        """A manifest for a file that carries its own ``facts``. Raises ValueError if they are none."""
        return _checked({**facts, "file": file, "size_bytes": size_bytes, "sha256": sha256})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest in ``text``. Raises ValueError, saying what is wrong, if it is none."""
        return _of_text(text)


@lru_cache(
    maxsize=64
)  # a save reads those of all files several times; nobody changes what is in one
def _of_text(text: str) -> Manifest:
    try:
        values = from_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object but {type(values).__name__}")  # noqa: TRY004  # as all garbage
    found = _checked(values)
    seal = values.pop(_SEAL, None)  # older files have none
    if seal is not None and seal != _seal_of(values):
        raise ValueError(f"its fields do not match its {_SEAL}")
    return found


def _seal_of(values: Mapping[str, object]) -> str:
    """Return the digest of a manifest's facts as they are read, by which a flipped bit in one of them is found.

    What it says about the file is compared with the file.
    """
    facts = {name: value for name, value in values.items() if name not in _ABOUT_THE_FILE}
    # Keys that are numbers are texts then, and sort as such.
    as_read = json.loads(json.dumps(facts, allow_nan=False))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


_TYPES: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "step": (int,),
    "epoch": (int,),
    "samples": (int,),
    "run_id": (str,),
    "file": (str,),
    "size_bytes": (int,),
    "sha256": (str,),
    "monitored": (int, float, type(None)),
    "meaning": (dict,),
    "settings_digest": (str,),
    "versions": (dict,),
    "created_utc": (str,),
    "reason": (str,),
    "order": (int,),
    "recipe": (dict,),
    "changes": (list,),
    "data": (dict,),
    "start_sha256": (str,),
    "about": (dict,),
    "monitor": (str,),
    "mode": (str,),
    "hashed": (str,),
}
# Fields that older files of this format lack.
_SINCE: dict[str, object] = {
    "order": 1,
    "recipe": {},
    "changes": [],
    "data": {},
    "start_sha256": "",
    "about": {},
    "monitor": "",
    "mode": "min",
    "hashed": PLAIN,
}
_NUMBER_MAX = 2**63  # JSON has no limit; what shows or compares numbers has
_COUNTS = ("step", "epoch", "samples", "size_bytes")


def _checked(values: Mapping[str, object]) -> Manifest:
    """Build a manifest out of parsed JSON. Fields that a newer version added are dropped."""
    values = {**_SINCE, **values}
    missing = sorted(set(_TYPES) - set(values))
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    for name, types in _TYPES.items():
        value = values[name]
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"{name} is {value!r}, not {wanted}")  # noqa: TRY004  # as all garbage
        if isinstance(value, int) and abs(value) > _NUMBER_MAX:
            raise ValueError(f"{name} is a number of {value.bit_length()} bits")
        if name in _COUNTS and isinstance(value, int) and value < 0:
            raise ValueError(f"{name} is {value}, below 0")
    if values["format"] not in FORMATS.values():
        raise ValueError(
            f"format {values['format']}; this version reads format 1 to {max(FORMATS.values())}"
        )
    if values["hashed"] not in FORMATS:
        raise ValueError(f"hashed {values['hashed']!r}; this version knows {', '.join(FORMATS)}")
    if not _SHA256.fullmatch(str(values["sha256"])):
        raise ValueError("sha256 is not 64 hexadecimal digits")
    if step_of(str(values["file"])) != values["step"]:
        raise ValueError(f"file {values['file']!r} is not the file of step {values['step']}")
    known: dict[str, object] = {**{name: values[name] for name in _TYPES}, "format": FORMAT}
    known["changes"] = tuple(str(line) for line in values["changes"])  # type: ignore[attr-defined] # a list
    return Manifest(**known)  # type: ignore[arg-type]  # the types were compared above


def is_judged_as(manifest: Manifest, other: Manifest) -> bool:
    """Return True if the monitored values of both can be compared."""
    names = {manifest.monitor, other.monitor}
    return manifest.mode == other.mode and (len(names) == 1 or "" in names)


def rank_of(value: float, mode: str) -> float:
    """Lower the better ``value`` is."""
    return -value if mode == "max" else value


def stage_name(manifest: Manifest | None) -> str:
    """The stage that it is of; empty without stages, and where nobody knows."""
    stage = None if manifest is None else StageOfFile.from_about(manifest.about)
    return "" if stage is None else stage.name


def best_of(manifest: Manifest) -> list[tuple[float, int]]:
    """Value and step of the best that a manifest knows of, whose file may be gone; empty without one."""
    best = manifest.about.get("best")
    if not isinstance(best, dict):
        return []
    value, step = best.get("value"), best.get("step")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(step, int):
        return []
    return [(float(value), step)]
