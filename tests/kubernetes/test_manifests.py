"""The manifests are what Kubernetes and Kubeflow take, and mean what the documentation says."""

from __future__ import annotations

import copy

import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.core.settings import RecoverySettings
from ddp_runner.kernel.rules.exits import ExitCode
from tests.kubernetes import manifests
from tests.kubernetes.manifests import action_on, container_of, documents, job_of, variables_of

INDEXED, TRAIN_JOB = "kubernetes-indexed-job.yaml", "kubernetes-trainjob.yaml"
BOTH = pytest.mark.parametrize("name", [INDEXED, TRAIN_JOB])


@BOTH
def test_every_field_is_one_of_its_kind(name):
    """Of the right type, and none that is needed is missing."""
    for document in documents(name).values():
        assert manifests.wrong_fields(document) == []


def test_a_wrong_field_is_found():
    """A word that is misspelled, missing, or of another type, at any depth."""
    whole = documents(INDEXED)["Job"]
    for change, line in (
        (lambda job: job["spec"].update(podFailPolicy={}), "Job.spec.podFailPolicy: is no field"),
        (lambda job: job["spec"].update(completions="2"), "Job.spec.completions: must be of"),
        (lambda job: job["spec"].pop("template"), "Job.spec.template: is missing"),
        (lambda job: job.update(apiVersion="batch/v2"), "('batch/v2', 'Job') is not known"),
        (
            lambda job: job["spec"]["podFailurePolicy"]["rules"][0].update(action="Fail"),
            "Job.spec.podFailurePolicy.rules[0].action: must be one of",
        ),
    ):
        changed = copy.deepcopy(whole)
        change(changed)
        (found,) = manifests.wrong_fields(changed)
        assert found.startswith(line)


def test_kubernetes_own_schema_takes_every_document():
    """The whole one, which refuses unknown fields; a runtime's job is a Job as well."""
    schema = pytest.importorskip(
        "kubernetes_validate", reason="the extra `manifests` is not installed"
    )
    runtime_job = copy.deepcopy(job_of(TRAIN_JOB))
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "node"},
        "spec": runtime_job,
    }
    for document in (*documents(INDEXED).values(), job):
        schema.validate(document, "1.33", strict=True)


@BOTH
def test_each_exit_code_leads_to_what_it_means(name):
    """Kubernetes reads the same codes as a shell; what else ends a pod counts against ``backoffLimit``."""
    job = job_of(name)
    actions = {code: action_on(job, int(code)) for code in ExitCode if code is not ExitCode.DONE}
    for_good = dict.fromkeys((ExitCode.FAILED, ExitCode.BAD_USAGE, ExitCode.GAVE_UP), "FailJob")
    assert actions == {**for_good, ExitCode.PREEMPTED: "Ignore", ExitCode.INTERRUPTED: "Count"}
    assert action_on(job, 137) == "Count"
    rules = job["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container_of(name)["name"]
    }
    # A pod whose exit codes are read may not restart its container, nor have a successor beside it.
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["podReplacementPolicy"] == "Failed"


@BOTH
def test_words_of_the_container_are_a_command_line(name):
    """Of this command, with folders that lie on the claim."""
    found = documents(name)
    one = found["TrainJob"]["spec"]["trainer"] if "TrainJob" in found else container_of(name)
    assert one["command"] == ["./launch_training.sh"]
    given = dict(parse_train(one["args"]).assignments)
    mounted = {mount["mountPath"]: mount["name"] for mount in container_of(name)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in job_of(name)["template"]["spec"]["volumes"]}
    assert "persistentVolumeClaim" in volumes[mounted["/shared"]]
    assert "emptyDir" in volumes[mounted["/dev/shm"]]
    for setting in ("--checkpoint-dir", "--log-dir"):
        assert given[setting].startswith("/shared/")


@BOTH
def test_a_pod_has_time_to_save_and_room_to_run(name):
    """Longer than the run takes to stop at most; requests keep it from full nodes, and from early eviction."""
    pod = job_of(name)["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > RecoverySettings().stop_timeout_s
    found = documents(name)
    resources = (
        found["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]
        if "TrainJob" in found
        else container_of(name)["resources"]
    )
    assert {*resources["requests"]} == {"cpu", "memory"}
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_pods_of_the_indexed_job_find_the_first():
    """By the service's name, which selects this job's pods and has the port."""
    found = documents(INDEXED)
    service, job = found["Service"], found["Job"]
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", pod["subdomain"])
    variables = variables_of(container_of(INDEXED), index=1, secret="0" * 16)
    (port,) = service["spec"]["ports"]
    assert variables["PET_RDZV_ENDPOINT"] == f"{name}-0.{pod['subdomain']}:{port['port']}"
    assert variables["PET_NODE_RANK"] == "1"
    assert variables["PET_NNODES"] == str(job["spec"]["completions"])
    assert job["spec"]["parallelism"] == job["spec"]["completions"]


def test_the_train_job_uses_the_runtime_beside_it():
    """Whose job and container have the names that the operator looks for."""
    found = documents(TRAIN_JOB)
    runtime, reference = found["TrainingRuntime"], found["TrainJob"]["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (
        "TrainingRuntime",
        runtime["metadata"]["name"],
    )
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (replicated["name"], container_of(TRAIN_JOB)["name"]) == ("node", "node")
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
