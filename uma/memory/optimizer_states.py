"""What optimizers keep for each trained array, by its shape."""

from math import prod

from uma.frozen import dataclass
from uma.quantization import FLOAT32

BLOCK = 256  # elements of one scale (bitsandbytes 0.50, optim/optimizer.py, init_state: blocksize)
SMALL = 4096  # arrays below this stay in 32 bits (Optimizer8bit, min_8bit_size)
PAGED_SMALL = 10**5  # arrays of fewer elements are not paged (optimizer.py, get_state_buffer)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on the device, and those that a paged optimizer may move to the host."""

    device_bytes: int
    paged_bytes: int = 0

    def __add__(self, other: "States") -> "States":
        return States(self.device_bytes + other.device_bytes, self.paged_bytes + other.paged_bytes)


def torch_states(optimizer: str, shape: tuple[int, ...], width: int) -> States:
    """States of one array under PyTorch's or bitsandbytes' optimizers.

    PyTorch keeps them in the width of the parameter (torch 2.13, ``optim/adamw.py``,
    ``zeros_like``) and a float32 step; bitsandbytes in float32, or in bytes with a float32 scale
    for ``BLOCK`` elements and two tables of 256 float32 that all share (not counted here).
    """
    elements = prod(shape)
    if optimizer in ("adam", "adamw"):
        return States(2 * elements * width)
    if optimizer == "paged-adamw":
        return _paged(2 * elements * 4, elements)
    if optimizer in ("adamw-8bit", "paged-adamw-8bit"):
        if elements < SMALL:
            return States(2 * elements * 4)
        scales = 2 * 4 * -(-elements // BLOCK)
        if optimizer == "adamw-8bit":
            return States(2 * elements + scales)
        paged = _paged(2 * elements, elements)
        return States(paged.device_bytes + scales, paged.paged_bytes)
    if optimizer == "adafactor":
        return States(_factored(shape) * 4)
    if optimizer in ("sgd-momentum", "lion", "muon"):
        return States(elements * width)
    return States(0)  # plain SGD


def mlx_states(optimizer: str, shape: tuple[int, ...], width: int) -> States:
    """States of one array under MLX's optimizers, in the width of its gradient.

    mlx 0.32.4, ``optimizers/optimizers.py``, ``init_single`` of each: Adam and AdamW two arrays,
    SGD one even without momentum, Adafactor row and column sums of matrices, Muon and Lion one.
    AdamW in bytes is our own (``uma/runtime/lora/adam8bit.py``).
    """
    elements = prod(shape)
    if optimizer == "adamw-8bit" and elements >= SMALL:
        blocks = -(-elements // BLOCK)
        return States(2 * blocks * (BLOCK + 4))
    if optimizer == "adamw-8bit":
        return States(2 * elements * width)
    if optimizer in ("adam", "adamw"):
        return States(2 * elements * width)
    if optimizer == "adafactor":
        return States(_factored(shape) * width)
    return States(elements * width)


def _paged(size_bytes: int, elements: int) -> States:
    """``get_state_buffer``: small arrays stay on the device."""
    return States(size_bytes) if elements < PAGED_SMALL else States(0, size_bytes)


def _factored(shape: tuple[int, ...]) -> int:
    """Elements of second moments: sums over rows and over columns of what has two dimensions."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def adafactor_temporary_bytes(largest: int, width: int) -> int:
    """What Adafactor's update of the largest array makes, of so many elements.

    transformers 5.24, ``optimization.py``, ``Adafactor.step``: the square of the gradient beside
    its sum with a constant, and float32 copies of gradient and parameter if they are narrower.
    """
    return largest * FLOAT32 * (4 if width < FLOAT32 else 2)


def step_temporary_bytes(elements: int, width: int, *, foreach: bool) -> int:
    """What the update makes beside parameters, gradients and states.

    The ``foreach`` variant of AdamW holds the root of the second moments of all arrays at once
    (torch 2.13, ``optim/adamw.py``, ``_multi_tensor_adamw``: ``exp_avg_sq_sqrt``); fused and
    single ones one array at a time, which is not counted.
    """
    return elements * width if foreach else 0
