"""The tasks, as strangers write them, and what may become of each under faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASKS = Path(__file__).with_name("tasks")

# What may become of a run: the weights of a run without a fault and ``exact: true``; or ``exact: false``
# with a reason that names why; or refused before the first step, with exit code 2 and a line.
EXACT = "exact"
TOLD = "told"
REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """One task of the table.

    ``allowed`` is what may become of it; of the words, one at least stands in the reason, or in the line
    that refuses. ``settings`` are its own. ``workers``: how many loader workers it is tried with.
    ``hash_seeds``: PYTHONHASHSEED of the launch and of that which resumes it. ``is_plain``: one process
    computes what a loop in plain PyTorch does. ``is_twin``: much as another one, so left to the slow tests.
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
    return [Stranger(file=file, name=name, is_twin=name in TWINS, **how) for name in names]


RELAXED = ("find_unused_parameters=false",)
KNOWN_OR_TOLD = (EXACT, TOLD)
# What is said of a state that nobody can see: by the repeat check, by the drill, by a repair.
UNSEEN = ("repeat", "drill", "replacement")

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
    *("GrowingVocabulary", "OddFigures"),
}

TABLE = {
    one.key: one
    for one in (
        # A loss that changes its batch.
        *_of("batches", "Normalized", "FirstItem", "Popped", settings=RELAXED),
        *_of("batches", "ThroughNumpy", "DataInPlace", "WordList", "InPlace"),
        *_of("batches", "NumpyBatches", "TextClassifier", "NamedTuples", "Packed"),
        *_of("batches", "Mixup"),
        *_of("batches", "ByReference", allowed=KNOWN_OR_TOLD, words=UNSEEN, waits_for="G"),
        # Weights that forward writes.
        *_of("clipping", "Critic", "Clamped", "Sphere", "Reassigned", "MaxNorm", waits_for="A"),
        *_of("clipping", "MaxNormEmbedding", "NoisyWeights", waits_for="A"),
        # Buffers and what stands for them.
        *_of("memories", "Growing", "Wider", "NotSaved", waits_for="A"),
        *_of("memories", "Late"),
        *_of("memories", "PlainTensor", "History", "Prototypes", waits_for="A"),
        *_of("memories", "Moco", "Codebook", "Smoothed", "BatchNorms", "CumulativeNorm"),
        # Trained for a part of the time.
        *_of("freezing", "FreezeLater", "UnfreezeLater", "FreezeThenThaw", waits_for="A"),
        *_of("freezing", "FreezeByOwnCount", "Gan", waits_for="A"),
        *_of("freezing", "FrozenNorm"),
        # Counters and generators.
        *_of("counting", "ExtraState", "CounterAttribute", "ModuleGenerator", waits_for="A"),
        *_of("counting", "ForwardHook", waits_for="A"),
        *_of("counting", "TaskGenerator", "RunningLoss", "AccumulateHook", waits_for="A"),
        *_of(
            "counting",
            *("TaskRandom", "TaskNumpy", "Curriculum", "RecentLosses", "GlobalCount"),
            *("ClosureCount", "FileCount", "PositivesSeen", "Cycled"),
            allowed=KNOWN_OR_TOLD,
            words=UNSEEN,
            waits_for="G",
        ),
        *_of("counting", "GradientHook"),
        # Teachers.
        *_of("teachers", "MeanTeacher", "QLearning", "FrozenTeacher"),
        *_of("teachers", "TeacherInTask", "HiddenTeacher", "Averaged", waits_for="A"),
        # Layers.
        *_of("layers", "SpectralOld", "SpectralNew", "WeightNormOld", "WeightNormNew"),
        *_of("layers", "Orthogonal", "OwnParametrization", "Gru", "Tied", "DropPath", "Phased"),
        *_of("layers", "Recomputed", "GradientPenalty", "Brain", "Doubles", "Mixed", "Complex"),
        *_of("layers", "Carried", allowed=KNOWN_OR_TOLD, words=("state", *UNSEEN), waits_for="A"),
        *_of("layers", "LazyLayers", allowed=(REFUSED,), words=("lazy",), is_plain=False),
        *_of("layers", "MadeOnFirstUse", allowed=(REFUSED,), words=("head",), waits_for="A"),
        *_of("layers", "Heads", allowed=KNOWN_OR_TOLD, words=("order",), hash_seeds=("1", "2")),
        # Data.
        *_of("datasets", "ShuffledRows", "NumpySplit", "TorchSplit"),
        *_of("datasets", "Augmentation", is_plain=False),
        *_of(
            "datasets",
            "FromSet",
            allowed=(EXACT, REFUSED),
            words=("order", "samples"),
            hash_seeds=("1", "2"),
            waits_for="C",
        ),
        *_of(
            "datasets",
            "UnseededSplit",
            allowed=(REFUSED,),
            words=("samples",),
            is_plain=False,
            waits_for="C",
        ),
        *_of(
            "datasets",
            *("DatasetWithRng", "CountingDataset", "GrowingVocabulary"),
            allowed=KNOWN_OR_TOLD,
            words=("sample", *UNSEEN),
            waits_for="G",
        ),
        *_of(
            "datasets",
            "ReadsTheClock",
            allowed=KNOWN_OR_TOLD,
            words=("sample", *UNSEEN),
            is_plain=False,
            waits_for="G",
        ),
        *_of("datasets", "StreamOverEpochs", workers=(0,), is_plain=False),
        *_of("datasets", "StreamGlobalRandom", "StreamWithState", workers=(0,), is_plain=False),
        # For people.
        *_of("people", "OddFigures", "Perplexity", "NoSample"),
    )
}
