"""The operations of PyTorch's modelling files in sizes: what each saves and allocates.

Widths are bytes an element. PEFT's layers are those of 0.13 to 0.20, bitsandbytes' of 0.43 to 0.50,
transformers' of 4.45 to 5.24.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from uma.frozen import dataclass
from uma.memory.autograd import Backward, Buffer, Graph, Tensor
from uma.quantization import FLOAT32

AttentionKernel = Literal["flash", "efficient", "eager"]


@dataclass(frozen=True, slots=True)
class Linear:
    """How a matrix is held: trained, adapted, dequantized for each product.

    ``temporary_width`` is the width of the copy that a quantized matrix is multiplied as
    (``bitsandbytes/autograd/_functions.py``, ``MatMul4Bit``), 0 where a kernel reads it packed.
    ``clones`` is set for the layers of quantized matrices, which work on a copy of their result
    (``peft/tuners/lora/bnb.py``, ``gptq.py``); ``fused`` for Unsloth's kernels, which save the
    input and nothing else. ``saved_width`` is the width of a copy that autograd saves instead:
    autocast's of float32 weights. ``keeps_input`` is bitsandbytes before 0.44
    (``autograd/_functions.py``, ``MatMul4Bit``: ``ctx.tensors``), whose nodes hold their input for
    as long as the graph lives.
    """

    rank: int = 0
    dora: bool = False
    trained: bool = False
    temporary_width: int = 0
    clones: bool = False
    fused: bool = False
    saved_width: int = 0
    keeps_input: bool = False


@dataclass(frozen=True, slots=True)
class Linears:
    """How the matrices of ``names`` are held, and all others."""

    names: frozenset[str]
    named: Linear
    other: Linear

    def __call__(self, name: str) -> Linear:
        return self.named if name in self.names else self.other

    @property
    def trains(self) -> bool:
        return self.other.trained or bool(self.names)

    @property
    def frozen(self) -> "Linears":
        """The same matrices in a layer that is not trained."""
        plain = replace(self.other, trained=False)
        return Linears(frozenset(), plain, plain)


TRAINED = Linear(trained=True)


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What decides the sizes of a layer's values.

    ``linear`` gives how the matrix of a name is held, ``experts`` how one of routed experts is, if
    otherwise. ``fused_norms`` are kernels for norms and rotary embeddings that save their input
    alone, ``fused_gates`` one for a gate and its product; ``repeats_kv`` copies keys and values to
    every query head before a kernel that would not need it (Mistral's and Mixtral's flash attention
    until transformers 4.47). ``gradient_width`` is that of trained parameters, which
    ``adds_gradients`` adds to those of earlier batches. ``sorted_experts`` run at once, on rows
    sorted by expert, instead of one after another; each of ``expert_devices`` has a part of them.
    ``caps_scores`` bounds attention's scores by a tanh; of each matrix ``tensor`` devices have a
    part.
    """

    linear: Linears
    compute_width: int = 2
    adapter_width: int = FLOAT32
    autocast: bool = False
    kernel: AttentionKernel = "flash"
    fused_norms: bool = False
    fused_gates: bool = False
    norms_trained: bool = False
    gradient_width: int = FLOAT32
    repeats_kv: bool = False
    query_norms: bool = False
    dropout: bool = False
    sorted_experts: bool = False
    adds_gradients: bool = False
    expert_devices: int = 1
    caps_scores: bool = False
    experts: Linears | None = None
    tensor: int = 1

    @property
    def frozen(self) -> "LayerSettings":
        """Of a layer that is not trained."""
        experts = self.experts and self.experts.frozen
        return replace(self, linear=self.linear.frozen, experts=experts, norms_trained=False)


class Program:
    """The operations, on one graph."""

    def __init__(self, graph: Graph, settings: LayerSettings) -> None:
        self.graph, self.settings, self.memory = graph, settings, graph.memory
        self.parameter_gradients: list[Buffer] = []
        self._peak = (0, 0)  # of the memory, with the gradients that were there
        self.kept: list[Buffer] = []
        self.alike: float = 1  # matrices that one which is laid out stands for
        self.linears = settings.linear

    def _unary(self, x: Tensor, width: int, saved: Buffer | None = None) -> Tensor:
        """An elementwise operation of one input, whose backward needs ``saved``."""
        size = x.size_bytes

        def back(grad: Buffer) -> Sequence[Buffer]:
            found = self.memory.buffer(size)
            del grad
            return [found] if saved is None or saved else []

        buffer = self.memory.buffer(x.elements * width)
        return self.graph.apply([x], buffer, x.elements, width, back)

    def cast(self, x: Tensor, width: int) -> Tensor:
        return x if x.width == width else self._unary(x, width)

    def scale(self, x: Tensor) -> Tensor:
        """A product with a constant, or a copy."""
        return self._unary(x, x.width)

    def activation(self, x: Tensor) -> Tensor:
        """SiLU or GELU: saves its input."""
        return self._unary(x, x.width, saved=x.buffer)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        width = max(x.width, y.width)
        sides = [(side.width, side.size_bytes) for side in (x, y)]

        def back(grad: Buffer) -> Sequence[Buffer]:
            return [grad if side == width else self.memory.buffer(size) for side, size in sides]

        buffer = self.memory.buffer(x.elements * width)
        return self.graph.apply([x, y], buffer, x.elements, width, back)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """An elementwise product: saves both sides."""
        saved, size = (x.buffer, y.buffer), x.size_bytes

        def back(grad: Buffer) -> Sequence[Buffer]:
            return [self.memory.buffer(size) for _ in saved]

        return self.graph.apply([x, y], self.memory.buffer(size), x.elements, x.width, back)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up`` in one kernel: saves both, and writes their gradients over them.

        Liger-Kernel 0.5, ``ops/swiglu.py`` and ``geglu.py``.
        """
        saved, size = (gate.buffer, up.buffer), gate.size_bytes

        def back(grad: Buffer) -> Sequence[Buffer]:
            return saved

        return self.graph.apply(
            [gate, up], self.memory.buffer(size), gate.elements, gate.width, back
        )

    def weighted(self, x: Tensor) -> Tensor:
        """Rows times a number each, whose gradient needs ``x`` and is a product that is summed."""
        saved, size = x.buffer, x.size_bytes

        def back(grad: Buffer) -> Sequence[Buffer]:
            found = self.memory.buffer(size)
            self.memory.passing(size)
            return [found] if saved else []

        return self.graph.apply([x], self.memory.buffer(size), x.elements, x.width, back)

    def product(self, x: Tensor, rows: int, columns: int, how: Linear, width: int) -> Tensor:
        """``x`` times a matrix of ``[rows, columns]``; the gradient of the matrix needs ``x``."""
        tokens, matrix = x.elements // columns, rows * columns // self.settings.tensor
        saved = x.buffer if how.trained else None
        size = x.size_bytes if x.node is not None else 0
        cast = self.memory.buffer(matrix * how.saved_width)
        trained = round(matrix * self.alike)
        if how.keeps_input and self.graph.enabled:
            self.keep(x.buffer)

        def back(grad: Buffer) -> Sequence[Buffer]:
            copy = self.memory.buffer(matrix * how.temporary_width)
            found = self.memory.buffer(size)
            del copy
            if saved is not None:
                self.gradient(trained)
            return [found] if cast else []

        copy = self.memory.buffer(matrix * how.temporary_width)
        buffer = self.memory.buffer(tokens * rows * width)
        del copy
        return self.graph.apply([x], buffer, tokens * rows, width, back, starts=how.trained)

    def keep(self, buffer: Buffer) -> None:
        """Hold an input that nodes keep; of one that several products read, once."""
        if all(buffer is not kept for kept in self.kept[-2:]):
            self.kept.append(buffer)

    def gradient(self, elements: int) -> None:
        """The gradient of a parameter, kept until the optimizer's step, or added to its sum."""
        self.graded_at_peak()  # before there is one more
        gradient = self.memory.buffer(elements * self.settings.gradient_width)
        if not self.settings.adds_gradients:
            self.parameter_gradients.append(gradient)

    @property
    def gradient_bytes(self) -> int:
        """Of trained parameters."""
        return sum(b.size_bytes for b in self.parameter_gradients)

    def graded_at_peak(self) -> int:
        """Gradients of parameters when the memory's peak was reached: asked before they change."""
        peak = self.memory.peak_bytes
        if peak != self._peak[0]:
            self._peak = peak, self.gradient_bytes
        return self._peak[1]

    def linear(self, name: str, x: Tensor, rows: int, columns: int) -> Tensor:
        """The layer ``name`` with its adapter."""
        how, width = self.linears(name), self.settings.compute_width
        inner = self.cast(x, width)
        result = self.product(inner, rows, columns, how, width)
        del inner
        if how.temporary_width:  # bitsandbytes/nn/modules.py, Linear4bit.forward
            result = self.cast(result, x.width)
        if not how.rank:
            return result
        if how.fused:
            return self._fused_adapter(result, x, rows, columns, how)
        if how.clones:
            result = self.scale(result)
        return self._adapted(result, x, rows, columns, how)

    def _adapted(self, result: Tensor, x: Tensor, rows: int, columns: int, how: Linear) -> Tensor:
        settings, given = self.settings, result.width
        if not (settings.autocast and how.clones):
            x = self.cast(x, settings.adapter_width)
        if settings.dropout:
            x = self._dropout(x)
        width = settings.compute_width if settings.autocast else settings.adapter_width
        inner = self.cast(x, width)
        low = self.product(inner, how.rank, columns, TRAINED, width)
        del inner
        high = self.product(low, rows, how.rank, TRAINED, width)
        del low
        high = self.scale(high)
        if how.dora:
            high = self._magnitude(high, result, rows, columns)
        if how.clones:
            high = self.cast(high, given)
        return self.cast(self.add(result, high), given)

    def _magnitude(self, high: Tensor, result: Tensor, rows: int, columns: int) -> Tensor:
        """DoRA (``peft/tuners/lora/dora.py``): the norm of the sum of weight and factors, which
        is made in full, then the scaled base product beside the scaled adapter."""
        self.memory.passing(3 * rows * columns * FLOAT32 // self.settings.tensor)
        return self.multiply(self.cast(result, high.width), high)

    def _fused_adapter(
        self, result: Tensor, x: Tensor, rows: int, columns: int, how: Linear
    ) -> Tensor:
        """Unsloth's ``LoRA_QKV`` and ``LoRA_W``: one node that saves the input."""
        if self.settings.dropout:
            x = self._unary(x, x.width, saved=x.buffer)  # the input and what is left of it
        low = self.product(x, how.rank, columns, TRAINED, self.settings.compute_width)
        saved, width, trained = low.buffer, result.width, round(rows * how.rank * self.alike)

        def back(grad: Buffer) -> Sequence[Buffer | None]:
            low_grad = self.memory.buffer(saved.size_bytes)
            self.gradient(trained)
            return [grad, low_grad]

        return self.graph.apply([result, low], result.buffer, result.elements, width, back)

    def _dropout(self, x: Tensor) -> Tensor:
        """Saves a mask of one byte an element."""
        return self._unary(x, x.width, saved=self.memory.buffer(x.elements))

    def norm(self, x: Tensor, width: int) -> Tensor:
        """RMSNorm step by step in float32, or one kernel that saves its input."""
        if self.settings.fused_norms:
            return self._fused_norm(x, width)
        wide = self.cast(x, FLOAT32)
        self.memory.passing(wide.size_bytes)  # its square
        saved, size = wide.buffer, wide.size_bytes

        def back(grad: Buffer) -> Sequence[Buffer]:
            first = self.memory.buffer(size)  # of the product
            second = self.memory.buffer(size)  # of the mean of squares, expanded
            return [second] if saved and first else []

        scaled = self.graph.apply([wide], self.memory.buffer(size), wide.elements, FLOAT32, back)
        del wide
        narrow = self.cast(scaled, width)
        del scaled
        return self._unary(narrow, width, narrow.buffer if self.settings.norms_trained else None)

    def _fused_norm(self, x: Tensor, width: int) -> Tensor:
        saved, same, size = x.buffer, x.width == width, x.size_bytes

        def back(grad: Buffer) -> Sequence[Buffer]:
            return [grad if same and saved else self.memory.buffer(size)]

        buffer = self.memory.buffer(x.elements * width)
        return self.graph.apply([x], buffer, x.elements, width, back)

    def rotary(self, x: Tensor) -> Tensor:
        """``x * cos + rotate_half(x) * sin``; in place where a kernel does it."""
        if self.settings.fused_norms:
            return x
        return self.add(self.scale(x), self.scale(self.scale(x)))

    def node(self, inputs: Sequence[Tensor], elements: int, width: int, back: Backward) -> Tensor:
        """An operation with a backward of its own."""
        buffer = self.memory.buffer(elements * width)
        return self.graph.apply(inputs, buffer, elements, width, back)
