"""What ranks and their GPUs do and use, and who is slow, as rows of tables of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_runner.observe.format import byte_size, count, duration, percent, rate
from ddp_runner.observe.history.json_lines import number, whole

Columns = tuple[tuple[str, str], ...]
RANK_COLUMNS: Columns = (
    ("rank", "rank"),
    ("node", "node"),
    ("state", "state"),
    ("step", "step"),
    ("phase", "phase"),
    ("device", "device"),
    ("memory", "memory"),
    ("loaders", "loaders"),
    ("cores", "cores"),
    ("samples", "samples/s"),
    ("wait", "data wait"),
    ("own", "own time a step"),
    ("slow", "slow"),
)
GPU_COLUMNS: Columns = (
    ("gpu", "GPU"),
    ("ranks", "ranks"),
    ("use", "use"),
    ("memory", "memory"),
    ("temperature", "temperature"),
    ("power", "power"),
    ("clock", "clock"),
    ("said", "age"),
    ("trouble", "throttled, problems"),
)
_OLD_S = 15.0


def rank_rows(
    ranks: Iterable[Mapping[str, Any]],
    *,
    own_s: Mapping[int, float],
    slow: Mapping[int, float],
) -> list[dict[str, Any]]:
    """A row a rank; what a run does not say is a dash. ``own_s``: own time a step; ``slow``: how many times the others'."""
    return [_rank(rank, own_s, slow) for rank in ranks]


def shown_columns(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Without those that say the same nothing in every row."""
    return tuple(
        (key, label) for key, label in columns if any(row[key] not in ("-", "") for row in rows)
    )


def _rank(rank: Mapping[str, Any], own: Mapping[int, float], slow: Mapping[int, float]) -> dict[str, Any]:  # fmt: skip
    number_ = whole(rank.get("rank"), 0)
    phase = str(rank.get("building") or rank.get("phase", ""))
    age_s = number(rank.get("phase_age_s")) or 0.0
    own_s = own.get(number_)
    return {
        "rank": number_,
        "node": whole(rank.get("node"), 0) or "-",
        "state": str(rank.get("state", "")),
        "step": _said(rank, "step", lambda value: count(int(value))),
        "phase": f"{phase} {duration(age_s)}" if age_s >= 2 else phase,
        "device": str(rank.get("device", "")),
        "memory": _said(rank, "rss_bytes", byte_size),
        "loaders": _said(rank, "loader_bytes", byte_size),
        "cores": _said(rank, "cpu_share", rate),
        "samples": _said(rank, "samples_per_s", rate),
        "wait": _said(rank, "data_wait_share", percent),
        "own": "-" if own_s is None else f"{own_s * 1e3:.1f} ms",
        "slow": f"{slow[number_]:.1f} times the others" if number_ in slow else "",
    }


def gpu_rows(gpus: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a GPU that ranks compute on."""
    rows = []
    for gpu in gpus:
        node, index = whole(gpu.get("node"), 0), whole(gpu.get("index"), 0)
        age_s = number(gpu.get("age_s"))
        rows.append(
            {
                "id": f"{node}:{index}",
                "gpu": f"{f'node {node}, ' if node else ''}{index} {gpu.get('name') or ''}".strip(),
                "ranks": _listed(gpu.get("ranks")),
                "use": _said(gpu, "use", percent),
                "memory": _of_total(gpu, "memory_used_bytes", "memory_total_bytes", byte_size),
                "temperature": _said(gpu, "temperature_c", lambda value: f"{value:.0f} °C"),
                "power": _of_total(gpu, "power_w", "power_limit_w", lambda value: f"{value:.0f} W"),
                "clock": _said(gpu, "clock_mhz", lambda value: f"{value:.0f} MHz"),
                "said": "-" if age_s is None or age_s < _OLD_S else f"{duration(age_s)} old",
                "trouble": ", ".join(
                    one for key in ("throttling", "problems") if (one := _listed(gpu.get(key)))
                ),
            }
        )
    return rows


def _said(record: Mapping[str, Any], key: str, form: Any) -> str:
    value = number(record.get(key))
    is_none = value is None or (form is byte_size and not value)  # of a process that has ended
    return "-" if is_none else str(form(value))


def _of_total(record: Mapping[str, Any], key: str, total: str, form: Any) -> str:
    used = _said(record, key, form)
    return used if record.get(total) is None else f"{used} of {_said(record, total, form)}"


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else ""
