"""What to change so that a training fits: the cheapest changes in time, none without need."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from uma.frozen import dataclass
from uma.plan.training.case import Needs, TrainingCase
from uma.plan.training.checks import torch_reasons
from uma.plan.training.places import on_host, places
from uma.units import format_gib
from uma.workload import Sharding, TrainingWorkload, bits_word

FEWEST_LAYERS = 4
SHORTEST_ROW = 128

Apply = Callable[[TrainingCase], TrainingCase]
Find = Callable[[TrainingCase, Needs], Apply | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """Something to do differently: what it saves after those before it, and its cost in time.

    ``fits`` says whether the case fits with it and those before it, on the device and the host.
    """

    name: str
    options: tuple[str, ...]
    saves_bytes: int
    cost: str
    workload: TrainingWorkload
    fits: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """``find`` gives the change that suits a case; the others describe the case before and after.

    ``options`` reads the case after the change, ``cost`` the cases before and after.
    """

    name: str
    find: Find
    options: Callable[[TrainingCase], tuple[str, ...]]
    cost: Callable[[TrainingCase, TrainingCase, Needs], str]


def measures(case: TrainingCase, needs: Needs) -> tuple[Measure, ...]:
    """What to change, the cheapest in time first; all that can be where even that does not do.

    Changes are added in the order of their cost until the case fits; then those are left out again,
    the costliest first, without which it fits too.
    """
    chosen: list[tuple[_Kind, Apply]] = []
    now = case
    for kind in _KINDS:
        if _fits(now, needs):
            chosen = _without_needless(case, chosen, needs)
            break
        apply = kind.find(now, needs)
        then = now if apply is None else apply(now)
        if apply is not None and _is_possible(then) and _helps(now, then, needs):
            chosen.append((kind, apply))
            now = then
    return tuple(_described(case, chosen, needs))


def _fits(case: TrainingCase, needs: Needs) -> bool:
    return needs(case) <= case.budget_bytes and not on_host(case).excess_bytes


def _is_possible(case: TrainingCase) -> bool:
    return case.engine == "mlx" or not any(torch_reasons(case))


def _helps(before: TrainingCase, after: TrainingCase, needs: Needs) -> bool:
    """Whether it saves where there is too little: on the device, or on the host."""
    crowded, then = on_host(before).excess_bytes, on_host(after).excess_bytes
    if crowded:
        return then < crowded and (needs(after) <= max(needs(before), after.budget_bytes))
    return not then and needs(after) < needs(before)


def _without_needless(
    case: TrainingCase, chosen: list[tuple[_Kind, Apply]], needs: Needs
) -> list[tuple[_Kind, Apply]]:
    for one in reversed(chosen[:-1]):  # the last one was needed
        rest = [other for other in chosen if other is not one]
        left = case
        for _, apply in rest:
            left = apply(left)
        if _is_possible(left) and _fits(left, needs):
            chosen = rest
    return chosen


def _described(
    case: TrainingCase, chosen: Sequence[tuple[_Kind, Apply]], needs: Needs
) -> Iterator[Measure]:
    """Each change after those before it that are left."""
    for kind, apply in chosen:
        after = apply(case)
        saved = needs(case) - needs(after)
        cost, fits = kind.cost(case, after, needs), _fits(after, needs)
        yield Measure(kind.name, kind.options(after), saved, cost, after.workload, fits)
        case = after


def _set(**changes: object) -> Apply:
    return lambda case: case.changed(**changes)


def _spread(**changes: Any) -> Apply:
    """Other values of how it is spread."""
    return lambda case: case.changed(sharding=replace(case.workload.sharding, **changes))


def _own_trainer(case: TrainingCase, needs: Needs) -> Apply | None:
    alone = case.workload.sharding.devices == 1
    if case.engine == "torch" or case.trainer == "uma" or not alone:
        return None
    return lambda case: replace(case, trainer="uma")


def _sliced(case: TrainingCase, needs: Needs) -> Apply | None:
    if case.engine == "mlx" or case.workload.loss == "sliced":
        return None
    return _set(loss="sliced")


def _eight_bit(case: TrainingCase, needs: Needs) -> Apply | None:
    if case.engine == "mlx" or case.workload.optimizer not in ("adam", "adamw"):
        return None
    return _set(optimizer="adamw-8bit")


def _checkpointed(case: TrainingCase, needs: Needs) -> Apply | None:
    if case.workload.grad_checkpoint:
        return None
    every = [1] if case.engine == "mlx" else [1, near_root(len(case.architecture.layers))]
    best = min(every, key=lambda k: needs(case.changed(grad_checkpoint=k)))
    return _set(grad_checkpoint=best)


def near_root(layers: int) -> int:
    """The divisor of ``layers`` nearest to their square root.

    >>> near_root(32), near_root(80), near_root(61)
    (4, 8, 1)
    """
    divisors = [k for k in range(1, layers + 1) if layers % k == 0]
    return min(divisors, key=lambda k: abs(k * k - layers))


def _checkpointing_cost(before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
    """Chen et al. 2016 (arXiv:1604.06174): one more forward pass, whatever is saved."""
    layers = len(before.architecture.layers)
    trained = (before.workload.num_layers or layers) / layers
    backward = trained * (2 if before.workload.method == "full" else 1)
    cost = f"each trained layer runs forward twice: {trained / (1 + backward):.0%} more products"
    root = near_root(layers)
    if before.engine == "mlx" or root == 1:
        return cost
    other = 1 if after.workload.grad_checkpoint > 1 else root
    instead = needs(before.changed(grad_checkpoint=other))
    if instead in (needs(after), needs(before)):
        return cost
    word = "every layer" if other == 1 else f"every {other} layers, about the root of {layers},"
    saved = format_gib(max(0, needs(before) - instead))
    return f"{cost}; {word} would save {saved} in the same time"


def _four_bits(case: TrainingCase, needs: Needs) -> Apply | None:
    if case.workload.quantized or case.workload.method == "full":
        return None
    if case.workload.sharding.tensor > 1 or case.stack.precision == "mixed":
        return None
    if case.engine == "torch":
        return _set(quantized="nf4")
    if case.smaller is None or case.workload.sharding.zero_stage:
        return None
    return lambda case: replace(
        case, weights=case.smaller, workload=replace(case.workload, quantized=bits_word(4))
    )


def _smaller_batch(case: TrainingCase, needs: Needs) -> Apply | None:
    """Accumulated to the batch that was asked for."""
    asked, steps = case.workload.batch_size, case.workload.grad_accumulation_steps
    least = case.workload.sharding.data if case.engine == "mlx" else 1
    return _first_that_fits(
        case,
        needs,
        [
            _set(batch_size=asked >> n, grad_accumulation_steps=steps << n)
            for n in range(1, asked.bit_length())
            if asked % (1 << n) == 0 and asked >> n >= least
        ],
    )


def _fewer_layers(case: TrainingCase, needs: Needs) -> Apply | None:
    if case.engine == "torch" and case.workload.method == "full":
        return None
    asked = case.workload.num_layers or len(case.architecture.layers)
    counts = [asked >> n for n in range(1, asked.bit_length()) if asked >> n >= FEWEST_LAYERS]
    return _first_that_fits(case, needs, [_set(num_layers=count) for count in counts])


def _shorter_rows(case: TrainingCase, needs: Needs) -> Apply | None:
    asked = case.workload.max_seq_length
    lengths = [asked >> n for n in range(1, asked.bit_length()) if asked >> n >= SHORTEST_ROW]
    return _first_that_fits(case, needs, [_set(max_seq_length=length) for length in lengths])


def _first_that_fits(case: TrainingCase, needs: Needs, changes: list[Apply]) -> Apply | None:
    """Of changes that need less and less the first that fits; the last where none does."""
    if not changes:
        return None
    low, high = 0, len(changes) - 1
    while low < high:
        middle = (low + high) // 2
        if needs(changes[middle](case)) <= case.budget_bytes:
            high = middle
        else:
            low = middle + 1
    return changes[low]


def _sharded(case: TrainingCase, needs: Needs) -> Apply | None:
    """Over the cards of the machine, where they are not all used."""
    if case.engine == "mlx" or case.machine_devices < 2 or case.workload.sharding.devices > 1:
        return None
    if case.stack.name == "unsloth":  # trains on one device
        return None
    spread = Sharding(data=case.machine_devices, zero_stage=3, fsdp=True)
    return _set(sharding=spread)


def _sent(before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
    sent = sum(places(after).sent_bytes.values())
    return f"each device sends {format_gib(sent)} for an update"


def _offloaded_optimizer(case: TrainingCase, needs: Needs) -> Apply | None:
    spread = case.workload.sharding
    if not _may_offload(case) or spread.offload_optimizer or spread.fsdp:
        return None
    stage = spread.zero_stage or 2
    return _spread(offload_optimizer="host", zero_stage=stage)


def _offloaded_parameters(case: TrainingCase, needs: Needs) -> Apply | None:
    spread = case.workload.sharding
    if not _may_offload(case) or spread.offload_parameters:
        return None
    return _spread(offload_optimizer="host", offload_parameters="host", zero_stage=3)


def _on_disk(case: TrainingCase, needs: Needs) -> Apply | None:
    """DeepSpeed's ZeRO-Infinity: what the host has no room for."""
    spread = case.workload.sharding
    if spread.zero_stage < 3 or spread.fsdp or spread.offload_optimizer != "host":
        return None
    return _spread(offload_optimizer="disk")


def _may_offload(case: TrainingCase) -> bool:
    """Only Trainer is known to go with DeepSpeed; paged states are on the host by themselves."""
    if case.engine == "mlx" or not case.stack.is_of_transformers:
        return False
    paged = case.workload.optimizer.startswith("paged")
    return case.machine.host_memory_bytes is not None and not paged


def _over_the_link(before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
    moved, link = places(after).sent_bytes.get("host", 0), before.machine.link_bytes_per_s
    cost = f"{format_gib(moved)} over the link for an update"
    if link:
        cost += f", {moved / link:.1f} s at {link / 1e9:.0f} GB/s"
    return f"{cost}; Adam on the host"


def _to_disk(before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
    moved = places(after).sent_bytes.get("disk", 0)
    saved = on_host(before).held_bytes - on_host(after).held_bytes
    less = f"{format_gib(saved)} less on the host"
    return f"{format_gib(moved)} to and from the disk for an update; {less}"


def _offload_words(case: TrainingCase) -> tuple[str, ...]:
    spread = case.workload.sharding
    sharded = () if spread.fsdp else ("--zero-stage", str(spread.zero_stage))
    parameters = ("--offload-parameters", "host") if spread.offload_parameters else ()
    return (*sharded, "--offload-optimizer", "host", *parameters)


def _says(text: str) -> Callable[[TrainingCase, TrainingCase, Needs], str]:
    return lambda before, after, needs: text


# QLoRA's slower products are those of the fms-acceleration rows: a quarter to a third fewer
# tokens/s than LoRA on the same card.
_KINDS = (
    _Kind(
        "our own trainer (uma lora train)",
        _own_trainer,
        lambda c: ("--trainer", "uma"),
        _says("0.75 to 0.85 of mlx_lm's step, measured on a CPU; not on a Mac"),
    ),
    _Kind(
        "loss in slices", _sliced, lambda c: ("--loss", "sliced"), _says("none to 5 % of a step")
    ),
    _Kind(
        "8-bit optimizer",
        _eight_bit,
        lambda c: ("--optimizer", "adamw-8bit"),
        _says("none to speak of"),
    ),
    _Kind(
        "a smaller batch, with accumulation",
        _smaller_batch,
        lambda c: (
            "--batch-size",
            str(c.workload.batch_size),
            "--grad-accumulation-steps",
            str(c.workload.grad_accumulation_steps),
        ),
        _says("little: the same tokens in more steps"),
    ),
    _Kind(
        "sharding",
        _sharded,
        lambda c: ("--devices", str(c.workload.sharding.data), "--fsdp", "full"),
        _sent,
    ),
    _Kind(
        "checkpointing",
        _checkpointed,
        lambda c: (
            ("--grad-checkpoint",)
            if c.workload.grad_checkpoint == 1
            else ("--grad-checkpoint", "--checkpoint-every", str(c.workload.grad_checkpoint))
        ),
        _checkpointing_cost,
    ),
    _Kind(
        "a base in 4 bits",
        _four_bits,
        lambda c: ("--quant", "nf4") if c.engine == "torch" else ("--bits", "4"),
        lambda before, after, needs: (
            "33 to 50 %" if before.engine == "torch" else "not known; products dequantize"
        ),
    ),
    _Kind(
        "fewer layers",
        _fewer_layers,
        lambda c: ("--num-layers", str(c.workload.num_layers)),
        _says("saves time; adapts less"),
    ),
    _Kind("optimizer on the host", _offloaded_optimizer, _offload_words, _over_the_link),
    _Kind("parameters on the host", _offloaded_parameters, _offload_words, _over_the_link),
    _Kind("optimizer on the disk", _on_disk, lambda c: ("--offload-optimizer", "disk"), _to_disk),
    _Kind(
        "shorter rows",
        _shorter_rows,
        lambda c: ("--max-seq-length", str(c.workload.max_seq_length)),
        _says("saves time; cuts the text"),
    ),
)
