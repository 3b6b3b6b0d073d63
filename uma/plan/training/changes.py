"""What can be changed so that a training needs less, by what it costs in time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from uma.frozen import dataclass
from uma.memory.weights import weight_bytes
from uma.plan.training.case import TrainingCase
from uma.plan.training.places import on_host, places
from uma.plan.training.verdict import Needs
from uma.quantization import quantization_for
from uma.units import format_gib
from uma.workload import Sharding, bits_word

FEWEST_LAYERS = 4
SHORTEST_ROW = 128

Apply = Callable[[TrainingCase], TrainingCase]
Cost = Callable[[TrainingCase, TrainingCase, Needs], str]


@dataclass(frozen=True, slots=True)
class Change:
    """``apply`` makes it, ``options`` ask for it; ``cost`` in time may be of before and after."""

    name: str
    options: tuple[str, ...]
    apply: Apply
    cost: str | Cost

    def cost_of(self, before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
        return self.cost if isinstance(self.cost, str) else self.cost(before, after, needs)


Find = Callable[[TrainingCase, Needs], Change | None]


def _set(**changes: Any) -> Apply:
    return lambda case: case.changed(**changes)


def _first_that_fits(case: TrainingCase, needs: Needs, changes: Sequence[Change]) -> Change | None:
    """Of changes that need less and less the first that fits; the last where none does."""
    if not changes:
        return None
    low, high = 0, len(changes) - 1
    while low < high:
        middle = (low + high) // 2
        if needs.fits(changes[middle].apply(case)):
            high = middle
        else:
            low = middle + 1
    return changes[low]


def _own_trainer(case: TrainingCase, needs: Needs) -> Change | None:
    """Times of ``scripts/bench_lora.py``: dense 0.36, experts 0.64, sliding 0.78, Mamba-2 0.87."""
    if case.engine == "torch" or case.trainer == "uma" or case.workload.sharding.devices > 1:
        return None
    return Change(
        "our own trainer (uma lora train)",
        ("--trainer", "uma"),
        lambda case: replace(case, trainer="uma"),
        "0.4 to 0.9 of mlx_lm's step with its checkpointing, on a CPU; not measured on a Mac",
    )


def _sliced(case: TrainingCase, needs: Needs) -> Change | None:
    if case.engine == "mlx" or case.workload.loss == "sliced":
        return None
    options = ("--loss", "sliced")
    return Change("loss in slices", options, _set(loss="sliced"), "none to 5 % of a step")


def _eight_bit(case: TrainingCase, needs: Needs) -> Change | None:
    """That of bitsandbytes."""
    known = {"adam": "adamw-8bit", "adamw": "adamw-8bit", "paged-adamw": "paged-adamw-8bit"}
    name = known.get(case.workload.optimizer)
    if case.engine == "mlx" or name is None:
        return None
    options = ("--optimizer", name)
    return Change("8-bit optimizer", options, _set(optimizer=name), "none to speak of")


def _smaller_batch(case: TrainingCase, needs: Needs) -> Change | None:
    """Accumulated to the batch that was asked for."""
    asked, steps = case.workload.batch_size, case.workload.grad_accumulation_steps
    least = case.workload.sharding.data if case.engine == "mlx" else 1
    halvings = [
        n for n in range(1, asked.bit_length()) if asked % (1 << n) == 0 and asked >> n >= least
    ]

    def accumulated(rows: int, batches: int) -> Change:
        options = ("--batch-size", str(rows), "--grad-accumulation-steps", str(batches))
        apply = _set(batch_size=rows, grad_accumulation_steps=batches)
        cost = "little: the same tokens in more steps"
        return Change("a smaller batch, with accumulation", options, apply, cost)

    changes = [accumulated(asked >> n, steps << n) for n in halvings]
    return _first_that_fits(case, needs, changes)


def _sharded(case: TrainingCase, needs: Needs) -> Change | None:
    """Over all cards of the machine; weights too, unless less does."""
    spread = case.workload.sharding
    count = max(case.machine_devices, spread.data)
    if case.engine == "mlx" or count < 2 or spread.devices > spread.data:
        return None
    kept = replace(spread, data=count)
    whole = replace(kept, zero_stage=3, fsdp=spread.fsdp or not spread.zero_stage)
    changes = [_sharding(one) for one in (kept, whole) if one.zero_stage and one != spread]
    return _first_that_fits(case, needs, changes)


def _sharded_by_deepspeed(case: TrainingCase, needs: Needs) -> Change | None:
    """Where FSDP is not possible: it goes with bitsandbytes' optimizers."""
    spread = case.workload.sharding
    if case.engine == "mlx" or spread.zero_stage or spread.devices > spread.data:
        return None
    count = max(case.machine_devices, spread.data)
    return _sharding(replace(spread, data=count, zero_stage=3)) if count > 1 else None


def _sharding(spread: Sharding) -> Change:
    return Change("sharding", spread_words(spread), _set(sharding=spread), _sent)


def spread_words(spread: Sharding) -> tuple[str, ...]:
    """All that a change may have set; hybrid sharding is the user's own."""
    devices = ("--devices", str(spread.data)) if spread.data > 1 else ()
    if spread.fsdp:
        return devices if spread.shard_group else (*devices, "--fsdp", "full")
    return (*devices, "--zero-stage", str(spread.zero_stage))


def _sent(before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
    sent = sum(places(after).sent_bytes.values())
    return f"each device sends {format_gib(sent)} for an update"


def _checkpointed(case: TrainingCase, needs: Needs) -> Change | None:
    if case.workload.grad_checkpoint or case.trainer == "uma":  # which does so by itself
        return None
    every = [1] if case.engine == "mlx" else [1, near_root(len(case.architecture.layers))]
    best = min(every, key=lambda k: needs(case.changed(grad_checkpoint=k)))
    options = ("--grad-checkpoint",) + (("--checkpoint-every", str(best)) if best > 1 else ())
    return Change("checkpointing", options, _set(grad_checkpoint=best), _checkpointing_cost)


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


def _four_bits(case: TrainingCase, needs: Needs) -> Change | None:
    """Of a base in more; under torch with scales that are quantized too where that is needed.

    QLoRA's slower products are those of the fms-acceleration rows: a quarter to a third fewer
    tokens/s than LoRA on the same card.
    """
    if case.workload.method == "full":
        return None
    name, held = "a base in 4 bits", case.workload.quantized
    if case.engine == "mlx":
        if case.mlx_bits <= 4:
            return None
        cost = "not known; products dequantize"
        return Change(name, ("--bits", "4"), _in_four_bits, cost)
    forms = ("nf4", "nf4-double")
    left = forms[forms.index(held) + 1 :] if held in forms else forms
    cost = "not known; products dequantize" if held else "33 to 50 %"
    if held == "nf4":
        name = "scales quantized too"
    changes = [Change(name, ("--quant", form), _set(quantized=form), cost) for form in left]
    return next((one for one in changes if needs.fits(one.apply(case))), (*changes, None)[0])


def _in_four_bits(case: TrainingCase) -> TrainingCase:
    weights = weight_bytes(case.architecture, quantization_for(4))
    return replace(case.changed(quantized=bits_word(4)), weights=weights)


def _fewer_layers(case: TrainingCase, needs: Needs) -> Change | None:
    if case.engine == "torch" and case.workload.method == "full":
        return None
    cost = "saves time; adapts less"
    asked = case.workload.num_layers or len(case.architecture.layers)
    changes = [
        Change("fewer layers", ("--num-layers", str(count)), _set(num_layers=count), cost)
        for count in _halved(asked, FEWEST_LAYERS)
    ]
    return _first_that_fits(case, needs, changes)


def _shorter_rows(case: TrainingCase, needs: Needs) -> Change | None:
    asked, cost = case.workload.max_seq_length, "saves time; cuts the text"
    changes = [
        Change("shorter rows", ("--max-seq-length", str(n)), _set(max_seq_length=n), cost)
        for n in _halved(asked, SHORTEST_ROW)
    ]
    return _first_that_fits(case, needs, changes)


def _halved(asked: int, least: int) -> list[int]:
    """Half of what is asked, half of that, and so on down to ``least``.

    >>> _halved(28, 4)
    [14, 7]
    """
    return [asked >> n for n in range(1, asked.bit_length()) if asked >> n >= least]


def _offloaded(case: TrainingCase, needs: Needs) -> Change | None:
    """State to the host, or to its disk."""
    return _moved(case, needs, map(_offloading, _offloads(case.workload.sharding)))


def offloaded_otherwise(case: TrainingCase, needs: Needs) -> Change | None:
    """By the other of FSDP and DeepSpeed, which hold different things beside the shards.

    FSDP moves layer after layer of one device too, whole (torch 2.13, ``fsdp/_init_utils.py``:
    ``NO_SHARD``).
    """
    spread = case.workload.sharding
    if spread.devices > spread.data:
        return None
    whole = Sharding(spread.data, zero_stage=3, fsdp=not spread.fsdp)
    sharded = [_sharding(whole)] if spread.data > 1 else []
    return _moved(case, needs, [*sharded, *map(_offloading, _offloads(whole))])


def _moved(case: TrainingCase, needs: Needs, changes: Iterable[Change]) -> Change | None:
    """The first that fits, or the last that the host holds.

    Only Trainer is known to go with DeepSpeed; paged states are on the host by themselves.
    """
    if case.engine == "mlx" or not case.stack.is_of_transformers:
        return None
    if case.machine.host_memory_bytes is None or case.workload.optimizer.startswith("paged"):
        return None
    last = None
    for change in changes:
        after = change.apply(case)
        if needs.fits(after):
            return change
        if not on_host(after).excess_bytes:
            last = change
    return last


def _offloads(spread: Sharding) -> Iterator[Sharding]:
    """From those that move least. FSDP offloads all, and to the host alone."""
    found = [replace(spread, offload_optimizer="host", zero_stage=spread.zero_stage or 2)]
    three = replace(spread, zero_stage=3)
    found.append(replace(three, offload_optimizer="host", offload_parameters="host"))
    found.append(replace(three, offload_optimizer="disk"))
    found.append(replace(three, offload_optimizer="disk", offload_parameters="host"))
    found.append(replace(three, offload_optimizer="disk", offload_parameters="disk"))
    if spread.fsdp:
        found = found[1:2]
    yield from (one for one in found if one != spread)


def _offloading(spread: Sharding) -> Change:
    return Change(_offload_name(spread), _offload_words(spread), _set(sharding=spread), _moving)


def _offload_name(spread: Sharding) -> str:
    places = {spread.offload_optimizer: ["optimizer"]}
    if spread.offload_parameters:
        places.setdefault(spread.offload_parameters, []).append("parameters")
    return ", ".join(f"{' and '.join(what)} on the {place}" for place, what in places.items())


def _offload_words(spread: Sharding) -> tuple[str, ...]:
    parameters = spread.offload_parameters
    moved = ("--offload-parameters", parameters) if parameters else ()
    return (*spread_words(spread), "--offload-optimizer", spread.offload_optimizer, *moved)


def _moving(before: TrainingCase, after: TrainingCase, needs: Needs) -> str:
    """What crosses the link and goes to the disk for an update."""
    sent, link = places(after).sent_bytes, before.machine.link_bytes_per_s
    moved = sent.get("host", 0)
    cost = f"{format_gib(moved)} over the link for an update"
    if link:
        cost += f", {moved / link:.1f} s at {link / 1e9:.0f} GB/s"
    if "disk" in sent:
        cost += f"; {format_gib(sent['disk'])} to and from the disk"
    return f"{cost}; {after.workload.optimizer} on the host"


def with_plain_adamw(change: Change) -> Change:
    """As bitsandbytes' optimizers go neither with FSDP nor to the host."""
    return Change(
        f"{change.name}, with plain AdamW",
        ("--optimizer", "adamw", *change.options),
        lambda case: change.apply(case.changed(optimizer="adamw")),
        change.cost,
    )


KINDS: tuple[Find, ...] = (
    _own_trainer,
    _sliced,
    _eight_bit,
    _smaller_batch,
    _sharded,
    _sharded_by_deepspeed,
    _checkpointed,
    _four_bits,
    _fewer_layers,
    _offloaded,
    _shorter_rows,
)
"""Kinds of change, the cheapest in time first."""
