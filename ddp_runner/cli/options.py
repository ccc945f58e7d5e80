"""The options of ``train`` as a table, from which both the parser and the help are made.

The option of a setting stands at its field, in ``core.settings``; here are those that are no settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_runner.config.fields import known_fields
from ddp_runner.core.settings.declaration import Option, OptionGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Options that the help shows under one heading."""

    title: str
    options: tuple[Option, ...]


_OWN = (
    Option(
        "--nnodes",
        metavar="N|MIN:MAX",
        default="1",
        aliases=("--num-machines", "--num-nodes"),
        group=OptionGroup.MACHINES,
        says="machines; with a range it goes on with fewer",
    ),
    Option(
        "--rdzv-endpoint",
        metavar="HOST[:PORT]",
        group=OptionGroup.MACHINES,
        says="of one of them, where they meet; port 29400",
    ),
    Option(
        "--rdzv-id", metavar="ID", default="none", group=OptionGroup.MACHINES, says="of the run"
    ),
    Option(
        "--node-rank",
        metavar="R",
        default="by the order of joining",
        aliases=("--machine-rank",),
        group=OptionGroup.MACHINES,
        says="the number of this machine; that of the endpoint is 0",
    ),
    Option(
        "--rdzv-backend",
        metavar="c10d",
        group=OptionGroup.MACHINES,
        says="c10d or static, which mean the same",
    ),
    Option(
        "--rdzv-conf",
        metavar="K=V,...",
        group=OptionGroup.MACHINES,
        says="join_timeout=600, last_call_timeout=30, is_host=1",
    ),
    Option(
        "--local-addr",
        metavar="ADDR",
        group=OptionGroup.MACHINES,
        says="the address of this machine; otherwise the one that leads to the endpoint",
    ),
    Option(
        "--token-file",
        metavar="FILE",
        group=OptionGroup.MACHINES,
        says="with the secret that all machines know; otherwise DDP_RUNNER_TOKEN, or a file that "
        "the coordinator makes in a checkpoint folder that they share",
    ),
    Option(
        "--engine",
        metavar="ray",
        group=OptionGroup.MACHINES,
        says="have Ray's cluster place and restart the machines; only --nnodes is given then",
    ),
    Option(
        "--preset",
        metavar="NAME",
        group=OptionGroup.FILES,
        says="settings of presets/NAME.yaml, which lie under those of --config",
    ),
    Option(
        "--config",
        metavar="FILE",
        aliases=("--config-name",),
        group=OptionGroup.FILES,
        says="YAML file of settings; may be repeated, the later wins",
    ),
    Option(
        "--dry-run",
        aliases=("--test-model",),
        group=OptionGroup.TRYING_OUT,
        says="build, compute one micro-batch, show modules and memory; write nothing",
    ),
    Option(
        "--find-batch-size",
        metavar="[SHARE]",
        group=OptionGroup.TRYING_OUT,
        says="try sizes by a few steps each, and show the largest batch that takes "
        "no more than SHARE of the memory [0.8]",
    ),
    Option(
        "--find-lr",
        metavar="[LOW:HIGH[:STEPS]]",
        group=OptionGroup.TRYING_OUT,
        says="train a copy at rates that grow, show the curve and a suggestion [1e-7:10:100]",
    ),
    Option("--help", short="-h", group=OptionGroup.HELP, says="this text"),
    Option(
        "--help-settings",
        group=OptionGroup.HELP,
        says="every setting: meaning, default, legal values",
    ),
    Option("--version", group=OptionGroup.HELP, says="the version"),
)
_OF_SETTINGS = tuple(spec.option for spec in known_fields().values() if spec.option is not None)
_OWN_FIRST = (
    OptionGroup.MACHINES,
)  # where the others are about a run of which these say that there is one


def _group(heading: OptionGroup) -> Group:
    """In the order of the settings."""
    own, others = ([one for one in some if one.group is heading] for some in (_OWN, _OF_SETTINGS))
    options = (*own, *others) if heading in _OWN_FIRST else (*others, *own)
    return Group(title=heading.value, options=options)


GROUPS = tuple(_group(heading) for heading in OptionGroup)
OPTIONS = {option.long: option for group in GROUPS for option in group.options}
LONG_OF_SHORT = {option.short: option.long for option in OPTIONS.values() if option.short}
LONG_OF_ALIAS = {alias: option.long for option in OPTIONS.values() for alias in option.aliases}
