"""One training step of ``mlx_lm.lora`` as a graph of sizes (mlx 0.32.4, mlx-lm 0.32.2).

Arrays are those that the gradients of MLX's primitives name (``mlx/primitives.cpp``, ``vjp``) after
``mx.compile`` has made one kernel of neighbouring elementwise operations. On the CPU, norms, rotary
embeddings and attention are their decompositions (``mlx/fast.cpp``); so is the backward pass of
attention everywhere without a fused one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from uma.architecture.layers import Architecture, Parameter
from uma.memory.adapters import Adapter
from uma.memory.gradient_graph import Builder
from uma.workload import TrainingWorkload

FLOAT32 = 4


@dataclass(slots=True)
class Step:
    """The graph of a step, and the trained arrays with the gradients that they get."""

    architecture: Architecture
    workload: TrainingWorkload
    fused_norms: bool = False
    graph: Builder = field(default_factory=Builder)
    trained: list[int] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that are put in: the last one of each row is only a target."""
        return self.workload.batch_size * max(1, self.workload.max_seq_length - 1)

    @property
    def length(self) -> int:
        return max(1, self.workload.max_seq_length - 1)

    @property
    def width(self) -> int:
        return self.workload.dtype_bytes

    # Elementwise and matrix operations.

    def elementwise(self, *inputs: int, kept: int = 0, of_output: bool = False) -> int:
        """One fused kernel whose gradient is another of the same inputs, or of its output.

        ``kept`` values on the way are outputs too, because the gradient needs them.
        """
        graph = self.graph
        size, width = graph.size(inputs[0]), graph.width(inputs[0])
        donors = range(len(inputs))
        out = graph.run("Compiled", inputs, size, width, donors=donors, outputs=1 + kept)
        saved = (out,) if of_output else (*inputs, *range(out + 1, out + 1 + kept))

        def vjp(gradient: int) -> list[int | None]:
            wanted = [i for i in inputs if i in graph.differentiated]
            count = max(1, len(wanted))
            given = (gradient, *saved)
            made = graph.run("Compiled", given, size, width, donors=(0,), outputs=count)
            numbers = iter(range(made, made + len(wanted)))
            return [
                self._reduced(next(numbers), graph.size(i)) if i in wanted else None for i in inputs
            ]

        return graph.record(inputs, out, vjp)

    def _reduced(self, x: int, elements: int) -> int:
        """The sum over what was broadcast."""
        graph = self.graph
        if graph.size(x) == elements:
            return x
        return graph.run("Reduce", (x,), elements, graph.width(x))

    def add(self, x: int, y: int) -> int:
        graph = self.graph
        out = graph.sum(x, y)
        return graph.record((x, y), out, lambda gradient: [gradient, gradient])

    def matmul(self, x: int, matrix: int, columns: int, rows: int) -> int:
        """``x`` of ``columns`` a row times a matrix, a row of ``rows`` out."""
        graph = self.graph
        count = graph.size(x) // columns
        out = graph.run("Matmul", (x, matrix), count * rows, graph.width(x))

        def vjp(gradient: int) -> list[int | None]:
            dx = dm = None
            if x in graph.differentiated:
                dx = graph.run("Matmul", (gradient, matrix), graph.size(x), graph.width(x))
            if matrix in graph.differentiated:
                dm = graph.run("Matmul", (x, gradient), graph.size(matrix), graph.width(matrix))
            return [dx, dm]

        return graph.record((x, matrix), out, vjp)

    def norm(self, x: int, weight: Parameter | None = None) -> int:
        """RMSNorm in its decomposition: squares, their mean, the product with the weight."""
        graph = self.graph
        size, width = graph.size(x), graph.width(x)
        scale = graph.source(0, width) if weight is None else self.weight(weight)
        if self.fused_norms:
            return self._fused_norm(x, scale)
        squares = graph.run("Compiled", (x,), size, width)
        mean = graph.run("Reduce", (squares,), self.tokens, FLOAT32)
        out = graph.run("Compiled", (x, mean, scale), size, width, donors=(0,))

        def vjp(gradient: int) -> list[int | None]:
            scaled = None
            if scale in graph.differentiated:
                product = graph.run("Compiled", (gradient, x, mean), size, width)
                scaled = graph.run("Reduce", (product,), graph.size(scale), width)
            product = graph.run("Compiled", (gradient, x), size, width)
            total = graph.run("Reduce", (product,), self.tokens, FLOAT32)
            whole = (gradient, x, mean, total)
            return [graph.run("Compiled", whole, size, width, donors=(0,)), scaled]

        return graph.record((x, scale), out, vjp)

    def _fused_norm(self, x: int, scale: int) -> int:
        """Metal's kernels: one forward, one backward (``RMSNorm``, ``RMSNormVJP``)."""
        graph = self.graph
        size, width = graph.size(x), graph.width(x)
        out = graph.run("RMSNorm", (x, scale), size, width, donors=(0,))

        def vjp(gradient: int) -> list[int | None]:
            dx = graph.run("RMSNormVJP", (x, scale, gradient), size, width, donors=(0, 2))
            if scale not in graph.differentiated:
                return [dx, None]
            return [dx, graph.run("Reduce", (dx,), graph.size(scale), width)]

        return graph.record((x, scale), out, vjp)

    def moved(self, x: int) -> int:
        """A copy into another order, and its gradient back."""
        graph = self.graph
        size, width = graph.size(x), graph.width(x)
        out = graph.run("Copy", (x,), size, width)
        return graph.record((x,), out, lambda g: [graph.run("Copy", (g,), size, width)])

    def part(self, x: int, elements: int) -> int:
        """Some columns, a view; the gradient is padded to the whole."""
        graph = self.graph
        out = graph.run("Slice", (x,), elements, graph.width(x))
        width = graph.width(x)
        return graph.record((x,), out, lambda g: [graph.run("Pad", (g,), graph.size(x), width)])

    def gathered(self, x: int, elements: int) -> int:
        """Rows by their indices; the gradient is scattered into zeros."""
        graph, width = self.graph, self.graph.width(x)
        out = graph.run("Gather", (x,), elements, width)

        def vjp(gradient: int) -> list[int]:
            zeros = graph.run("Full", (), graph.size(x), width)
            return [graph.run("Scatter", (zeros, gradient), graph.size(x), width, donors=(0,))]

        return graph.record((x,), out, vjp)

    def weighted(self, x: int, weights: int, elements: int) -> int:
        """The sum of each token's experts by their weights."""
        graph, width, size = self.graph, self.graph.width(x), self.graph.size(x)
        product = graph.run("Compiled", (x, weights), size, width, donors=(0,))
        out = graph.run("Reduce", (product,), elements, width)

        def vjp(gradient: int) -> list[int]:
            dx = graph.run("Compiled", (gradient, weights), size, width)
            dw = graph.run("Compiled", (gradient, x), size, width)
            return [dx, graph.run("Reduce", (dw,), graph.size(weights), width)]

        return graph.record((x, weights), out, vjp)

    def rotary(self, x: int) -> int:
        """Two halves, turned and joined; each half's gradient is padded to the whole."""
        graph = self.graph
        size, width = graph.size(x), graph.width(x)
        if self.fused_norms:
            whole = graph.run("RoPE", (x,), size, width, donors=(0,))
            return graph.record(
                (x,), whole, lambda g: [graph.run("RoPE", (g,), size, width, donors=(0,))]
            )
        first = graph.run("Compiled", (x,), size // 2, width, outputs=2)
        out = graph.run("Concatenate", (first, first + 1), size, width)

        def vjp(gradient: int) -> list[int]:
            half = graph.run("Compiled", (gradient,), size // 2, width, outputs=2)
            sides = [graph.run("Pad", (half + i,), size, width) for i in range(2)]
            return [graph.sum(*sides)]

        return graph.record((x,), out, vjp)

    # Parameters.

    def weight(self, parameter: Parameter) -> int:
        """The array of a parameter; frozen ones take no bytes here."""
        found = self.weights.get(parameter.name)
        if found is None:
            full = self.workload.method == "full"
            elements = parameter.size if full else 0
            found = self.graph.source(elements, self.width, trained=full)
            self.weights[parameter.name] = found
            if full:
                self.trained.append(found)
        return found

    def linear(self, x: int, parameter: Parameter, adapter: Adapter | None) -> int:
        """``nn.Linear`` or ``LoRALinear``: ``y + scale * (x @ a) @ b``."""
        rows, columns = parameter.shape[-2], parameter.shape[-1]
        y = self.matmul(x, self.weight(parameter), columns, rows)
        if adapter is None:
            return y
        a = self._factor(f"{parameter.name}.lora_a", columns * adapter.rank)
        b = self._factor(f"{parameter.name}.lora_b", adapter.rank * rows)
        low = self.matmul(self._wide(x), a, columns, adapter.rank)
        out = self._merged(y, self.matmul(low, b, adapter.rank, rows))
        return self._magnitude(out, parameter, adapter, a, b) if adapter.magnitude else out

    def _magnitude(self, x: int, parameter: Parameter, adapter: Adapter, a: int, b: int) -> int:
        """``DoRALinear``: the norm of the sum of weight and factors, and its product with ``x``.

        A quantized weight is dequantized whole for the product and for the norm.
        """
        graph, matrix = self.graph, parameter.size
        delta = graph.run("Matmul", (a, b), matrix, FLOAT32)
        squares = graph.run("Compiled", (delta,), matrix, FLOAT32, donors=(0,))
        norm = graph.run("Reduce", (squares,), adapter.rows, FLOAT32)
        m = self._factor(f"{parameter.name}.m", adapter.rows)
        size, width = graph.size(x), graph.width(x)
        out = graph.run("Compiled", (x, m, norm), size, width, donors=(0,))

        def vjp(gradient: int) -> list[int]:
            product = graph.run("Compiled", (gradient, x), size, width)
            dm = graph.run("Reduce", (product, norm), adapter.rows, FLOAT32)
            return [graph.run("Compiled", (gradient, m, norm), size, width, donors=(0,)), dm]

        return graph.record((x, m), out, vjp)

    def _wide(self, x: int) -> int:
        """``x`` in float32, as the factors are."""
        if self.graph.width(x) == FLOAT32:
            return x
        graph = self.graph
        out = graph.run("AsType", (x,), graph.size(x), FLOAT32)
        width = graph.width(x)
        return graph.record((x,), out, lambda g: [graph.run("AsType", (g,), graph.size(x), width)])

    def _merged(self, y: int, z: int) -> int:
        """``y + (scale * z).astype(y.dtype)``: the gradient of ``z`` is scaled."""
        graph = self.graph
        size = graph.size(y)
        out = graph.run("Compiled", (y, z), size, graph.width(y), donors=(0, 1))
        width = graph.width(z)
        return graph.record((y, z), out, lambda g: [g, graph.run("Compiled", (g,), size, width)])

    def _factor(self, name: str, elements: int) -> int:
        found = self.weights.get(name)
        if found is None:
            found = self.graph.source(elements, FLOAT32, trained=True)
            self.weights[name] = found
            self.trained.append(found)
        return found


def checkpointed(step: Step, forward: Callable[[int], int], x: int) -> int:
    """``mx.checkpoint``: the function again, on its inputs after the gradient is there."""
    graph, first = step.graph, len(step.trained)
    graph.recording = False
    out = forward(x)
    graph.recording = True
    trained = step.trained[first:]

    def vjp(gradient: int) -> Sequence[int | None]:
        start = len(graph.records)
        again = graph.after(x, gradient)
        if x in graph.differentiated:
            graph.differentiated.add(again)
        result = forward(again)
        return graph.gradients(result, gradient, [again, *trained], start)

    return graph.record((x, *trained), out, vjp)


def loss(step: Step, x: int) -> int:
    """``default_loss``: all logits, their logarithmic sum, the score of each target.

    The gradient of the sum is a softmax of the logits, that of the scores is scattered into zeros
    of the same size (``nn/losses.py``, ``cross_entropy``).
    """
    graph, tokens = step.graph, step.tokens
    width = graph.width(x)
    head = graph.source(0, width)
    logits = step.matmul(x, head, step.architecture.hidden_size, step.architecture.vocab_size)
    if logits not in graph.differentiated:
        return logits
    size = graph.size(logits)
    sums = graph.run("Reduce", (logits,), tokens, width)
    scores = graph.run("Gather", (logits,), tokens, width)
    total = graph.run("Compiled", (sums, scores), 1, FLOAT32)

    def vjp(gradient: int) -> list[int]:
        softmax = graph.run("Softmax", (logits,), size, width)
        zeros = graph.run("Full", (), size, width)
        scattered = graph.run("Scatter", (zeros, gradient), size, width, donors=(0,))
        return [graph.run("Compiled", (softmax, scattered), size, width, donors=(0, 1))]

    return graph.record((logits,), total, vjp)
