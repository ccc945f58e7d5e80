"""What the zygote of a run imports beside torch, so that none of its forks has to. Pure."""

from __future__ import annotations

import re

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.script import ZYGOTE_OF_LOOPS, ZYGOTE_OF_SCRIPTS

_NAME_IN_TASK = re.compile(r":\w+$")  # behind the file or module


def what_to_import(plan: LaunchPlan) -> str:
    """What the zygote is sent: the task, or that its forks run programs, and modules to import for them."""
    if plan.script is not None:
        return ZYGOTE_OF_SCRIPTS + ",".join(plan.script.preload)
    if plan.loop is not None:
        return ZYGOTE_OF_LOOPS + ",".join(plan.loop.preload)
    # What a stage's task imports, all forks would have: also a later stage's, whose folder may have another
    # module of that name.
    tasks = {_NAME_IN_TASK.sub("", one.run.task) for one in plan.stages}
    return "" if len(tasks) > 1 else plan.settings.run.task
