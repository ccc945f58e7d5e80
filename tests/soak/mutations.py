"""One small break of each invariant that the package names, and the tests that are to notice it.

An invariant is a comment ``INVARIANT name: ...`` with ``Guarded by: test_...``. A row here says how to break it: in
the file with that comment, the first ``old`` after it becomes ``new``. Where the code that keeps the invariant stands
elsewhere, ``after`` is a text that stands once in the package, and ``old`` is the first one from there on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ddp_runner"
LINES_MAX = (
    60  # between the anchor and what is replaced: farther away it would be of something else
)
_GUARDS_LINES_MAX = 20
_NAMED = re.compile(r"INVARIANT ([a-z][a-z0-9-]*):")
_TEST = re.compile(r"\btest_\w+")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """``invariant`` is broken where ``old`` becomes ``new``. ``also``: tests beside those that the comment names."""

    invariant: str
    old: str
    new: str
    after: str = ""
    also: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Its name for pytest: the invariant and what is put in."""
        return f"{self.invariant}: {' '.join(self.new.split())}"[:80]


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """A comment that names one, and the tests that guard it."""

    name: str
    path: Path  # in the package
    line: int  # from 0
    tests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a mutation is made: ``text`` is the whole file afterwards."""

    path: Path
    text: str
    tests: tuple[str, ...]


def sources(package: Path = PACKAGE) -> dict[Path, str]:
    """Every file of the package."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}


def invariants(files: dict[Path, str], name: str = "") -> list[Invariant]:
    """All that the package names, in the order of its files; with ``name`` only those of that name."""
    found = []
    for path, text in files.items():
        if f"INVARIANT {name}" not in text:
            continue
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if (named := _NAMED.search(line)) is not None and name in ("", named[1]):
                tests = _guards(lines[number : number + _GUARDS_LINES_MAX])
                found.append(Invariant(name=named[1], path=path, line=number, tests=tests))
    return found


def _guards(lines: list[str]) -> tuple[str, ...]:
    """The tests that the comment beginning there names."""
    comment = " ".join(line.strip().lstrip("#").strip() for line in lines)
    _, _, named = comment.partition("Guarded by:")
    return tuple(_TEST.findall(re.match(r"[^.]*", named)[0]))


def place_of(mutation: Mutation, files: dict[Path, str]) -> Place:
    """Where it is made. Raises ValueError where that is not one place."""
    named = invariants(files, mutation.invariant)
    found = []
    anchor = mutation.after or f"INVARIANT {mutation.invariant}:"
    for path, text in files.items():
        if anchor not in text:
            continue
        lines = text.splitlines(keepends=True)
        if mutation.after:
            starts = [n for n, line in enumerate(lines) if mutation.after in line]
        else:
            starts = [one.line for one in named if one.path == path]
        for start in starts:
            begin = sum(map(len, lines[:start]))
            near = "".join(lines[start : start + LINES_MAX])
            offset = near.find(mutation.old)
            if offset >= 0:
                found.append((path, begin + offset))
    if len(found) != 1:
        raise ValueError(f"{mutation.invariant}: {mutation.old!r} stands at {len(found)} places")
    [(path, begin)] = found
    text = files[path]
    guards = [one.tests for one in named if mutation.after or one.path == path]
    tests = dict.fromkeys(name for names in (*guards, mutation.also) for name in names)
    mutated = text[:begin] + mutation.new + text[begin + len(mutation.old) :]
    return Place(path=path, text=mutated, tests=tuple(tests))


def _break(invariant: str, old: str, new: str, *, after: str = "", also: str = "") -> Mutation:
    return Mutation(invariant=invariant, old=old, new=new, after=after, also=tuple(also.split()))


# What no mutation of one place can show here, and why.
LEFT_OUT = {
    "ends-with-its-actor": "needs a cluster of Ray",
    "token-by-environment": "needs a cluster of Ray",
}

MUTATIONS = (
    # collective
    _break("waited-by-us", "if not self._inner.check(keys):", "if False:"),
    _break("nobody-inside-while-aborting", "with self._inside:", "if True:"),
    _break("nobody-waits-inside-gloo", "if self._is_aborted.is_set():", "if False:"),
    _break("nobody-waits-inside-gloo", "work.wait(_LOOK_EVERY)", "work.wait()"),
    _break(
        "unanswered-is-asked-again",
        "state.is_rehearsed, self._is_first = False, True",
        "state.is_rehearsed, self._is_first = True, True",
    ),
    _break(
        "interrupted-is-asked-again",
        "self._has_rehearsed, self._held = True, None",
        "self._has_rehearsed, self._held, state.is_rehearsed = True, None, True",
    ),
    _break(
        "interrupted-is-asked-again",
        "is_first or not self._state.is_rehearsed",
        "is_first",
        after="# In a later generation only where an interrupted first step is rehearsed again.",
    ),
    _break("late-alone", "with waiting_for_peers(self.slot):", "if True:"),
    _break(
        "duplicates-now",
        "duplicate = duplicate_if_connected(descriptor)",
        "duplicate = None",
        after="def _adopt_since(",
        also="test_only_connections_made_inside_the_block_are_shut_down",
    ),
    _break("laid-out-by-model", "if not self.find_unused_parameters:", "if False:"),
    _break(
        "read-while-held",
        "group.wait_for_messages([group.send(_mark(), rank) for rank in readers])",
        "pass",
    ),
    _break(
        "nobody-waits-inside-a-message",
        "_wait([*self._marks, *self._works])",
        "_wait([*self._works, *self._marks])",
    ),
    _break(
        "nobody-waits-inside-a-message",
        "_wait([*self._receipts, *self._works])",
        "_wait([*self._works, *self._receipts])",
    ),
    _break("left-before-begun", "if not self.ends_in_silence:", "if False:"),
    _break("answered-is-whole", "if self._switch.tripped else None", "if False else None"),
    _break("committed-is-finished", "== newest_step - 1", "== newest_step + 1"),
    _break(
        "committed-is-finished",
        "newest if is_in_steps else -1",
        "-1",
        after="newest = self._newest_step(generation)",
        also="test_a_step_that_only_the_lost_rank_has_is_finished_by_others",
    ),
    _break("same-names", "world.group_count = 0", "pass"),
    _break("gloo-fails-itself", "if rank != backend.rank():", "if False:"),
    # supervisor
    _break("token-on-no-disk", "str(can_inject))", "str(can_inject), token)"),
    _break(
        "reader-is-apart",
        "if self._keeper.look(now_s) is not None and not self._has_warned:",
        "if False:",
    ),
    _break("secret-by-channel", "secrets.token_hex(SECRET_BYTES)", '"00" * SECRET_BYTES'),
    _break(
        "only-the-hung",
        "for rank in hung:",
        "for rank in range(len(self.ranks)):",
        also="test_only_a_rank_that_hangs_is_made_to_write_its_stacks",
    ),
    _break("one-owner", "self.run_end.at_once(Ending.of(RunStatus.PREEMPTED, line))", "pass"),
    _break("memory-outlasts-a-start", "elif not (but_parked and node.keeps_memory):", "else:"),
    _break(
        "living-ranks-stay", 'return "" if lives else self._no_zygote', "return self._no_zygote"
    ),
    _break("freed-before-the-end", "atexit.register(leave.join, FREED_WITHIN_S)", "pass"),
    _break("cut-off-parks", "self._world.abort(self._generation, now_s)", "pass"),
    _break("counted-as-they-move", "self._members[standing[0]] += 1", "pass"),
    _break(
        "one-holder", "start_new_session=True,", "start_new_session=True, pass_fds=(self._writer,),"
    ),
    _break("same-environment", "if dict(environment) != self._environment or", "if"),
    _break("proved-or-said", "if self.pending is not None:", "if False:"),
    _break("ordered-by-the-living", "if is_fenced:", "if False:"),
    _break("one-writer", "self._world.fence(handle, is_fenced=handle.rank != move.rank)", "pass"),
    _break(
        "all-where-one-is-late",
        "return None\n        is_open",
        "pass\n        is_open",
        after="if max(ages_ns) / 1e9 > IN_TIME_SHARE",
    ),
    _break(
        "all-where-one-is-late",
        "return None if any(look.stopped for _, look in few) else few",
        "return few",
        after="if max(ages_ns) / 1e9 > IN_TIME_SHARE",
    ),
    _break("drilled-in-the-end", "self.is_owed = True", "pass"),
    _break("back-for-all", "lost=tuple(sorted({*world.lost, *distrusted})),", "lost=world.lost,"),
    _break(
        "reaped-first",
        "if handle.state is RankState.DEAD",
        "if handle.state in (RankState.DEAD, RankState.KILLING)",
        also="test_a_killed_rank_that_never_ends_is_given_up_where_allowed",
    ),
    _break(
        "agree-then-abort",
        "if any(h.state in _MAY_COMMIT and not h.does_not_end(now_s) for h in self._world.ranks):",
        "if False:",
    ),
    # training
    _break("left-out-as-begun", "if one == hashes[name]", "if True"),
    _break(
        "counted-once",
        "base = self._before if step == self._step else self._now",
        "base = self._now",
    ),
    _break(
        "laid-out-alike",
        "return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)",
        "return tensor",
    ),
    _break("recomputed-alike", "owner[key] = copy.clone()", "pass", after="def _second(self)"),
    _break(
        "recomputed-alike",
        "owner[key] = buffer",
        "pass",
        after="def _second(self)",
        also="test_a_second_forward_leaves_the_buffers_where_they_were",
    ),
    _break(
        "weights-stay",
        "tensor.data = average.to(tensor.device, tensor.dtype)",
        "tensor.data.copy_(average)",
    ),
    _break(
        "check-before-step",
        "replica.check_reduced()",
        "pass",
        also="test_nothing_is_done_with_gradients_that_are_not_reduced",
    ),
    _break("copied-before-change", "state.before_change()", "pass"),
    _break("confirmed-before-commit", "replica.group.confirm()", "pass"),
    _break("dirty-around-update", "self._slot.set(Cell.DIRTY, 1)", "pass"),
    _break("wrapped-as-trained", "raise WrapAgainError", "pass"),
    _break(
        "seeded-with-batch",
        "self._replica.drop_signals()",
        "self._replica.drop_signals(); self.seed()",
        also="test_draws_within_a_block_follow_those_before_it",
    ),
    _break(
        "seeded-with-batch",
        "self._client.steps.seed()",
        "pass",
        after="A step's batch is given to the loop.",
    ),
    # A change before the net is called is seen twice: also behind its forward, which is done again then.
    _break(
        "summed-as-trained",
        "return not any(now and not wrapped for now, wrapped in zip(flags, self._flags, strict=True))",
        "return True",
    ),
    _break(
        "gradients-are-left",
        "parameter.grad = torch.zeros_like(parameter, requires_grad=False)",
        "parameter.grad = None",
    ),
    _break(
        "called-together",
        "if own[0] == newest[0] and own < newest:",
        "if False:",
    ),
    _break(
        "carried-is-lost",
        "self.began_again |= self._has_formed or self.own_step > 0",
        "pass",
    ),
    _break(
        "pass-leaves-nothing",
        "self._left = [name for name in changed",
        "self._left = [name for name in ()",
        after="def pass_ends(self)",
    ),
    _break(
        "loaded-as-never-before",
        "self.keeps_draws = len(later) > 1",
        "self.keeps_draws = len(later) > 9",
    ),
    _break(
        "update-is-repeated",
        "self._unlike = first_unlike",
        "first_unlike",
        after="def beside(",
    ),
    _break(
        "unrehearsed-says-so",
        "group.world_size > 1 and ",
        "",
        after="sums_in_forward = any(",
    ),
    _break(
        "bound-where-read",
        "        found |= (late - early) & read\n",
        "",
    ),
    _break(
        "hooks-write-first",
        "one.removesuffix(_CALLED) for one in written if one.endswith(_CALLED)",
        "one for one in ('net',)",
    ),
    _break(
        "hooks-write-first",
        "if not _uses_arguments_alone(hook, source, value, places):",
        "if False:",
        after="value, places = _values_in(hook, source, given)",
    ),
    _break(
        "looked-behind-a-repair",
        "or self._is_last_chance()",
        "",
        after="def begin_next(self)",
    ),
    _break(
        "built-as-a-rank-builds",
        "state.room = room_for_state(state.optimizer)",
        'state.room = __import__("torch").rand(1)',
    ),
    _break(
        "built-as-a-rank-builds",
        "workload, state = build_workload(settings, rank_info)",
        'workload, state = build_workload(settings, rank_info); __import__("torch").rand(1)',
    ),
    _break(
        "compiled-alike", '"automatic_dynamic_shapes": False', '"automatic_dynamic_shapes": True'
    ),
    _break("compiled-alike", '"optimize_ddp": False', '"optimize_ddp": True'),
    _break(
        "compared-before-save",
        "judge(Trust.UNKNOWN)",
        "judge(Trust.SOUND)",
        also="test_of_ranks_that_differ_only_what_the_majority_has_is_saved",
    ),
    _break(
        "compared-before-save",
        "if not self._compares:",
        "self._durable.judge(Trust.SOUND)\n        if not self._compares:",
        after="Nothing may change the state before :meth:`may_commit`, which gives the verdict.",
    ),
    _break("odd-ones-first", 'self._group.await_notes(f"odd/{step}", comparison.odd)', "pass"),
    _break("left-for-good", "self._state.committed_step = EMPTY_STEP", "pass"),
    _break(
        "left-before-shared",
        "leave_other_branch(",
        "(lambda *asked, **named: None)(",
    ),
    _break("nothing-held", "drop_frames(error)", "pass"),
    _break("nothing-held", "self._step.micro_batches.clear()", "pass"),
    _break(
        "kept-order",
        "known_order_version(",
        "(lambda version: ORDER_VERSION)(",
        after='get("order"',
    ),
    _break("written-over-when-empty", "if self.committed_step != EMPTY_STEP:", "if False:"),
    _break(
        "updated-as-captured",
        " or name in named",
        "",
        also="test_what_was_trained_and_is_frozen_again_keeps_its_moments",
    ),
    _break("moments-by-name", "if names is None:", "if True:"),
    _break(
        "best-of-the-course",
        "is_judged = self.judged_step == self.committed_step or not monitor.by_evaluations",
        "is_judged = True",
        after="def judged(self",
    ),
    # A generator is seeded for each micro-batch, so that a draw beside it changes nothing.
    _break(
        "untouched",
        "self._is_drilled_next()",
        "micro_batches[0].batch[0].neg_()",
    ),
    _break(
        "untouched",
        "self._is_drilled_next()",
        "next(iter(self._state.replicated().values())).data.neg_()",
    ),
    _break("kept-where-it-is", "self._look_into(changed)", "pass"),
    _break(
        "put-back-whole",
        "self._lost.append(name)",
        "pass",
        also="test_what_changes_late_is_followed_or_reported",
    ),
    _break(
        "put-back-whole",
        "if not (is_fresh and self._give_back(name, kept, giving)):",
        "if not is_fresh:",
    ),
    _break(
        "handles-in-workers",
        "if self._has_workers:",
        "if False:",
        after="source = SampleReader(dataset, seed=seed, collate=list)",
    ),
    _break(
        "length-from-the-start",
        "if other is None or first + other >= step:",
        "if other is None or first + other <= step:",
    ),
    _break("one-course", "slots.clear()", "pass"),
    _break("calm-to-go-back-to", "store.catalog.set_later_aside(", "str("),
    _break("no-end-on-the-way", "state.forget_evaluation()", "pass"),
    _break("hooks-observe", "state.side.follow_changed_since(held)", "[]"),
    _break("best-kept", 'self.group.exchange("kept", "")', "pass"),
    _break("seeded-before-user-code", "seed_all(settings.run.seed)", "pass"),
    _break("own-stage", "raise OtherStageError(other)", "return loaded"),
    _break("nothing-new-in-threads", "tensor_hash(tensor)", "pass"),
    # the command
    # Of start.py Python itself puts the package's folder first, where nothing is planted; of -m the working directory.
    _break(
        "no-code-from-here",
        'if sys.argv[:1] == ["-m"] and _is_ours(sys.orig_argv):',
        "if False:",
        after="def leave_working_directory(",
        also="test_python_m_and_launch_leave_the_folder_out_too",
    ),
    _break(
        "no-run-without-a-waiter",
        "before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
        "before = signal.pthread_sigmask(signal.SIG_BLOCK, [])",
        after="def _interrupts_held(",
    ),
    _break(
        "nothing-left-behind",
        "when_cancelled()",
        "raise",
        also="test_a_cancelled_run_is_saved_and_goes_on",
    ),
    _break("shares-stay", "if began is not None:", "if False:"),
    _break("marker-last", "temporary.replace(self._marker)", "pass"),
    _break(
        "page-asks-first",
        'if (is_action or not self._is_open or "token" in asked) and not self._knows(headers, asked):',
        "if False:",
    ),
    _break("page-asks-first", "if self._is_open and _hostname(", "if False and _hostname("),
    _break("pruned-behind-sound", "entry.manifest is not None and verify(entry) is None", "1"),
    _break("tested-on-a-copy", "path=str(entries[0].path.absolute())", "path=''"),
    # data
    _break("given-once", "batches = self._source.given_again(step, self._load_beside)", "pass"),
    _break("same-stand-in", "draw = 0", "draw = len(self._bad)"),
    _break("same-items", "self._warn_of_others(READ_AGAIN)", "pass"),
    _break("stable-order", "_ROUNDS_OF_FEW if size < _FEW else _ROUNDS", "_ROUNDS"),
    _break("preloaded-draws-nothing", 'bool(getattr(dataset, "deterministic", False))', "True"),
    _break(
        "counted-last",
        'self._write(b"".join(packed), offsets[0])',
        "self._write((_HEADER.pack(_MAGIC, filling.done, filling.unread, filling.first_unread)"
        ' + struct.pack("<q", self.samples)).ljust(_HEADER_BYTES, b"\\0"), 0);'
        ' self._write(b"".join(packed), offsets[0])',
    ),
    # Read and unpacked as torch does it: whole, but without a look at the workers.
    _break(
        "one-way-in",
        "self._iterator._get_data = self._receive_in_time",
        "self._iterator._get_data = lambda: (lambda number, packed:"
        " (number, self._inboxes.unpack(packed)))(*results.get(timeout=5.0))",
    ),
    _break("die-downhill", "parent_death.die_with_parent(self._rank_pid)", "pass"),
    _break(
        "descriptors-first",
        'socket.send_fds(outbox, [b"\\0"], some)',
        '__import__("threading").Timer('
        '0.3, socket.send_fds, (outbox, [b"\\0"], [os.dup(one) for one in some])).start()',
    ),
    _break(
        "epoch-by-epoch", "return self._replace(later=(*self.later, (epoch, items)))", "return self"
    ),
    _break(
        "dealt-alike",
        "stand = Stand.from_record(json.loads(records[newest]))",
        "stand = stand or Stand.from_record(json.loads(records[newest]))",
    ),
    # a rank, and what is written
    _break("lease", "or 0 < lease_ns < now_ns", ""),
    _break("lease", "bool(slot.get(Cell.FENCED)) or", ""),
    _break("no-context", "if opened:", "if False:"),
    _break("same-numbers", "with generators_kept():", "if True:"),
    _break("one-traceback", "flush_output()", "pass"),
    _break("groups-held", "_held.setdefault(id(group), group)", "pass"),
    _break("bare-names", "if at is None or part != _wrapped_child(at):", "if True:"),
    _break(
        "sealed-last", "os.pwrite(self._descriptor, _EMPTY, 0)", "pass", after="def clear(self)"
    ),
    _break(
        "sync-before-rename",
        "disk.sync_file(handle)",
        "pass",
        after="def _write_synced(",
    ),
    _break(
        "publish-last",
        "disk.sync_directory(directory)",
        "pass",
        after="lambda out: torch.save(content, out),",
    ),
    _break("one-truth", "if path.exists():", "if False:"),
    _break("replaced-first", "if self._is_sound(entry, published)", "if True"),
    _break("verdict-before-change", "self._thread.join()", "pass"),
    _break("publish-last", "is_synced=True", "is_synced=False"),
    _break("publish-last", "os.fsync(directory)", "pass"),
    _break("own-host-judges", "if writer.is_foreign:", "if False:", after="def left_over("),
    _break("own-token", "if found.st_mode & _OF_OTHERS:", "if False:"),
    _break(
        "own-token",
        "if found.st_uid != os.geteuid():",
        "if False:",
        also="test_a_token_of_another_user_is_refused",
    ),
    _break("only-the-holder", "lambda: holder_of(folder) == pid", "lambda: True"),
    _break("lock-of-now", "self.acquire()", "pass"),
    _break("proved-before-sent", "if not self.is_proved:", "if False:"),
    _break("proved-frames", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
    _break(
        "last-words",
        "packet, descriptors = self._next_packet()",
        'raise ChannelClosedError("the other end is closed") from None',
    ),
    _break(
        "whole-lines",
        "self._torn = written < len(data)",
        "self._torn = False",
        after="self._torn = ends_torn(",
    ),
    _break(
        "whole-lines",
        "self._torn = ends_torn(self._path)",
        "self._torn = False",
        after="self._torn = ends_torn(",
    ),
    _break("no-step-twice", "if self.steps and step <= self.steps[-1]:", "if False:"),
    _break("report-is-text", 'for sign in "<>&\\u2028\\u2029":', 'for sign in "":'),
    _break(
        "events-first", "while self._held and self._held[0].utc <= record.utc:", "while self._held:"
    ),
    # core
    _break("one-course", "return facts.formed_in <= facts.generation", "return True"),
    _break(
        "one-course", "return term == facts.term and facts.number not in without", "return True"
    ),
    _break("spare-without-faults", "return fault_free and stepped", "return stepped"),
    _break(
        "workers-first", "return broke >= BREAKS_TO_SUSPECT or repair.workers == 0", "return False"
    ),
    _break(
        "drill-without-faults",
        "facts.fault_free and ",
        "",
        also="test_a_drill_begins_without_faults_and_alone",
    ),
    _break(
        "drill-without-faults",
        "not facts.fault_free or ",
        "",
        after="def must_end(facts: DrillFacts)",
    ),
    # several machines
    _break("superseded-orders-nobody", "if self._machines.has_successor:", "if False:"),
    _break("copies-have-a-term", "clear_slots(self._copies)", "pass"),
    _break("past-is-not-news", "self._leaving.add(handle.rank)", "pass"),
    _break("copies-of-this-course", "newest > step", "False"),
    _break(
        "newest-succeeds",
        "and kept.number not in owner.without",
        "",
        also="test_the_newest_memory_is_known_by_term_and_number",
    ),
    _break("one-vote", " and not is_older", ""),
    _break("promise-is-kept", "return ballot >= record.has_promised", "return True"),
    _break("one-script", "max(self._again_at_s, now_s + ends_s)", "self._again_at_s"),
    _break("script-known-by-all", "self._is_fault_free and ", ""),
    _break("majority-of-both", "(record.members, record.before)", "(record.members,)"),
    _break(
        "majority-forms",
        "return has_majority(newest(records),",
        "return True or has_majority(newest(records),",
    ),
    _break("end-is-known", "bool(over) and not any(", "bool(over) or any("),
    _break("noted-before-going-on", "return False", "return True"),
    _break("newest-is-saved", "return present if is_newer else here", "return here or present"),
    _break("superseded-writes-nothing", "self._files.status.is_anothers", "False"),
    _break("taken-over-is-repaired", "replaced = self._without_memory()", "return"),
    _break(
        "taken-over-is-repaired",
        "facts.took_over or facts.owes_proof",
        "facts.took_over",
        after="before, self._processes = self._processes, processes",
    ),
    _break("one-budget", "[before] * heir.restarts", "[]"),
    _break("memory-is-saved", "return True", "return False"),
    # what each rank has of its own
    _break("built-as-known", "known = tracing.used", "known = None"),
    _break("local-sealed-last", "self.clear()", "pass", after="os.strerror(errno.EFBIG))"),
    _break("outlives-its-machine", "if step is None or giver is None or giver == number:", "if 1:"),
    _break("order-is-named", "if now == pickled or", "if now is not None or"),
    _break("late-is-known", "is_late |= bool(is_known_late)", "pass"),
    _break("local-before-commit", "self._write(pickled, step, settled=False)", "pass"),
    _break("once-each-step", "self._give(found[0].read(found[1]), is_foreign=False)", "pass"),
    # drills
    _break("kept-to-go-back", "self.catalog.pointer(SPARED)", "None"),
    _break("witnessed-repairs", "rank not in (self._witnesses(number) or self.ranks)", "False"),
    _break("never-as-rank-0", "1 + drilled_rank(number, ranks - 1)", "drilled_rank(number, ranks)"),
    # what follows a drill that failed
    _break("seen-right", "step >= left.case.step", "True"),
    _break(
        "seen-right",
        "left.is_back = True",
        "left.is_back = True\n            self.passed(rank, step=left.case.step)",
        after="if not left.is_back and held > left.back_at:",
    ),
    _break("trusted-is-held", "one.trusted = min(one.trusted, step)", "pass"),
    _break("three-tries", "tries.count += 1", "pass", after="def asked(self, wish"),
    _break("a-reason-each", "differs_words(rank) in each", "differs_words() in each"),
    _break(
        "lacked-is-not-wrong",
        "finding=finding, host=host",
        "finding=finding, host=host, inexact_reason=found",
        after="def _has_other_update",
    ),
    _break(
        "lacked-is-not-wrong",
        "self._world.send(handle, NotKept(what=UNSEEN_STATE))",
        "pass",
    ),
    _break("no-device-for-samples", "and not of_samples", ""),
    _break("no-device-for-samples", "or of_samples", ""),
    _break("last-holder-stays", "if not goes_back and", "if False and"),
    _break("undone-first", "one not in may_be_withdrawn for", "True for"),
    _break("failed-behind-is-said", "for one in self._observers:", "for one in ():"),
    _break("replaced-are-compared", "(is_first and result.wanted.news)", "False"),
    _break("explained-once", "and not self._state.carried", ""),
    _break(
        "finding-outlives-a-rank",
        "if self._known_in is not group",
        "if False and self._known_in is not group",
    ),
    _break(
        "drilled-as-begun", "return None if is_sealed_whole else self.mine(step)", "return None"
    ),
    _break("no-blame-without-evidence", "if not (found.had_state and", "if not (True and"),
    _break("no-blame-without-evidence", "found.had_data and", "True and"),
    _break("no-blame-without-evidence", "found.agrees and case.are_alike", "case.are_alike"),
    _break("no-blame-without-evidence", "found.agrees and case.are_alike", "found.agrees"),
    _break("alike-when-received", "if not side.is_as_received:", "if True:"),
    _break("no-silent-drill", "self._report_part(step, STATE, STILL_WRITTEN)", "pass"),
    _break(
        "drilled-where-it-is", "first <= drilled < first + membership", "0 <= drilled < membership"
    ),
    _break("looked-beside", "except Exception as error:", "except KeyboardInterrupt as error:"),
    _break("tried-first", "had_state = side is not None and not other.missing", "had_state = True"),
    _break("tried-first", "agrees = not with_data or", "agrees = True or"),
)
