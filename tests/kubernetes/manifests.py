"""The manifests of docs/examples, the fields that they may have, and the variables that a pod gets from its operator."""

from __future__ import annotations

from functools import cache

import yaml

from tests.scenarios.harness import ROOT

EXAMPLES = ROOT / "docs" / "examples"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

# Fields and types by the API reference of Kubernetes 1.37 (batch/v1, v1) and the resource definitions of
# Kubeflow Trainer, trainer.kubeflow.org/v1alpha1 at commit 8c0f505 of August 2026. Both were read for what
# is used here, and both whole schemas have taken these manifests; a field that is not in here is refused.
TEXT, NUMBER = str, int
METADATA = {"name!": TEXT, "labels": {"*": TEXT}}
SOURCE = {"fieldRef": {"fieldPath!": TEXT}, "secretKeyRef": {"name!": TEXT, "key!": TEXT}}
VARIABLES = [{"name!": TEXT, "value": TEXT, "valueFrom": SOURCE}]
RESOURCES = {"limits": {"*": (TEXT, NUMBER)}, "requests": {"*": (TEXT, NUMBER)}}
CONTAINER = {
    "name!": TEXT,
    "image!": TEXT,
    "workingDir": TEXT,
    "command": [TEXT],
    "args": [TEXT],
    "env": VARIABLES,
    "resources": RESOURCES,
    "volumeMounts": [{"name!": TEXT, "mountPath!": TEXT}],
}
VOLUME = {
    "name!": TEXT,
    "persistentVolumeClaim": {"claimName!": TEXT},
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": TEXT},
}
POD = {
    "subdomain": TEXT,
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "terminationGracePeriodSeconds": NUMBER,
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
}
CODES = {"containerName": TEXT, "operator!": {"In", "NotIn"}, "values!": [NUMBER]}
RULE = {
    "action!": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onExitCodes": CODES,
    "onPodConditions": [{"type!": TEXT, "status!": {"True", "False", "Unknown"}}],
}
JOB = {
    "completionMode": {"NonIndexed", "Indexed"},
    "completions": NUMBER,
    "parallelism": NUMBER,
    "backoffLimit": NUMBER,
    "podReplacementPolicy": {"TerminatingOrFailed", "Failed"},
    "successPolicy": {"rules!": [{"succeededIndexes": TEXT, "succeededCount": NUMBER}]},
    "podFailurePolicy": {"rules!": [RULE]},
    "template!": {"metadata": {"labels": {"*": TEXT}}, "spec!": POD},
}
REPLICATED = {
    "name!": TEXT,
    "replicas": NUMBER,
    "template!": {"metadata": {"labels": {"*": TEXT}}, "spec!": JOB},
}
SERVICE = {
    "clusterIP": TEXT,
    "publishNotReadyAddresses": bool,
    "selector": {"*": TEXT},
    "ports": [{"name": TEXT, "port!": NUMBER}],
}
RUNTIME = {
    "mlPolicy": {"numNodes": NUMBER, "torch": {}},
    "template": {"spec!": {"replicatedJobs": [REPLICATED]}},
}
TRAIN_JOB = {
    "runtimeRef!": {"name!": TEXT, "apiGroup": TEXT, "kind": TEXT},
    "trainer": {
        "numNodes": NUMBER,
        "numProcPerNode": NUMBER,
        "image": TEXT,
        "command": [TEXT],
        "args": [TEXT],
        "env": VARIABLES,
        "resourcesPerNode": RESOURCES,
    },
}
SPECS = {
    ("v1", "Service"): SERVICE,
    ("batch/v1", "Job"): JOB,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): RUNTIME,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
}


@cache
def documents(name):
    """The documents of a manifest, by kind."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def wrong_fields(document):
    """What of a document is unknown, missing or of another type, as lines."""
    kind = (document.get("apiVersion"), document.get("kind"))
    if kind not in SPECS:
        return [f"{kind} is not known"]
    shape = {"apiVersion!": TEXT, "kind!": TEXT, "metadata!": METADATA, "spec!": SPECS[kind]}
    return list(_wrong(document, shape, kind[1]))


def _wrong(value, shape, place):
    if isinstance(shape, list):
        yield from _wrong_items(value, shape[0], place)
    elif isinstance(shape, dict):
        yield from _wrong_members(value, shape, place)
    elif isinstance(shape, set):
        if value not in shape:
            yield f"{place}: must be one of {sorted(shape)}"
    elif not isinstance(value, shape) or (shape is NUMBER and isinstance(value, bool)):
        yield f"{place}: must be of {shape}"


def _wrong_items(value, shape, place):
    if not isinstance(value, list) or not value:
        yield f"{place}: must be a list of something"
        return
    for number, one in enumerate(value):
        yield from _wrong(one, shape, f"{place}[{number}]")


def _wrong_members(value, shape, place):
    if not isinstance(value, dict):
        yield f"{place}: must have fields"
        return
    known = {name.rstrip("!"): each for name, each in shape.items()}
    needed = [name.rstrip("!") for name in shape if name.endswith("!")]
    yield from (f"{place}.{name}: is missing" for name in needed if name not in value)
    for name, one in value.items():
        if name in known or "*" in known:
            yield from _wrong(one, known.get(name, known.get("*")), f"{place}.{name}")
        else:
            yield f"{place}.{name}: is no field"


def job_of(name):
    """The spec of the Job that runs the pods, as it stands in the manifest or the runtime."""
    found = documents(name)
    if "Job" in found:
        return found["Job"]["spec"]
    (replicated,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(name):
    """The container that trains."""
    (container,) = job_of(name)["template"]["spec"]["containers"]
    return container


def action_on(job, exit_code):
    """What the Job's controller does about a pod that ended so: the first rule that fits, else Count."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and (exit_code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


def variables_of(container, *, index, secret):
    """The ``env`` of a container in the pod of that completion index."""
    found = {}
    for one in container.get("env", ()):
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[one["name"]] = secret
        elif source.get("fieldRef", {}).get("fieldPath") == INDEX:
            found[one["name"]] = str(index)
        else:
            found[one["name"]] = one["value"]
    return found


def variables_of_train_job(name, *, index, secret):
    """By EnforceMLPolicy in pkg/runtime/framework/plugins/torch/torch.go of kubeflow/trainer, commit 8c0f505."""
    job = documents(name)["TrainJob"]
    trainer, called = job["spec"]["trainer"], job["metadata"]["name"]
    return {
        **variables_of(trainer, index=index, secret=secret),
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{called}-node-0-0.{called}",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(index),  # by the Job's controller
    }


def variables_of_pytorch_job(*, index, replicas, ranks, secret):
    """By setPodEnv in pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator, branch release-1.9.

    A Master and Workers, no elastic policy: RANK and WORLD_SIZE are of pods and of ranks (pytorch#146371).
    """
    return {
        "DDP_RUNNER_TOKEN": secret,
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "train-master-0",
        "PET_MASTER_ADDR": "train-master-0",
        "WORLD_SIZE": str(replicas * ranks),
        "RANK": str(index),
        "PET_NODE_RANK": str(index),
        "PET_NPROC_PER_NODE": str(ranks),
        "PET_NNODES": str(replicas),
    }
