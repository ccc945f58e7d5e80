"""The tasks, as strangers write them, and what may become of each under faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASKS = Path(__file__).with_name("tasks")

# What may become of a run: the weights of a run without a fault and ``exact: true``; or ``exact: false``
# with a reason that names why; or refused before the first step, with exit code 2 and a line.
EXACT = "exact"
REPORTED = "reported"
REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """One task of the table.

    ``allowed`` is what may become of it; of the words, one at least stands in the reason, or in the line
    that refuses. ``settings`` are its own. ``workers``: how many loader workers it is tried with.
    ``hash_seeds``: by which tests.hashed_names hash in the launch and in that which resumes it. ``is_plain``: one process
    computes what a loop in plain PyTorch does. ``is_twin``: much as another one, or as a task of
    tests/scenarios, so left to the slow tests.
    ``is_drilled``: nothing but a drill sees what it does, so one comes to its end before the first fault.
    ``waits_for``: the part of the product that it does not hold without.
    """

    file: str
    name: str
    allowed: tuple[str, ...] = (EXACT,)
    words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 2)
    hash_seeds: tuple[str, str] = ()
    is_plain: bool = True
    is_twin: bool = False
    is_drilled: bool = False
    waits_for: str = ""

    @property
    def spec(self) -> str:
        """What ``--task`` takes."""
        return f"{TASKS / self.file}.py:{self.name}"

    @property
    def key(self) -> str:
        """By what a test or a person names it."""
        return f"{self.file}.{self.name}"


def _of(file: str, *names: str, **how: object) -> list[Stranger]:
    return [
        Stranger(file=file, name=name, is_twin=name in TWINS or name in SHOWN, **how)
        for name in names
    ]


RELAXED = ("find_unused_parameters=false",)
KNOWN_OR_REPORTED = (EXACT, REPORTED)
# What is said of a state that nobody can see, by the repeat check or by a drill. Of one that each rank
# has its own of, the reason has its name.
UNSEEN = ("cannot be repeated", "would not compute the same")

TWINS = {
    *("TextClassifier", "Packed", "Reassigned", "MaxNorm", "Codebook", "History", "CumulativeNorm"),
    *(
        "FreezeLater",
        "FrozenNorm",
        "TaskNumpy",
        "Cycled",
        "ClosureCount",
        "TaskRandom",
        "QLearning",
    ),
    *("FrozenTeacher", "Averaged", "SpectralOld", "WeightNormOld", "OwnParametrization", "Doubles"),
    *("Mixed", "Recomputed", "Gru", "TorchSplit", "NumpySplit", "CountingDataset"),
    *(
        "GrowingVocabulary",
        "OddFigures",
        "WeightNormNew",
        "Orthogonal",
        "ForwardHook",
        "PositivesSeen",
        "StaticTwice",
        "Strided",
    ),
}

# What shows the same in tests/scenarios, under kills and, where it matters, over a resume.
SHOWN = {
    **dict.fromkeys(
        (
            *("Normalized", "FirstItem", "Popped", "ThroughNumpy", "InPlace", "DataInPlace"),
            *("NumpyBatches", "WordList"),
        ),
        "test_batches: a loss may change its batch",
    ),
    **dict.fromkeys(("Critic", "Clamped"), "test_changing: Clips"),
    **dict.fromkeys(("Growing", "Wider", "NotSaved"), "test_changing: Grows"),
    "BatchNorms": "the model of PacedTask",
    **dict.fromkeys(("UnfreezeLater", "FreezeThenThaw"), "test_changing: Unfreezes"),
    "Prototypes": "PlainTensor, here",
    "RecentLosses": "RunningLoss, here",
    "MeanTeacher": "Moco, here",
    "DropPath": "the dropout of PacedTask",
    "GradientPenalty": "test_plain: it has no state, so that a fault finds nothing of it",
    "Perplexity": "test_careless: figures that raise",
    "TaskGenerator": "test_changing: Counts",
    "GlobalCount": "test_drills: HoldsAGlobal; test_changing: HasAGlobal",
    "FileCount": "test_drills: HoldsAFile",
    "Heads": "test_careless: a model made from a set",
    "ShuffledRows": "test_careless: data that is shuffled where it is made",
    "Augmentation": "the samples of PacedTask",
    "FromSet": "test_same_data: data that changed between launches",
    "DatasetWithRng": "test_same_data: a generator of its own in a dataset",
    "StreamOverEpochs": "test_batches: an order that is carried over epochs",
    "StreamWithState": "test_loading: a stream goes on exactly, with a state",
    "NoSample": "PacedTask, which has none either",
    "NamedTuples": "tests/training/test_batch_copy.py: what batches are made of",
    "Sphere": "test_changing: Clips",
    **dict.fromkeys(("CounterAttribute", "ModuleGenerator", "Curriculum"), "test_changing: Counts"),
    "FreezeByOwnCount": "test_changing: Unfreezes",
    "Smoothed": "test_changing: Grows",
    "Holders": "test_odd_state: Odd",
    "GradientHook": "test_plain: it has no state, so that a fault finds nothing of it",
    "SyncNorms": "test_speed: batch norm over ranks; test_attached: synced norms",
    "MaxNormEmbedding": "NoisyWeights, here",
}

TABLE = {
    one.key: one
    for one in (
        # A loss that changes its batch.
        *_of("batches", "Normalized", "FirstItem", "Popped", settings=RELAXED),
        *_of("batches", "ThroughNumpy", "DataInPlace", "WordList", "InPlace"),
        *_of("batches", "NumpyBatches", "TextClassifier", "NamedTuples", "Packed", "Mixup"),
        *_of("batches", "ByReference", is_plain=False),  # what a step does to its batch is not data
        # Weights that forward writes.
        *_of("clipping", "Critic", "Clamped", "Sphere", "Reassigned", "MaxNorm"),
        *_of(
            "clipping",
            *("MaxNormEmbedding", "NoisyWeights"),
            allowed=(REFUSED,),
            words=("weight is written",),
        ),
        # Buffers and what stands for them.
        *_of("memories", "Growing", "Wider", "NotSaved", "Late"),
        *_of(
            "memories", "RegisteredLate", allowed=(REFUSED,), words=("center came",), is_plain=False
        ),
        *_of("memories", "PlainTensor", allowed=KNOWN_OR_REPORTED, words=("running",)),
        *_of("memories", "History", allowed=KNOWN_OR_REPORTED, words=("history",)),
        *_of("memories", "Prototypes", allowed=KNOWN_OR_REPORTED, words=("prototypes",)),
        *_of("memories", "Moco", "Codebook", "Smoothed", "BatchNorms", "CumulativeNorm"),
        # Trained for a part of the time.
        *_of("freezing", "FreezeLater", "FreezeThenThaw"),
        *_of("freezing", "UnfreezeLater", is_plain=False),  # here an optimizer learns of it
        *_of("freezing", "FreezeByOwnCount", "FrozenNorm", "Gan"),
        # Counters and generators.
        *_of("counting", "ExtraState", "CounterAttribute", "ModuleGenerator", "ForwardHook"),
        *_of("counting", "TaskGenerator", "TaskRandom", "TaskNumpy", "Curriculum", "GradientHook"),
        *_of("counting", "RunningLoss", allowed=KNOWN_OR_REPORTED, words=("task.mean",)),
        *_of("counting", "AccumulateHook", allowed=KNOWN_OR_REPORTED, words=("largest",)),
        *_of("counting", "RecentLosses", allowed=KNOWN_OR_REPORTED, words=("recent",)),
        *_of("counting", "PositivesSeen", allowed=KNOWN_OR_REPORTED, words=("positives",)),
        *_of(
            "counting",
            *("GlobalCount", "ClosureCount", "FileCount", "Cycled"),
            allowed=KNOWN_OR_REPORTED,
            words=(*UNSEEN, "is kept nowhere"),
            is_plain=False,  # the repeat check has moved it
        ),
        *_of("counting", "Holders"),
        # Teachers.
        *_of(
            "teachers", "MeanTeacher", "QLearning", "FrozenTeacher", "TeacherInTask", "CopiedTarget"
        ),
        *_of("teachers", "HiddenTeacher", allowed=KNOWN_OR_REPORTED, words=("_teacher",)),
        *_of("teachers", "Averaged", allowed=KNOWN_OR_REPORTED, words=("average",)),
        # Layers.
        *_of("layers", "SpectralOld", "SpectralNew", "WeightNormOld", "WeightNormNew"),
        *_of("layers", "Orthogonal", "OwnParametrization", "Gru", "Tied", "DropPath", "Phased"),
        *_of("layers", "Recomputed", "GradientPenalty", "Brain", "Doubles", "Mixed", "Complex"),
        *_of("layers", "Carried", allowed=KNOWN_OR_REPORTED, words=("model.state",)),
        *_of("layers", "LazyLayers", allowed=(REFUSED,), words=("lazy",), is_plain=False),
        *_of("layers", "MadeOnFirstUse", allowed=(REFUSED,), words=("head",), is_plain=False),
        *_of("layers", "Heads", allowed=KNOWN_OR_REPORTED, words=("order",), hash_seeds=("1", "2")),
        # Kinds of models and tensors.
        *_of("kinds", "Scripted", "Jagged"),
        *_of("kinds", "Strided", is_plain=False),  # torch warns of it
        *_of("kinds", "SyncNorms", is_plain=False),  # torch's own layer takes GPUs alone
        *_of("kinds", "StaticTwice", settings=("static_graph=true",)),
        *_of(
            "kinds",
            "CheckpointedTwice",
            allowed=(REFUSED,),
            words=("ddp.static_graph",),
            is_plain=False,
        ),
        *_of("kinds", "SparseLookup", allowed=(REFUSED,), words=("table has",), is_plain=False),
        *_of("kinds", "MetaLayer", allowed=(REFUSED,), words=("1.weight",), is_plain=False),
        # Data.
        *_of("datasets", "ShuffledRows", "NumpySplit", "TorchSplit"),
        *_of("datasets", "Augmentation", is_plain=False),
        *_of(
            "datasets",
            "FromSet",
            allowed=(EXACT, REFUSED),
            words=("order", "samples"),
            hash_seeds=("1", "2"),
        ),
        *_of("datasets", "UnseededSplit", allowed=(REFUSED,), words=("samples",), is_plain=False),
        # What is looked at to compare it between the ranks is read, here, in the rank itself.
        *_of(
            "datasets",
            *("DatasetWithRng", "CountingDataset", "ReadsTheClock"),
            allowed=KNOWN_OR_REPORTED,
            words=("sample",),
            is_plain=False,
        ),
        *_of(
            "datasets",
            "GrowingVocabulary",
            allowed=KNOWN_OR_REPORTED,
            words=("sample",),
            is_plain=False,
            is_drilled=True,
        ),
        *_of(
            "datasets",
            "StreamOverEpochs",
            allowed=KNOWN_OR_REPORTED,
            words=("gave other items",),
            workers=(0,),
            is_plain=False,
        ),
        *_of("datasets", "StreamGlobalRandom", "StreamWithState", workers=(0,), is_plain=False),
        # For people.
        *_of("people", "OddFigures", "Perplexity", "NoSample"),
    )
}
