"""The block that says what runs: each row in plain words, and a display breaks those wider than its terminal."""

from __future__ import annotations

import pytest

from ddp_runner.config import from_flat
from ddp_runner.observe.start_block import StartFacts, start_block
from ddp_runner.observe.terminal import fitted


def facts(**changes):
    known = {
        "ranks": 4,
        "device": "NVIDIA H100 80GB HBM3",
        "backend": "cpu:gloo,cuda:nccl",
        "threads": 0,
        "precision": "bf16",
        "parameters": 1_000_000,
        "trained": 1_000_000,
        "total_steps": 3000,
        "steps_per_epoch": 1000,
        "committed_step": 0,
        "shares": (),
        "samples": 512_000,
        "global_batch": 512,
        "micro_batch_size": 32,
        "loader_workers": 2,
        "checkpoint_bytes": 12_000_000,
        "room_bytes": 120_000_000,
        "is_task": True,
        "schedule": "cosine to 0 at step 3,000, after 50 steps of warm-up",
    }
    return StartFacts(**{**known, **changes})


def rows(settings=None, **changes):
    """The text of each label, lines of it joined by a slash."""
    found = {}
    for line in start_block(from_flat(settings or {}), facts(**changes)):
        label = line[1:15].strip()
        name = label or name  # noqa: F821 - of the line before
        found[name] = f"{found[name]} / {line[15:]}" if name in found else line[15:]
    return found


def test_the_block_says_what_runs_row_by_row():
    """With the words of each row, in the order in which a reader asks for them."""
    assert rows({"learning_rate": 3e-4, "max_grad_value": 0.5}) == {
        "ranks": "4 on NVIDIA H100 80GB HBM3, nccl",
        "precision": "bf16 where it is safe, fp32 elsewhere (precision=auto)",
        "model": "1,000,000 parameters, all trained",
        "data": "512,000 samples, 2 loader workers per rank",
        "global batch": "512 = 32 x 4 accumulated x 4 ranks",
        "length": "3,000 steps, 3 epochs of 1,000",
        "optimizer": "adamw, learning rate 0.0003, weight decay 0.01, gradient norm at most 1, gradient values at most 0.5",
        "schedule": "cosine to 0 at step 3,000, after 50 steps of warm-up",
        "checkpoints": "about 12.0 MB each, at most 5 at a time, room for 10",
    }


@pytest.mark.parametrize(
    ("changes", "row", "words"),
    [
        (
            {"ranks": 1, "device": "the CPU", "backend": "gloo", "threads": 2},
            "ranks",
            "1 on the CPU, gloo, 2 threads",
        ),
        ({"mode": "single: there is one GPU"}, "mode", "single: there is one GPU"),
        (
            {"ranks": 1, "devices": 4, "global_batch": 128, "micro_batch_size": 128},
            "global batch",
            "128 = 128 x 1 rank, shared out over 4 devices",
        ),
        ({"machines": 2}, "ranks", "4 on 2 machines, NVIDIA H100 80GB HBM3, nccl"),
        (
            {"ranks": 2, "device": "the CPU", "backend": "gloo", "threads": 1},
            "ranks",
            "2 on the CPU, gloo, 1 thread each",
        ),
        ({"trained": 1000}, "model", "1,000,000 parameters: 1,000 trained, 999,000 frozen"),
        ({"loader_workers": 0}, "data", "512,000 samples, loaded by the ranks themselves"),
        ({"micro_batch_size": 128}, "global batch", "512 = 128 x 4 ranks"),
        (
            {"ranks": 3, "global_batch": 500},
            "global batch",
            "500 over 3 ranks, at most 32 at once",
        ),
        ({"micro_batch_size": 50}, "global batch", "512 = 128 (in parts of 50) x 4 ranks"),
        ({"ranks": 1, "global_batch": 128}, "global batch", "128 = 32 x 4 accumulated x 1 rank"),
        ({"total_steps": 30}, "length", "30 steps of an epoch of 1,000"),
        ({"total_steps": 1000}, "length", "1,000 steps, 1 epoch of 1,000"),
        (
            {"committed_step": 1200},
            "length",
            "3,000 steps, 3 epochs of 1,000 / resumed at step 1,200",
        ),
        (
            {"left_out": 999_000},
            "checkpoints",
            (
                "about 12.0 MB each, at most 5 at a time, room for 10 / without 999,000 frozen"
                " parameters: a resume needs the same start weights"
            ),
        ),
        ({"room_bytes": None}, "checkpoints", "about 12.0 MB each, at most 5 at a time"),
        (
            {"room_bytes": 10**18},
            "checkpoints",
            "about 12.0 MB each, at most 5 at a time, room for over 1,000",
        ),
    ],
)
def test_a_row_follows_what_is_there(changes, row, words):
    """One rank and many, parts that do not divide, a resume, a disk that does not say."""
    assert rows(**changes)[row] == words


@pytest.mark.parametrize(
    ("settings", "row", "words"),
    [
        ({"precision": "fp32"}, "precision", "fp32 (precision=fp32)"),
        ({"max_grad_norm": None}, "optimizer", "gradients not clipped"),
        ({"ema_decay": 0.99}, "average", "of the weights, decay 0.99; evaluation uses it"),
        (
            {"ema_decay": 0.9, "ema_every": 5, "ema_start_step": 1000, "ema_device": "cpu"},
            "average",
            "of the weights, decay 0.9, every 5 steps, from step 1,000, in host memory; evaluation",
        ),
        ({"activation_checkpointing": "all"}, "recomputed", "activations of all blocks, in"),
        ({"activation_checkpointing": ["a", "b.*"]}, "recomputed", "activations of a, b.*, in"),
        ({"max_time": "90m"}, "length", " / this launch saves and ends after 1h 30m"),
        (
            {"keep_every": 700},
            "checkpoints",
            " / and one every 700 steps is never deleted, 4 more of these",
        ),
        ({"keep_last": 1}, "checkpoints", "at most 3 at a time"),
        ({"explosion_loss_max": 50}, "loss watch", "loss above 50: the step is skipped"),
        (
            {"explosion_rate_factor": 0.5},
            "loss watch",
            "after an explosion: learning rate x 0.5, back over 1,000 steps",
        ),
        ({"compile": True}, "compiled", "mode default; evaluations run uncompiled"),
        (
            {"compile": True, "compile_mode": "reduce-overhead", "deterministic": True},
            "compiled",
            "uncompiled / reduce-overhead with deterministic: CUDA graphs hold extra",
        ),
        (
            {"compile": True, "compile_mode": "max-autotune", "deterministic": True},
            "compiled",
            "uncompiled / max-autotune with deterministic: compiling takes longer, and a",
        ),
        (
            {"train_layers": "head, norm.*", "unfreeze": "enc.*@1e3,all@0.25"},
            "layers",
            "trained from the first step: head, norm.* / enc.* from step 1,000 on / all from 0.25 of the run",
        ),
        (
            {"sync_batchnorm": True, "gradient_dtype": "bf16", "static_graph": True},
            "over ranks",
            (
                "batch norm uses the batches of all ranks (sync_batchnorm) / gradients are summed in"
                " bf16 / every step uses the same parameters (static_graph)"
            ),
        ),
        (
            {"plateau_patience": 3, "early_stopping_patience": 9},
            "loss watch",
            "3 evaluations without improvement: learning rate x 0.5 / 9 evaluations without improvement: the run ends",
        ),
    ],
)
def test_a_row_follows_the_settings(settings, row, words):
    """What is off is said where it is a choice, and left out where nobody expects it."""
    precision = "bf16" if settings.get("precision") is None else settings["precision"]
    assert words in rows(settings, precision=precision)[row]
    assert not {"loss watch", "layers", "over ranks", "compiled", "recomputed"} & rows().keys()
    assert ("average" in rows(settings)) is ("ema_decay" in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"compile_mode": "max-autotune", "deterministic": False},
        {"compile_mode": "default", "deterministic": True},
    ],
)
def test_a_mode_without_deterministic_has_no_costs_named(settings):
    """One without the other is what somebody chose, and needs no note."""
    assert rows({"compile": True, **settings})["compiled"].endswith("evaluations run uncompiled")


def test_a_loop_of_ones_own_shows_what_is_known():
    """Its optimizer, precision and batches are the program's."""
    unknown = dict.fromkeys(("samples", "global_batch", "micro_batch_size", "loader_workers"))
    found = rows(is_task=False, checkpoint_bytes=None, **unknown)
    assert list(found) == ["ranks", "model", "length"]


@pytest.mark.parametrize("columns", [60, 100, 140])
def test_a_terminal_breaks_rows_between_words_below_their_values(columns):
    """However long the figures are; a row that fits stays on one line, and other output stays as it is."""
    wild = {"max_grad_norm": 1.2345e-7, "max_grad_value": 9.87654e10, "min_lr": 1.2345e-7}
    changes = {
        "total_steps": 10**12,
        "steps_per_epoch": 10**9,
        "committed_step": 10**12 - 1,
        "parameters": 10**15,
        "trained": 10**14,
        "samples": 10**15,
        "global_batch": 64 * 10**9,
        "micro_batch_size": 7,
        "device": "a card with a name that is far too long for anybody to read it all on a line",
    }
    block = start_block(from_flat(wild), facts(**changes))
    broken = 0
    for row in block:
        first, *rest = fitted(row, "INFO", columns)
        assert max(map(len, (first, *rest))) < columns
        assert all(line[:15].isspace() and line[15] != " " for line in rest)
        assert " ".join((first, *(line.strip() for line in rest))) == row
        assert bool(rest) == (len(row) >= columns)
        broken += bool(rest)
    assert broken or columns == 140
    assert fitted("x " * columns, "RAW", columns) == ["x " * columns]
    assert fitted(block[0], "INFO", None) == [block[0]]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (192, "512 = 192 + 192 + 128"),
        (64, "512 = 192 + 192 + 128, at most 64 at once"),
    ],
)
def test_unequal_shares_are_shown_as_samples_of_each_rank(part, words):
    """Who reads it sees what each device has to do."""
    found = rows(ranks=3, shares=(192, 192, 128), micro_batch_size=part)
    assert found["global batch"] == words


@pytest.mark.parametrize(
    ("total", "changes", "words"),
    [
        (7, {}, "7 loader workers over 4 ranks"),
        (1, {"ranks": 1}, "1 loader worker over 1 rank"),
        (5, {"machines": 2}, "5 loader workers over 2 ranks of each machine"),
        (0, {"loader_workers": 0}, "loaded by the ranks themselves"),
    ],
)
def test_a_total_of_loader_workers_is_shown_as_one(total, changes, words):
    """Ranks may have unlike parts of it."""
    assert rows({"workers_total": total}, **changes)["data"] == f"512,000 samples, {words}"


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (
            {"accumulation": 4},
            {},
            (
                "512 = 32 x 4 accumulated x 4 ranks / accumulation=4 counts for each rank: 512 samples;"
                " over all ranks (accumulation_total=4) it would be 128"
            ),
        ),
        (
            {"accumulation_total": 16},
            {},
            (
                "512 = 32 x 4 accumulated x 4 ranks / accumulation_total=16 counts over all ranks: 512"
                " samples; for each rank (accumulation=16) it would be 2,048"
            ),
        ),
        (
            {"accumulation": 16},
            {"ranks": 1},
            "512 = 32 x 16 accumulated x 1 rank",
        ),
    ],
)
def test_both_readings_of_accumulation_are_shown_in_samples(settings, changes, words):
    """Trainers count it for each rank, some pipelines over all; one rank has one reading."""
    assert rows(settings, **changes)["global batch"] == words
