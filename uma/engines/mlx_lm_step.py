"""One training step of ``mlx_lm.lora`` as the graph that MLX evaluates (mlx-lm 0.32.2).

``tuner/trainer.py``, ``train``: forward, gradients and update are one compiled function.
"""

from collections.abc import Sequence

from uma.architecture.layers import Architecture
from uma.engines.mlx_attention import FLOAT32, rms_norm
from uma.engines.mlx_layers import LayerProgram
from uma.engines.mlx_updates import UPDATES
from uma.memory.adapters import trained_layers
from uma.memory.mlx_program import Program, Value
from uma.workload import Backend, TrainingWorkload


def step_bytes(architecture: Architecture, workload: TrainingWorkload, backend: Backend) -> int:
    """The peak of a step above the parameters, gradients and states that are there before."""
    p = Program()
    roots = step_roots(p, architecture, workload, backend)
    return p.compiled_most(roots, backend) - sum(x.nbytes for x in p.sources)


def forward_bytes(architecture: Architecture, workload: TrainingWorkload, backend: Backend) -> int:
    """The peak of ``evaluate`` on one batch, which is not compiled."""
    p = Program()
    x = _layers(p, architecture, workload, backend, None)
    loss = default_loss(p, architecture, workload, x)
    return p.most([loss], backend) - sum(x.nbytes for x in p.sources)


def step_roots(
    p: Program, architecture: Architecture, workload: TrainingWorkload, backend: Backend
) -> list[Value]:
    """The step; what is evaluated: parameters, states, the loss."""
    runs: list[LayerProgram] = []
    x = _layers(p, architecture, workload, backend, runs)
    parameters = [value for run in runs for value in run.in_order()]
    loss = default_loss(p, architecture, workload, x)
    gradients = p.vjp([(loss, p.scalar(FLOAT32))], parameters)
    return [*updated(p, workload.optimizer, parameters, gradients), loss]


def _layers(
    p: Program,
    architecture: Architecture,
    workload: TrainingWorkload,
    backend: Backend,
    runs: list[LayerProgram] | None,
) -> Value:
    """Embedding and layers; with ``runs`` they are trained, and put there."""
    shape = workload.batch_size, max(1, workload.max_seq_length - 1)
    table = p.source(architecture.vocab_size, architecture.hidden_size, width=workload.dtype_bytes)
    x = p.take(table, p.source(*shape, width=4))
    trained = {id(layer) for layer in trained_layers(architecture, workload)}
    for layer in architecture.layers:
        run = LayerProgram(
            p,
            architecture,
            workload,
            layer,
            shape[1],
            backend,
            differentiated=runs is not None and id(layer) in trained,
            slice_bytes=None,
            inline=runs is not None,
        )
        again = runs is not None and workload.grad_checkpoint
        x = checkpointed(run, x) if again else run.forward(x)
        if runs is not None:
            runs.append(run)
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
        inputs.extend([*run.trained, x, *run.masks.values()])
        return out

    def backward(g: Value) -> Sequence[Value]:
        again = p.all_depend(inputs, outputs[0])
        again[: len(run.trained) + 1] = map(p.primal, again[: len(run.trained) + 1])
        count = len(run.trained)
        run.given = iter(again[:count])
        run.masks = dict(zip(run.masks, again[count + 1 :], strict=True))
        return p.vjp([(run.forward(again[count]), g)], again[: count + 1])

    outputs.append(p.custom(forward, backward, inputs))
    return outputs[0]


def default_loss(
    p: Program, architecture: Architecture, workload: TrainingWorkload, x: Value
) -> Value:
    """``trainer.py``, ``default_loss``: all logits, their logarithmic sum, the targets' scores."""
    size, width = architecture.hidden_size, workload.dtype_bytes
    normed = rms_norm(p, x, p.source(size, width=width))
    head = p.source(architecture.vocab_size, size, width=width)
    if workload.quantized:
        logits = p.quantized_matmul(normed, head, head.shape[0])
    else:
        logits = p.matmul(normed, p.swapped(head))
    rows = logits.shape[:2]
    targets = p.expand_dims(p.source(*rows, width=4), 2)
    scores = p.squeeze(p.take_along_axis(logits, targets), (2,))
    sums = p.squeeze(p.op("LogSumExp", [logits], (*rows, 1)), (2,))
    mask = p.source(*rows, width=FLOAT32)
    each = p.multiply(p.subtract(sums, scores), mask)
    return p.divide(p.sum(p.astype(each, FLOAT32), (0, 1)), p.scalar(FLOAT32))


def updated(
    p: Program, optimizer: str, parameters: Sequence[Value], gradients: Sequence[Value]
) -> list[Value]:
    """New parameters, then new states."""
    made: list[Value] = []
    states: list[Value] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        new, kept = UPDATES[optimizer](p, parameter, gradient)
        made.append(new)
        states += kept
    return [*made, *states]
