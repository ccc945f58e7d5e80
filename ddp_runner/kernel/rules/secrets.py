"""Recognises secrets by the names of their settings, and masks them. Never reads a file.

Names are taken word by word: ``api_key``, ``hfToken`` and ``wandb_apikey`` hide their values;
``max_tokens=512``, ``tokenizer`` and ``keyboard`` do not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

HIDDEN = "***"
_CHARACTERS_MIN = 4  # of a value that is looked for in other texts: "1" would be everywhere
_VARIABLE_CHARACTERS_MIN = 8  # of a variable of any program: true, none and 1 are no secrets
_EVERYWHERE = frozenset({"true", "false", "none", "null", "auto"})
# Names the variables that a .env file has given, which are meant for this run: shorter ones are secrets, too.
GIVEN_BY_FILE = "DDP_RUNNER_ENV_FILE_NAMES"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(r"key|token|(?:.*(?:secret|password|passwd).*)|.+(?:key|token)")
_SEVERAL = re.compile(r".*(?:key|token)s")
_ASSIGNMENT = re.compile(r"((?:--)?[^\s=]+)=(.*)", re.DOTALL)


def is_secret(name: str, value: object = "") -> bool:
    """Return whether ``name``, alone or as part of a section, names a secret. Several tokens may be a number."""
    is_one, are_several = _names(name)
    return is_one or (are_several and not isinstance(value, (int, float)) and value is not None)


@functools.lru_cache(
    maxsize=1024
)  # all settings have names, and their record is masked more than once
def _names(name: str) -> tuple[bool, bool]:
    """Return whether ``name`` is that of a secret, and whether it is that of several, or of their number."""
    last = (name.split() or [""])[-1]
    words = [word.lower() for word in _WORDS.findall(last)]
    return any(map(_SECRET.fullmatch, words)), any(map(_SEVERAL.fullmatch, words))


def holds_secret(name: str, value: object) -> bool:
    """Return whether ``value`` is a secret, or a mapping that contains one."""
    return masked(value, name) != value


def masked(value: object, name: str = "") -> object:
    """``value`` with each secret replaced, wherever in a mapping or list it stands."""
    if name and is_secret(name, value) and value not in (None, ""):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(masked(item) for item in value)
    return value


def masked_words(words: Sequence[str]) -> tuple[str, ...]:
    """A command line as it may be written down: ``NAME=***`` and ``--NAME ***``."""
    shown: list[str] = []
    is_value = False
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if is_value and not word.startswith("--"):
            shown.append(HIDDEN)
        elif found and is_secret(found[1], found[2]):
            shown.append(f"{found[1]}={HIDDEN}")
        else:
            shown.append(_masked_inside(found[1], found[2]) if found else word)
        is_value = word.startswith("--") and not found and is_secret(word)
    return tuple(shown)


def _masked_inside(name: str, text: str) -> str:
    """``NAME=TEXT``; a mapping in the text that names a secret is hidden whole."""
    hides = "{" in text and any(
        is_secret(word) for word in re.findall(r"[\w.-]+(?=\s*['\"]?:)", text)
    )
    return f"{name}={HIDDEN if hides else text}"


def secret_texts(value: object, name: str = "") -> Iterator[str]:
    """Every secret in ``value``, as text that others may have put into theirs."""
    if name and is_secret(name, value):
        yield from _texts(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from secret_texts(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from secret_texts(item)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif len(str(value)) >= _CHARACTERS_MIN and not isinstance(value, bool):
        yield str(value)


def environment_secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of those variables that are secrets by their names, and long enough to be looked for.

    Short ones count where a .env file has given them, but for numbers and words that stand everywhere.
    """
    by_file = environment.get(GIVEN_BY_FILE, "").split(",")
    return tuple(
        value
        for name, value in environment.items()
        if is_secret(name, value)
        and (len(value) >= _VARIABLE_CHARACTERS_MIN or (name in by_file and _is_telling(value)))
    )


def _is_telling(value: str) -> bool:
    is_number = value.replace(".", "").isdecimal()
    return len(value) >= _CHARACTERS_MIN and not is_number and value.lower() not in _EVERYWHERE


def hidden_texts(task: object, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Every secret of a run: among its task's arguments, and in its environment."""
    return (*secret_texts(task), *environment_secrets(environment))


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """``text``, as of an error of a user's code, with each of ``secrets`` replaced."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
