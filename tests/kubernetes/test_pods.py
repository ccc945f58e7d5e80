"""Two supervisors with the variables of two pods, and what a Job's controller then does about their ends."""

from __future__ import annotations

import signal

import pytest

from tests.features.machines.whole_runs.conftest import SETTINGS, STEPS, TOKEN, free_port
from tests.kubernetes import manifests
from tests.kubernetes.manifests import action_on, container_of, job_of
from tests.kubernetes.test_manifests import INDEXED, TRAIN_JOB
from tests.scenarios.conftest import made_once
from tests.scenarios.harness import ONE_THREAD, Run

__all__ = ["made_once"]
pytestmark = pytest.mark.whole_run
PACE = "task.pace_s=0.05"


class Pods:
    """Two of them, of one rank each; what the cluster's DNS resolves is 127.0.0.1 here."""

    def __init__(self, folder, variables, *, job=None):
        self.folder = folder
        self.job = job
        self._variables = variables
        self._port = str(free_port())
        self.started = []

    def start(self, index):
        found = {**self._variables(index), "PET_NPROC_PER_NODE": "1"}
        for name in found:
            if name.endswith("MASTER_ADDR"):
                found[name] = "127.0.0.1"
            elif name.endswith("MASTER_PORT"):
                found[name] = self._port
            elif name == "PET_RDZV_ENDPOINT":
                found[name] = f"127.0.0.1:{self._port}"
        folder = self.folder / f"pod{index}"
        pod = Run(folder, PACE, ONE_THREAD, *SETTINGS, world=None, variables=found)
        self.started.append(pod)
        return pod

    def ended(self, pod, *, index):
        """The exit code, and the pod that the controller has in its place; None for none."""
        code = pod.wait()
        action = "" if code == 0 else action_on(self.job, code % 256)
        return code, self.start(index) if action in ("Ignore", "Count") else None


@pytest.fixture
def pods(tmp_path):
    made = []

    def make(*arguments, **how):
        made.append(Pods(tmp_path, *arguments, **how))
        return made[-1]

    yield make
    for one in made:
        for pod in one.started:
            pod.__exit__(None, None, None)


@pytest.fixture
def weights(made_once):
    """Of two ranks on one machine."""
    return made_once(*SETTINGS, world=2).digest


def test_an_evicted_pod_of_an_indexed_job_is_made_again(pods, weights):
    """SIGTERM: the run saves, both end with 75, which no limit counts, and new pods go on to the same weights."""
    container = container_of(INDEXED)
    both = pods(
        lambda index: manifests.variables_of(container, index=index, secret=TOKEN),
        job=job_of(INDEXED),
    )
    first, second = both.start(0), both.start(1)
    first.wait_for_step(5)
    second.signal(signal.SIGTERM)
    code, again = both.ended(second, index=1)
    assert (code, both.ended(first, index=0)[0]) == (75, 75), first.console + second.console
    first = both.started[-1]
    assert (first.wait(), again.wait()) == (0, 0), first.console + again.console
    assert (first.summary()["steps"], first.digest) == (STEPS, weights)


def test_a_killed_pod_of_a_train_job_comes_back_in_place(pods, weights):
    """Its machine is gone: the other pod keeps its process, and no step is lost."""
    both = pods(
        lambda index: manifests.variables_of_train_job(TRAIN_JOB, index=index, secret=TOKEN),
        job=job_of(TRAIN_JOB),
    )
    first, second = both.start(0), both.start(1)
    first.wait_for_step(5)
    stays = first.rank_pid(0)
    second.signal(signal.SIGKILL)
    second.assert_gone()
    assert action_on(both.job, 128 + signal.SIGKILL) == "Count"
    second = both.start(1)
    reached = first.committed()
    first.wait_for_step(reached + 5)
    assert first.rank_pid(0) == stays
    assert (first.wait(), second.wait()) == (0, 0), first.console + second.console
    faults = [(fault["kind"], fault["steps_lost"]) for fault in first.summary()["faults"]]
    assert (faults, first.digest) == ([("node_lost", 0)], weights)


def test_pods_of_a_pytorch_job_are_machines_and_not_ranks(pods, weights):
    """Though RANK and WORLD_SIZE are set in them."""
    both = pods(
        lambda index: manifests.variables_of_pytorch_job(
            index=index, replicas=2, ranks=1, secret=TOKEN
        )
    )
    first, second = both.start(0), both.start(1)
    assert (first.wait(), second.wait()) == (0, 0), first.console + second.console
    assert (first.summary()["world_size"], first.digest) == (2, weights)
    assert "of the environment are not used: this command" in first.console


def test_wrong_input_in_a_pod_fails_the_job(pods):
    """Exit code 2 at once, and no pod is made in its place."""
    container = container_of(INDEXED)
    both = pods(
        lambda index: {
            **manifests.variables_of(container, index=index, secret=TOKEN),
            "PET_NNODES": "0",
        },
        job=job_of(INDEXED),
    )
    assert both.ended(both.start(0), index=0) == (2, None)
