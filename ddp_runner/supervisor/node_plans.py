"""Makes of a launch plan what a node needs of it: the environment of its ranks, what is imported ahead, what they share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner import config
from ddp_runner.kernel.processes.node_plan import NodePlan
from ddp_runner.kernel.wire.fork_specs import ForkKind, Program
from ddp_runner.observe.logger import new_seal
from ddp_runner.system import local_places
from ddp_runner.system.environment import as_under_torchrun, training_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_runner.core.launch_plan import LaunchPlan

_NAME_IN_TASK = re.compile(r":\w+$")  # behind the file or module


def node_plan(plan: LaunchPlan) -> NodePlan:
    """Return what a node needs of ``plan``."""
    settings, loop = plan.settings, plan.loop
    kind = ForkKind.RANK if loop is None else ForkKind.LOOP
    copies = ("state_copy_0", "state_copy_1") if settings.checkpoint.memory_every else ()
    return NodePlan(
        kind=kind if plan.opaque is None else ForkKind.PROGRAM,
        module=plan.rank_module,
        wanted=what_to_import(plan),
        environment=zygote_environment(plan, os.environ),
        settings=config.to_record(settings),
        around=tuple(_around(plan, rank) for rank in range(plan.world_size)),
        has_own_device=tuple(plan.has_own_device(rank) for rank in range(plan.world_size)),
        ranks_per_node=plan.ranks_per_node,
        is_alone=plan.nodes is None,
        log_dir=Path(settings.run.log_dir),
        store_port=settings.ddp.port,
        log_seal=new_seal(),
        shared={
            "preload": ("training_samples", "validation_samples") if settings.data.preload else (),
            "memory_slots": copies,
            local_places.FIELD: () if plan.opaque is not None else local_places.NAMES,
        },
        # On several machines who may write is a matter of leases, which only a rank has.
        has_saver=bool(copies) and plan.opaque is None and plan.nodes is None,
        shares_trouble=bool(settings.run.inject),
        program=None
        if loop is None
        else Program(
            path=loop.path,
            module=loop.module,
            arguments=tuple(loop.arguments),
            source="",
            in_place=loop.in_place,
        ),
        source=b"" if loop is None else loop.source,
    )


def zygote_environment(plan: LaunchPlan, own: Mapping[str, str]) -> dict[str, str]:
    """``own`` with what this run needs. A variable that the user has set is left alone."""
    if plan.opaque is not None:
        return as_under_torchrun(str(plan.threads_per_rank), own)
    settings = plan.settings.run
    return training_environment(
        own,
        threads=plan.threads_per_rank,
        is_deterministic=settings.deterministic,
        is_debug=settings.debug,
        is_alone=plan.nodes is None,
    )


def what_to_import(plan: LaunchPlan) -> str:
    """Return what the zygote imports, so that none of its forks has to: the module of its ranks, and words for that."""
    if plan.opaque is not None:
        words = ",".join(plan.opaque.preload)
    elif plan.loop is not None:
        words = ",".join(plan.loop.preload)
    else:
        # What a stage's task imports, all forks would have: also a later stage's, whose folder may have another
        # module of that name.
        tasks = {_NAME_IN_TASK.sub("", one.run.task) for one in plan.stages}
        words = "" if len(tasks) > 1 else plan.settings.run.task
    return f"{plan.rank_module}:{words}"


def _around(plan: LaunchPlan, rank: int) -> dict[str, Any]:
    """The fields of Surroundings that follow from the plan."""
    return {
        "device": plan.devices[rank].device,
        "other_devices": plan.devices[rank].others,
        "mode": plan.mode,
        "code": plan.code,
        "world_size": plan.world_size,
        "local_world_size": plan.ranks_per_node,
        "threads": plan.threads_per_rank,
        "detect_anomaly": plan.settings.run.detect_anomaly,
        "node": rank // plan.ranks_per_node,
        "local_addr": "" if plan.nodes is None else plan.nodes.local_addr,
    }
