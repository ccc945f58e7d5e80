"""Writes the pages of the reference that are made from the code's tables.

``PYTHONPATH=. python docs/generate.py`` writes them; a test says when that is due.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from ddp_runner.cli.commands import commands
from ddp_runner.cli.parser import GROUPS, LONG_OF_ALIAS, OPTIONS
from ddp_runner.cli.usage import EXAMPLES, INJECTIONS, default_of, shown_default
from ddp_runner.config.fields import ALIASES, SWITCHES, known_fields, sections
from ddp_runner.config.foreign import ALWAYS, ANSWERS, FACTS, HEADINGS, WORDS
from ddp_runner.config.meanings import meanings
from ddp_runner.core.settings.declaration import OnResume, Option
from ddp_runner.features.script.run_command import OWN
from ddp_runner.features.script.run_options import (
    ACCEPTED_VALUES,
    ALSO_CALLED,
    REFUSED,
    SAYS_OF_SHARED,
    SHARED,
)
from ddp_runner.features.script.run_options import EXAMPLES as EXAMPLES_OF_RUN
from ddp_runner.kernel.rules.lifecycle import MEMBERSHIP_TABLE, RANK_TABLE, RUN_TABLE

DOCS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """A rule of the code. ``file``: inside the package."""

    name: str
    rule: str
    file: str
    tests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Guide:
    """Where people come from: names that are settings there, and options of its launcher."""

    about: str
    names: str
    options: str = ""


_FIRST_COMMANDS = (
    (
        "`accelerate launch --num_processes 2 train.py`",
        "`./launch_training.sh run --num_processes 2 train.py`; repaired in place [with two changed lines](accelerate.md)",
    ),
    (
        "`torchrun --nproc-per-node 2 train.py`",
        "`./launch_training.sh run --nproc-per-node 2 train.py`",
    ),
    (
        "a script with a `Trainer` of transformers or Lightning",
        (
            "`./launch_training.sh run -n 2 train.py`; see [Your own script](own-script.md)"
            "; it is repaired in place with one changed line: [transformers](transformers.md), [Lightning](lightning.md)"
        ),
    ),
    (
        "a model, a `DataLoader`, an optimizer",
        "[`DDPTrainer`](python.md#from-objects-that-you-have)",
    ),
    ("your own loop", "[`attach()`](own-loop.md), six changed lines"),
    (
        "settings in a YAML file",
        "`./launch_training.sh --config FILE.yaml --task my_task.py`",
    ),
    ("`nn.DataParallel(model)`", "[`mode=data_parallel`](modes.md), or `auto`"),
)
_GUIDES = {
    "accelerate": Guide(
        about="The runner also reads the file of `accelerate config`; a line says which of its values it uses.",
        names="num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids mixed_precision"
        " dynamo_backend multi_gpu same_network use_cpu project_dir gradient_accumulation_steps deepspeed fsdp"
        " zero_stage distributed_type",
        options="--num-processes --num-machines --machine-rank --main-process-ip --main-process-port --gpu-ids"
        " --mixed-precision --module --debug --cpu",
    ),
    "torchrun": Guide(
        about="`run` supports several machines: [Scripts](several-machines.md#scripts).",
        names="nproc nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend rdzv_id rdzv_conf standalone"
        " use_env module hostfile",
        options="--nproc-per-node --nproc --module --no-python --standalone --max-restarts --monitor-interval"
        " --log-dir --tee --local-ranks-filter --master-port --role --rdzv-id --rdzv-conf --nnodes --node-rank"
        " --master-addr --local-addr --rdzv-backend --rdzv-endpoint --start-method --redirects --run-path"
        " --shutdown-timeout --signals-to-handle --logs-specs --event-log-handler --duplicate-stdout-filters"
        " --duplicate-stderr-filters --numa-binding --virtual-local-rank",
    ),
    "TrainingArguments of transformers": Guide(
        about="`learning_rate`, `weight_decay`, `warmup_steps`, `max_steps`, `seed` and `max_grad_norm` have the same names here.",
        names="num_train_epochs per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps"
        " lr_scheduler_type warmup_ratio optim adam_beta1 adam_beta2 fp16 bf16 tf32 torch_compile"
        " torch_compile_mode gradient_checkpointing dataloader_num_workers dataloader_pin_memory"
        " dataloader_prefetch_factor ddp_backend ddp_timeout ddp_bucket_cap_mb ddp_find_unused_parameters logging_dir"
        " logging_steps eval_steps eval_on_start save_steps save_total_limit load_best_model_at_end"
        " metric_for_best_model greater_is_better report_to run_name output_dir overwrite_output_dir"
        " resume_from_checkpoint no_cuda use_cpu n_gpu deepspeed fsdp do_train do_eval",
    ),
    "Lightning": Guide(
        about="`precision` also accepts Lightning's values: `bf16-mixed`, `16-mixed`, `32-true`.",
        names="max_epochs accumulate_grad_batches gradient_clip_val devices accelerator strategy num_nodes ckpt_path"
        " default_root_dir limit_val_batches val_check_interval check_val_every_n_epoch log_every_n_steps"
        " fast_dev_run enable_progress_bar logger",
    ),
    "Pipelines for language models": Guide(
        about="[Stages](stages.md) are a list in the file; `init_from: scratch` starts without weights.",
        names="context_size context_length block_size max_iters num_steps warmup_iters lr_decay_iters decay_lr lr"
        " min_lr wd grad_clip clip_grad max_norm dtype out_dir eval_interval valid_interval_steps eval_batches"
        " save_interval_steps train_batch_size eval_batch_size test_batch_size train_file data_path data_dir"
        " preload_data_to_ram pretrained_path use_amp amp use_torch_compile config_name test_model ema"
        " persistent_workers drop_last",
    ),
    "Manuals for DataParallel and DistributedDataParallel": Guide(
        about="This command starts the ranks and wraps the model. [One GPU or several](modes.md) explains the modes.",
        names="training_mode device_ids enable_data_parallel enable_distributed dataparallel num_gpus n_gpu world_size"
        " rank local_rank init_method timeout enable_gradient_as_bucket_view enable_gpu_monitoring sync_bn"
        " sync_batch_norm use_mixed_precision enable_mixed_precision enable_gradient_checkpointing data_workers workers"
        " broadcast_buffers",
        options="--num-gpus --device-ids",
    ),
}
_RESUME = {
    OnResume.REFUSED: "refused",
    OnResume.REPORTED: "reported",
    OnResume.CANNOT_MATTER: "-",
}
_MADE = "<!-- Made by docs/generate.py from the code's tables; changes here are lost. -->\n"
_MADE_BELOW = "<!-- Made by docs/generate.py from the code's tables; changes below are lost. -->\n"
# The settings of a page that is written by hand, in this order; a section stands for all of its own.
_SETTINGS_OF = {
    "evaluation.md": (
        *("log.evaluate_interval", "log.evaluate_every_steps", "log.evaluate_at_start"),
        *("log.evaluate_batches", "data.evaluation_batch_size", "data.validation_fraction"),
        *("checkpoint.monitor", "checkpoint.mode", "run.load_best_at_end"),
        "recovery.evaluation_timeout_s",
    ),
    "trackers.md": ("log.trackers", "log.log_interval"),
    "watch.md": (
        "log.gpu_watch_s",
        "memory.memory_check_interval",
        "log.log_interval",
        "log.display",
    ),
    "profile.md": ("log.profile", "log.phase_times"),
    "page.md": ("log.page", "log.page_port", "log.page_can_inject"),
    "modes.md": (
        *("run.mode", "run.device", "run.gpus", "run.nproc_per_node", "ddp.backend"),
        "run.threads_per_rank",
    ),
    "files.md": ("run.name", "run.log_dir", "run.checkpoint_dir", "run.resume", "checkpoint"),
}
_WHAT_INJECTIONS_ARE = {
    "of a rank": "kill stop exit raise hang spin gil slow oom",
    "of its step": "unused nan spike diverge wrong_gradient hidden_state",
    "of its data": "loader_kill loader_stop bad_sample",
    "of its saves": "disk_full disk_error slow_disk corrupt_checkpoint",
}


def settings_page() -> str:
    """Every setting: name, default, legal values, meaning, and what a resume makes of a change."""
    lines = [
        "# Settings",
        _MADE,
        "Each setting can be given as `section.name=value`, or without its section where the name is unique:",
        "`num_workers=2 save_every_steps=50`. Later sources override earlier ones: default, `~/.config/ddp_runner.yaml`, `--preset NAME` (`presets/NAME.yaml`),",
        "`--config FILE.yaml`, environment (`DDP_RUNNER_DATA__BATCH_SIZE=8`), command line. A wrong name or value is",
        "reported in one line, with the legal ones, before any process starts. Arguments of your own task are `task.NAME=VALUE`.",
        "",
        "The column *resume* gives the effect of a change on a resumed run. *refused*: use another `--name` for the new value.",
        "*reported*: the run continues with the new value, and is not exact from then on. *-*: the steps stay the same.",
        "The settings of a model are refused for the built-in tasks, which read them.",
        "",
        "On several machines the coordinator's settings apply to all. Only a setting that is marked *each machine has its own*",
        "keeps the value of the machine.",
    ]
    section = ""
    for key, spec in known_fields().items():
        this_section, _, name = key.partition(".")
        if this_section != section:
            section = this_section
            about = (sections()[section].__doc__ or "").replace("``", "`")
            lines += ["", f"## {section}", "", about, ""]
            lines += [
                "| name | default | legal values | meaning | resume |",
                "|---|---|---|---|---|",
            ]
        lines.append(_row(key, name, _RESUME[spec.on_resume]))
    lines += [
        "",
        "Names of other trainers and launchers are taken, too: [Coming from](coming-from.md).",
    ]
    return "\n".join(lines) + "\n"


def _row(key: str, name: str, *more: str) -> str:
    """A setting, called ``name``: default, legal values, meaning, and ``more`` cells."""
    spec = known_fields()[key]
    meaning = meanings()[key] + (" *Each machine has its own.*" if spec.per_machine else "")
    cells = (f"`{name}`", shown_default(spec), spec.expected(), meaning, *more)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def settings_of(page: str) -> str:
    """What is written on that page, and below it the settings that it is about."""
    lines = ["", "| setting | default | legal values | meaning |", "|---|---|---|---|"]
    for one in _SETTINGS_OF[page]:
        keys = [one] if "." in one else [key for key in known_fields() if key.startswith(f"{one}.")]
        lines += (_row(key, key) for key in keys)
    return _below(page, lines)


def _below(page: str, lines: list[str]) -> str:
    """The page, with ``lines`` in the place of what stands below the mark."""
    written, mark, _ = (DOCS / page).read_text(encoding="utf-8").partition(_MADE_BELOW)
    if not mark:
        raise ValueError(f"{page}: no mark to write below")
    return written + mark + "\n".join([*lines, ""])


def coming_from_page() -> str:
    """The words of other guides, by where people come from, and what each is here."""
    left = dict.fromkeys((*ALIASES, *ALWAYS, *ANSWERS))
    options = dict.fromkeys((*ALSO_CALLED, *REFUSED))
    lines = [
        "# Coming from",
        _MADE,
        "Type the names that you know. A name with one meaning here is accepted in files, in the environment, on the command line and in Python.",
        "Any other name stops the start with one line that says what to write. Nothing is guessed.",
        "",
        "| you have | you type |",
        "|---|---|",
        *(f"| {there} | {here} |" for there, here in _FIRST_COMMANDS),
    ]
    for title, guide in _GUIDES.items():
        lines += ["", f"## {title}", "", guide.about, "", *_table(guide.names.split())]
        if guide.options:
            lines += ["", "Options of `run`:", "", *_options_from(guide.options.split())]
        left = {name: None for name in left if name not in guide.names.split()}
        options = {long: None for long in options if long not in guide.options.split()}
    lines += ["", "## Others", "", *_table(list(left))]
    if options:
        lines += ["", "Options of `run`:", "", *_options_from(list(options))]
    return "\n".join([*lines, "", *_headings()]) + "\n"


def _table(names: list[str]) -> list[str]:
    """What each is, those together that are the same."""
    here: dict[str, list[str]] = {}
    for name in names:
        here.setdefault(_meaning_of(name), []).append(f"`{name}`")
    rows = (f"| {', '.join(said)} | {_cell(meaning)} |" for meaning, said in here.items())
    return ["| you write | here |", "|---|---|", *rows]


def _meaning_of(name: str) -> str:
    if name in FACTS:
        return f"accepted if it matches the run; otherwise refused: {ANSWERS[name]}"
    if name in ANSWERS:
        return f"refused: {ANSWERS[name]}"
    if name in ALWAYS:
        return f"always on: true is accepted, false is refused ({ALWAYS[name]})"
    section, _, setting = ALIASES[name].partition(".")
    words = [f"[`{section}.{setting}`](settings.md#{section})"]
    if name in SWITCHES:
        for text, value in zip(("true", "false"), SWITCHES[name], strict=True):
            words.append(f"{text} changes nothing" if value is None else f"{text} is `{value}`")
    here: dict[str, list[str]] = {}
    for text, value in WORDS.get(name, {}).items():
        if text != value:
            here.setdefault(f"`{value}`" if value else "empty", []).append(f"`{text}`")
    words += [
        f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} {value}"
        for value, said in here.items()
    ]
    return "; ".join(words)


def _options_from(options: list[str]) -> list[str]:
    """What ``run`` makes of each, those together that are the same."""
    here: dict[str, list[str]] = {}
    for long in options:
        if long in ALSO_CALLED:
            meaning = f"`{ALSO_CALLED[long]}`"
        elif long in OWN or long in SHARED:
            says = SAYS_OF_SHARED.get(long, (OWN.get(long) or OPTIONS[long]).says)
            meaning = f"the same: {says}"
        else:
            taken = (
                "accepted with the values for one machine; otherwise "
                if long in ACCEPTED_VALUES
                else ""
            )
            meaning = f"{taken}refused: {REFUSED[long]}"
        here.setdefault(meaning, []).append(f"`{long}`")
    rows = (f"| {', '.join(said)} | {_cell(meaning)} |" for meaning, said in here.items())
    return ["| option | here |", "|---|---|", *rows]


def _headings() -> list[str]:
    """The headings of files that stand over settings."""
    names = ", ".join(f"`{name}:`" for name in HEADINGS)
    return [
        "In a YAML file you may use these headings for settings of any section:",
        f"{names}.",
        "Under `optimizer:` and `scheduler:` the keys `name` and `type` select the optimizer or schedule.",
    ]


def stages_page() -> str:
    """What is written there, and the settings that a stage may have of its own."""
    lines = ["", "| section | settings |", "|---|---|"]
    for section in sections():
        specs = known_fields().values()
        names = [f"`{one.name}`" for one in specs if one.per_stage and one.section == section]
        if names:
            lines.append(f"| [{section}](settings.md#{section}) | {', '.join(names)} |")
    return _below("stages.md", lines)


def command_line_page() -> str:
    """The commands, the options of ``train`` and what can be injected."""
    lines = [
        "# Command line",
        _MADE,
        "```text",
        "./launch_training.sh [OPTIONS] [SETTING=VALUE ...]    train",
        "./launch_training.sh COMMAND [OPTIONS]",
        "```",
        "",
        "`ddp-runner` is the same command where the package is installed, and so is `python -m ddp_runner`.",
        "Each command has `--help`.",
        "",
        "## Commands",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| `{name}` | {row.says} |" for name, row in commands().items()),
    ]
    for group in GROUPS:
        lines += ["", f"## {group.title}", "", "| option | default | meaning |", "|---|---|---|"]
        for option in group.options:
            says = option.says[0].upper() + option.says[1:] + "."
            lines.append(f"| {_flags(option)} | {default_of(option)} | {_cell(says)} |")
    lines += [
        "",
        "Underscores work as dashes; "
        + ", ".join(f"`{alias}` is `{long}`" for alias, long in LONG_OF_ALIAS.items())
        + ".",
        "Any setting can be written as an option, too: `--num-workers 2`.",
        "",
        *_options_of_run(),
        "",
        "## Faults on request",
        "",
        "`--inject KIND:KEY=VALUE,...` causes a fault, and may be repeated.",
        "",
        "| | |",
        "|---|---|",
    ]
    for words, kinds in _WHAT_INJECTIONS_ARE.items():
        lines.append(
            f"| kinds {words} | " + ", ".join(f"`{kind}`" for kind in kinds.split()) + " |"
        )
    for left, right in INJECTIONS[1:]:
        values = right
        if left.strip().startswith("random"):
            values = re.sub(r"(\w+=[\w+]+)", r"`\1`", right)
        if left.strip().startswith("phase"):
            names, _, rest = right.partition(" [")
            values = ", ".join(f"`{name}`" for name in names.split(", ")) + f" [{rest}"
        lines.append(f"| `{left.strip()}` | {_cell(values)} |")
    lines += [
        "",
        "`gil` holds the interpreter's lock. `diverge` flips one bit of a weight, `wrong_gradient` one bit of a rank's own gradient before it is summed.",
        "With `hidden_state`, from that step on a rank's loss depends on state that only its process has. Only drills find these last two.",
        "A value in brackets is the default.",
        "Rank 0 writes the checkpoints: the kinds of saves happen there, whatever `rank` says.",
        "If a requested fault was never caused, the run names it at its end (`never caused: ...`) and exits with 1.",
        "An attached loop has no `backward`, `compile` or `profile`, and none of the kinds of a step: they are refused.",
        "",
        "## Examples",
        "",
        "| command | what it does |",
        "|---|---|",
        *(
            f"| `./launch_training.sh{' ' * bool(words)}{words}` | {says} |"
            for words, says in EXAMPLES
        ),
    ]
    return "\n".join(lines) + "\n"


def _options_of_run() -> list[str]:
    """The options of ``run``, those of ``train`` that it shares, and those of torchrun that it refuses."""
    shared = (OPTIONS[long] for long in SHARED)
    lines = [
        "## Options of `run`",
        "",
        "`run [OPTIONS] [SETTING=VALUE ...] train.py ARGS`, or `-m MODULE ARGS`; see [Your own script](own-script.md).",
        "",
        "| option | meaning |",
        "|---|---|",
    ]
    for option in (*OWN.values(), *shared):
        says = SAYS_OF_SHARED.get(option.long, option.says)
        lines.append(f"| {_flags(option)} | {_cell(says[0].upper() + says[1:])}. |")
    refused, ignored = [
        ", ".join(f"`{long}`" for long in REFUSED if (long in ACCEPTED_VALUES) is is_ignored)
        for is_ignored in (False, True)
    ]
    lines += ["", f"Options of torchrun that are accepted and change nothing: {ignored}."]
    lines += [f"Options that are refused, with a line that says why: {refused}."]
    lines += ["", "| example | what it does |", "|---|---|"]
    return [
        *lines,
        *(f"| `./launch_training.sh run {words}` | {says} |" for words, says in EXAMPLES_OF_RUN),
    ]


def states_page() -> str:
    """The tables of ``kernel/rules/lifecycle.py``: what each state makes of each event, and a diagram of it."""
    lines = [
        "# States",
        _MADE,
        "Every state of a run and of its ranks changes by a row of a table in `ddp_runner/kernel/rules/lifecycle.py`, where each row",
        "that ignores an event says why. An event that has no row in a state is a bug, and raises.",
        "",
        "In the tables: the state that follows; *same* where the event is ignored; empty where there is no row. The diagrams, in",
        "Mermaid, which GitHub draws, show what is not ignored.",
    ]
    about = {
        "The run": "`state` in `status.json`.",
        "The process of a rank": "`ranks[].state` in `status.json`, where `killing` is shown as `aborting` and `ended` as `finished`.",
        "The membership of a rank": "Whether the world counts on it; independent of what its process does, and not shown outside.",
    }
    tables = (RUN_TABLE, RANK_TABLE, MEMBERSHIP_TABLE)
    for (title, says), table in zip(about.items(), tables, strict=True):
        rows = {(one.value, event.value): after.value for (one, event), after in table.items()}
        lines += ["", f"## {title}", "", says, "", *_matrix(rows), "", *_diagram(rows)]
    return "\n".join(lines) + "\n"


def _matrix(rows: dict[tuple[str, str], str]) -> list[str]:
    """What each state makes of each event, in the order in which the table names them."""
    states = dict.fromkeys(state for state, _ in rows) | dict.fromkeys(rows.values())
    events = list(dict.fromkeys(event for _, event in rows))
    lines = [f"| | {' | '.join(events)} |", "|---" * (len(events) + 1) + "|"]
    for state in states:
        cells = (rows.get((state, event), "") for event in events)
        shown = ("*same*" if after == state else after for after in cells)
        lines.append(f"| **{state}** | {' | '.join(shown)} |")
    return lines


def _diagram(rows: dict[tuple[str, str], str]) -> list[str]:
    """A Mermaid state diagram; one arrow for all events that lead from one state to another."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in rows.items():
        if after != state:
            arrows.setdefault((state, after), []).append(event)
    drawn = (f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items())
    return ["```mermaid", "stateDiagram-v2", *drawn, "```"]


def invariants_page() -> str:
    """Every INVARIANT block of the code: its rule, where it stands, and the test that guards it."""
    lines = [
        "# Invariants",
        _MADE,
        "The rules that must hold whatever fails, and when. Each stands as an `INVARIANT` block beside the code that must obey",
        "it, with what would break it; the test fails without that code.",
        "",
        "| invariant | rule, file, guarding test |",
        "|---|---|",
    ]
    for block in invariants():
        tests = ", ".join(f"`{test}`" for test in block.tests)
        lines.append(f"| `{block.name}` | {_cell(block.rule)}<br>`{block.file}`, {tests} |")
    return "\n".join(lines) + "\n"


def invariants() -> list[Invariant]:
    """Those of the package, by file. Raises ValueError for one without a rule or a test."""
    found = []
    for path in sorted((DOCS.parent / "ddp_runner").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if not re.match(r"\s*(# )?INVARIANT [\w-]+:", line):
                continue
            text = _comment(lines[number:])
            name, _, rest = text.removeprefix("INVARIANT ").partition(":")
            rule, _, rest = rest.partition("Broken if:")
            tests = tuple(re.findall(r"test_\w+", rest.partition("Guarded by:")[2]))
            file = str(path.relative_to(DOCS.parent / "ddp_runner"))
            if not rule.strip() or not tests:
                raise ValueError(f"{file}: INVARIANT {name} has no rule, or no test")
            rule = rule.strip()
            found.append(
                Invariant(name=name, rule=rule[0].upper() + rule[1:], file=file, tests=tests)
            )
    return found


def _comment(lines: list[str]) -> str:
    """The comment, or the paragraph of a docstring, that begins with the first line."""
    mark = "#" if lines[0].lstrip().startswith("#") else ""
    stripped = (line.strip() for line in lines)
    block = takewhile(lambda line: line and line.startswith(mark), stripped)
    return " ".join(line.removeprefix("#").strip() for line in block)


def _flags(option: Option) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    return ", ".join(f"`{name}{value}`" for name in (option.short, option.long) if name)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<r>", "&lt;r&gt;").replace("**", "\\*\\*")


PAGES = {
    "settings.md": settings_page,
    "command-line.md": command_line_page,
    "invariants.md": invariants_page,
    "states.md": states_page,
    "stages.md": stages_page,
    "coming-from.md": coming_from_page,
    **{page: partial(settings_of, page) for page in _SETTINGS_OF},
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
