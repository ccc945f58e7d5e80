"""What the zygote's environment holds before torch is imported."""

from __future__ import annotations

from pathlib import Path

import ddp_runner
from ddp_runner.core.launch_plan import TRAINED, LaunchPlan
from ddp_runner.core.settings import RunSettings, Settings
from ddp_runner.supervisor.node_plans import what_to_import, zygote_environment
from ddp_runner.system.environment import kept_against_advice

ON_PATH = str(Path(ddp_runner.__file__).resolve().with_name("on_path"))


def plan_of(settings, *, threads=3, stages=()):
    return LaunchPlan(
        settings=settings,
        origins={},
        devices=(),
        world_size=1,
        threads_per_rank=threads,
        resume_key={},
        settings_digest="0",
        command=(),
        notes=(),
        stages=stages,
    )


def environment(own, *, debug=False, threads=3):
    plan = plan_of(Settings(run=RunSettings(debug=debug)), threads=threads)
    return zygote_environment(plan, own)


def test_every_rank_gets_its_share_of_threads():
    """Part of the run's settings, since summation order depends on it."""
    made = environment({})
    assert made["OMP_NUM_THREADS"] == made["MKL_NUM_THREADS"] == "3"


def test_what_the_user_has_set_is_left_alone():
    """A variable of one's own wins over a default of ours."""
    made = environment({"OMP_NUM_THREADS": "7", "TORCH_CPP_LOG_LEVEL": "INFO", "MINE": "x"})
    assert made["OMP_NUM_THREADS"] == "7"
    assert made["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert made["MINE"] == "x"


def test_a_watchdog_that_would_kill_survivors_is_off():
    """A rank must outlive a failed NCCL collective."""
    assert environment({})["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_gpus_are_counted_as_nvidia_smi_counts_them():
    """What --gpus names, and what is printed, is the GPU that the rank gets."""
    assert environment({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    own = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert environment(own)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_sets_of_names_have_one_order_in_every_process():
    """A model that is made from one has its parts in the same order in a replacement and at a resume."""
    assert environment({})["PYTHONHASHSEED"] == "0"
    assert environment({"PYTHONHASHSEED": "7"})["PYTHONHASHSEED"] == "7"


def test_large_tensors_come_in_large_pages():
    """Unless the user has said otherwise."""
    assert environment({})["THP_MEM_ALLOC_ENABLE"] == "1"
    assert environment({"THP_MEM_ALLOC_ENABLE": "0"})["THP_MEM_ALLOC_ENABLE"] == "0"


def test_debug_turns_on_torch_s_own_checks():
    """And leaves its messages on; without, neither."""
    debug, quiet = environment({}, debug=True), environment({})
    assert debug["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert debug["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "TORCH_CPP_LOG_LEVEL" not in debug
    assert "TORCH_DISTRIBUTED_DEBUG" not in quiet
    assert quiet["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_the_package_is_found_from_any_folder():
    """Behind what the user has put on the path, and once."""
    assert environment({})["PYTHONPATH"] == ON_PATH
    assert environment({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"/a:/b:{ON_PATH}"
    again = environment({"PYTHONPATH": f"/a:{ON_PATH}"})
    assert again["PYTHONPATH"] == f"/a:{ON_PATH}"


def test_the_given_environment_is_not_changed():
    """Control: it is the supervisor's own."""
    own = {"PYTHONPATH": "/a"}
    environment(own)
    assert own == {"PYTHONPATH": "/a"}


def test_ranks_on_gpus_meet_on_loopback_and_can_be_forked():
    """A repair needs the one, a user who asks for is_available() at import the other."""
    made = environment({})
    assert (made["NCCL_SOCKET_IFNAME"], made["PYTORCH_NVML_BASED_CUDA_CHECK"]) == ("lo", "1")
    assert made["TORCH_NCCL_ENABLE_MONITORING"] == made["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    for name in ("NCCL_ALGO", "NCCL_NVLS_ENABLE"):
        assert name not in made, "control: how sums are made is NCCL's choice"


def test_a_variable_that_stands_against_repairs_is_named():
    """It is kept; control: who has set what is needed, or something else, reads nothing."""
    mine = {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_DEBUG": "INFO"}
    assert kept_against_advice(mine, is_deterministic=True) == (
        "NCCL_NVLS_ENABLE=1 of your environment is kept; 0 is what repairs on GPUs need",
    )
    assert kept_against_advice(mine, is_deterministic=False) == ()
    assert kept_against_advice({"NCCL_ALGO": "Tree"}, is_deterministic=False) == ()
    assert len(kept_against_advice({"NCCL_ALGO": "Tree"}, is_deterministic=True)) == 1
    network = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert len(kept_against_advice(network, is_deterministic=False)) == 1
    assert kept_against_advice(network, is_deterministic=False, is_alone=False) == ()


def test_tasks_of_several_files_are_imported_by_ranks_alone():
    """A module of one stage is not found by another in the place of its own; a shared file is imported ahead."""
    one, same, other = (
        Settings(run=RunSettings(task=task)) for task in ("a/t.py:A", "a/t.py:B", "b/t.py:B")
    )
    assert what_to_import(plan_of(one)) == f"{TRAINED}:a/t.py:A"
    assert what_to_import(plan_of(one, stages=(one, same))) == f"{TRAINED}:a/t.py:A"
    assert what_to_import(plan_of(one, stages=(one, same, other))) == f"{TRAINED}:"
