"""Names that other launchers and trainers use: accepted where they mean ours, else answered. Data only.

torchrun, accelerate, deepspeed, Lightning and Hugging Face's Trainer, as their documentation has them.
"""

from __future__ import annotations

from collections.abc import Mapping

# Name -> the setting that means exactly the same.
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs", "n_epochs"), "run.epochs"),
    **dict.fromkeys(("num_steps", "max_iters", "steps"), "run.max_steps"),
    **dict.fromkeys(("nproc", "num_processes", "num_gpus"), "run.nproc_per_node"),
    "gpu_ids": "run.gpus",
    "run_name": "run.name",
    "ckpt_path": "run.resume",
    "logging_dir": "run.log_dir",
    "per_device_train_batch_size": "data.batch_size",
    **dict.fromkeys(("data", "data_path", "data_dir", "train_file"), "data.path"),
    **dict.fromkeys(("workers", "dataloader_num_workers"), "data.num_workers"),
    "dataloader_pin_memory": "data.pin_memory",
    "dataloader_prefetch_factor": "data.prefetch_factor",
    "lr": "optim.learning_rate",
    "min_lr": "optim.min_learning_rate",
    "wd": "optim.weight_decay",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clip_val"), "optim.max_grad_norm"),
    "amp": "optim.use_amp",
    **dict.fromkeys(("master_port", "main_process_port"), "ddp.port"),
    "ddp_backend": "ddp.backend",
    "ddp_timeout": "ddp.collective_timeout_s",
    "ddp_bucket_cap_mb": "ddp.bucket_cap_mb",
    "ddp_find_unused_parameters": "ddp.find_unused_parameters",
    "save_steps": "checkpoint.save_every_steps",
    **dict.fromkeys(("logging_steps", "log_every_n_steps"), "log.log_interval"),
    "check_val_every_n_epoch": "log.evaluate_interval",
    "eval_steps": "log.evaluate_every_steps",
    "regrow_after_s": "recovery.regrow_after",
}
_ONE_MACHINE = "a run is on one machine: leave it out"
_BY_THEMSELVES = "the ranks find each other by themselves: leave it out"
_PRECISION = "here that is use_amp=true: bf16 where the GPU has it, else fp16"
_MICRO = "here --batch-size is a whole step's samples of a rank, and data.micro_batch_size a part's"
_DEVICES = "here that is --nproc-per-node N for how many, --gpus 0,1 for which"
_FOLDERS = (
    "here that is --checkpoint-dir for checkpoints and --log-dir for logs, or --name for both"
)
_ALWAYS_DDP = "every run is DistributedDataParallel: leave it out"
_IN_TASK = "that is the task's own: do it in build_model()"
# Name -> what to write instead, where there is nothing that means exactly the same.
ANSWERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("nnodes", "num_nodes", "num_machines", "node_rank", "machine_rank", "hostfile"),
        _ONE_MACHINE,
    ),
    **dict.fromkeys(("master_addr", "main_process_ip", "same_network"), _ONE_MACHINE),
    **dict.fromkeys(
        ("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "use_env"),
        _BY_THEMSELVES,
    ),
    "module": "here that is --task module:NAME",
    "local_rank": "this command starts the ranks: leave it out",
    "world_size": "here that is --nproc-per-node N",
    **dict.fromkeys(("mixed_precision", "precision", "fp16", "bf16"), _PRECISION),
    **dict.fromkeys(("devices", "include", "multi_gpu", "n_gpu"), _DEVICES),
    **dict.fromkeys(
        ("accelerator", "no_cuda", "use_cpu"),
        "here GPUs are used where there are any, and --cpu trains on the CPU",
    ),
    **dict.fromkeys(
        ("strategy", "distributed_type", "deepspeed", "deepspeed_config", "fsdp", "zero_stage"),
        _ALWAYS_DDP,
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _MICRO),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size"), "evaluations take --batch-size, too"
    ),
    "warmup_ratio": "here that is warmup_steps=N, in steps",
    "lr_scheduler_type": "here that is schedule=constant, cosine or linear, each after warmup_steps",
    "optim": "here that is optimizer=adamw, adam, sgd, adafactor or muon",
    **dict.fromkeys(("output_dir", "default_root_dir", "save_dir", "project_dir"), _FOLDERS),
    "overwrite_output_dir": "here that is --resume none: old files are set aside",
    "resume_from_checkpoint": "here that is --resume auto, last, best or PATH",
    "save_total_limit": "here that is keep_last=N; the best one is kept beside these",
    "limit_val_batches": "here that is evaluate_batches=N",
    "val_check_interval": "here that is evaluate_every_steps=N",
    "fast_dev_run": "here that is --test",
    "ema": "here that is ema_decay=0.999",
    **dict.fromkeys(("torch_compile", "dynamo_backend", "gradient_checkpointing"), _IN_TASK),
    **dict.fromkeys(
        ("do_train", "do_eval", "report_to", "enable_progress_bar", "logger"),
        "there is no such switch: leave it out",
    ),
}
