"""Builds the optimizer over a model's trainable parameters, in a fixed order. Never steps it.

Measured with 3.2 million float32 parameters on one CPU thread: fused AdamW 1.7 ms a step, plain loop
5.0 ms, foreach 7.0 ms; so fused is used wherever the parameters allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.several_optimizers import SeveralOptimizers

if TYPE_CHECKING:
    from ddp_runner.core.settings import OptimSettings

_FUSED_DEVICES = ("cpu", "cuda")  # of those that we run on, in every torch from 2.6
_MOMENTUM_OF_SGD = 0.9  # torch's own is none


def build_optimizer(
    model: nn.Module, settings: OptimSettings, *, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` name, with weight decay on matrices only, not on vectors.

    ``model`` must already be on ``device``. Parameters stand in the order in which the model names
    them, those with decay first: the order is the same on every rank and after every restart,
    which the saved optimizer state relies on. Frozen parameters are left out. With muon two
    optimizers stand in one: torch's Muon for what :func:`_muon_parameters` gives, AdamW for the rest.
    Raises BadInputError when nothing is trainable, or nothing of it by that optimizer.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise BadInputError(
            "--task",
            type(model).__name__,
            "the model has no trainable parameter; build_model() must leave some with requires_grad",
        )
    fused = _can_fuse(trainable, device=device)
    if settings.optimizer != "muon":
        make = _maker(settings, fused=fused)
        if settings.optimizer == "adafactor" and not all(map(torch.is_floating_point, trainable)):
            raise BadInputError(
                "optim.optimizer", "adafactor", "takes no complex parameters: take adamw"
            )
        return make([group for group in _groups(trainable, settings) if group["params"]])
    matrices = _muon_parameters(model)
    if not matrices:
        raise BadInputError(
            "optim.optimizer", "muon", "the model has no matrix for it to train: take adamw"
        )
    rest = [one for one in trainable if id(one) not in matrices]
    by_muon = [one for one in trainable if id(one) in matrices]
    # A part that has nothing to train yet may get something that is unfrozen.
    groups = [group for group in _groups(rest, settings) if group["params"]]
    parts = [
        _make_muon(by_muon, settings),
        _maker(settings, fused=fused)(groups or _groups([], settings)[:1]),
    ]
    return cast("torch.optim.Optimizer", SeveralOptimizers(parts))


def _groups(parameters: Iterable[nn.Parameter], settings: OptimSettings) -> list[dict[str, Any]]:
    """Return two groups: the parameters with weight decay, and those without."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _maker(
    settings: OptimSettings, *, fused: bool
) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Return a function that makes the optimizer from groups; for muon, the one for its other parameters."""
    rate, decay = settings.learning_rate, settings.weight_decay  # decay: of a group added later
    epsilon = settings.epsilon
    if settings.optimizer == "sgd":
        momentum = _MOMENTUM_OF_SGD if settings.momentum == "auto" else settings.momentum
        # torch's fused kernel breaks where a parameter has its first gradient later than others.
        can_fuse = fused and not momentum
        return lambda groups: torch.optim.SGD(
            groups, lr=rate, momentum=momentum, weight_decay=decay, fused=can_fuse or None
        )
    if settings.optimizer == "adafactor":
        options: dict[str, Any] = {} if epsilon == "auto" else {"eps": (epsilon, 1e-3)}
        return lambda groups: torch.optim.Adafactor(groups, lr=rate, weight_decay=decay, **options)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    options = {} if epsilon == "auto" else {"eps": epsilon}
    betas = (settings.beta1, settings.beta2)
    return lambda groups: kind(
        groups, lr=rate, betas=betas, weight_decay=decay, fused=fused, **options
    )


def _make_muon(
    parameters: Sequence[nn.Parameter], settings: OptimSettings
) -> torch.optim.Optimizer:
    made = getattr(torch.optim, "Muon", None)
    if made is None:
        raise BadInputError("optim.optimizer", "muon", _lacks_muon())
    options: dict[str, Any] = {} if settings.epsilon == "auto" else {"eps": settings.epsilon}
    if settings.momentum != "auto":
        options["momentum"] = settings.momentum
    optimizer: torch.optim.Optimizer = made(
        [{"params": list(parameters)}],
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # one learning rate then suits both
        **options,
    )
    return optimizer


def _lacks_muon() -> str:
    return f"torch {torch.__version__} has none, it came with 2.9: take a newer torch, or adamw"


def _muon_parameters(model: nn.Module) -> set[int]:
    """The ids of real matrices, trained or not, that are no embedding: those are AdamW's."""
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    return {
        id(one)
        for one in model.parameters()
        if one.ndim == 2 and one.is_floating_point() and id(one) not in embeddings
    }


def bytes_to_come(optimizer: torch.optim.Optimizer | SeveralOptimizers) -> int:
    """About what the optimizer's first step will keep for what it updates; of one that is not ours, as of Adam."""
    parts = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else [optimizer]
    return sum(
        _kept_numbers(part, group, parameter) * parameter.element_size()
        for part in parts
        for group in part.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def _kept_numbers(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> int:
    size, shape = parameter.numel(), parameter.shape
    if isinstance(optimizer, torch.optim.SGD):
        return size if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.Adafactor):
        return size // shape[-1] + size // shape[-2] if len(shape) > 1 and size else size
    if type(optimizer).__name__ == "Muon":
        return size
    return size * (3 if group.get("amsgrad") else 2)


def take_in(optimizer: torch.optim.Optimizer | SeveralOptimizers, model: nn.Module) -> None:
    """Have ``optimizer``, of :func:`build_optimizer`, update what requires a gradient since then too.

    None is taken out: one that is frozen has no gradient, and is not updated.
    """
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    update_only(
        optimizer, model, [p for p in model.parameters() if p.requires_grad or id(p) in known]
    )


def update_only(
    optimizer: torch.optim.Optimizer | SeveralOptimizers,
    model: nn.Module,
    wanted: list[nn.Parameter],
) -> None:
    """Have ``optimizer``, of :func:`build_optimizer`, update ``wanted`` and nothing else.

    These must be in the model's order, and are so in the optimizer then, whichever came when. What it has
    learnt of others is forgotten, and so are their gradients.
    """
    known = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    kept = {id(one) for one in wanted}
    if kept == known.keys():
        return
    parts = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else [optimizer]
    for gone in known.keys() - kept:
        known[gone].grad = None
        for one in parts:
            one.state.pop(known[gone], None)
    if isinstance(optimizer, SeveralOptimizers):
        matrices = _muon_parameters(model)
        by_muon, by_the_other = optimizer.parts
        _update_only(by_muon, [one for one in wanted if id(one) in matrices])
        _update_only(by_the_other, [one for one in wanted if id(one) not in matrices])
    else:
        _update_only(optimizer, wanted)


def _update_only(optimizer: torch.optim.Optimizer, wanted: list[nn.Parameter]) -> None:
    for is_matrix in (True, False):
        members = [one for one in wanted if (one.ndim >= 2) is is_matrix]
        groups = [
            group
            for group in optimizer.param_groups
            if group["params"] and (group["params"][0].ndim >= 2) is is_matrix
        ]
        if groups:
            groups[0]["params"] = members
        elif members:
            options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            decay = 0.0 if not is_matrix else optimizer.defaults["weight_decay"]
            optimizer.add_param_group({**options, "params": members, "weight_decay": decay})
        if groups and not members and len(optimizer.param_groups) > 1:  # one that came later
            optimizer.param_groups[:] = [g for g in optimizer.param_groups if g is not groups[0]]


def _can_fuse(parameters: list[nn.Parameter], *, device: torch.device) -> bool:
    """Return True if the fused kernel takes all ``parameters``: real numbers, on a device that has it."""
    return device.type in _FUSED_DEVICES and all(
        parameter.is_floating_point() and parameter.device.type == device.type
        for parameter in parameters
    )
