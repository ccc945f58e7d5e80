"""One generation's DDP replica: wraps loss and model, carries small signals along with gradients.

The loss is computed *inside* the wrapped module's forward, so that a task may use the bare model in
any way. A few numbers (loss, votes to stop or save) ride in the gradient of a tiny extra parameter:
every rank knows everybody's after backward, without a collective of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as torch_ddp
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.kernel.group.device import DeviceProgress, wait_clock
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.replica.bucket_sums import BucketSums
from ddp_runner.kernel.replica.loss import Loss, LossForm, LossMeans
from ddp_runner.kernel.replica.loss_module import PLAIN_FORM, LossModule, Signal
from ddp_runner.kernel.rules.phases import Moment, Phase
from ddp_runner.kernel.wire.board import Slot

BUCKET_TENSORS = 1000  # in a bucket; about so many at most


class Relaid(Protocol):
    """Buffers whose shapes and types may change."""

    def layouts(self) -> Mapping[str, Any]:
        """Return the current layouts by name, as plain values."""
        ...

    def agree_on_layouts(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Take those of the first rank where they have to be alike; ``found``: every rank's."""
        ...


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


class ReplicaSettings(Protocol):
    """The settings of a replica: how its gradients are summed."""

    @property
    def gradient_dtype(self) -> str:
        """The type that gradients are sent as: ``auto``, ``fp32``, ``bf16`` or ``fp16``."""
        ...

    @property
    def bucket_cap_mb(self) -> int:
        """The largest size of gradients that are summed at once."""
        ...

    @property
    def find_unused_parameters(self) -> bool | str:
        """Whether a step may leave parameters out; ``auto`` counts as true."""
        ...

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether a gradient is a view of what is summed."""
        ...

    @property
    def static_graph(self) -> bool:
        """Whether each step uses the same parameters in the same order."""
        ...


class UnreducedError(RuntimeError):
    """A backward has left gradients of a rank unreduced; ``names``: of their parameters, as far as they are known."""

    def __init__(self, what: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"Expected to have finished reduction: {what}")
        self.names = tuple(names)


class Replica:
    """A model wrapped for one generation. Every rank of the group must build it."""

    averages = False  # gradients are summed over ranks: the loss is weighted

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        group: Group,
        settings: ReplicaSettings,
        slot: Slot,
        is_relaid: Callable[[], bool] = lambda: False,
        device: DeviceProgress | None = None,
        form: LossForm = PLAIN_FORM,
        others: Sequence[torch.device] = (),
    ) -> None:
        """``is_relaid``: whether a step has changed the shape or type of a buffer. ``form``: of the loss.

        ``others``: devices that have parts of each batch, beside the group's own.
        """
        module = LossModule(
            model,
            loss,
            device=group.device,
            rank=group.rank,
            is_relaid=is_relaid,
            form=form,
            others=others,
        )
        self.agreed_form = self._form = form
        self._wrap(module, group=group, settings=settings, slot=slot, device=device)

    def _wrap(
        self,
        module: Any,
        *,
        group: Group,
        settings: ReplicaSettings,
        slot: Slot,
        device: DeviceProgress | None,
    ) -> None:
        """``module``: has ``model``, ``signal``, ``has_graph`` and ``begin_step()``, as LossModule."""
        self.group = group
        self._module: Any = module
        self._signal: Any = module.signal  # the parameter whose gradient carries the signals
        self._slot = slot
        self._waits = wait_clock(group.device)
        self._device = device or DeviceProgress()
        self.sums = BucketSums(
            group,
            self._signal,
            not_all_used=Signal.NOT_ALL_USED,
            gradient_dtype=settings.gradient_dtype,
            on_begun=self._has_begun_sums,
        )
        self._parameters = list(module.parameters())  # found once: a model has many modules
        cap_mb = bucket_cap_mb(self._parameters, settings.bucket_cap_mb)
        arguments = _accepted_arguments(settings, group.device, cap_mb=cap_mb)
        with contextlib.nullcontext() if "init_sync" in arguments else _not_synced():
            self._ddp = _LaidOutDdp(
                self._module, process_group=group.of_reducer(self.sums), **arguments
            )
        # Wrapped, because DDP refuses a hook whose annotations are strings, as ours are.
        self._ddp.register_comm_hook(
            state=self,
            hook=lambda replica, bucket: _sum_over_ranks(replica, bucket),  # noqa: PLW0108
        )
        with waiting_for_peers(slot):  # which wrap again between steps, where one may be late
            self._ddp.lay_out()
        self.sums.finds_unused = self._ddp.find_unused_parameters
        # Is given each parameter with this rank's own gradient of the step, before it is summed: of
        # all micro-batches, times the loss scale, zeros for a parameter without any. Not the signals'.
        self.on_own_gradient: Callable[[Tensor, Tensor], None] | None = None
        self._closed = False
        self._check_finalized = getattr(self._ddp, "_check_reducer_finalized", None)

    def bucket_sizes(self) -> str:
        """The bytes of each bucket in which gradients are summed, as DDP has laid them out."""
        found = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001
        return str(found.get("rebuilt_bucket_sizes") or found.get("bucket_sizes") or "not known")

    def close(self) -> None:
        """Let go of the model: no hook of this replica may hear of another one's backward."""
        if self._closed:
            return
        self._closed = True
        # The reducer holds our hook's state, this very object, in C++: a cycle that Python's
        # collector cannot see. Left alone, its autograd hooks would stay on the parameters.
        remove = getattr(self._ddp, "_remove_autograd_hooks", None)
        if remove is not None:
            remove()
        self._check_finalized = None
        self.sums.drop()
        del self._ddp

    def forward(
        self,
        batch: Any,
        *,
        weight: float,
        votes: Sequence[float],
        loss_limit: float = math.inf,
        count: float = 1.0,
    ) -> Tensor:
        """``weight`` x the loss of ``batch``, ready for backward; the sum over ranks is the step's.

        Of a loss that is a total with a weight of its own: the total, in units; :meth:`divide_by_weight`
        makes the mean of the sum. ``count``: the batch's samples. A loss above ``loss_limit`` puts this rank
        among those that are in trouble. ``votes``: a number for each :class:`Signal`.
        """
        loss: Tensor = self._ddp(batch, weight, votes, loss_limit, count)
        self.group.refuse_aborted()  # a large model's backward takes longer than all the rest
        return loss

    def use_unit(self, unit: float) -> None:
        """Set the factor of totals and weights before they are summed; it is the same on all ranks."""
        if self._module.unit != unit:
            self._module.unit = unit

    @property
    def sums_totals(self) -> bool:
        """True if the loss has a weight: ranks then sum totals instead of means."""
        return self._form.is_weighted

    @property
    def carried(self) -> Tensor | None:
        """The signals as they were summed over ranks, after backward."""
        gradient: Tensor | None = self._signal.grad
        return gradient

    def divide_by_weight(self, gradients: list[Tensor], *, scale: float = 1.0) -> None:
        """Make means of summed totals, on the device, without a look at it.

        After backward. ``scale``: the gradient scaler's, which stays. Without any weight they are not finite.
        """
        torch._foreach_div_(gradients, self._signal.grad[-1] / scale)

    def means(self, signals: Sequence[float]) -> LossMeans:
        """Return the means over all ranks' losses, from the summed ``signals``."""
        form, loss = self._form, signals[Signal.LOSS]
        if not form.cells:
            return LossMeans(loss=loss, parts={}, weight=None)
        named = dict(zip(form.names, signals[len(Signal) :], strict=False))
        if not form.is_weighted:
            return LossMeans(loss=loss, parts=named, weight=None)
        weight = signals[-1]
        return LossMeans(
            loss=loss / weight if weight else math.nan,
            parts=named,
            weight=weight / self._module.unit,
        )

    @property
    def has_graph(self) -> bool:
        """True if a loss of this rank, in this step, depended on any parameter."""
        return bool(self._module.has_graph)

    def without_sync(self) -> AbstractContextManager[None]:
        """Return a context for all but the last micro-batch of a step: gradients accumulate without a reduction."""
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def backward_alone(self, loss: Tensor) -> None:
        """Add this rank's own gradient of ``loss`` to its parameters; DDP hears nothing of it.

        After a backward in :meth:`without_sync`, DDP would expect of the next step that it uses the
        same parameters.
        """
        if not self._ddp.find_unused_parameters:  # it keeps no account of the used ones, and
            loss.backward()  # type: ignore[no-untyped-call]  # reentrant checkpoints need this one
            return
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                own = parameter.grad  # never added to in place: two of them may share memory
                parameter.grad = gradient if own is None else own + gradient

    def zero_gradients(self) -> None:
        """Drop every gradient, the signals' too: a step begins."""
        self.sums.drop()
        self._module.begin_step()
        for parameter in self._parameters:
            parameter.grad = None

    def check_reduced(self) -> None:
        """Raise UnreducedError if this rank's backward left a gradient unreduced.

        DDP itself would say so only at the next forward, after every rank has stepped with its own
        unsynchronised gradient (torch: PR #100773 for the check).
        """
        if self._check_finalized is not None:
            try:
                self._check_finalized()
            except RuntimeError as error:
                names = self._named_in(str(error)) or self.unused_parameters()
                shown = f"no gradient came for {', '.join(names) or 'some parameter'}"
                raise UnreducedError(shown, names) from error
        if self._signal.grad is None:
            raise UnreducedError("no gradient was reduced at all")

    def _named_in(self, error: str) -> list[str]:
        """The parameters that DDP counts as without a gradient; it knows of the last micro-batch."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", error)
        numbered = [name for name, p in self._module.named_parameters() if p.requires_grad]
        if found is None:
            return []
        # As _LaidOutDdp counts them, from the last one; named from the first one.
        missing = [numbered[-1 - int(index)] for index in reversed(found[1].split())]
        return [name.removeprefix("model.") for name in missing if name != "signal"]

    def unused_parameters(self) -> list[str]:
        """The module paths of trainable parameters without a gradient, after backward."""
        named = self._module.model.named_parameters()
        return [name for name, p in named if p.requires_grad and p.grad is None]

    def every_parameter_was_used(self) -> bool:
        """Return True if, in this step, every rank had a gradient for every parameter; call it after backward.

        All ranks get the same answer: with ``find_unused_parameters=True`` DDP sums its map of the
        used parameters itself, and has waited for it. False where torch does not show the map.
        """
        if self.sums.all_used is not None:
            return self.sums.all_used
        used = getattr(self._ddp.reducer, "_get_local_used_map", None)
        return used is not None and bool((used() == self.group.world_size).all())

    def signals(
        self, *, scale: float = 1.0, beside: Tensor | None = None
    ) -> tuple[list[float], float | None]:
        """The signals summed over ranks, after backward, and the number ``beside``, which is read with them.

        Reading waits for the device, once for both. ``scale``: the gradient scaler's.
        """
        gradient = self._signal.grad
        if gradient is None:
            raise RuntimeError("signals are known only after backward")
        other = None
        if beside is None:
            values = gradient.tolist()
        elif gradient.is_cpu and beside.is_cpu:
            values, other = gradient.tolist(), beside.item()
        else:
            both = torch.promote_types(gradient.dtype, beside.dtype)  # neither loses a bit
            *values, other = torch.cat(
                [gradient.to(both), beside.to(gradient.device, both).view(1)]
            ).tolist()
        return [float(value) / scale for value in values], other

    def share_buffers(self, buffers: list[Tensor]) -> None:
        """Make rank 0's ``buffers`` everyone's, within the step that changed them.

        DDP would do so at the next forward; then the death of rank 0 would lose running statistics
        that no survivor holds.
        """
        if not buffers or self.group.world_size == 1:
            return
        for device in sorted({buffer.device for buffer in buffers}, key=str):
            self._share([buffer for buffer in buffers if buffer.device == device])
        # An abort may cut these short as well, and the step is confirmed next.
        self.group.finish_on_device()

    def share_layouts(self, buffers: Relaid, *, step: int) -> None:
        """Bring every rank's buffers to one layout, where some rank's has changed, or its loss has other parts.

        Every rank must call it, before :meth:`share_buffers`. ``agreed_form`` is what all need then.
        """
        seen: LossForm = self._module.seen
        mine = json.dumps([buffers.layouts(), seen.names, seen.is_weighted])
        with waiting_for_peers(self._slot):
            found = [json.loads(one) for one in self.group.exchange(f"layouts/{step}", mine)]
        buffers.agree_on_layouts([layouts for layouts, _, _ in found])
        self.agreed_form = seen.united(
            LossForm(names=tuple(names), is_weighted=weighted) for _, names, weighted in found
        )

    def _share(self, buffers: list[Tensor]) -> None:
        # Large elements first, so that each begins where its type may begin.
        ordered = sorted(buffers, key=lambda buffer: -buffer.element_size())
        flat = torch.cat([_bytes_of(buffer) for buffer in ordered])
        self._device.come_to_sum()  # as a chain, it may wait for more than who sends
        self.group.broadcast(flat)
        if self.group.rank == 0:
            return
        shared = flat.split([buffer.nbytes for buffer in ordered])  # type: ignore[no-untyped-call]
        for buffer, own in zip(ordered, shared, strict=True):
            buffer.copy_(own.view(buffer.dtype).view_as(buffer))

    def stamp_reduce(self) -> None:
        """Note on the board that this rank's own share of the backward is done."""
        self._waits.own_is_done()
        self._slot.stamp(Phase.REDUCE, time.monotonic_ns())

    def come_to_last_sum(self) -> None:
        """Have the device note that it has come here, once it has."""
        self._device.come_to_sum()

    def _has_begun_sums(self) -> None:
        self.reach(Moment.REDUCING)

    def show_own(self, bucket: GradBucket) -> None:
        """Hand over this rank's own gradients in ``bucket`` to whoever wants to know them."""
        if self.on_own_gradient is None:
            return
        for parameter, gradient in zip(bucket.parameters(), _gradients_in(bucket), strict=True):
            if parameter is not self._signal:
                self.on_own_gradient(parameter, _as_laid_out(gradient, parameter))

    def reach(self, moment: Moment) -> None:
        """Be at ``moment`` of the step."""
        self._slot.reach(moment)

    def note_reduced(self) -> None:
        """Backward is over, and with it the sums over ranks."""
        self._waits.is_reduced()

    def waited_ns(self) -> int:
        """Return how long this rank has waited for the others since its own part was done; after :meth:`signals`."""
        return self._waits.waited_ns()

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sum a few numbers over ranks in float64; every rank must call it."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.group.device)
        self.sum_in_place(tensor)
        return [float(value) for value in tensor.tolist()]

    def sum_in_place(self, tensor: Tensor) -> None:
        """Sum a tensor on this rank's device over ranks; every rank must call it."""
        with waiting_for_peers(self._slot):
            self._device.come_to_sum()
            self.group.all_reduce(tensor)
            self.group.finish_on_device()
            self.group.confirm()

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self.group.device

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.group.rank

    def exchange(self, name: str, value: str) -> list[str]:
        """Return every rank's ``value``; every rank must call it with this ``name``, and not in a step."""
        with waiting_for_peers(self._slot):
            return self.group.exchange(name, value)


# INVARIANT laid-out-by-model: which gradients are summed side by side follows from the model, the size of a
# bucket and the flags requires_grad alone; the order of a sum of three numbers shows in its last bits.
# Broken if: DDP lays its buckets out by the order in which the gradients of some step came.
# Guarded by: test_the_order_of_gradients_and_the_search_change_no_bit.
class _LaidOutDdp(DistributedDataParallel):
    """DDP whose buckets take the parameters from the last to the first, with and without the search for unused ones.

    DDP itself counts them from the first one, and lays them out again after the first backward without that
    search, in the order in which their gradients came.
    """

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], are_sparse[::-1]

    def _ddp_init_helper(self, *args: Any, **named: Any) -> None:
        with _buckets_begun_first_to_last():
            super()._ddp_init_helper(*args, **named)  # type: ignore[no-untyped-call]

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Raise where one of torch's own layers would: those of :class:`SyncedNorms` take any device."""
        layers = [one for one in module.modules() if isinstance(one, nn.SyncBatchNorm)]
        if any(type(one).forward is nn.SyncBatchNorm.forward for one in layers):
            super()._passing_sync_batchnorm_handle(module)  # type: ignore[no-untyped-call]

    def lay_out(self) -> None:
        """Have DDP lay its buckets out again now, where it would after the first backward. On all ranks alike."""
        if not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()  # noqa: SLF001 - as DDP's own hook for joined ranks does
            self.reducer._rebuild_buckets()  # noqa: SLF001 - once only: not by any backward


@contextlib.contextmanager
def _buckets_begun_first_to_last() -> Iterator[None]:
    """Have DDP begin to sum a bucket as soon as the last of its parameters, as they are counted, has its gradient."""
    library: Any = dist  # whose stub does not show this one
    cut = library._compute_bucket_assignment_by_size  # noqa: SLF001

    def ordered(*args: Any, **named: Any) -> tuple[list[list[int]], list[int]]:
        buckets, limits = cut(*args, **named)
        by_last = sorted(zip(buckets, limits, strict=True), key=lambda one: -max(one[0]))
        return [one for one, _ in by_last], [limit for _, limit in by_last]  # which DDP reverses

    library._compute_bucket_assignment_by_size = ordered  # noqa: SLF001
    try:
        yield
    finally:
        library._compute_bucket_assignment_by_size = cut  # noqa: SLF001


def _sum_over_ranks(replica: Replica, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: sum; never divide where the loss is weighted before backward.

    Without a hook DDP multiplies by 1/world in the first iteration and divides by world later, which
    differ in the last bit when the world size is no power of two.
    """
    is_last = replica.sums.is_last(bucket)
    if is_last:
        replica.stamp_reduce()
    if replica.on_own_gradient is not None:
        replica.show_own(bucket)
    if is_last:
        replica.come_to_last_sum()
    if replica.averages:
        bucket.buffer().div_(replica.group.world_size)  # before the sum, as torch's allreduce_hook
    return replica.sums.begin(bucket)


def _gradients_in(bucket: GradBucket) -> list[Tensor]:
    """Return one gradient for each parameter. DDP shows a bucket of complex ones as pairs of real numbers."""
    parameters, gradients = bucket.parameters(), bucket.gradients()
    if not parameters[0].is_complex() or gradients[0].is_complex():
        return gradients
    whole = torch.view_as_complex(bucket.buffer().view(-1, 2))
    parts = whole.split([one.numel() for one in parameters])  # type: ignore[no-untyped-call]
    return [part.view(one.shape) for part, one in zip(parts, parameters, strict=True)]


def _as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A bucket holds the gradient as the parameter lies in memory, and shows it as if it lay in order."""
    spanned = 1 + sum(
        (n - 1) * by for n, by in zip(parameter.size(), parameter.stride(), strict=True)
    )
    if parameter.is_contiguous() or spanned != parameter.numel():
        return gradient
    return gradient.as_strided(parameter.size(), parameter.stride())


def bucket_cap_mb(parameters: Sequence[Tensor], wanted_mb: float) -> float:
    """``wanted_mb``, or less where a bucket would hold far more than :data:`BUCKET_TENSORS`.

    Setting a bucket up takes torch the square of the number of its tensors: 0.5 s for ten thousand. A
    function of the model alone, so that it is the same on all ranks and after every repair.
    """
    sizes = [one.nbytes for one in parameters if one.requires_grad]
    if len(sizes) <= BUCKET_TENSORS:
        return wanted_mb
    by_mean_mb = min(wanted_mb, sum(sizes) / len(sizes) * BUCKET_TENSORS / 2**20)
    # Beside a tensor that is far larger the mean says nothing of the others; the least of so many in a row does.
    ends = [0, *itertools.accumulate(sizes)]
    row_mb = (
        min(end - begin for begin, end in zip(ends, ends[BUCKET_TENSORS:], strict=False)) / 2**20
    )
    # Each bucket is a sum of its own in every step: no more of them than their number of tensors asks for.
    buckets_max = _buckets(sizes, by_mean_mb) + len(sizes) / BUCKET_TENSORS
    return row_mb if row_mb < by_mean_mb and _buckets(sizes, row_mb) <= buckets_max else by_mean_mb


def _buckets(sizes: Sequence[int], cap_mb: float) -> int:
    """Return the number of buckets that DDP makes of tensors of these sizes; a tensor that fills one ends it."""
    buckets, held = 1, 0
    for size in sizes:
        if held >= cap_mb * 2**20 and held:
            buckets, held = buckets + 1, 0
        held += size
    return buckets


@contextlib.contextmanager
def _not_synced() -> Iterator[None]:
    """Have DDP send no state when it is made, as init_sync=False does from torch 2.7 on."""
    sent = ("_verify_param_shape_across_processes", "_sync_module_states")
    before = {name: getattr(torch_ddp, name) for name in sent}
    for name in sent:
        setattr(torch_ddp, name, lambda *_arguments, **_options: None)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch_ddp, name, function)


def _accepted_arguments(
    settings: ReplicaSettings, device: torch.device, *, cap_mb: float
) -> dict[str, Any]:
    """Return only the arguments that the installed torch knows and does not deprecate."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # Buffers are shared by share_buffers, parameters by the state transfer.
    sync_name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    wanted: dict[str, Any] = {
        sync_name: False,
        "init_sync": False,
        # "auto" starts safe; whoever relaxes it passes settings that say False.
        "find_unused_parameters": bool(settings.find_unused_parameters),
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
        "bucket_cap_mb": cap_mb,
        "static_graph": settings.static_graph and not settings.find_unused_parameters,
    }
    if device.type == "cuda":
        wanted["device_ids"] = [device.index]
    return {name: value for name, value in wanted.items() if name in known}
