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

    ``made`` are the bytes of the outputs, ``temporary`` those of buffers that are free once it has
    run, and ``largest`` is one of either, but for the first output. That takes over one of the
    inputs ``donors``, if it has at most ``room`` bytes; the operation begins with a copy if it
    ``copies``. ``spanned`` are elements of the buffers behind inputs and the first output,
    ``elements`` those of all outputs.
    """

    shares: bool = False
    donors: Numbers = ()
    dispatches: int = 0
    copies: bool = False
    made: Numbers = ()
    temporary: int = 0
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
    made = tuple([buffer_bytes(x.spanned * x.itemsize, backend) for x in found.outputs])
    temporaries = [buffer_bytes(size, backend) for size in found.temporaries]
    return Kind(
        donors=tuple([i for i in found.donors if inputs[i].itemsize == head.itemsize]),
        dispatches=found.dispatches,
        copies=found.copies,
        made=made,
        temporary=sum(temporaries),
        largest=max([*made[1:], *temporaries], default=0),
        room=maxsize if found.exact else outputs[0].nbytes + DONATION_EXTRA,
        spanned=(*[x.spanned for x in inputs], head.spanned),
        elements=sum([x.spanned for x in found.outputs]) if found.dispatches else 0,
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
        for number, inputs, outputs in order:
            kind = kinds[number]
            if kind.shares and len(inputs) == len(outputs) == 1:
                self._view(inputs[0], outputs[0])
            else:
                self._add(number, kind, inputs, outputs)
        self.stops = self._stops([self.slots[i] for i in marks])

    def _stops(self, slots: Sequence[int]) -> Numbers:
        if not slots:
            return ()
        made = {step.made: count for count, step in enumerate(self.steps, 1)}
        gone = {i: count for count, step in enumerate(self.steps, 1) for i in step.freed}
        return (*[made[slot] for slot in slots], gone[slots[0]])

    def _view(self, source: int, made: int) -> None:
        slot = self.slots[made] = self.slots[source]
        self._uses[source] -= 1
        if self._uses[source]:  # else it takes the source's place
            self._sharers[slot] += 1
        self.views[-1] += 1

    def _add(self, number: int, kind: Kind, inputs: Numbers, outputs: Numbers) -> None:
        place = len(self.steps)
        before = [self.slots[i] for i in inputs]
        donors = self._donors(kind, inputs, before) if kind.donors else ()
        made = self._shared(before, outputs) if kind.shares else self._new(outputs)
        last = made[-1]
        used = {*before, *made[:-1]}
        if kind.shares:
            used.discard(last)
        for slot in used:
            self._held[slot] = place
        gone = self._gone(inputs, outputs)
        if kind.shares and not used:
            self.views[-1] += 1
            return
        reads = self._reads(before, made, place) if kind.dispatches else ()
        dropped: Numbers = ()
        if last in gone:
            gone.remove(last)
            dropped = (last,)
        first = -1 if kind.shares else last - len(outputs) + 1
        self.steps.append(Step(number, first, donors, reads, tuple(gone), dropped))
        self.views.append(0)

    def _donors(self, kind: Kind, inputs: Numbers, before: Sequence[int]) -> tuple[Donor, ...]:
        """Those that nothing else needs, nor a view of them."""
        found = []
        for at in kind.donors:
            slot = before[at]
            if self._sharers[slot] == 1 and self._uses[inputs[at]] == 1:
                found.append(Donor(slot, self._held[slot], self._touched[slot], at))
        return tuple(found)

    def _shared(self, before: Sequence[int], outputs: Numbers) -> Sequence[int]:
        made = [before[min(at, len(before) - 1)] for at in range(len(outputs))]
        for slot, i in zip(made, outputs, strict=True):
            self._sharers[slot] += 1
            self.slots[i] = slot
        return made

    def _new(self, outputs: Numbers) -> Sequence[int]:
        first = len(self._sharers)
        for slot, i in enumerate(outputs, first):
            self.slots[i] = slot
            self._sharers.append(1)
            self._held.append(-1)
            self._touched.append(-1)
        return range(first, first + len(outputs))

    def _gone(self, inputs: Numbers, outputs: Numbers) -> list[int]:
        """Slots of which no array is needed any more."""
        uses, dead, gone = self._uses, [], []
        for i in inputs:
            uses[i] -= 1
            if not uses[i]:
                dead.append(i)
        dead += [i for i in outputs if i not in uses]
        for i in dead:
            slot = self.slots[i]
            self._sharers[slot] -= 1
            if not self._sharers[slot]:
                gone.append(slot)
        return gone

    def _reads(
        self, before: Sequence[int], made: Sequence[int], place: int
    ) -> tuple[tuple[int, int], ...]:
        touched = self._touched
        last = dict(zip(before, range(len(before)), strict=True))
        found = tuple([(touched[slot], at) for slot, at in last.items()])
        for slot in (*before, *made):
            touched[slot] = place
        return found

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
        largest = finished = opened = 0
        tasks = _MetalTasks() if backend == "metal" else _CpuTasks(dispatched + self.views[0])
        ends: list[int] = []  # of each step the task that frees what it used, and how much
        frees: list[int] = []
        peaks, needed, stops = [], [], Counter(self.stops)
        for place, (number, made, donors, reads, freed, dropped) in enumerate(self.steps, 1):
            kind = kinds[number]
            dispatches, fresh, free = kind.dispatches, kind.elements, kind.temporary
            for touched, at in reads:
                if touched < opened:
                    fresh += kind.spanned[at]
            if made >= 0:
                slots[made : made + len(kind.made)] = kind.made
                live += sum(kind.made) + free
                largest = max(largest, kind.largest)
                for donor, held, touched, at in donors:
                    if held < finished and slots[donor] <= kind.room:
                        live -= slots[made]
                        slots[made], slots[donor] = slots[donor], 0
                        dispatches -= kind.copies
                        fresh -= kind.spanned[at if touched < opened else -1]
                        break
                else:
                    largest = max(largest, kind.made[0])
                peak = max(peak, live)
            for slot in freed:
                free += slots[slot]
            for slot in dropped:
                live -= slots[slot]
            task = tasks.add(dispatches, fresh, self.views[place])
            ends.append(task)
            frees.append(free)
            if task <= tasks.done:
                opened = place
            while finished < place and ends[finished] <= tasks.done - tasks_ahead:
                live -= frees[finished]
                finished += 1
            if place in stops:
                peaks.append(peak)
                needed += [live - sum(frees[finished:])] * stops[place]
                peak = live
        return Run((*peaks, peak), tuple(needed), sum(frees[finished:]), largest, slots)


class _CpuTasks:
    """``CommandEncoder::dispatch`` of the CPU: one task for every ten dispatches."""

    def __init__(self, dispatched: int) -> None:
        self.dispatches = dispatched
        self.done = 0  # tasks that are whole

    def add(self, dispatches: int, elements: int, views: int) -> int:
        """Count an operation's dispatches and the one that frees, which is the only one of views.

        The task that frees what the operation used.
        """
        last = self.dispatches + dispatches + 1
        self.dispatches = last + views
        self.done = self.dispatches // DISPATCHES_PER_TASK
        return -(-last // DISPATCHES_PER_TASK)


class _MetalTasks:
    """Command buffers of Metal, closed by operations or by elements of the arrays in them."""

    def __init__(self) -> None:
        self.done = self.operations = self.elements = 0

    def add(self, dispatches: int, elements: int, views: int) -> int:
        """Count an operation and its new elements; the number of its command buffer."""
        self.operations += dispatches
        self.elements += elements
        task = self.done + 1
        if self.operations > MAX_OPERATIONS or self.elements >> 20 > MAX_ELEMENTS >> 20:
            self.done, self.operations, self.elements = task, 0, 0
        return task
