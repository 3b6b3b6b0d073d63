"""Buffers over one evaluation: which are made, taken over and freed, and when.

Arrays that are views of each other share a slot. Which slots a step makes, may take over and leaves
behind follows from the order and from what each kind of operation does. Sizes, and what of them
fits in what, are looked at only when a ``Timeline`` is run: on the CPU and on Metal, where buffers
are freed when the task that used them has run (mlx 0.32.4, ``mlx/transforms.cpp``, ``eval_impl``).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from sys import maxsize
from typing import NamedTuple

from uma.memory.array_layout import Effect, Layout
from uma.memory.metal_activations import MAX_ELEMENTS, MAX_OPERATIONS
from uma.workload import Backend

DISPATCHES_PER_TASK = 10  # mlx/backend/cpu/encoder.h
DONATION_EXTRA = 16384  # mlx/backend/common/utils.h, is_donatable
METAL_PAGE = 16384  # mlx/backend/metal/allocator.cpp rounds larger buffers up to it

Numbers = tuple[int, ...]


class Kind(NamedTuple):
    """What an operation does to memory, in one case.

    ``first`` and ``others`` are the bytes of its outputs, ``temporary`` those of buffers that are
    free once it has run; together they are ``made``, and ``largest`` is one of them but the first
    output. That takes over one of the inputs ``donors``, if it has at most ``room`` bytes; the
    operation begins with a copy if it ``copies``. ``spanned`` are elements of the buffers behind
    inputs and the first output, ``elements`` those of all outputs.
    """

    shares: bool = False
    donors: Numbers = ()
    dispatches: int = 0
    copies: bool = False
    first: int = 0
    others: Numbers = ()
    temporary: int = 0
    made: int = 0
    largest: int = 0
    room: int = 0
    spanned: Numbers = ()
    elements: int = 0


VIEWS = Kind(shares=True)
"""That of an operation whose outputs are views: it does nothing."""


def kind_of(
    found: Effect, inputs: Sequence[Layout], outputs: Sequence[Layout], backend: Backend
) -> Kind:
    """``outputs`` are laid out row by row, which ``found`` may change."""
    if found.shares:
        return VIEWS
    head = found.outputs[0]
    first, *others = [buffer_bytes(x.spanned * x.itemsize, backend) for x in found.outputs]
    temporaries = [buffer_bytes(size, backend) for size in found.temporaries]
    temporary = sum(temporaries)
    return Kind(
        False,
        tuple([i for i in found.donors if inputs[i].itemsize == head.itemsize]),
        found.dispatches,
        found.copies,
        first,
        tuple(others),
        temporary,
        first + sum(others) + temporary,
        max([*others, *temporaries], default=0),
        maxsize if found.exact else outputs[0].nbytes + DONATION_EXTRA,
        (*[x.spanned for x in inputs], head.spanned),
        sum([x.spanned for x in found.outputs]) if found.dispatches else 0,
    )


def buffer_bytes(size: int, backend: Backend) -> int:
    """What a buffer takes."""
    if backend == "cpu" or size <= METAL_PAGE:
        return size
    return -(-size // METAL_PAGE) * METAL_PAGE


class Donor(NamedTuple):
    """A slot that may be taken over, the last steps that held and touched it, its input."""

    slot: int
    held: int
    touched: int
    place: int


class Step(NamedTuple):
    """One operation that does more than make views of one slot.

    ``made`` is the first slot of its outputs, or -1. ``reads`` are inputs behind which there are
    different slots, with the last step that touched each. ``freed`` slots are free when the step's
    task has run, ``dropped`` ones at once.
    """

    kind: int
    made: int
    donors: tuple[Donor, ...]
    reads: tuple[tuple[int, int], ...]
    freed: Numbers
    dropped: Numbers


class Run(NamedTuple):
    """The most bytes at once until each stop and after the last, and those needed at each stop.

    Then those not free yet at the end, the largest buffer made, all slots.
    """

    peaks: Numbers
    needed: Numbers
    pending: int
    largest: int
    slots: list[int]

    @property
    def peak(self) -> int:
        return max(self.peaks)


class Timeline:
    """The steps of an evaluation; the ``slots`` of arrays by number, and ``sources`` in use.

    ``views`` counts the operations before the first step and after each that only make views.
    ``stops`` are steps: those that make the arrays ``marks``, and that with the last use of the
    first of them.
    """

    def __init__(
        self,
        order: Sequence[tuple[int, Numbers, Numbers]],
        kinds: Sequence[Kind],
        sources: Iterable[int],
        kept: Iterable[int],
        marks: Sequence[int] = (),
    ) -> None:
        """``order`` are kinds, inputs and outputs; arrays ``kept`` are needed at the end."""
        self._uses = Counter(chain(kept, *[inputs for _, inputs, _ in order]))
        self.sources = [i for i in sources if i in self._uses]
        self.slots = {i: slot for slot, i in enumerate(self.sources)}
        self._sharers = [1] * len(self.sources)
        self._held, self._touched = ([-1] * len(self.sources) for _ in range(2))
        self.steps: list[Step] = []
        self.views = [0]
        slots, uses, views = self.slots, self._uses, self.views
        for number, inputs, outputs in order:
            kind = kinds[number]
            if not kind.shares:
                self._make(number, kind, inputs, outputs)
            elif len(inputs) == len(outputs) == 1:
                (source,), (made,) = inputs, outputs
                slot = slots[made] = slots[source]
                uses[source] -= 1
                if uses[source]:  # else it takes the source's place
                    self._sharers[slot] += 1
                views[-1] += 1
            else:
                self._share(number, inputs, outputs)
        self.stops = self._stops([self.slots[i] for i in marks])

    def _stops(self, slots: Sequence[int]) -> Numbers:
        if not slots:
            return ()
        made = {step.made: count for count, step in enumerate(self.steps, 1)}
        gone = {i: count for count, step in enumerate(self.steps, 1) for i in step.freed}
        return (*[made[slot] for slot in slots], gone[slots[0]])

    def _share(self, number: int, inputs: Numbers, outputs: Numbers) -> None:
        """Outputs that are views of inputs, those beyond the last one of that."""
        before = [self.slots[i] for i in inputs]
        made = [before[min(at, len(before) - 1)] for at in range(len(outputs))]
        for slot, i in zip(made, outputs, strict=True):
            self._sharers[slot] += 1
            self.slots[i] = slot
        used = {*before, *made} - {made[-1]}
        for slot in used:
            self._held[slot] = len(self.steps)
        gone = self._gone(inputs, outputs)
        if used:
            self._step(number, -1, (), (), gone, made[-1])
        else:
            self.views[-1] += 1

    def _make(self, number: int, kind: Kind, inputs: Numbers, outputs: Numbers) -> None:
        """Outputs in slots of their own."""
        place, first, slots = len(self.steps), len(self._sharers), self.slots
        held, touched = self._held, self._touched
        before = [slots[i] for i in inputs]
        donors = self._donors(kind, inputs, before) if kind.donors else ()
        for last, i in enumerate(outputs, first):
            slots[i] = last
            self._sharers.append(1)
            held.append(place)
            touched.append(place if kind.dispatches else -1)
        held[-1] = -1
        reads = {slot: (touched[slot], at) for at, slot in enumerate(before)}
        for slot in reads:
            held[slot] = place
            if kind.dispatches:
                touched[slot] = place
        read = tuple(reads.values()) if kind.dispatches else ()
        self._step(number, first, donors, read, self._gone(inputs, outputs), last)

    def _donors(self, kind: Kind, inputs: Numbers, before: Sequence[int]) -> tuple[Donor, ...]:
        """Those that nothing else needs, nor a view of them."""
        found = []
        for at in kind.donors:
            slot = before[at]
            if self._sharers[slot] == 1 and self._uses[inputs[at]] == 1:
                found.append(Donor(slot, self._held[slot], self._touched[slot], at))
        return tuple(found)

    def _gone(self, inputs: Numbers, outputs: Numbers) -> list[int]:
        """Slots of which no array is needed any more."""
        uses, dead = self._uses, []
        for i in inputs:
            uses[i] -= 1
            if not uses[i]:
                dead.append(i)
        dead += [i for i in outputs if i not in uses]
        gone = []
        for i in dead:
            slot = self.slots[i]
            self._sharers[slot] -= 1
            if not self._sharers[slot]:
                gone.append(slot)
        return gone

    def _step(
        self,
        number: int,
        made: int,
        donors: tuple[Donor, ...],
        reads: tuple[tuple[int, int], ...],
        gone: list[int],
        last: int,
    ) -> None:
        dropped: Numbers = ()
        if last in gone:
            gone.remove(last)
            dropped = (last,)
        self.steps.append(Step(number, made, donors, reads, tuple(gone), dropped))
        self.views.append(0)

    def run(
        self,
        kinds: Sequence[Kind],
        sources: Iterable[int],
        backend: Backend,
        tasks_ahead: int = 0,
        dispatched: int = 0,
    ) -> Run:
        """The same with sizes: bytes of ``sources``, and ``kinds`` that differ in sizes only.

        ``tasks_ahead`` is the number of tasks that may be waiting on the device, ``dispatched``
        what the CPU's encoder has counted of its first task already.
        """
        slots = [*sources, *[0] * (len(self._sharers) - len(self.sources))]
        live = peak = sum(slots)
        metal = backend == "metal"
        operations = 0 if metal else dispatched + self.views[0]
        largest = elements = finished = opened = done = 0  # of tasks those that are whole
        ends: list[int] = []  # of each step the task that frees what it used, and how much
        frees: list[int] = []
        peaks, needed, stops = [], [], Counter(self.stops)
        for place, (number, made, donors, reads, freed, dropped) in enumerate(self.steps, 1):
            kind = kinds[number]
            _, _, dispatches, copies, first, others, free, new, most, room, spanned, fresh = kind
            for touched, at in reads:
                if touched < opened:
                    fresh += spanned[at]
            if made >= 0:
                slots[made] = first
                if others:
                    slots[made + 1 : made + 1 + len(others)] = others
                live += new
                for donor, held, touched, at in donors:
                    if held < finished and slots[donor] <= room:
                        live -= first
                        slots[made], slots[donor] = slots[donor], 0
                        dispatches -= copies
                        fresh -= spanned[at if touched < opened else -1]
                        break
                else:
                    if first > most:
                        most = first
                if live > peak:
                    peak = live
                if most > largest:
                    largest = most
            for slot in freed:
                free += slots[slot]
            for slot in dropped:
                live -= slots[slot]
            frees.append(free)
            operations += dispatches
            if metal:
                elements += fresh
                task = done + 1
                if operations > MAX_OPERATIONS or elements >> 20 > MAX_ELEMENTS >> 20:
                    done, operations, elements = task, 0, 0
            else:  # the dispatch that frees is the only one of views
                task = operations // DISPATCHES_PER_TASK + 1
                operations += 1 + self.views[place]
                done = operations // DISPATCHES_PER_TASK
            ends.append(task)
            if task <= done:
                opened = place
            while finished < place and ends[finished] <= done - tasks_ahead:
                live -= frees[finished]
                finished += 1
            if place in stops:
                peaks.append(peak)
                needed += [live - sum(frees[finished:])] * stops[place]
                peak = live
        return Run((*peaks, peak), tuple(needed), sum(frees[finished:]), largest, slots)
