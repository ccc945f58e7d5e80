"""Words of other guides, as their readers type them, and what comes of each: one table."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import fields

import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.config import from_flat, resolve
from ddp_runner.config.fields import ALIASES
from ddp_runner.config.foreign import ALWAYS, ANSWERS, HEADINGS
from ddp_runner.features.script.run_command import settings_of
from ddp_runner.features.script.run_options import ALSO_CALLED, REFUSED
from ddp_runner.kernel.rules.errors import BadInputError
from tests.scenarios.harness import ROOT

# What is typed -> the settings that it changes, with "; " between them; or, behind "!", the line that answers it.
# "run": before a script; "file": lines of YAML, with | between them; "python": of a dict; the others: behind train.
TRAIN, RUN, FILE, PYTHON = "train", "run", "file", "python"
ROWS = [
    # accelerate
    (RUN, "--num_processes 2 train.py", "run.nproc_per_node=2"),
    (RUN, "--num_processes=4 --gpu_ids 0,1,2,3 train.py", "run.nproc_per_node=4; run.gpus=(0, 1, 2, 3)"),
    (RUN, "--gpu_ids all train.py", ""),
    (RUN, "--num_machines 1 --machine_rank 0 train.py", ""),
    (RUN, "--num_machines 2 train.py", ""),
    (RUN, "--main_process_port 29501 train.py", "ddp.port=29501"),
    (RUN, "--main_process_ip localhost train.py", ""),
    (RUN, "--mixed_precision bf16 train.py --epochs 3", ""),
    (RUN, "--cpu -m package.train", "!package.train"),
    (RUN, "--multi_gpu train.py", "!--multi_gpu: unknown option"),
    (TRAIN, "--num_processes 2 --mixed_precision fp16", "run.nproc_per_node=2; optim.precision=fp16"),
    (TRAIN, "--mixed_precision no", "optim.precision=fp32"),
    (TRAIN, "--dynamo_backend inductor", "!use compile=true, with torch's default backend"),
    (TRAIN, "--use_cpu", "!--cpu trains on the CPU"),
    (FILE, "num_processes: 2|mixed_precision: 'no'", "run.nproc_per_node=2; optim.precision=fp32"),
    (FILE, "distributed_type: MULTI_GPU", "!use mode=auto, single, data_parallel or distributed"),
    (FILE, "gpu_ids: all", ""),
    (FILE, "deepspeed_config: {zero_stage: 2}", "!each rank has the whole model"),
    (FILE, "same_network: true", "!the ranks find each other"),
    (PYTHON, {"gradient_accumulation_steps": 4}, "data.accumulation=4"),
    # torchrun
    (RUN, "--nproc-per-node 2 train.py --lr 1e-3", "run.nproc_per_node=2"),
    (RUN, "--nproc_per_node=2 --nnodes=1 --node_rank=0 train.py", "run.nproc_per_node=2"),
    (RUN, "--standalone --nproc_per_node gpu train.py", "run.device=cuda"),
    (RUN, "--nnodes=1:1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id=7 train.py", ""),
    (RUN, "--nnodes=1:4 --rdzv_endpoint=node1:29400 --rdzv_conf=join_timeout=60 --node_rank=1 train.py", ""),
    (RUN, "--master_addr=127.0.0.1 --master_port=29500 train.py", "ddp.port=29500"),
    (RUN, "--max_restarts=3 --monitor_interval=1 train.py", "recovery.max_restarts=3"),
    (RUN, "-r 3 -t 3 --log_dir out train.py", "run.log_dir=out"),
    (RUN, "--start_method spawn train.py", ""),
    (RUN, "--start_method thread train.py", "!--start-method=thread: must be spawn, fork or forkserver"),
    (RUN, "--run_path train.py", "!--run-path: is not needed"),
    (RUN, "--shutdown_timeout 30 train.py", "!--shutdown-timeout=30: is called --grace-period here"),
    (RUN, "--numa_binding node train.py", "!--numa-binding=node: is not supported"),
    (RUN, "--find-lr train.py", "!--find-lr: is for tasks"),
    (FILE, "rdzv_backend: c10d", "!is an option of the command, not a setting"),
    (TRAIN, "--standalone", "!the ranks find each other"),
    (TRAIN, "--use_env", "!the ranks find each other"),
    (TRAIN, "--master_port 29500", "ddp.port=29500"),
    (TRAIN, "--module package.train", "!use --task module:NAME"),
    (FILE, "nproc: 2", "run.nproc_per_node=2"),
    # transformers' TrainingArguments
    (
        TRAIN,
        "--num_train_epochs 3 --per_device_train_batch_size 8 --learning_rate 5e-5 --weight_decay 0.1",
        "run.epochs=3; data.batch_size=8; optim.learning_rate=5e-05; optim.weight_decay=0.1",
    ),
    (TRAIN, "--gradient_accumulation_steps 4 --max_steps 100", "data.accumulation=4; run.max_steps=100"),
    (TRAIN, "--bf16", "optim.precision=bf16"),
    (TRAIN, "--fp16 true --tf32 true", "optim.precision=fp16; run.matmul_precision=high"),
    (TRAIN, "--fp16 false", ""),
    (TRAIN, "--lr_scheduler_type linear --warmup_steps 50", "optim.schedule=linear; optim.warmup_steps=50"),
    (TRAIN, "--lr_scheduler_type constant_with_warmup", "optim.schedule=constant"),
    (TRAIN, "--lr_scheduler_type polynomial", "!must be one of"),
    (TRAIN, "--warmup_ratio 0.1", "!use warmup_steps=SHARE"),
    (TRAIN, "--optim adamw_torch", "!use optimizer=adamw"),
    (TRAIN, "--gradient_checkpointing", "memory.activation_checkpointing=all"),
    (TRAIN, "--torch_compile --torch_compile_mode max-autotune", "run.compile=True; run.compile_mode=max-autotune"),
    (TRAIN, "--dataloader_num_workers 4 --dataloader_pin_memory false", "data.num_workers=4; data.pin_memory=False"),
    (TRAIN, "--dataloader_prefetch_factor 4", "data.prefetch_factor=4"),
    (TRAIN, "--ddp_find_unused_parameters false", "ddp.find_unused_parameters=False"),
    (TRAIN, "--ddp_backend gloo --ddp_timeout 600", "ddp.backend=gloo; ddp.collective_timeout_s=600.0"),
    (TRAIN, "--logging_steps 5 --save_steps 50", "checkpoint.save_interval=0; log.log_interval=5; checkpoint.save_every_steps=50"),
    (TRAIN, "--save_total_limit 2 --load_best_model_at_end", "checkpoint.keep_last=2; run.load_best_at_end=True"),
    (TRAIN, "--metric_for_best_model loss", "checkpoint.monitor=loss"),
    (TRAIN, "--greater_is_better true", "checkpoint.mode=max"),
    (TRAIN, "--report_to tensorboard --run_name one", "log.trackers=('tensorboard',); run.name=one"),
    (TRAIN, "--output_dir out", "!use --checkpoint-dir for checkpoints"),
    (TRAIN, "--overwrite_output_dir", "!use --resume none"),
    (TRAIN, "--resume_from_checkpoint out/checkpoint-50", "!use --resume auto, last, best or PATH"),
    (TRAIN, "--eval_steps 50", "!use evaluate_every_steps=N for the interval"),
    (TRAIN, "--do_train --do_eval", "!there is no such switch"),
    (TRAIN, "--no_cuda", "!--cpu trains on the CPU"),
    (TRAIN, "--deepspeed ds.json", "!each rank has the whole model"),
    (PYTHON, {"num_train_epochs": 2, "bf16": True}, "run.epochs=2; optim.precision=bf16"),
    # Lightning
    (
        FILE,
        "trainer: {max_epochs: 3, accumulate_grad_batches: 2, gradient_clip_val: 0.5}",
        "run.epochs=3; data.accumulation=2; optim.max_grad_norm=0.5",
    ),
    (FILE, "trainer: {precision: bf16-mixed}", "optim.precision=bf16"),
    (TRAIN, "--precision 16-mixed --max_epochs 5", "optim.precision=fp16; run.epochs=5"),
    (TRAIN, "--precision 32-true", "optim.precision=fp32"),
    (TRAIN, "--precision 64", "!must be one of auto, fp32, bf16, fp16"),
    (TRAIN, "--devices 2", "!use --nproc-per-node N for the number"),
    (TRAIN, "--accelerator gpu", "!GPUs are used if there are any"),
    (TRAIN, "--strategy ddp", "!use mode=auto, single, data_parallel or distributed"),
    (TRAIN, "--sync_batchnorm true", "ddp.sync_batchnorm=True"),
    (TRAIN, "--log_every_n_steps 20 --check_val_every_n_epoch 2", "log.log_interval=20; log.evaluate_interval=2"),
    (TRAIN, "--val_check_interval 100", "!use evaluate_every_steps=N"),
    (TRAIN, "--limit_val_batches 10", "!use evaluate_batches=N"),
    (TRAIN, "--fast_dev_run", "!use --test"),
    (TRAIN, "--enable_progress_bar false", "!there is no such switch"),
    (PYTHON, {"ckpt_path": "last"}, "run.resume=last"),
    (PYTHON, {"default_root_dir": "out"}, "!use --checkpoint-dir"),
    # pipelines for language models
    (
        FILE,
        "batch_size: 12|block_size: 64|max_iters: 2000|eval_interval: 250",
        "data.batch_size=12; model.seq_len=64; run.max_steps=2000; log.evaluate_every_steps=250; log.evaluate_interval=0",
    ),
    (
        FILE,
        "warmup_iters: 100|lr_decay_iters: 2000|min_lr: 1.0e-5|decay_lr: true",
        "optim.warmup_steps=100; optim.schedule_steps=2000; optim.min_learning_rate=1e-05",
    ),
    (FILE, "decay_lr: false|grad_clip: 1.5", "optim.schedule=constant; optim.max_grad_norm=1.5"),
    (FILE, "dtype: bfloat16|compile: true", "optim.precision=bf16; run.compile=True"),
    (FILE, "out_dir: out", "run.checkpoint_dir=out"),
    (FILE, "init_from: scratch", ""),
    (FILE, "pretrained_path: model.pt", "run.init_from=model.pt"),
    (FILE, "training: {lr: 0.001, wd: 0.1}", "optim.learning_rate=0.001; optim.weight_decay=0.1"),
    (FILE, "optimizer: {type: sgd, lr: 0.5, momentum: 0.5}", "optim.optimizer=sgd; optim.learning_rate=0.5; optim.momentum=0.5"),
    (FILE, "lr_scheduler: {name: linear, warmup_steps: 9}", "optim.schedule=linear; optim.warmup_steps=9"),
    (FILE, "system: {num_workers: 3, seed: 5}", "data.num_workers=3; run.seed=5"),
    (FILE, "lr: {base: 0.1}", "!lr.base: unknown setting"),
    (FILE, "optimizer: {nesterov: true}", "!optimizer.nesterov: unknown setting"),
    (TRAIN, "--save_interval_steps 50 --valid_interval_steps 20", "checkpoint.save_interval=0; checkpoint.save_every_steps=50; log.evaluate_every_steps=20; log.evaluate_interval=0"),
    (TRAIN, "--eval_batches 5 --test_batch_size 16", "log.evaluate_batches=5; data.evaluation_batch_size=16"),
    (TRAIN, "--ema", "!use ema_decay=0.999"),
    (TRAIN, "--preload_data_to_ram", "data.preload=True"),
    (TRAIN, "--persistent_workers --drop_last", ""),
    (TRAIN, "--drop_last false", "!cannot be turned off: each step has the whole global batch"),
    (TRAIN, "--headless", ""),
    (TRAIN, "--use_torch_compile --use_amp", "run.compile=True"),
    (TRAIN, "--use_amp=false", "optim.precision=fp32"),
    # manuals for DataParallel and DistributedDataParallel
    (PYTHON, {"device_ids": [0, 1]}, "run.gpus=(0, 1)"),
    (PYTHON, {"device_ids": None}, ""),
    (FILE, "training_mode: dataparallel", "run.mode=data_parallel"),
    (FILE, "training_mode: distributed", "run.mode=distributed"),
    (FILE, "training_mode: ddp", "run.mode=distributed"),
    (FILE, "training_mode: fsdp", "!must be one of auto, single, data_parallel, distributed"),
    (FILE, "enable_gradient_as_bucket_view: false", "ddp.gradient_as_bucket_view=False"),
    (FILE, "enable_gpu_monitoring: false", "log.gpu_watch_s=0.0"),
    (FILE, "sync_bn: true", "ddp.sync_batchnorm=True"),
    (FILE, "broadcast_buffers: false", "!cannot be turned off: buffers are made the same"),
    (FILE, "timeout: 30", "!write collective_timeout_s=N for collectives"),
    (FILE, "find_unused_parameters: true|static_graph: true", "ddp.find_unused_parameters=True; ddp.static_graph=True"),
    (FILE, "bucket_cap_mb: 50", "ddp.bucket_cap_mb=50"),
    (TRAIN, "--num_gpus 2 --workers 4", "run.nproc_per_node=2; data.num_workers=4"),
    (TRAIN, "--n_gpu 2", "!use --nproc-per-node N for the number"),
    (TRAIN, "--enable_mixed_precision true", ""),
    (TRAIN, "--activation_checkpointing UNetBlock,encoder.*", "memory.activation_checkpointing=('UNetBlock,encoder.*',)"),
]  # fmt: skip


def settings_for(kind, typed, folder):
    """What is typed there -> settings. Raises BadInputError."""
    if kind == PYTHON:
        return from_flat(typed)
    if kind == FILE:
        file = folder / "guide.yaml"
        file.write_text(typed.replace("|", "\n"))
        return resolve(files=[file]).settings
    words = shlex.split(typed)
    if kind == RUN:
        (folder / "train.py").write_text("print()\n")
        return settings_of(words)
    return resolve(command_line=parse_train(words).assignments).settings


def changed(settings, usual):
    """Dotted key -> value of each setting that is not as usual, without what follows from a name."""
    found = {}
    for section in fields(usual):
        own, other = (getattr(one, section.name) for one in (usual, settings))
        for field in fields(own) if hasattr(own, "__dataclass_fields__") else ():
            value = getattr(other, field.name)
            if value != getattr(own, field.name):
                found[f"{section.name}.{field.name}"] = value
    if "run.name" in found:
        del found["run.log_dir"], found["run.checkpoint_dir"]
    return found


@pytest.mark.parametrize(("kind", "typed", "comes_of_it"), ROWS, ids=lambda value: str(value)[:60])
def test_words_of_other_guides_mean_the_same_or_are_answered(
    kind, typed, comes_of_it, tmp_path, monkeypatch
):
    """The settings that change are just those, or one line says what to write."""
    monkeypatch.chdir(tmp_path)
    if comes_of_it.startswith("!"):
        with pytest.raises(BadInputError) as caught:
            settings_for(kind, typed, tmp_path)
        assert comes_of_it[1:] in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    usual = {RUN: "train.py", FILE: "", PYTHON: {}, TRAIN: ""}[kind]
    found = changed(settings_for(kind, typed, tmp_path), settings_for(kind, usual, tmp_path))
    expected = comes_of_it.split("; ") if comes_of_it else []
    assert sorted(f"{key}={value}" for key, value in found.items()) == sorted(expected)


def page():
    place = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(place)
    sys.modules["generate"] = generate
    try:
        place.loader.exec_module(generate)
    finally:
        del sys.modules["generate"]
    return generate.coming_from_page()


def test_the_page_has_each_name_that_is_taken_or_answered():
    """In the tables by where people come from, or in that of the others."""
    text = page()
    names = {*ALIASES, *ANSWERS, *ALWAYS, *ALSO_CALLED, *REFUSED}
    names |= {f"{name}:" for name in HEADINGS}
    assert [name for name in names if f"`{name}`" not in text] == []
