"""The options for several machines, and what the command line asks about them."""

from __future__ import annotations

from ddp_runner.cli.several import Several
from ddp_runner.core.settings.declaration import Option, OptionGroup
from ddp_runner.features.machines.rules.node_options import (
    ENGINE,
    VARIABLES,
    node_options,
    unused_on_one_machine,
)

_ENDPOINT, _TOKEN_FILE, _LOCAL_ADDR = "--rdzv-endpoint", "--token-file", "--local-addr"
OPTIONS = (
    Option(
        "--nnodes",
        metavar="N|MIN:MAX",
        default="1",
        aliases=("--num-machines", "--num-nodes"),
        group=OptionGroup.MACHINES,
        says="number of machines; with a range the run continues with fewer",
    ),
    Option(
        _ENDPOINT,
        metavar="HOST[:PORT]",
        group=OptionGroup.MACHINES,
        says="address of one of the machines, where all meet; the port is 29400 by default",
    ),
    Option(
        "--rdzv-id",
        metavar="ID",
        default="none",
        group=OptionGroup.MACHINES,
        says="name of the run, the same on each machine",
    ),
    Option(
        "--node-rank",
        metavar="R",
        default="by the order of joining",
        aliases=("--machine-rank",),
        group=OptionGroup.MACHINES,
        says="number of this machine; the machine of the endpoint is 0",
    ),
    Option(
        "--rdzv-backend",
        metavar="c10d",
        group=OptionGroup.MACHINES,
        says="accepted values are c10d and static, with the same meaning",
    ),
    Option(
        "--rdzv-conf",
        metavar="K=V,...",
        group=OptionGroup.MACHINES,
        says="rendezvous options: join_timeout=600, last_call_timeout=30, is_host=1",
    ),
    Option(
        _LOCAL_ADDR,
        metavar="ADDR",
        group=OptionGroup.MACHINES,
        says="address or name of this machine [the address that leads to the endpoint]",
    ),
    Option(
        _TOKEN_FILE,
        metavar="FILE",
        group=OptionGroup.MACHINES,
        says="file with the secret shared by all machines [DDP_RUNNER_TOKEN, or a file that "
        "the coordinator creates in a shared checkpoint folder]",
    ),
    Option(
        ENGINE,
        metavar="ray",
        group=OptionGroup.MACHINES,
        says="let a Ray cluster place and restart the machines; give only --nnodes with it",
    ),
)
SEVERAL = Several(
    variables=VARIABLES,
    engine=ENGINE,
    of_run=(
        Option(
            "--master-addr",
            metavar="HOST",
            says="host of the endpoint on several machines; with --master-port PORT the same as "
            "--rdzv-endpoint HOST:PORT",
        ),
    ),
    of_doctor=(
        Option(
            _ENDPOINT,
            metavar="HOST[:PORT]",
            says="endpoint of a run on several machines: check that it answers, the token, the "
            "local address and shared folders, without disturbing a run there",
        ),
        Option(
            _TOKEN_FILE,
            metavar="FILE",
            says="file with the token, as for training [DDP_RUNNER_TOKEN, or the folder's]",
        ),
        Option(
            _LOCAL_ADDR,
            metavar="ADDR",
            says="address of this machine, as for training [the one that leads to the endpoint]",
        ),
    ),
    asked=node_options,
    unused=unused_on_one_machine,
    launching="ddp_runner.features.machines.launching",
    checking="ddp_runner.features.machines.node_checks",
)
