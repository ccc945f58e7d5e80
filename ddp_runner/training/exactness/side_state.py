"""What forward and loss change beside the optimizer: found by looking, then kept, put back, sent, saved.

That is what hangs on the modules of the model, on the task and on what the task holds (``object_graph``): tensors
that are no parameters and no saved buffers, numbers, lists, random generators, extra state. The model's own
state dict is not touched: see ``buffers`` for what of it a step changes. What an iterator has given cannot be
seen: it is named.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.checkpoint.entry_names import bare_names
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.training.exactness.kept_kinds import GivingBack, Kept, NotPlainError, TensorCopy
from ddp_runner.training.exactness.traces import Trace
from ddp_runner.training.exactness.values import (
    Made,
    Stateful,
    from_wire,
    idents,
    kept_of,
    made_of,
    mark_shared,
    objects_in,
    wired,
)
from ddp_runner.values.object_graph import (
    Closed,
    Owner,
    Reach,
    Walk,
    attributes_of,
    state_in,
)

LOOK_SHARE = 0.002  # of a step's time, for looking at what has not changed so far
COPY_SHARE = 0.02  # the same of copies for a way back
LOOKS_AT_FIRST = 3  # after every step, whatever a look takes
OWNERS_MAX = 1_200  # besides the model's modules
DEPTH_MAX = 20  # of objects in objects
_NO_STEPS = -1


class SideState:
    """Of one rank. Names are paths: ``task.queue``, ``model.layer2.counter``.

    What could not be put back or taken over is what :meth:`take_lost` returns. ``apart``: objects that are
    somebody else's, as the datasets. The order of calls: :meth:`keep` at each commit, :meth:`drop` when
    the step after it is given up.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Any = None,
        *,
        root_name: str = "task",
        apart: Iterable[Any] = (),
        beside: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """``root_name``: what ``task``, or what stands there in its place, is called in paths.

        ``beside`` gives further values by name, of which only a change is noticed.
        """
        self._model = model
        self._task = task
        self._root_name = root_name
        self._beside = beside
        self._apart = {id(one) for one in apart if one is not None}  # all of them alive
        self._own: frozenset[int] = frozenset()  # ids of what is the model's own state
        self._owned = frozenset[int]()  # ids of the objects whose attributes are looked at
        self._followed: dict[str, Kept] = {}
        self._blind: set[str] = set()  # written without torch's counting it
        self._picture: dict[str, Kept] = {}  # of what is not followed
        self._pictured_step = _NO_STEPS
        self._looks = 0  # after steps
        self._look_s = 0.0
        self._copies = 0  # of everything, for a way back
        self._copied_s = self._copy_s = 0.0  # when the newest was made, and what it took
        self._credit_s = 0.0
        self._stepped_s = 0.0
        self.differing: set[str] = set()  # names of what two ranks have differently
        self.took_over: list[str] = []  # of those, what is another rank's now
        self._traces: dict[str, Trace] = {}  # of what is not looked into, as it was built
        self.opaque: list[str] = []  # names of those which steps use
        self.doubtful: list[
            str
        ] = []  # of those, what may not be as it was, since a repair or a resume
        self.has_news = False  # something is followed that was not compared with other ranks
        self.was_received = False  # the state of another process, since it was compared
        self._received_step = 0  # with which it came, or was built
        self._lost: list[str] = []
        self._step = 0
        self._left: list[Any] = []  # of the objects, those that are too many
        self._left_name = ""  # of the first
        self._functions: dict[str, FunctionType] = {}  # those that keep nothing so far
        self._parameters: dict[str, Tensor] = {}  # of the model
        self._closed: dict[str, Any] = {}  # what is not looked into, by its name
        self._owners = self._walk()
        self._traces = {name: Trace(value) for name, value in self._closed.items()}
        self._note_used()
        self._take_picture()

    def no_longer_apart(self, identity: int) -> None:
        """The object of this id, one of those apart, is no more; another one may get its id."""
        self._apart.discard(identity)

    def owns(self, value: Any) -> bool:
        """Return True for an object whose attributes are kept once steps change them."""
        return id(value) in self._owned

    def hold(self) -> dict[str, Kept]:
        """A copy of everything, in host memory where it lies on a device."""
        self._owners = self._walk()
        self._take_picture()
        on_host = any(one.device.type != "cpu" for one in self._model.parameters())
        return self._all(with_contents=True, on_host=on_host)

    def whole_record(self) -> dict[str, tuple[str, Any]]:
        """Return all inspectable state, followed or not, for another process: name -> digest and plain value."""
        self.look_again(whole=True)  # changed state is now followed, not taken as constant
        held = self.hold()
        mark_shared(held.values())
        found = {}
        for name, kept in held.items():
            with contextlib.suppress(NotPlainError):
                found[name] = repr(kept.digest()), wired(kept)
        return found

    def unlike(self, record: Mapping[str, tuple[str, Any]]) -> list[str]:
        """Return the names in another process's :meth:`whole_record` whose content differs here."""
        mine = self.whole_record()
        return [
            name
            for name, (digest, _) in record.items()
            if name not in mine or mine[name][0] != digest
        ]

    def missing_in(self, record: Mapping[str, tuple[str, Any]]) -> list[str]:
        """Return the names of what steps change and a :meth:`whole_record` of this process does not have."""
        return [
            *self.opaque,
            *(n for n in self._followed if n not in record and self._now(n) is not _ABSENT),
        ]

    def take_over(self, record: Mapping[str, tuple[str, Any]], names: Iterable[str]) -> list[str]:
        """Put these of a :meth:`whole_record` in the place of what is here; return those that cannot be."""
        self._owners = self._walk()
        giving = GivingBack()
        return [
            name for name in names if not self._give_back(name, from_wire(record[name][1]), giving)
        ]

    def hold_bytes(self) -> int:
        """About what :meth:`hold` takes."""
        found = 0
        for owner in self._owners.values():
            for _, value in owner.entries():
                if isinstance(value, Tensor) and id(value) not in self._own:
                    found += value.nbytes
        return found

    def follow_changed_since(self, held: Mapping[str, Kept]) -> list[str]:
        """Put back all that is not as it was held, and follow it from now on; its names."""
        # Functions and parameters that kept nothing may do so now.
        idle = {**self._functions, **self._noted_parameters()}
        bare = [
            Owner(path, at, is_models=False)
            for path, at in idle.items()
            if path not in self._owners
        ]
        every = (*self._owners.values(), *bare)
        now = [f"{one.path}.{key}" for one in every for key, _ in one.entries()]
        changed = []
        giving = self._giving_back(held)
        for name in [*held, *(name for name in now if name not in held)]:
            owner, key = self._place(name)
            if owner is None:
                continue
            value, seen = owner.read(key), self._picture.get(name)  # made when all was held
            is_as_held = name in held and _is_in(held[name], value)
            is_as_seen = seen is not None and _is_in(seen, value, whole=True)
            if is_as_held and (seen is None or is_as_seen):
                continue
            # One that is written with what it held is followed too: a picture does not know what that was.
            if not is_as_held:
                changed.append(name)
                if is_as_seen:
                    self._blind.add(name)  # its content has changed, torch's count has not
            self._give_back(name, held.get(name), giving)
            self._follow(name, held.get(name))
        self._owners = self._walk()
        self._note_used(whole=True)
        self._keep_followed()
        self._take_picture()
        return changed

    @property
    def is_as_received(self) -> bool:
        """True if no step was committed since this process has built the state, or received it."""
        return self._received_step == self._step

    def way_back(self, *, has_room: bool) -> Callable[[], bool]:
        """Return a call that undoes what changes from now on; it returns False where some of it has no copy.

        ``has_room``: tensors that steps do not change may be copied too. Where this is asked for so often that copies
        of everything would take more than :data:`COPY_SHARE` of the time, what is not followed is lost if it changes.
        """
        began_s = time.perf_counter()
        is_whole = self._copies < LOOKS_AT_FIRST or began_s >= self._copied_s + (
            self._copy_s / COPY_SHARE
        )
        if not is_whole:
            return partial(self._go_back, {name: self._now(name) for name in self._followed})
        self._owners = self._walk()
        held = self._all(with_contents=has_room)
        held |= {name: self._now(name) for name in self._followed if name in held}
        self._copies += 1
        self._copied_s = time.perf_counter()
        self._copy_s = self._copied_s - began_s

        def undo() -> bool:
            changed = self.follow_changed_since(held)
            return all(_is_in(held.get(name, _ABSENT), self._read(name)) for name in changed)

        return undo

    def _go_back(self, followed: Mapping[str, Kept]) -> bool:
        """Put back what was followed; what is followed only since then is lost."""
        self._lost += [name for name in self._followed if name not in followed]
        self._followed |= followed
        self.drop()
        return True

    def keep(self, step: int = 0) -> None:
        """A step is committed: remember what is followed as it is now; look at the rest, now and then."""
        if self._received_step == _NO_STEPS:
            self._received_step = step
        now_s = time.perf_counter()
        passed_s, self._stepped_s = now_s - self._stepped_s, now_s
        self._credit_s = min(self._credit_s + LOOK_SHARE * passed_s, 2 * self._look_s)
        self._step = step
        if self._looks < LOOKS_AT_FIRST or self._credit_s >= self._look_s:
            self._looks += 1
            self.look()
            self._look_s = time.perf_counter() - now_s
            self._credit_s -= self._look_s
        self._keep_followed()

    def _keep_followed(self) -> None:
        # INVARIANT kept-where-it-is: what is followed in an object is that of the object that stands there now.
        # Broken if: a step has put another one there, and what the one before held is put back into it.
        # Guarded by: test_an_object_that_steps_replace_is_put_back_as_it_was.
        if changed := self._keep_each():
            self._look_into(changed)
            self._keep_each()

    def _keep_each(self) -> list[str]:
        """Return the names that other objects have now; what is in these has been kept as of those before."""
        changed = []
        for name, kept in self._followed.items():
            owner, key = self._place(name)
            if owner is None or not owner.has(key):
                self._followed[name] = _ABSENT
                continue
            value = owner.read(key)
            if isinstance(kept, TensorCopy) and name not in self._blind and kept.seen.is_in(value):
                continue
            now = self._followed[name] = self._kept(value, before=kept)
            if objects_in(now) != objects_in(kept):
                changed.append(name)
        return changed

    def _look_into(self, names: Iterable[str]) -> None:
        """See which objects stand under these names now: what a whole walk would find there, in less time."""
        below = tuple(f"{name}{sign}" for name in names for sign in (".", "["))
        places = {name.rpartition(".")[0] for name in names}
        roots = [(path, self._owners[path].of) for path in places if path in self._owners]
        owners = {p: one for p, one in self._owners.items() if not f"{p}.".startswith(below)}
        for path, at, reach in self._walk_rules(owners).over(roots):
            if reach is Reach.ENTERED and f"{path}.".startswith(below):
                owners[path] = Owner(path, at, is_models=False)
        self._owners = owners

    def _put_objects_back(self, giving: GivingBack) -> None:
        """Those that the step has put others in the place of; then what is in them has its names again."""
        others = [
            name
            for name, kept in self._followed.items()
            if objects_in(kept) and not kept.is_in(self._read(name))
        ]
        for name in others:
            self._give_back(name, self._followed[name], giving)
        if others:
            self._owners = self._walk()

    def drop(self) -> None:
        """A step is given up: put everything back as it was when :meth:`keep` was called last."""
        # INVARIANT put-back-whole: a step that is given up leaves nothing of what it has changed, or
        # it is reported. Broken if: something changes that is neither put back nor in take_lost().
        # Guarded by: test_a_step_given_up_twice_and_done_is_as_once_done.
        self._owners = self._walk()
        self._note_used(whole=True)
        giving = self._giving_back(self._followed)
        self._put_objects_back(giving)
        unfollowed = dict.fromkeys(name for name, _ in self._changed(whole=True))
        for name in unfollowed:
            kept = self._picture.get(name)
            # A picture of a step before this one is no way back.
            is_fresh = self._pictured_step == self._step
            if not (is_fresh and self._give_back(name, kept, giving)):
                self._lost.append(name)
            self._follow(name, None)
            self._followed[name] = self._now(name)
        for name in [one for one in self._followed if one not in unfollowed]:
            if not self._give_back(name, self._followed[name], giving):
                self._lost.append(name)
        self.doubtful = list(self.opaque)
        self._take_picture()

    def take_lost(self) -> list[str]:
        """What could not be put back, or taken over, since this was asked last."""
        found, self._lost = self._lost, []
        return sorted(set(found))

    def follow(self, names: Iterable[str]) -> None:
        """Keep these from now on, as they are."""
        for name in names:
            self._follow(name, None)
        self._keep_followed()

    def followed_names(self) -> list[str]:
        """What steps were seen to change."""
        return list(self._followed)

    def tensors(self) -> list[Tensor]:
        """The live tensors that are followed, for whoever must not read them beside a step."""
        found = []
        for name in self._followed:
            owner, key = self._place(name)
            value = None if owner is None else owner.read(key)
            if isinstance(value, Tensor):
                found.append(value.detach())
        return found

    def to_record(self) -> dict[str, Any]:
        """What is followed, plain, for a file and the wire; empty where nothing is."""
        self.look_again()
        there = {}
        for name in self._followed:
            owner, key = self._place(name)
            if owner is not None and owner.has(key):
                there[name] = self._kept(owner.read(key))
        mark_shared(there.values())
        values: dict[str, Any] = dict.fromkeys(self._followed)
        values |= {name: _plain_or_why(kept) for name, kept in there.items()}
        for name, packed in values.items():
            if isinstance(packed, str) and (made := self._made(name)) is not None:
                values[name] = [made.plain()]
        if not values and not self.opaque:
            return {}
        return {
            "values": values,
            "blind": sorted(self._blind),
            "differing": sorted(self.differing),
            "used": self.opaque,
        }

    def restore(self, record: Mapping[str, Any], *, is_begin: bool = False) -> None:
        """Take over a record of another process, or of before. ``is_begin``: no step has changed anything yet."""
        self._owners = self._walk()
        self.was_received = not is_begin
        self._received_step = _NO_STEPS  # known with the next keep()
        self._note_used()
        self.opaque = sorted({*self.opaque, *record.get("used", ())})
        self.doubtful = [] if is_begin else list(self.opaque)
        self._blind |= set(record.get("blind", ()))
        self.differing |= set(record.get("differing", ()))
        values = record.get("values", {})
        self._lost += [name for name in self._followed if name not in values]
        giving = GivingBack()
        arrived = {n: from_wire(p[0]) for n, p in values.items() if isinstance(p, (list, tuple))}
        for name in sorted(arrived):  # an object before those that were created in it
            if isinstance(made := arrived[name], Made):
                arrived[name] = self._built(name, made)
        for name, packed in values.items():
            self._follow(name, None)
            kept = arrived.get(name, None if packed is None else Kept(None))
            # An object that does not load such a state: it is of another program, or damaged.
            raises = isinstance(kept, Stateful)
            if isinstance(packed, str) or not self._give_back(name, kept, giving, raises=raises):
                self._lost.append(name)
        self.took_over = [name for name in values if name in self.differing]
        self._owners = self._walk()
        self._looks = 0
        self._keep_followed()
        self._take_picture()

    def _made(self, name: str) -> Made | None:
        """The object that a step has put under this name, for a process that lacks it; None if it cannot be sent."""
        owner, value = self._owners.get(name), self._read(name)
        if (
            owner is None
            or owner.of is not value
            or isinstance(value, (Dataset, type, FunctionType))
        ):
            return None
        within = (f"{name}.", f"{name}[")
        outside = [
            one
            for one in self._owners.values()
            if one is not owner and not one.path.startswith(within)
        ]
        held: list[Any] = [*self._model.parameters(), *self._model.buffers()]
        for one in outside:
            held += [one.of, *(at for key, at in one.entries() if f"{one.path}.{key}" != name)]
        return made_of(value, beside=self._model, held=held)

    def _built(self, name: str, made: Made) -> Kept:
        """Put the object under its name; as it is kept from now on."""
        try:
            kept = Kept(made.built(like=self._model))
        except Exception as error:  # a class that is not there, or that raises what it likes
            if lacks_memory(error):
                raise
            return made
        self._give_back(name, kept, GivingBack())
        self._owners = self._walk()
        return kept

    def digests(self) -> dict[str, str]:
        """Name -> a text that two ranks have alike where they hold the same."""
        found = {}
        for name in sorted(self._followed):
            owner, key = self._place(name)
            if owner is None:
                continue
            try:
                found[name] = repr(self._kept(owner.read(key)).digest())
            except NotPlainError:
                continue
        return found

    def look(self, *, whole: bool = False) -> None:
        """Follow what has changed since the last look, and remember the rest as it is now.

        ``whole``: also of what is so much that a look sees a part of it only.
        """
        self._owners = self._walk()
        self._note_used(whole=whole)
        changed = [name for name, _ in self._changed(whole=whole)] if self._picture else []
        for name in changed:
            self._follow(name, None)
            self._followed[name] = self._now(name)  # a step may be given up before the next commit
        self._take_picture(is_compared=True)

    def look_again(self, *, whole: bool = False) -> None:
        """The same between two steps, if one was committed since: what is saved or compared lacks nothing."""
        if self._pictured_step != self._step or whole:
            self.look(whole=whole)

    def _changed(self, *, whole: bool = False) -> list[tuple[str, Any]]:
        """What is not followed and is not as the picture has it."""
        found = []
        gone = set(self._picture)
        for owner in self._owners.values():
            for key, value in owner.entries():
                name = f"{owner.path}.{key}"
                if name in self._followed:
                    continue
                gone.discard(name)
                kept = self._picture.get(name)
                if kept is None or not _is_in(kept, value, whole=whole):
                    found.append((name, value))
        return found + [(name, None) for name in gone if name not in self._followed]

    def _take_picture(self, *, is_compared: bool = False) -> None:
        """``is_compared``: what the picture has now is known to be as it is."""
        kept = self._picture
        picture = {}
        for owner in self._owners.values():
            for key, value in owner.entries():
                name = f"{owner.path}.{key}"
                if name in self._followed:
                    continue
                known = kept.get(name)
                if known is None or not (is_compared or _is_in(known, value)):
                    known = self._kept(value, with_contents=False)
                picture[name] = known
        self._picture = picture
        self._pictured_step = self._step

    def _follow(self, name: str, kept: Kept | None) -> None:
        self.has_news = self.has_news or name not in self._followed
        self._followed.setdefault(name, kept or _ABSENT)
        self._picture.pop(name, None)

    def _giving_back(self, kept: Mapping[str, Kept]) -> GivingBack:
        return GivingBack(idents(kept.values()))

    def _give_back(
        self, name: str, kept: Kept | None, giving: GivingBack, *, raises: bool = False
    ) -> bool:
        """Whether ``name`` is now what was kept. ``raises``: an error of the user's class is raised again."""
        owner, key = self._place(name)
        if owner is None:
            return kept is None or kept is _ABSENT
        try:
            if kept is None or kept is _ABSENT:
                owner.remove(key)  # it was not there
                return True
            owner.write(key, kept.given_back(owner.read(key), giving))
        except (
            Exception
        ) as error:  # a class of the user's may refuse to be written, or to load its state
            if lacks_memory(error) or (raises and not isinstance(error, NotPlainError)):
                raise
            return False
        return True

    def _read(self, name: str) -> Any:
        owner, key = self._place(name)
        return _NOTHING if owner is None or not owner.has(key) else owner.read(key)

    def _now(self, name: str) -> Kept:
        value = self._read(name)
        return _ABSENT if value is _NOTHING else self._kept(value)

    def _place(self, name: str) -> tuple[Owner | None, str]:
        path, _, key = name.rpartition(".")
        if path in self._owners:
            return self._owners[path], key
        idle = self._functions.get(path, self._parameters.get(path))
        return (None if idle is None else Owner(path, idle, is_models=False)), key

    def _kept(self, value: Any, **options: Any) -> Kept:
        return kept_of(value, skipped=self._is_skipped, **options)

    def _is_skipped(self, value: Any) -> bool:
        """What is looked at elsewhere: the model's own tensors, and what is an owner itself."""
        if id(value) in self._own or id(value) in self._apart:
            return True
        return issubclass(type(value), (nn.Module, Dataset))

    def _all(self, **options: Any) -> dict[str, Kept]:
        return {name: self._kept(value, **options) for name, value in self._entries()}

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """Give the path and the value of each attribute that is looked at."""
        for owner in self._owners.values():
            for key, value in owner.entries():
                yield f"{owner.path}.{key}", value

    def _walk(self) -> dict[str, Owner]:
        """Every object that is looked at, by its path."""
        owners = self._owners_of_model()
        roots = [(self._root_name, self._task)] if self._task is not None else []
        roots += [(one.path, one.of) for one in owners.values()]
        walk = self._walk_rules(owners)
        closed: dict[str, Any] = {}
        functions: dict[str, FunctionType] = {}
        left: list[Any] = []
        for path, at, reach in walk.over(roots):
            if reach is Reach.LEAF:
                inner = at.value if isinstance(at, Closed) else at
                closed[f"{path} ({type(inner).__name__})"] = inner
            elif reach is Reach.LEFT:
                left.append(at)
                self._left_name = self._left_name or path
            elif reach is Reach.ENTERED:
                name = _free(path, owners)
                owners[name] = Owner(name, at, is_models=False)
            elif type(at) is FunctionType:
                functions[path] = at
        if left:
            if [*map(id, left)] == [*map(id, self._left)]:
                left = self._left
            self._left = left
            closed[f"{self._left_name} and other objects"] = left
        closed |= self._beside()
        self._closed, self._functions = closed, functions
        for path, parameter in self._noted_parameters().items():
            owners.setdefault(path, Owner(path, parameter, is_models=False))
        self._owned = frozenset(id(one.of) for one in owners.values())
        return owners

    def _walk_rules(self, owners: Mapping[str, Owner]) -> Walk:
        modules = {id(one.of) for one in owners.values() if one.is_models}
        return Walk(
            inside=state_in,
            counts=lambda at: id(at) not in modules and not _keeps_nothing(at),
            objects_max=OWNERS_MAX,
            depth_max=DEPTH_MAX,
            without=self._apart,
        )

    def _owners_of_model(self) -> dict[str, Owner]:
        """Return the model's modules, by path; note what is the model's own state."""
        own: set[int] = {id(one) for one in self._model.parameters()}
        owners: dict[str, Owner] = {}
        bare_of = bare_names(self._model)
        for path, module in self._model.named_modules():
            unsaved = module._non_persistent_buffers_set  # noqa: SLF001
            saved = {k: b for k, b in module._buffers.items() if k not in unsaved}  # noqa: SLF001
            own.update(id(buffer) for buffer in saved.values() if buffer is not None)
            bare = bare_of(path)
            name = f"model.{bare}" if bare else "model"
            owners.setdefault(name, Owner(name, module, is_models=True))
        self._own = frozenset(own)
        named = self._model.named_parameters()
        self._parameters = {f"model.{bare_of(name)}": one for name, one in named}
        return owners

    def _noted_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that the program has given attributes, by their paths."""
        return {path: one for path, one in self._parameters.items() if vars(one)}

    def _note_used(self, *, whole: bool = False) -> None:
        """See which of what is not looked into is no longer as it was built."""
        known = {*self.opaque}
        for name, value in self._closed.items():
            if name not in known:
                trace = self._traces.get(name)
                if trace is None or not trace.is_of(value, whole=whole):
                    self.opaque.append(name)
        self.opaque.sort()


def _keeps_nothing(at: Any) -> bool:
    """Whether it is a function that nothing is kept in so far."""
    return type(at) is FunctionType and not attributes_of(at)


def _free(path: str, owners: Mapping[str, Owner]) -> str:
    """``path``, or, where two objects have the same name, another one."""
    number = 1
    name = path
    while name in owners:
        number += 1
        name = f"{path}#{number}"
    return name


_NOTHING = object()
_ABSENT = Kept(_NOTHING)


def _is_in(kept: Kept, value: Any, *, whole: bool = False) -> bool:
    """Whether ``value`` is what was kept; no, if an object of the user's does not let itself be compared."""
    try:
        return kept.is_wholly_in(value) if whole else kept.is_in(value)
    except Exception as error:
        if lacks_memory(error):
            raise
        return False


def _plain_or_why(kept: Kept) -> list[Any] | str:
    """As it travels; else what in it cannot."""
    try:
        return [wired(kept)]
    except NotPlainError as error:
        return str(error)
