"""COMPOSES: presets, files, environment and command line become one checked ``Settings``.

Imports nothing of the package but ``core``. Only this room reads names of settings from outside.
"""

from ddp_runner.config.compose import (
    Resolved,
    SettingsError,
    from_flat,
    origins_of,
    refuse_untrue,
    resolve,
)
from ddp_runner.config.foreign_values import RunFacts, facts_of_rank
from ddp_runner.config.identity import (
    Surroundings,
    aligned,
    described_key,
    difference,
    digest,
    from_record,
    is_described,
    read_yaml,
    recipe,
    record_to_show,
    resume_key,
    stage_digest,
    task_resume_key,
    to_record,
    to_yaml,
)
from ddp_runner.config.presets import PRESETS
from ddp_runner.config.relations import (
    check_relations,
    init_from_path,
    refuse_for_loops,
    refuse_without_supervisor,
)
from ddp_runner.config.sources import home_files, preset_file
from ddp_runner.config.usual import is_usual, unread_warning
from ddp_runner.config.ways_on import (
    no_checkpoint,
    own_folder,
    resume_as_given,
    ways_on,
    ways_on_with_data,
    words_of,
)

__all__ = [
    "PRESETS",
    "Resolved",
    "RunFacts",
    "SettingsError",
    "Surroundings",
    "aligned",
    "check_relations",
    "described_key",
    "difference",
    "digest",
    "facts_of_rank",
    "from_flat",
    "from_record",
    "home_files",
    "init_from_path",
    "is_described",
    "is_usual",
    "no_checkpoint",
    "origins_of",
    "own_folder",
    "preset_file",
    "read_yaml",
    "recipe",
    "record_to_show",
    "refuse_for_loops",
    "refuse_untrue",
    "refuse_without_supervisor",
    "resolve",
    "resume_as_given",
    "resume_key",
    "stage_digest",
    "task_resume_key",
    "to_record",
    "to_yaml",
    "unread_warning",
    "ways_on",
    "ways_on_with_data",
    "words_of",
]
