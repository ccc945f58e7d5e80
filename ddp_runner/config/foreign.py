"""Names that other launchers and trainers use and that are no setting here, and their words for values. Data only.

Names that mean a setting stand at its field, in ``core.settings``.

torchrun, accelerate, deepspeed, Lightning and Hugging Face's Trainer, as their documentation has them.
"""

from __future__ import annotations

from collections.abc import Mapping

# Name -> words of theirs that are another word here.
_SCHEDULES = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
_PRECISIONS = {
    **dict.fromkeys(("no", "false", "32", "32-true", "float32"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "float16"), "fp16"),
    "true": "auto",
}
_ALL_GPUS = dict.fromkeys(("all", "none", "null"), "")
WORDS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("precision", "optim.precision", "mixed_precision", "dtype"), _PRECISIONS),
    **dict.fromkeys(("gpus", "run.gpus", "gpu_ids", "device_ids"), _ALL_GPUS),
    "training_mode": {"dataparallel": "data_parallel", "dp": "data_parallel", "ddp": "distributed"},
    "report_to": {
        "none": "",
        "null": "",
        **{name: name for name in ("tensorboard", "wandb", "mlflow")},
    },
    "lr_scheduler": _SCHEDULES,
    "lr_scheduler_type": _SCHEDULES,
}
# Headings of files over settings of ours, with those of their keys that are another word here.
_AS_HERE: Mapping[str, str] = {}
_OF_OPTIMIZERS = {"name": "optimizer", "type": "optimizer"}
_OF_SCHEDULES = {"name": "schedule", "type": "schedule"}
HEADINGS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("train", "training", "trainer", "system", "hardware"), _AS_HERE),
    "distributed": _AS_HERE,
    **dict.fromkeys(("dataloader", "lr"), _AS_HERE),
    "optimizer": _OF_OPTIMIZERS,
    **dict.fromkeys(("scheduler", "lr_scheduler"), _OF_SCHEDULES),
}
# Name of a switch that is always on here -> why false is refused.
ALWAYS: Mapping[str, str] = {
    "persistent_workers": "loader workers live as long as the run",
    "drop_last": "each step has the whole global batch, so that its meaning never changes",
    "broadcast_buffers": "buffers are made the same on all ranks, so that any rank can be replaced",
    "headless": "every run is headless, and needs no terminal",
}
SAID = ("headless",)  # of these, those that are answered also where they are asked for
_NODES = "use the option --nnodes N, with --node-rank R"
_ENDPOINT = "use the option --rdzv-endpoint HOST:PORT; a single machine needs none"
_NUMBERED = "the launcher numbers the ranks: leave it out"
_OPTION_ONLY = "is an option of the command, not a setting: --rdzv-id, --rdzv-conf"
_BY_THEMSELVES = "the ranks find each other: leave it out"
_DEVICES = "use --nproc-per-node N for the number of ranks, --gpus 0,1 to choose GPUs"
_FOLDERS = "use --checkpoint-dir for checkpoints and --log-dir for logs, or --name for both"
_MODES = "use mode=auto, single, data_parallel or distributed"
_WHOLE_MODELS = "each rank has the whole model, as in DistributedDataParallel: leave it out"
# Name -> what to write instead, where there is nothing that means exactly the same.
ANSWERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("nnodes", "num_nodes", "num_machines", "node_rank", "machine_rank", "hostfile"), _NODES
    ),
    **dict.fromkeys(("master_addr", "main_process_ip", "rdzv_endpoint"), _ENDPOINT),
    **dict.fromkeys(("rdzv_backend", "rdzv_id", "rdzv_conf"), _OPTION_ONLY),
    **dict.fromkeys(("standalone", "use_env", "same_network"), _BY_THEMSELVES),
    "module": "use --task module:NAME",
    **dict.fromkeys(("rank", "local_rank"), _NUMBERED),
    "world_size": "use --nproc-per-node N, the ranks of each machine",
    "preset": "use train's option --preset NAME, for presets/NAME.yaml",
    **dict.fromkeys(("devices", "include", "multi_gpu", "n_gpu"), _DEVICES),
    **dict.fromkeys(
        ("accelerator", "no_cuda", "use_cpu"),
        "GPUs are used if there are any, and --cpu trains on the CPU",
    ),
    **dict.fromkeys(
        (
            *("strategy", "distributed_type", "enable_distributed", "enable_data_parallel"),
            "dataparallel",
        ),
        _MODES,
    ),
    **dict.fromkeys(("deepspeed", "deepspeed_config", "fsdp", "zero_stage"), _WHOLE_MODELS),
    "timeout": "write collective_timeout_s=N for collectives, or loader_timeout_s=N for a batch",
    "init_method": _ENDPOINT,
    "config_name": "use the option --config FILE",
    "test_model": "use train's option --dry-run",
    "eval_steps": "use evaluate_every_steps=N for the interval, or evaluate_batches=N for the amount",
    "warmup_ratio": "use warmup_steps=SHARE, below 1",
    "optim": "use optimizer=adamw, adam, sgd, adafactor or muon",
    **dict.fromkeys(("output_dir", "default_root_dir", "save_dir", "project_dir"), _FOLDERS),
    "overwrite_output_dir": "use --resume none, which moves old files to a backup folder",
    "resume_from_checkpoint": "use --resume auto, last, best or PATH",
    **dict.fromkeys(("limit_val_batches", "limit_eval_batches"), "use evaluate_batches=N"),
    "limit_train_batches": "use limit_batches=N",
    "val_check_interval": "use evaluate_every_steps=N",
    "fast_dev_run": "use --test",
    "ema": "use ema_decay=0.999",
    "dynamo_backend": "use compile=true, with torch's default backend",
    **dict.fromkeys(
        (
            "do_train",
            "do_eval",
            "enable_progress_bar",
            "logger",
        ),
        "there is no such switch: leave it out",
    ),
}
# Names, all of them in ANSWERS too, of what a run is and no setting says -> what each says. Passed over where it
# is so (foreign_values.untrue), else answered by how the run was started.
FACTS: Mapping[str, str] = {
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "machines"),
    **dict.fromkeys(("node_rank", "machine_rank"), "node rank"),
    **dict.fromkeys(("master_addr", "main_process_ip", "rdzv_endpoint"), "endpoint"),
    "init_method": "init method",
    "world_size": "ranks",
    "rank": "rank",
    "local_rank": "local rank",
    "enable_distributed": "distributed",
    **dict.fromkeys(("enable_data_parallel", "dataparallel"), "data parallel"),
    "test_model": "dry run",
    "config_name": "file",
}
SWITCHES_OF_FACTS = ("enable_distributed", "enable_data_parallel", "dataparallel", "test_model")
# Setting that earlier versions had -> its usual value, which a config.yaml of theirs has and which is passed
# over, and what to say of any other.
REMOVED: Mapping[str, tuple[str, str]] = {
    "data.reserved_cores": (
        "0",
        "use taskset and num_workers to place data loading, and leave it out",
    ),
    "data.largest_samples": (
        "false",
        "--find-batch-size takes samples as they come: leave it out",
    ),
}
