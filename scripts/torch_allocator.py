#!/usr/bin/env python3
"""What torch's CUDA allocator holds beside what is allocated, by running its rules on sizes.

Usage: torch_allocator.py [BATCHES]

``Allocator`` is torch 2.4's ``c10/cuda/CUDACachingAllocator.cpp`` without expandable segments: the
smallest free block that is large enough is split, free neighbours are joined, and nothing goes back
to the device. The first line is the making of Llama-2-7B for QLoRA by torchtune with torchao 0.1,
whose tutorial says what was reserved (docs/source/tutorials/qlora_finetune.rst). The others are
LoRA with batches of ever other lengths: lognormal, deviating by 48 % of their mean, as the median
of 143 data sets in ms-swift's list does. Slack is told over the logits that the longest batch
makes, as ``VARIABLE_SLACK`` of ``uma/engines/torch_training.py`` is; it is the less the earlier the
longest batch comes.
"""

import random
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import log, prod, sqrt
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from uma.architecture import architecture_from_config  # noqa: E402
from uma.architecture.layers import Layer, parameters  # noqa: E402
from uma.catalog import model_config  # noqa: E402
from uma.checkpoint.free_names import find_free  # noqa: E402
from uma.engines.torch_asked import layer_settings, step_settings  # noqa: E402
from uma.engines.torch_layers import Batch, decoder_layer  # noqa: E402
from uma.engines.torch_model import Model, Settings  # noqa: E402
from uma.engines.torch_ops import Program  # noqa: E402
from uma.engines.torch_training import training_terms  # noqa: E402
from uma.memory.autograd import Buffer, Graph, Memory, Tensor  # noqa: E402
from uma.memory.loss import TRANSFORMERS, LossRun  # noqa: E402
from uma.units import MIB  # noqa: E402
from uma.workload import TrainingWorkload  # noqa: E402

SMALL, SMALL_SEGMENT, MEDIUM, MEDIUM_SEGMENT, ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 512
DEVIATION, ABOVE = 0.48, 2.5  # of lengths, in means; the longest in deviations above the mean


class Block:
    """A part of a segment, between its neighbours there."""

    __slots__ = ("after", "before", "key", "pool", "size")

    def __init__(self, size: int, pool: int) -> None:
        self.size, self.pool = size, pool
        self.before: Block | None = None
        self.after: Block | None = None
        self.key: tuple[int, int] | None = None  # while it is free


class Allocator:
    """Bytes that are allocated and reserved, and the most of both."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = 0
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])  # small ones, and others
        self._blocks: dict[tuple[int, int], Block] = {}
        self._count = 0

    def malloc(self, size: int) -> Block:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = int(size > SMALL)
        place = bisect_left(self._free[pool], (size, 0))
        if place < len(self._free[pool]):
            block = self._take(self._blocks[self._free[pool][place]])
        else:
            block = Block(_segment(size), pool)
            self.reserved += block.size
        left = block.size - size
        if left >= ROUND if pool == 0 else left > SMALL:
            rest = Block(left, pool)
            rest.before, rest.after, block.size = block, block.after, size
            if block.after:
                block.after.before = rest
            block.after = rest
            self._put(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        if block.before and block.before.key:
            block = _joined(self._take(block.before), block)
        if block.after and block.after.key:
            block = _joined(block, self._take(block.after))
        self._put(block)

    def _put(self, block: Block) -> None:
        self._count += 1
        block.key = (block.size, self._count)
        self._blocks[block.key] = block
        insort(self._free[block.pool], block.key)

    def _take(self, block: Block) -> Block:
        assert block.key is not None
        free = self._free[block.pool]
        del free[bisect_left(free, block.key)], self._blocks[block.key]
        block.key = None
        return block


def _segment(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


def _joined(first: Block, second: Block) -> Block:
    first.size, first.after = first.size + second.size, second.after
    if second.after:
        second.after.before = first
    return first


def nf4_weight(device: Allocator, elements: int) -> Iterator[Block]:
    """torchao 0.1, ``dtypes/nf4tensor.py``, ``NF4Tensor.from_tensor``: the blocks that stay."""
    scales = elements // 64
    yield device.malloc(scales)  # of a byte each
    yield device.malloc(2 * scales)  # a view of the factors keeps all of them
    scaled = device.malloc(2 * elements)
    differences = device.malloc(32 * elements)
    absolutes = device.malloc(32 * elements)
    device.free(differences)
    least, indices = device.malloc(2 * elements), device.malloc(8 * elements)
    device.free(least)
    device.free(absolutes)
    shifted, joined = device.malloc(4 * elements), device.malloc(4 * elements)
    device.free(shifted)
    yield device.malloc(elements // 2)
    for block in (joined, indices, scaled):
        device.free(block)


def original(device: Allocator, elements: int) -> Block:
    """``NF4Tensor.get_original_weight``, which torchtune's ``clone`` quantizes again."""
    made = [device.malloc(4 * elements) for _ in range(2)]  # indices of 8 bytes, of halves
    made += [device.malloc(elements) for _ in range(4)]
    found = device.malloc(2 * elements)
    for block in made:
        device.free(block)
    return found


def torchtune_qlora(device: Allocator) -> None:
    """Llama-2-7B: a layer is made, copied for each of all layers, and given up."""
    hidden, inner, vocabulary = 4096, 11008, 32000
    sizes = [hidden * hidden] * 4 + [hidden * inner] * 3
    first = []
    for elements in sizes:
        weight = device.malloc(2 * elements)
        first += nf4_weight(device, elements)
        device.free(weight)
    for _ in range(2):
        device.malloc(2 * vocabulary * hidden)
    for _ in range(32):
        for elements in sizes:
            weight = original(device, elements)
            list(nf4_weight(device, elements))
            device.free(weight)
    for block in first:
        device.free(block)


class Held(Buffer):
    """A buffer that has a block."""

    __slots__ = ("block",)

    def __init__(self, memory: "OnDevice", size_bytes: int) -> None:
        super().__init__(memory, size_bytes)
        self.block = memory.device.malloc(size_bytes) if size_bytes else None

    def __del__(self) -> None:
        super().__del__()
        if self.block is not None:
            self.memory.device.free(self.block)  # type: ignore[attr-defined]


class OnDevice(Memory):
    __slots__ = ("device",)

    def __init__(self, device: Allocator) -> None:
        super().__init__()
        self.device = device

    def buffer(self, size_bytes: int) -> Buffer:
        return Held(self, size_bytes)


def run_step(device: Allocator, model: Model, length: int) -> None:
    """Forward and backward pass of one batch of rows of ``length`` tokens, checkpointed."""
    architecture, settings = model.architecture, step_settings(model)
    memory, batch = OnDevice(device), Batch(model.workload.batch_size, length)
    run = Program(Graph(memory), layer_settings(model))
    tokens, hidden = batch.tokens, architecture.hidden_size
    x = run.graph.leaf(run.graph.tensor(tokens * hidden, settings.stream_width))
    for layer in architecture.layers:
        x = _checkpointed(run, layer, x, hidden, batch)
    normed = run.norm(x, x.width)
    del x
    vocabulary, width = architecture.vocab_size, settings.head_width
    loss = LossRun(memory, tokens, vocabulary, width, settings.copies)
    loss.forward(normed.size_bytes)
    node, size = normed.node, normed.size_bytes
    del normed
    assert node is not None
    node.grad = loss.backward(size)
    run.graph.backward(node)


def _checkpointed(run: Program, layer: Layer, x: Tensor, hidden: int, batch: Batch) -> Tensor:
    kept, elements, width = x.buffer, x.elements, x.width

    def back(grad: Buffer) -> Sequence[Buffer | None]:
        leaf = run.graph.leaf(Tensor(kept, elements, width))
        node = decoder_layer(run, layer, leaf, hidden, batch).node
        assert node is not None
        assert leaf.node is not None
        node.grad = grad
        run.graph.backward(node)
        return [leaf.node.grad]

    with run.graph.no_grad():
        out = decoder_layer(run, layer, Tensor(kept, elements, width), hidden, batch)
    return run.graph.apply([x], out.buffer, out.elements, out.width, back)


def slack_over_logits(model: Model, batches: int, seed: int) -> float:
    """Of what is reserved once all batches have run, one of which has the longest row."""
    device, longest = Allocator(), model.workload.max_seq_length
    for parameter in parameters(model.architecture):
        device.malloc(parameter.size * model.workload.dtype_bytes)
    for shape, count in model.shapes.items():
        for _ in range(3 * count):  # adapters and their states
            device.malloc(prod(shape) * 4)
    draw = random.Random(seed)
    lengths = [
        max(_length(draw, longest) for _ in range(model.workload.batch_size))
        for _ in range(batches - 1)
    ]
    lengths.insert(draw.randrange(batches), longest)
    for length in lengths:
        run_step(device, model, length)
    terms = training_terms(model.architecture, model.workload, model.settings)
    logits = sum(t.size_bytes for t in terms if t.name == "logits")
    return (device.reserved - device.peak_allocated) / logits


def _length(draw: random.Random, longest: int) -> int:
    spread = sqrt(log(1 + DEVIATION**2))
    mean = log(longest / (1 + ABOVE * DEVIATION)) - spread**2 / 2
    return max(1, min(longest, int(draw.lognormvariate(mean, spread))))


def lora(name: str, batch_size: int, max_seq_length: int) -> Model:
    """LoRA of all matrices with checkpointing, as Trainer and PEFT do it."""
    workload = TrainingWorkload(
        num_layers=None,
        batch_size=batch_size,
        max_seq_length=max_seq_length,
        grad_checkpoint=1,
        optimizer="adamw",
    )
    architecture = architecture_from_config(model_config(find_free(name)).values)
    return Model(architecture, workload, Settings(copies=TRANSFORMERS))


SEEDS = range(1, 6)
CASES = (
    ("Qwen/Qwen2.5-1.5B", 1, 2048),
    ("meta-llama/Llama-2-7b-hf", 1, 1024),
    ("meta-llama/Llama-2-7b-hf", 8, 1024),
    ("meta-llama/Meta-Llama-3-8B", 4, 2048),
)


def main(batches: int) -> int:
    """Print what was reserved, and slack over logits."""
    device = Allocator()
    torchtune_qlora(device)
    print(f"torchtune QLoRA: {device.reserved / 1e9:.2f} GB reserved, published 9.13")
    shares = []
    for name, batch_size, longest in CASES:
        model = lora(name, batch_size, longest)
        found = [slack_over_logits(model, batches, seed) for seed in SEEDS]
        told = ", ".join(f"{share:.1f}" for share in found)
        print(f"{name}, {batch_size} x {longest:,} tokens, {batches} batches: {told} of the logits")
        shares += found
    print(f"median {median(shares):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
