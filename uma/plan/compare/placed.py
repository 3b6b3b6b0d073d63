"""Where transformers and accelerate put a model on cards, in the host's memory and on its disk."""

from collections.abc import Sequence
from dataclasses import replace

from uma.frozen import dataclass
from uma.ledger import peak
from uma.plan.compare.subject import Subject, cached_bytes
from uma.plan.emit.device_map import Device, Module, Placement, modules_of, placement
from uma.plan.engine_case import EngineCase

SCHEMES = {"bf16": None, "int8": "int8", "nf4": "nf4"}  # of bitsandbytes, made while loading


@dataclass(frozen=True, slots=True)
class Placed:
    """What each place leaves to weights, and the weights that are put there.

    ``beside_bytes`` are what all cards hold besides: caches, activations, contexts.
    """

    rooms: dict[Device, int]
    placement: Placement
    beside_bytes: int
    largest_bytes: int

    def weights_on(self, *places: Device) -> int:
        return sum(self.placement.size_bytes.get(place, 0) for place in places)

    @property
    def cards_bytes(self) -> int:
        """Weights on all cards."""
        sizes = self.placement.size_bytes
        return sum(size for place, size in sizes.items() if isinstance(place, int))

    @property
    def least_short_bytes(self) -> int:
        """What the first card lacks to hold the largest module and what is copied to it."""
        return max(1, 2 * self.largest_bytes - self.rooms[0])


def placed(subject: Subject, case: EngineCase) -> Placed:
    """The placement of ``case``, by what the cards leave beside what each holds for itself.

    Every card has a context and, as layers run one after the other, activations of its own. A
    cache is where its layer runs, of layers on the host on the first card (accelerate 1.15,
    ``big_modeling.py``, ``dispatch_model``, ``main_device``).
    """
    memory = tuple(device.memory_bytes for device in case.machine.devices)
    rooms = (*memory, case.budget.budget_bytes, case.machine.host_room_bytes)
    return subject.once(("placed", case.format, rooms), lambda: _placed(subject, case))


def _placed(subject: Subject, case: EngineCase) -> Placed:
    alone = replace(case, settings=replace(case.settings, num_devices=1))
    terms = subject.once(("alone", case.format), lambda: alone.terms(alone.workload))
    cache = cached_bytes(terms)
    each = peak(terms)[1] - case.weights.size_bytes - cache
    memory = [device.memory_bytes for device in case.machine.devices]
    contexts = (len(memory) - 1) * case.settings.cuda_context_bytes  # off the budget already
    whole = case.budget.budget_bytes + contexts
    free = [whole * size // sum(memory) - each for size in memory]
    shares = [size / sum(memory) for size in memory]
    scheme, architecture = SCHEMES[case.format], subject.architecture
    modules = subject.once("modules", lambda: modules_of(architecture))
    rooms: dict[Device, int] = {}
    for _ in memory[:2]:  # of several cards again, with the caches of the layers that they got
        rooms = {i: max(0, free[i] - -int(-cache * share // 1)) for i, share in enumerate(shares)}
        rooms["cpu"] = case.machine.host_room_bytes
        found = placement(architecture, rooms, scheme, modules)
        shares = _cache_shares(found, len(architecture.layers), len(memory))
    return Placed(rooms, found, cache + each * len(memory) - contexts, largest_bytes(modules))


def largest_bytes(modules: Sequence[Module]) -> int:
    """The largest module in 16 bits, which the first card keeps room for where it copies any."""
    whole, head = modules
    parts = (*whole.children[1].children, whole.children[0], head)
    return max(part.size_bytes for part in parts)


def _cache_shares(found: Placement, layers: int, cards: int) -> list[float]:
    """The part of the layers that each card runs: its own, and the first those of the host."""
    counts = [0] * cards
    for index in range(layers):
        names = (f"model.layers.{index}", "model.layers", "model", "")
        device = next(found.device_map[name] for name in names if name in found.device_map)
        counts[device if isinstance(device, int) else 0] += 1
    return [count / layers for count in counts]
