"""Reads a dead process's last output: the reason of its death and its place in the code.

It knows the texts of faulthandler, of tracebacks, of the C++ runtime and of glibc; it opens no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_runner.kernel.rules.faults import DETAIL_CHARACTERS_MAX

REASON_CHARACTERS_MAX = 300
_REASON_TEXT_MAX = 2_000  # a what() may bring along the stack of C++

_FATAL = "Fatal Python error: "
# What faulthandler calls the signals that a process brings upon itself.
_FATAL_OF_SIGNAL = {
    "SIGILL": ("Illegal instruction",),
    "SIGABRT": ("Aborted",),
    "SIGBUS": ("Bus error",),
    "SIGFPE": ("Floating point exception", "Floating-point exception"),
    "SIGSEGV": ("Segmentation fault",),
}
SELF_MADE_SIGNALS = frozenset(_FATAL_OF_SIGNAL)
_FATAL_TEXTS = frozenset(text for texts in _FATAL_OF_SIGNAL.values() for text in texts)

_TERMINATE = "terminate called "
_WHAT = "  what():"
# glibc and OpenMP say why they abort in the line before it.
_ABORT_LINE = re.compile(
    r"(free|munmap_chunk|(m|re|c)alloc|corrupted|double free|tcache\w*)\b.*"
    r"|\*\*\* .* detected \*\*\*.*|.*: Assertion .* failed\.?|OMP: Error .*"
)
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)\.")
_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_MAIN = re.compile(r"^(?:Current thread 0x|Thread 0x[0-9a-f]+ \[MainThread\])", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashOutput:
    """The report of a crash. ``reason`` is the first line that says why; ``text`` the excerpt worth keeping, bounded.

    ``mismatch``: the bytes that gloo was sent and expected, if it ended the process for that.
    """

    reason: str
    text: str
    mismatch: tuple[int, int] | None = None


def read_crash_output(said: str, *, signal_name: str) -> CrashOutput | None:
    """Why a process that ``signal_name`` ended died, by its own account; None where it gives none."""
    if signal_name not in SELF_MADE_SIGNALS:
        return None
    begin, title = _last_dump(said, signal_name)
    preamble = _preamble(said[:begin]) if signal_name == "SIGABRT" else ""
    if not preamble and begin == len(said):
        return None
    reason = _reason(preamble) or (title if title not in _FATAL_TEXTS else "")
    sizes = _MISMATCH.search(preamble)
    return CrashOutput(
        reason=reason[:REASON_CHARACTERS_MAX],
        text=_kept(preamble, said[begin:]),
        mismatch=None if sizes is None else (int(sizes[1]), int(sizes[2])),
    )


def read_stack(said: str) -> str:
    """Return a process's place when a signal asked for its stacks: the main thread's first stack, or "".

    Later stacks are ignored: the abort of its generation may have freed the process since.
    """
    asked = _MAIN.search(said)
    return _first_stack(said[asked.start() :])[:DETAIL_CHARACTERS_MAX] if asked else ""


def user_frame(text: str, *, own: str) -> str:
    """Return the user's innermost frame, as ``in loss, task.py:31``; "" if the stack has none.

    ``text`` is a traceback, or a list of stacks, of which the first counts. Frames of Python, of packages and
    of files below the folder ``own`` are not the user's, except its tasks, which are examples of user code.
    """
    newest_last = "(most recent call last)" in text
    begin = _BLOCK.search(text)
    stack = text if newest_last or begin is None else _first_stack(text[begin.start() :])
    frames = [
        found
        for found in _FRAME.finditer(stack)
        if not _LIBRARY.search(found["file"])
        and (not found["file"].startswith(f"{own}/") or found["file"].startswith(f"{own}/tasks/"))
    ]
    if not frames:
        return ""
    innermost = frames[-1 if newest_last else 0]
    return f"in {innermost['name']}, {innermost['file'].rpartition('/')[2]}:{innermost['line']}"


def _last_dump(said: str, signal_name: str) -> tuple[int, str]:
    """Return where the newest dump for the signal begins, and its title; the end of the text if there is none."""
    begin = said.rfind(_FATAL)
    title = said[begin:].partition("\n")[0].removeprefix(_FATAL)
    # Python itself aborts with a title of its own; a loader worker may have dumped as well.
    others = _FATAL_TEXTS.difference(_FATAL_OF_SIGNAL[signal_name])
    fits = (
        title not in others if signal_name == "SIGABRT" else title in _FATAL_OF_SIGNAL[signal_name]
    )
    return (begin, title) if begin >= 0 and fits else (len(said), "")


def _preamble(said: str) -> str:
    """Return the last words of the C++ runtime or of glibc, which may belong to this abort."""
    begin = said.rfind(_TERMINATE)
    if begin >= 0:
        return said[begin:]
    last = said.rstrip("\n").rpartition("\n")[2]
    return last if _ABORT_LINE.fullmatch(last) else ""


def _reason(preamble: str) -> str:
    lines = preamble.splitlines()
    what = next((line for line in lines if line.startswith(_WHAT)), "").removeprefix(_WHAT).strip()
    return what or (lines[0].strip() if lines else "")


def _kept(preamble: str, dump: str) -> str:
    """The dump with the stack of the thread that died first: what comes last may be cut."""
    title, _, rest = dump.partition("\n")
    blocks = [_first_stack(rest[match.start() :]) for match in _BLOCK.finditer(rest)]
    blocks.sort(key=lambda block: not block.startswith("Current"))
    if blocks and not blocks[0].startswith("Current"):
        blocks.reverse()  # a thread of C++ alone died; the main thread is the last one of Python's
    text = "\n\n".join([preamble[:_REASON_TEXT_MAX].strip(), title, *blocks]).strip()
    return text[:DETAIL_CHARACTERS_MAX]


def _first_stack(text: str) -> str:
    """The first thread's lines: its head and the frames below it."""
    head, _, rest = text.partition("\n")
    lines = [head]
    for line in rest.split("\n"):
        if not line.startswith("  "):
            break
        lines.append(line)
    return "\n".join(lines)
