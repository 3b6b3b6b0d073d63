"""Where accelerate puts the modules of a model: its ``device_map="auto"``, from shapes alone.

What is placed are whole decoder layers and the modules around them, first to last, on the first
card until it is full, on the next, in the host's memory, on disk. The first card and the host keep
room for the largest layer that is still to be placed, into which offloaded ones are copied
(accelerate 1.15, ``utils/modeling.py``, ``infer_auto_device_map``). A script that compares this
with accelerate itself is ``scripts/check_torch_device_map.py``.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from uma.architecture.layers import Architecture, Attention, Parameter
from uma.engines.transformers import weights_term
from uma.errors import UnsupportedModel
from uma.frozen import dataclass

Device = int | str

# model_type of transformers 5.24 whose causal language model is model.{embed_tokens, layers, norm,
# rotary_emb} and lm_head.
FAMILIES = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "phi3", "gemma"}
    | {"gemma2", "gemma3", "gemma3_text"}
)


@dataclass(frozen=True, slots=True)
class Module:
    """A module with its bytes, and the modules in it that it may be split into.

    ``host_bytes`` is what it takes in the host's memory or on disk where that is more: bitsandbytes
    converts on cards alone.
    """

    name: str
    size_bytes: int
    children: "tuple[Module, ...]" = ()
    host_bytes: int = 0

    def bytes_on(self, device: Device) -> int:
        return max(self.size_bytes, self.host_bytes) if isinstance(device, str) else self.size_bytes

    @property
    def most_bytes(self) -> int:
        return max(self.size_bytes, self.host_bytes)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each module is, and the bytes of weights in each place."""

    device_map: dict[str, Device]
    size_bytes: dict[Device, int]


def placement(
    architecture: Architecture,
    rooms: Mapping[Device, int],
    scheme: str | None = None,
    modules: Sequence[Module] = (),
) -> Placement:
    """The map of a model in 16 bits, or in bitsandbytes' ``int8`` or ``nf4`` on the cards.

    Modules that have no room on a card are not converted (transformers 5.24,
    ``quantizers/quantizer_bnb_8bit.py``, ``_process_model_before_weight_loading``). ``modules`` are
    those of the architecture, where they are at hand.
    """
    tied = architecture.tie_word_embeddings
    modules = modules or modules_of(architecture)
    if scheme is not None:
        converted = _converted(architecture, modules, scheme)
        found = auto_device_map(converted, rooms, tied_head=tied)
        if any(isinstance(device, str) for device in found.values()):
            modules = _with_host(converted, modules)
            found = auto_device_map(modules, rooms, tied_head=tied)
        else:
            modules = converted
    else:
        found = auto_device_map(modules, rooms, tied_head=tied)
    sizes: dict[Device, int] = {}
    for module in _parts(modules, found):
        device = found.get(module.name, found.get(""))
        assert device is not None
        sizes[device] = sizes.get(device, 0) + module.bytes_on(device)
    return Placement(found, sizes)


def _parts(modules: Sequence[Module], found: Mapping[str, Device]) -> Iterator[Module]:
    """The modules that the map names."""
    for module in modules:
        if module.name in found or "" in found:
            yield module
        else:
            yield from _parts(module.children, found)


def _converted(
    architecture: Architecture, modules: Sequence[Module], scheme: str
) -> tuple[Module, ...]:
    """The same with the matrices of layers in ``scheme``."""
    whole, head = modules
    layers = tuple(
        replace(module, size_bytes=_layer_bytes(architecture, index, scheme))
        for index, module in enumerate(whole.children[1].children)
    )
    size = sum(layer.size_bytes for layer in layers)
    inner = tuple(
        replace(one, size_bytes=size, children=layers) if one.name == "model.layers" else one
        for one in whole.children
    )
    return replace(whole, size_bytes=sum(one.size_bytes for one in inner), children=inner), head


def _layer_bytes(architecture: Architecture, index: int, scheme: str) -> int:
    alone = replace(architecture, layers=(architecture.layers[index],), parameters=())
    return weights_term(alone, scheme).size_bytes


def _with_host(converted: Sequence[Module], stored: Sequence[Module]) -> tuple[Module, ...]:
    return tuple(
        replace(one, host_bytes=other.size_bytes, children=_with_host(one.children, other.children))
        for one, other in zip(converted, stored, strict=True)
    )


def check_names(architecture: Architecture) -> None:
    """Refuse a model whose modules have other names in transformers.

    Raises:
        UnsupportedModel: If they are not those of a known family.
    """
    if architecture.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(
            f"the modules of {architecture.model_type} in transformers are not known; known: "
            f"{known}"
        )


def modules_of(architecture: Architecture, bytes_each: int = 2) -> tuple[Module, ...]:
    """The modules of transformers' causal language model with numbers of ``bytes_each`` bytes.

    Families that ``check_names`` refuses have modules of these sizes under other names.
    """
    layers = tuple(
        Module(f"model.layers.{index}", bytes_each * _elements(layer.parameters))
        for index, layer in enumerate(architecture.layers)
    )
    matrix = architecture.vocab_size * architecture.hidden_size
    rest = _elements(architecture.parameters) - matrix
    head = 0 if architecture.tie_word_embeddings else matrix
    inner = (
        Module("model.embed_tokens", bytes_each * matrix),
        Module("model.layers", sum(layer.size_bytes for layer in layers), layers),
        Module("model.norm", bytes_each * max(0, rest - head)),
        Module("model.rotary_emb", bytes_each * _rotary_elements(architecture)),
    )
    whole = Module("model", sum(module.size_bytes for module in inner), inner)
    return whole, Module("lm_head", bytes_each * head)


def _elements(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.size for parameter in parameters)


def _rotary_elements(architecture: Architecture) -> int:
    """Frequencies of each kind of attention, ``inv_freq`` and ``original_inv_freq``."""
    mixers = [m for layer in architecture.layers for m in layer.mixers if isinstance(m, Attention)]
    return sum({(m.head_dim, m.sliding_window is None): m.head_dim for m in mixers}.values())


def auto_device_map(
    modules: Sequence[Module], rooms: Mapping[Device, int], *, tied_head: bool = False
) -> dict[str, Device]:
    """The device of each module, modules that are together on one as one.

    ``rooms`` are bytes by device in the order in which they are filled: cards by number, then
    ``"cpu"``. What has room on none of them is on ``"disk"``. A tied head goes with the embeddings.
    """
    devices = [*rooms, "disk"]
    keep_room = {devices[0], "cpu"}
    queue, placed = deque(modules), dict[str, Device]()
    used = where = 0
    largest, names = _largest(queue)
    while queue:
        module = queue.popleft()
        names -= {leaf.name for leaf in _leaves(module)}
        if not names:
            largest, names = _largest(queue)
        device = devices[where]
        room = rooms.get(device)
        if room is not None and device in keep_room:
            room -= largest
        size = module.bytes_on(device)
        if room is None or used + size <= room:
            used += size
            placed[module.name] = device
            if tied_head and module.name == "model.embed_tokens":
                placed["lm_head"] = device
                queue = deque(m for m in queue if m.name != "lm_head")
        elif module.children:
            queue.extendleft(reversed(module.children))
            largest, names = _largest(queue)
        else:
            queue.appendleft(module)
            used, where = 0, where + 1
    return _joined(modules, placed)


def _largest(modules: Sequence[Module] | deque[Module]) -> tuple[int, set[str]]:
    """The size of the largest layers of those to be placed, and their names."""
    leaves = [leaf for module in modules for leaf in _leaves(module)]
    size = max((leaf.most_bytes for leaf in leaves), default=0)
    return size, {leaf.name for leaf in leaves if leaf.most_bytes == size}


def _leaves(module: Module) -> Iterator[Module]:
    if not module.children:
        yield module
    for child in module.children:
        yield from _leaves(child)


def _joined(modules: Sequence[Module], placed: Mapping[str, Device]) -> dict[str, Device]:
    """One entry for all that is on one device."""
    found: dict[str, Device] = {}
    for module in modules:
        if module.name in placed:
            found[module.name] = placed[module.name]
            continue
        inner = _joined(module.children, placed)
        alike = set(inner.values())
        found |= {module.name: alike.pop()} if len(alike) == 1 else inner
    everywhere = set(found.values())
    if any(module.name == "lm_head" for module in modules) and len(everywhere) == 1:
        return {"": everywhere.pop()}
    return found
