"""What fault-free runs are measured by: in one process, each task trains to the weights of plain PyTorch."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from ddp_runner import DDPTrainer
from ddp_runner.data.order import SampleOrder
from ddp_runner.values.generators import seed_all, seed_step
from tests.strangers.table import TABLE, TASKS

SEED = 1234
BATCH = 8
STEPS = 18  # of six an epoch
PLAIN = [pytest.param(one, id=key) for key, one in TABLE.items() if one.is_plain]


def loop(stranger):
    """The model, trained as somebody would do it by hand, in the runner's order and with its seeds."""
    spec = importlib.util.spec_from_file_location("plain_task", TASKS / f"{stranger.file}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_task"] = module
    spec.loader.exec_module(module)
    seed_all(SEED)
    task = getattr(module, stranger.name)()
    datasets = task.build_datasets()
    seed_all(SEED)
    model = task.build_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    parameters = [*matrices, *vectors]
    decays = ((matrices, 0.01), (vectors, 0.0))
    groups = [{"params": each, "weight_decay": decay} for each, decay in decays if each]
    is_fused = all(p.is_floating_point() for p in parameters)
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.98), fused=is_fused)
    collate = datasets.collate or torch.utils.data.default_collate
    size = len(datasets.train)
    order = SampleOrder(seed=SEED, dataset_size=size, global_batch_size=BATCH)
    model.train()
    for step in range(STEPS):
        batch = collate([datasets.train[int(i)] for i in order.indices(step)])
        seed_step(seed=SEED, step=step, rank=0, micro_step=0)
        optimizer.zero_grad()
        task.loss(model, batch).float().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return model


@pytest.mark.parametrize("stranger", PLAIN)
@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of a gradient's gradient, by DDP
@pytest.mark.usefixtures("clean_imports")
def test_a_run_without_faults_is_a_plain_loop(tmp_path, monkeypatch, stranger):
    """Bit for bit: nothing of what guards a run changes what it computes."""
    for place in ("plain", "runner"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "plain")
    expected = loop(stranger).state_dict()
    monkeypatch.chdir(tmp_path / "runner")
    own = dict(word.split("=") for word in stranger.settings)
    config = {
        "task": stranger.spec,
        "seed": SEED,
        "batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 0.05,
        "warmup_steps": 0,
        "schedule": "constant",
        "beta2": 0.98,
        "device": "cpu",
        "use_amp": False,
        "num_workers": 0,
        "evaluate_interval": 0,
        "log_dir": "logs",
        "checkpoint_dir": "checkpoints",
        "display": "none",
        **own,
    }
    trained = DDPTrainer(config=config).train().model.state_dict()
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(trained[name], value), name
        else:
            assert trained[name] == value, name
