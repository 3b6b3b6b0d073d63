"""One training step of ``mlx_lm.lora`` as the graph that MLX evaluates (mlx-lm 0.32.2).

``tuner/trainer.py``, ``train``: forward, gradients and update are one compiled function.
"""

from collections.abc import Collection, Sequence

from uma.architecture.layers import Architecture
from uma.engines.mlx_attention import rms_norm
from uma.engines.mlx_compiled_update import updated
from uma.engines.mlx_layers import LayerProgram
from uma.memory.adapters import trained_layers
from uma.memory.mlx_program import Program, Value
from uma.quantization import FLOAT32
from uma.workload import Backend, TrainingWorkload


def forward_roots(
    p: Program, architecture: Architecture, workload: TrainingWorkload, backend: Backend
) -> list[Value]:
    """What ``evaluate`` does with one batch, which is not compiled."""
    batch = _batch(p, workload)
    x = _layers(p, architecture, workload, backend, batch, None)
    return default_loss(p, architecture, workload, backend, batch, x)


def step_roots(
    p: Program,
    architecture: Architecture,
    workload: TrainingWorkload,
    backend: Backend,
    *,
    inner: bool = False,
    small: int = 0,
    summed_together: Collection[int] = (),
) -> list[Value]:
    """The step; what is evaluated: parameters, states, the loss.

    With ``inner`` sizes count alone, those of any layer but the first: what is embedded is as wide
    as the input of later ones, and gets a gradient.
    So many ``small`` arrays are updated after those of the first layer. Gradients of some layers
    are ``summed_together``.
    """
    runs: list[LayerProgram] = []
    batch = _batch(p, workload)
    x = _layers(p, architecture, workload, backend, batch, runs, summed_together, inner=inner)
    wanted = [value for run in runs for value in run.in_order()]
    loss, tokens = default_loss(p, architecture, workload, backend, batch, x)
    gradients = p.vjp([(loss, p.scalar(FLOAT32))], wanted, in_order=not inner)
    parameters = [value for run in runs for value in run.in_order()]
    after = len(runs[0].trained)
    for values, held in ((parameters, False), (gradients, True)):
        values[after:after] = [p.source(1, width=FLOAT32, held=held) for _ in range(small)]
    return [*updated(p, workload.optimizer, parameters, gradients, once=inner), loss, tokens]


def _batch(p: Program, workload: TrainingWorkload) -> Value:
    return p.source(workload.batch_size, max(2, workload.max_seq_length), width=4)


def _layers(
    p: Program,
    architecture: Architecture,
    workload: TrainingWorkload,
    backend: Backend,
    batch: Value,
    runs: list[LayerProgram] | None,
    summed_together: Collection[int] = (),
    *,
    inner: bool = False,
) -> Value:
    """Embedding and layers; with ``runs`` they are trained, and put there."""
    length = batch.shape[1] - 1
    table = p.source(architecture.vocab_size, architecture.hidden_size, width=workload.dtype_bytes)
    x = p.take(table, p.slice(batch, 1, 0, length))
    if architecture.model_type.startswith("gemma"):
        x = p.scaled(x)
    x = p.primal(p.astype(x, FLOAT32)) if inner else x
    trained = {id(layer) for layer in trained_layers(architecture, workload)}
    for n, layer in enumerate(architecture.layers):
        run = LayerProgram(
            p,
            architecture,
            workload,
            layer,
            length,
            backend,
            differentiated=runs is not None and id(layer) in trained,
            slice_bytes=None,
            inline=runs is not None,
            first=x.number not in p.differentiated,
            summed_together=n in summed_together,
        )
        again = runs is not None and workload.grad_checkpoint
        x = checkpointed(run, x) if again else run.forward(x)
        if runs is not None:
            runs.append(run)
            p.marks.append(x.number)
    p.marks = p.marks[:-1]  # what the last layer gives may be no array of its own, but in a kernel
    return x


def checkpointed(run: LayerProgram, x: Value) -> Value:
    """``mx.checkpoint``: the layer again, on its inputs after its first output is there.

    Not after the gradient is (``mlx/transforms.cpp``, ``checkpoint``: ``depends(primals,
    outputs)``), so that the order of evaluation alone says how many layers are alive again.
    """
    p = run.program
    inputs: list[Value] = []
    outputs: list[Value] = []

    def forward() -> Value:
        out = run.forward(x)
        inputs.extend([*run.in_order(), x, *run.masks.values()])
        return out

    def backward(g: Value) -> Sequence[Value]:
        count = len(run.trained)
        again = p.all_depend(inputs, outputs[0])
        again[: count + 1] = map(p.primal, again[: count + 1])
        new = dict(zip(inputs, again, strict=True))
        run.trained = [new[value] for value in run.trained]  # what the optimizer finds
        run.given = iter(run.trained)
        run.masks = {name: new[mask] for name, mask in run.masks.items()}
        return p.vjp([(run.forward(new[x]), g)], again[: count + 1])

    outputs.append(p.custom(forward, backward, inputs))
    return outputs[0]


def default_loss(
    p: Program,
    architecture: Architecture,
    workload: TrainingWorkload,
    backend: Backend,
    batch: Value,
    x: Value,
) -> list[Value]:
    """``trainer.py``, ``default_loss``: the loss from all logits, and the number of tokens."""
    size, width = architecture.hidden_size, workload.dtype_bytes
    normed = rms_norm(p, x, p.source(size, width=width))
    head = p.source(architecture.vocab_size, size, width=width)
    if workload.quantized:
        logits = p.quantized_matmul(normed, head, head.shape[0])
    else:
        logits = p.matmul(normed, p.swapped(head))
    rows = logits.shape[:2]
    mask = _of_the_rows(p, *rows)
    tokens = p.squeeze(p.op("Reduce", [mask], (1, 1), 4), (0, 1))
    targets = p.slice(batch, 1, 1, rows[1] + 1)
    each = cross_entropy(p, logits, targets, workload, backend)
    each = p.multiply(each, p.astype(mask, width))
    total = p.sum(p.astype(each, FLOAT32), (0, 1))
    return [p.divide(total, p.op("AsType", [tokens], ())), tokens]


def cross_entropy(
    p: Program, logits: Value, targets: Value, workload: TrainingWorkload, backend: Backend
) -> Value:
    """``nn.losses.cross_entropy`` of mlx 0.32.4: one kernel each way on a GPU.

    ``"naive"`` is that of earlier versions there. On the CPU the largest of a row is taken off.
    """
    rows = logits.shape[:2]
    if backend == "metal" and workload.loss == "fused":
        loss = p.op("CrossEntropy", [logits, targets], rows, FLOAT32, opaque=True)
        return p.astype(loss, logits.width)
    if backend == "cpu":
        most = p.stop_gradient(p.op("Reduce", [logits], (*rows, 1)))
        logits = p.subtract(logits, most)
    scores = p.squeeze(p.take_along_axis(logits, p.expand_dims(targets, 2)), (2,))
    sums = p.squeeze(p.op("LogSumExp", [logits], (*rows, 1)), (2,))
    return p.subtract(sums, scores)


def _of_the_rows(p: Program, batch_size: int, length: int) -> Value:
    """Which tokens lie between the first and the last that count, of each row."""
    lengths, steps = p.source(batch_size, 2, width=4), p.arange(length)
    first, last = p.slice(lengths, 1, 0, 1), p.slice(lengths, 1, 1, 2)
    after, before = p.compared("GreaterEqual", steps, first), p.compared("LessEqual", steps, last)
    return p.op("LogicalAnd", [after, before], after.shape)
