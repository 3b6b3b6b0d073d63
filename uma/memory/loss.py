"""The loss: copies of the logits, as programs make them.

A logit is one of ``vocab_size`` numbers a token; widths are bytes an element.
"""

from math import ceil

from uma.architecture.layers import Architecture
from uma.frozen import dataclass
from uma.memory.autograd import Buffer, Memory
from uma.quantization import FLOAT32


@dataclass(frozen=True, slots=True)
class Copies:
    """How a program computes cross-entropy from logits of 16 or 32 bits.

    ``shifts`` copies the float32 logits without the last token; ``keeps_logits`` is a name that
    keeps the 16-bit ones while the loss is computed, ``keeps_outputs`` one that keeps them through
    the backward pass. ``in_place`` kernels write the gradient over their input. ``chunks`` is the
    number of parts whose float32 copies are made one after another; ``slices`` that of parts in
    which head, loss and gradients are computed at once. ``compiled`` code reads the logits where
    they are and keeps nothing else. ``width`` is that of the loss, float32 unless a model's file
    does not upcast; ``converts_outputs`` is accelerate's copy of the outputs in float32. ``caps``
    bounds the logits by a tanh, whose result the backward pass needs.
    """

    shifts: bool = False
    keeps_logits: bool = True
    keeps_outputs: bool = False
    in_place: bool = False
    chunks: int = 1
    slices: int = 1
    compiled: bool = False
    width: int = FLOAT32
    converts_outputs: bool = False
    caps: bool = False


# transformers, loss/loss_utils.py, ForCausalLMLoss; before 4.46 in each modelling file.
TRANSFORMERS_45 = Copies(shifts=True, keeps_logits=False)
TRANSFORMERS_46 = Copies(shifts=True)  # until 4.49, which pads the labels instead
TRANSFORMERS = Copies()


def sliced(architecture: Architecture) -> Copies:
    """Liger's and Unsloth's: as many slices as the vocabulary is wider than the input.

    Liger-Kernel 0.5, ``ops/fused_linear_cross_entropy.py``, ``inc_factor``.
    """
    return Copies(slices=ceil(architecture.vocab_size / architecture.hidden_size))


class LossRun:
    """Forward and backward of head and loss over ``tokens`` rows of ``vocab_size``."""

    def __init__(
        self, memory: Memory, tokens: int, vocab_size: int, width: int, copies: Copies
    ) -> None:
        self.memory, self.width, self.copies = memory, width, copies
        self.logits = tokens * vocab_size
        self.saved: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.bounded: Buffer | None = None

    def _buffer(self, width: int, parts: int = 1) -> Buffer:
        return self.memory.buffer(self.logits * width // parts)

    def forward(self, input_bytes: int) -> None:
        """Logits, their float32 copies, and the log-softmax that the backward pass needs."""
        copies = self.copies
        if copies.slices > 1:
            self._sliced(input_bytes)
            return
        logits: Buffer | None = self._buffer(self.width)
        if copies.caps:
            self.bounded, logits = logits, self._buffer(self.width)
        if copies.compiled:
            assert logits is not None
            self.saved = [logits]
            return
        if copies.chunks > 1:
            assert logits is not None
            self.outputs, self.saved = [logits], [self._buffer(self.copies.width)]
            return
        wide = self._buffer(self.copies.width) if self.width < self.copies.width else logits
        if copies.keeps_outputs and logits is not None and wide is not None:
            self.outputs.append(logits if copies.keeps_logits else wide)
        if not copies.keeps_logits:
            logits = None
        last = self._buffer(self.copies.width) if copies.shifts else wide
        assert last is not None
        self.saved = [last if copies.in_place else self._buffer(self.copies.width)]
        del last, wide
        if copies.converts_outputs:
            converted = self._buffer(FLOAT32)
            if copies.keeps_outputs:
                self.outputs.append(converted)

    def _sliced(self, input_bytes: int) -> None:
        """Head, loss and their gradients a slice at a time; only the input's gradient is kept."""
        self.saved = [self.memory.buffer(input_bytes)]
        self.memory.passing(self.logits * (2 * self.width + FLOAT32) // self.copies.slices)

    def backward(self, input_bytes: int) -> Buffer:
        """The gradient of the head's input."""
        copies, parts = self.copies, self.copies.chunks
        if copies.slices > 1:
            return self.saved.pop()
        if copies.in_place:
            grad = self.saved.pop()
        elif copies.compiled:
            grad = self._buffer(self.width, parts)
        else:
            picked = self._buffer(self.copies.width, parts)  # of the negative log-likelihood
            grad = self._buffer(self.copies.width, parts)
            del picked
        if parts == 1:
            self.saved.clear()
        if copies.shifts:
            grad = self._buffer(self.copies.width)
        if self.width < self.copies.width and not copies.compiled:
            grad = self._buffer(self.width)
        self.saved.clear()
        if copies.caps:
            grad = self._buffer(self.width)
            self.bounded = None
        return self._input_gradient(grad, input_bytes)

    def _input_gradient(self, logits: Buffer, input_bytes: int) -> Buffer:
        """The product of the logits' gradient with the head."""
        return self.memory.buffer(input_bytes if logits else 0)
