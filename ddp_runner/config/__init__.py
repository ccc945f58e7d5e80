"""COMPOSES: presets, files, environment and command line become one checked ``Settings``.

fields     every setting as a name, a kind and a legal range; text -> value
meanings   what each setting means, in words, for help and documentation
foreign    names of other launchers and trainers: accepted, or answered with ours
suggest    which known name may have been meant by another
sources    YAML files, environment and command line -> assignments
presets    the CPU and smoke-test values that lie over the defaults
naming     what a run is called, and the folders that its name gives it
compose    assignments -> Settings, with the origin of each value; the Python API's flat keys
relations  how settings must fit together, and whether the paths they name can be used
ways_on    what to type where a folder holds a run of other settings
identity   what a run means (for refusing a resume), how its steps are computed (for telling that
           they changed), its digest, and its written forms

Imports nothing of the package but ``core``. Only this room reads names of settings from outside.
"""

from ddp_runner.config.compose import Resolved, SettingsError, from_flat, resolve
from ddp_runner.config.identity import (
    Surroundings,
    aligned,
    difference,
    digest,
    from_record,
    meaning,
    read_yaml,
    recipe,
    task_meaning,
    to_record,
    to_yaml,
)
from ddp_runner.config.presets import PRESETS
from ddp_runner.config.relations import check_relations
from ddp_runner.config.ways_on import own_folder, ways_on, ways_on_with_data

__all__ = [
    "PRESETS",
    "Resolved",
    "SettingsError",
    "Surroundings",
    "aligned",
    "check_relations",
    "difference",
    "digest",
    "from_flat",
    "from_record",
    "meaning",
    "own_folder",
    "read_yaml",
    "recipe",
    "resolve",
    "task_meaning",
    "to_record",
    "to_yaml",
    "ways_on",
    "ways_on_with_data",
]
