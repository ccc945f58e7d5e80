"""Fetches a repository's files of weights from the Hugging Face hub, or finds them in its cache."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path

from ddp_runner.checkpoint.weight_files import weights_file_in
from ddp_runner.core.hub import EXPECTED, lacks_hub, repository_of
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.errors import BadInputError

_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_IN_FOLDERS = "*/*"  # other forms of the same weights
_SHOWN_MAX = 300


@cache
def fetched(written: str) -> Path:
    """The folder with the weights of ``hf://USER/NAME``, always the same one within a process.

    It is asked for at the hub, and taken from the cache where there is no network or ``HF_HUB_OFFLINE``
    is set. Safetensors are preferred. Blocks; raises BadInputError (``--init-from``).
    """
    repository = repository_of(written)
    if repository is None:
        raise BadInputError("--init-from", written, EXPECTED)
    try:
        library = importlib.import_module("huggingface_hub")  # an extra
    except ImportError as error:
        raise BadInputError("--init-from", written, lacks_hub(python=sys.executable)) from error
    try:
        for patterns in (_SAFETENSORS, _PICKLED):
            folder = Path(
                library.snapshot_download(
                    repository.name,
                    revision=repository.revision or None,
                    allow_patterns=list(patterns),
                    ignore_patterns=[_IN_FOLDERS],
                )
            )
            if weights_file_in(folder) is not None:
                return folder
    except Exception as error:  # whatever network, hub and cache raise: nobody can list all of it
        if lacks_memory(error):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:_SHOWN_MAX]
        raise BadInputError("--init-from", written, f"cannot be fetched: {first}") from error
    raise BadInputError("--init-from", written, "has no safetensors and no pytorch_model.bin")
