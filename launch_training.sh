#!/usr/bin/env bash
# Finds or makes the Python environment, then becomes the command `ddp_runner`. It decides nothing else.
#
#   ./launch_training.sh [OPTIONS]            train; --help lists the options
#   ./launch_training.sh COMMAND [OPTIONS]    train, run, checkpoints, report, page, doctor, demo, check, kill, docs
#   ./launch_training.sh environment          only print the interpreter that would be used
#
# DDP_RUNNER_PYTHON names the interpreter to use; ddp_runner/cli/python_environment.py documents the order.
set -euo pipefail
trap 'printf "ddp_runner: interrupted\n" >&2; exit 130' INT
trap '' USR2 # asks a run for a checkpoint, and there is none yet
# If `env` can, a Ctrl-C is held back until start.py answers it with one line. This comes first: the shell
# forgets a Ctrl-C that arrives during a $(...) that succeeds.
if [[ -z ${DDP_RUNNER_HELD:-} ]] && /usr/bin/env --block-signal=INT true 2>/dev/null; then
    DDP_RUNNER_HELD=1 exec /usr/bin/env --block-signal=INT "$BASH" "${BASH_SOURCE[0]}" "$@"
fi
unset DDP_RUNNER_HELD

# Without a PATH (env -i) the shell makes one up, which nobody else sees and which may end with the
# working directory.
if [[ $(declare -p PATH 2>/dev/null) != 'declare -x'* ]]; then
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
fi

fail() {
    printf 'ddp_runner: error: %s\n' "$1" >&2
    exit 2
}

# Prints the program behind an interpreter that starts and is new enough to run ddp_runner/cli/python_environment.py:
# a version manager's script in its place takes longer to find it than the rest of this one.
program_of() {
    "$1" -I -S -c 'import sys; print(sys.executable) if sys.version_info >= (3, 10) else sys.exit(1)' 2>/dev/null
}

# Prints the interpreter to begin with: the chosen one, else the active one, else the first fit.
first_python() {
    local candidate
    if [[ -n ${DDP_RUNNER_PYTHON:-} ]]; then
        program_of "$DDP_RUNNER_PYTHON" ||
            fail "DDP_RUNNER_PYTHON=$DDP_RUNNER_PYTHON: must be a Python 3.10 or newer that starts"
        return
    fi
    if [[ -n ${VIRTUAL_ENV:-} ]]; then
        if program_of "$VIRTUAL_ENV/bin/python"; then
            return
        fi
        printf 'ddp_runner: the active environment %s has no Python 3.10 or newer that starts; using another\n' \
            "$VIRTUAL_ENV" >&2
    fi
    for candidate in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if program_of "$candidate"; then
            return
        fi
    done
    fail 'no Python 3.10 or newer found; install one or set DDP_RUNNER_PYTHON'
}

# As it was typed, for the messages that name a command to run.
typed=${BASH_SOURCE[0]}
[[ $typed == */* ]] || typed=./$typed
printf -v DDP_RUNNER_COMMAND %q "$typed"
export DDP_RUNNER_COMMAND

script=$(readlink -f -- "${BASH_SOURCE[0]}")
repository=$(dirname -- "$script")
# The package runs from the checkout, whatever folder the user is in and keeps; what lies beside it there
# is on no path. An empty part of PYTHONPATH would be the working directory, whose files are not ours to run.
path=:${PYTHONPATH:-}:
while [[ $path == *::* ]]; do path=${path//::/:}; done
path=${path#:}
export PYTHONPATH="$repository/ddp_runner/on_path${path:+:${path%:}}"
start=$repository/ddp_runner/start.py

first=$(first_python)
if [[ ${1:-} == environment ]]; then
    exec "$first" "$start" ddp_runner.cli.python_environment "${@:2}"
fi
extra=
# A help needs no extra, and so none is installed for it.
if [[ (${1:-} == docs || ${1:-} == page) && " ${*:2} " != *" --help "* && " ${*:2} " != *" -h "* ]]; then
    extra=$1
fi
exec "$first" "$start" ddp_runner.cli.python_environment --extra "$extra" --run "$@"
