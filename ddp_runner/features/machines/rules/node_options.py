"""The number of machines and their meeting point, as torchrun's options and variables give them.

Nothing is looked up: no name is resolved and no address is contacted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_runner.core.launch_plan import NNODES, NO_ID, NodeOptions
from ddp_runner.kernel.rules.errors import BadInputError

DEFAULT_PORT = 29400  # torchrun's
ENGINE = "--engine"  # has a cluster place the machines
# Option -> the variables that stand for it, of which the first that is set counts.
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "--nnodes": NNODES,
    "--node-rank": ("PET_NODE_RANK", "NODE_RANK"),
    "--rdzv-endpoint": ("PET_RDZV_ENDPOINT",),
    "--rdzv-id": ("PET_RDZV_ID",),
    "--rdzv-backend": ("PET_RDZV_BACKEND",),
    "--rdzv-conf": ("PET_RDZV_CONF",),
    "--local-addr": ("PET_LOCAL_ADDR",),
}
# What is given as an option, and not by a launcher's variables, is meant.
_OF_SEVERAL = ("--rdzv-endpoint", "--master-addr", "--node-rank")
# Host and port of rank 0, as launchers name them that know no endpoint.
OF_MASTER = ("--master-addr", "--master-port")
_MASTERS = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT"))
_HERE = r"localhost|127\.0\.0\.1|0\.0\.0\.0|\[?::1\]?"
# What they may say of a run on one machine, which is so in any case.
_SO_OF_ONE = {
    "--node-rank": "0",
    "--master-addr": _HERE,
    "--rdzv-endpoint": rf"({_HERE})(:\d+)?",
}
_BACKENDS = ("c10d", "static")
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_PORT_MAX = 65_535
_NONE: Mapping[str, tuple[str, str]] = {}


def node_options(
    options: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    settings: Mapping[str, tuple[str, str]] = _NONE,
    own_host: str = "",
) -> NodeOptions | None:
    """Return the machines that the options, else the environment, else the settings ask for; None for one machine.

    ``options`` has ``--nnodes`` and the others. ``settings``: by option, how it was written there and its text.
    ``own_host``: the name of this machine, where options may say of one machine what is so in any case; empty:
    they may not. Raises BadInputError, which names the option, the variable or the setting.
    """
    asked = _Asked(options, environment, settings)
    least, most = asked.range_of_nodes()
    if most > 1 or "--rdzv-backend" in options:
        asked.refuse_backend()
    if most == 1:
        asked.refuse_alone(own_host)
        return None
    host, port = asked.endpoint()
    conf = asked.conf()
    return NodeOptions(
        least=least,
        most=most,
        host=host,
        port=port,
        node_rank=asked.node_rank(most),
        run_id=asked.text("--rdzv-id")[1] or NO_ID,
        is_host=conf.is_host,
        join_timeout_s=conf.join_timeout_s,
        last_call_s=conf.last_call_s,
        local_addr=asked.text("--local-addr")[1],
    )


def unused_on_one_machine(environment: Mapping[str, str]) -> str:
    """A line for people that names the variables of torchrun's options that this run does not use; else empty."""
    names = (name for name in environment if name.startswith("PET_") and name != "PET_NNODES")
    found = sorted(names)
    if not found:
        return ""
    has = "is" if len(found) == 1 else "are"
    return f"{', '.join(found)} of the environment {has} not used: this run is on one machine"


def endpoint_of(text: str) -> tuple[str, int]:
    """Host and port of an endpoint as ``--rdzv-endpoint`` has it. Raises BadInputError."""
    return _Asked({"--rdzv-endpoint": text}, {}, _NONE).endpoint()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conf:
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    is_host: bool | None = None


class _Asked:
    """Options first, then variables, then settings; each answer with the name that it was given by."""

    def __init__(
        self,
        options: Mapping[str, str],
        environment: Mapping[str, str],
        settings: Mapping[str, tuple[str, str]],
    ) -> None:
        self._options = options
        self._environment = environment
        self._settings = settings

    def text(self, option: str) -> tuple[str, str]:
        """Return the name that was used, and its value; two empty texts if there is none."""
        if option in self._options:
            return option, self._options[option]
        for name in VARIABLES[option]:
            if self._environment.get(name):
                return name, self._environment[name]
        return self._settings.get(option, ("", ""))

    def range_of_nodes(self) -> tuple[int, int]:
        name, text = self.text("--nnodes")
        if not name:
            return 1, 1
        first, has_range, second = text.partition(":")
        expected = "must be a number of machines, such as 2, or a range, such as 2:4"
        least = _whole(name, text, first, expected, at_least=1)
        most = _whole(name, text, second, expected, at_least=1) if has_range else least
        if least > most:
            raise BadInputError(name, text, f"must not begin above its end: {most}:{least}")
        return least, most

    def refuse_alone(self, own_host: str) -> None:
        """Options of several machines where nothing says how many: each would train by itself."""
        is_said = bool(self.text("--nnodes")[0])
        for option in _OF_SEVERAL:
            value = self._options.get(option)
            if value and not is_said and not (own_host and _is_so_of_one(option, value, own_host)):
                expected = (
                    "is for several machines: give --nnodes as well, such as 2, on all of them"
                )
                raise BadInputError(option, value, expected)
        if "--node-rank" in self._options:
            self.node_rank(1)

    def node_rank(self, most: int) -> int | None:
        name, text = self.text("--node-rank")
        if not name:
            return None
        expected = f"must be the number of this machine, 0 to {most - 1}"
        rank = _whole(name, text, text, expected, at_least=0)
        if rank >= most:
            raise BadInputError(name, text, f"{expected}, with --nnodes {most}")
        return rank

    def endpoint(self) -> tuple[str, int]:
        name, text = self.text("--rdzv-endpoint")
        if name != "--rdzv-endpoint" and (host := self._options.get(OF_MASTER[0], "")):
            port = self._options.get(OF_MASTER[1], "")
            return _checked_host(OF_MASTER[0], host, host), _port(OF_MASTER[1], port, port)
        is_setting = name not in ("--rdzv-endpoint", *VARIABLES["--rdzv-endpoint"])
        if name and not (is_setting and any(self._environment.get(one) for one, _ in _MASTERS)):
            host, port = _split(text)
            return _checked_host(name, text, host), _port(name, text, port)
        for address, port_name in _MASTERS:
            host = self._environment.get(address, "")
            if host:
                port = self._environment.get(port_name, "")
                return _checked_host(address, host, host), _port(port_name, port, port)
        raise BadInputError(
            "--rdzv-endpoint",
            "",
            "is needed with several machines: HOST[:PORT] of one of them, the same on all",
        )

    def refuse_backend(self) -> None:
        name, text = self.text("--rdzv-backend")
        if name and text not in _BACKENDS:
            raise BadInputError(name, text, "must be c10d or static, which mean the same here")

    def conf(self) -> _Conf:
        name, text = self.text("--rdzv-conf")
        found: dict[str, float | bool] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = part.partition("=")
            if key in ("join_timeout", "last_call_timeout"):
                field = "join_timeout_s" if key == "join_timeout" else "last_call_s"
                found[field] = _seconds(name, part, value)
            elif key == "is_host" and value.lower() in (*_TRUE, *_FALSE):
                found["is_host"] = value.lower() in _TRUE
            else:
                raise BadInputError(
                    name,
                    part,
                    "is not known here; known are join_timeout=S, last_call_timeout=S and is_host=1",
                )
        return _Conf(**found)  # type: ignore[arg-type] # each name with its own type, above


def _is_so_of_one(option: str, value: str, own_host: str) -> bool:
    said = value.replace(own_host, "localhost")
    return re.fullmatch(_SO_OF_ONE[option], said) is not None


def _whole(name: str, text: str, part: str, expected: str, *, at_least: int) -> int:
    if not (part.isascii() and part.isdecimal()) or int(part) < at_least:
        raise BadInputError(name, text or "''", expected)
    return int(part)


def _seconds(name: str, part: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise BadInputError(name, part, "must be a number of seconds")
    return seconds


def _split(text: str) -> tuple[str, str]:
    """Host and port; an IPv6 address has brackets where a port follows."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    if text.count(":") > 1:
        return text, ""
    host, _, port = text.partition(":")
    return host, port


def _checked_host(name: str, text: str, host: str) -> str:
    if not host or any(mark in host for mark in "/ \t"):
        raise BadInputError(name, text or "''", "must be HOST or HOST:PORT, such as node0:29400")
    return host


def _port(name: str, text: str, port: str) -> int:
    if not port:
        return DEFAULT_PORT
    number = _whole(name, text, port, f"must have a port of 1 to {_PORT_MAX}", at_least=1)
    if number > _PORT_MAX:
        raise BadInputError(name, text, f"must have a port of 1 to {_PORT_MAX}")
    return number
