"""``kill``: ends one rank of a run on this machine, for trying out how it is replaced. Never any other process."""

from __future__ import annotations

import signal

from ddp_runner.cli.command import LOG_DIR, NAME, Arguments, SmallCommand
from ddp_runner.cli.runs import elsewhere, log_dir_of
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.observe.history.json_lines import whole
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.start import COMMAND
from ddp_runner.system.run_holder import holder_of, signal_below_holder


def _run(arguments: Arguments) -> int:
    """Kill the rank. Raises BadInputError where there is no such run or no such rank."""
    if not arguments.words:
        raise BadInputError("kill", "", "needs the number of a rank, as in: kill 1")
    (asked,) = arguments.words
    try:
        folder = log_dir_of(arguments)
    except BadInputError as error:
        raise BadInputError("kill", asked, f"no run is training there: {error}") from error
    history = RunHistory(folder)
    history.read_status()
    state = history.state
    if state.pid <= 1 or holder_of(folder) != state.pid:
        what = f"the run in {folder} is not training on this machine{elsewhere(folder)}"
        raise BadInputError("kill", asked, what)
    pids = {str(rank.get("rank")): whole(rank.get("pid"), 0) for rank in state.ranks}
    if asked not in pids:
        known = f"the run in {folder} has the ranks {', '.join(pids)}" if pids else "there is none"
        raise BadInputError("kill", asked, f"must be the number of a rank; {known}")
    # A pid from the file is signalled only while it is a child of the process that holds the run's folder.
    if not signal_below_holder(folder, state.pid, pids[asked], signal.SIGKILL):
        raise BadInputError(
            "kill", asked, "this rank has no process on this machine now: try again in a second"
        )
    print(f"killed rank {asked}, process {pids[asked]}, of the run in {folder}")
    return ExitCode.DONE


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} kill RANK [--name NAME | -l DIR]

Kills a rank of a run on this machine (SIGKILL), to show how it is replaced.""",
    options=(NAME, LOG_DIR),
    words_max=1,
    perform=_run,
)
