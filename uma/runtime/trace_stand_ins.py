"""Opaque stand-ins for operations that a graph on Linux shows decomposed, or cannot show.

MLX's CPU backend has no fused attention, norms or rotation, and mlx-lm steps recurrences token by
token where there is no Metal kernel. While a model is traced for Metal, each of these is replaced
by one operation with the outputs and the workspace of the kernel. ``mx.contiguous`` and the casts
to and from FP8 are replaced on both backends, because MLX cannot export them.

In the graph a stand-in is a ``Depends`` of templates for its outputs, filled with its number, on
its inputs.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from uma.memory.metal_activations import FEW_QUERIES, FUSED_FEW, FUSED_MANY, MAX_GROUPED_QUERIES
from uma.quantization import FLOAT32
from uma.workload import Backend

# Where each is fused, or why it cannot be exported (mlx 0.32.4; mlx-lm 0.32.2).
SOURCES = {
    "attention": "mlx/backend/metal/scaled_dot_product_attention.cpp",
    "rms_norm": "mlx/backend/metal/normalization.cpp, RMSNorm::eval_gpu",
    "layer_norm": "mlx/backend/metal/normalization.cpp, LayerNorm::eval_gpu",
    "rope": "mlx/backend/metal/rope.cpp, RoPE::eval_gpu",
    "cross_entropy": "mlx/fast_primitives.h, CrossEntropy and CrossEntropyVJP",
    "compiled": "mlx/backend/metal/compiled.cpp, Compiled::eval_gpu",
    "contiguous": "mlx/backend/gpu/primitives.cpp, Contiguous; mlx/export.cpp does not list it",
    "gated_delta": "mlx_lm/models/gated_delta.py, _gated_delta_kernel_impl",
    "ssm": "mlx_lm/models/ssm.py, ssm_update_kernel",
    "wkv7": "mlx_lm/models/rwkv7.py, wkv7_kernel",
    "attention_residual": "mlx_lm/models/kimi_k3.py, _attn_res_kernel",
    "sinkhorn": "mlx_lm/models/deepseek_v41.py, _make_sinkhorn_kernel",
    "fp8": "mlx/fast_primitives.h, ConvertFP8; mlx/export.cpp does not list it",
    "expert_routing": "mlx_lm/kernels/expert_routing.py",
    "norm_add_norm": "mlx_lm/kernels/norm_add_norm.py",
    "expert_combine": "mlx_lm/kernels/post_expert_norm_combine.py",
    "qk_norm": "mlx_lm/kernels/qk_norm.py",
    "qk_norm_rope": "mlx_lm/kernels/qk_norm_rope.py",
    "norm_gate": "mlx_lm/kernels/rms_norm_sigmoid_gate.py",
    "bitlinear": "mlx_lm/models/bitlinear_layers.py, make_bitlinear_kernel",
}

# Custom Metal kernels: the module of mlx-lm and the global that holds one, the stand-in.
KERNELS = (
    ("mlx_lm.models.gated_delta", "_gated_delta_kernel", "gated_delta"),
    ("mlx_lm.models.gated_delta", "_gated_delta_kernel_masked", "gated_delta"),
    ("mlx_lm.models.gated_delta", "_gated_delta_kernel_vec", "gated_delta"),
    ("mlx_lm.models.gated_delta", "_gated_delta_kernel_vec_masked", "gated_delta"),
    ("mlx_lm.models.gated_delta", "_gated_delta_kernel_packed", "gated_delta"),
    ("mlx_lm.models.ssm", "_ssm_kernel", "ssm"),
    ("mlx_lm.models.rwkv7", "_wkv7_kernel", "wkv7"),
    ("mlx_lm.models.kimi_k3", "_attn_res_kernel", "attention_residual"),
    ("mlx_lm.models.deepseek_v41", "_sinkhorn_kernel", "sinkhorn"),
    ("mlx_lm.models.bitlinear_layers", "_bitlinear_kernel", "bitlinear"),
    ("mlx_lm.kernels.expert_routing", "_routing_kernel", "expert_routing"),
    ("mlx_lm.kernels.norm_add_norm", "_norm_add_norm_kernel", "norm_add_norm"),
    ("mlx_lm.kernels.norm_add_norm", "_norm_add_kernel", "norm_add_norm"),
    ("mlx_lm.kernels.norm_add_norm", "_pre_norm_kernel", "norm_add_norm"),
    ("mlx_lm.kernels.post_expert_norm_combine", "_expert_combine_kernel", "expert_combine"),
    ("mlx_lm.kernels.qk_norm", "_qk_norm_kernel", "qk_norm"),
    ("mlx_lm.kernels.qk_norm_rope", "_qk_norm_rope_kernel", "qk_norm_rope"),
    ("mlx_lm.kernels.rms_norm_sigmoid_gate", "_norm_gate_kernel", "norm_gate"),
)

VECTOR_KEYS = 1024  # scaled_dot_product_attention.cpp: two passes from so many keys on Max, Ultra
VECTOR_BLOCKS = 128  # sdpa_vector_2pass: of Max chips up to 8,192 keys and of Ultra ones
SMALL_INTEGERS = 128  # that every dtype tells apart
MARK = 1 << 30  # added to the number of a stand-in, so that no other constant is taken for one


@dataclass(frozen=True, slots=True)
class StandIn:
    """One replaced operation: its name, workspace in bytes, and inputs that it may overwrite."""

    name: str
    workspace_bytes: int = 0
    donors: tuple[int, ...] = ()


class StandIns:
    """The operations replaced so far; a template in the graph holds an index into ``made``."""

    def __init__(self) -> None:
        self.made: list[StandIn] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({stand_in.name for stand_in in self.made}))

    def operation(
        self,
        stand_in: StandIn,
        inputs: Sequence[Any],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Arrays of the given shapes and dtypes that depend on ``inputs``."""
        self.made.append(stand_in)
        number = mx.array(MARK + len(self.made) - 1, mx.int32)
        templates = [mx.broadcast_to(number, shape).astype(dtype) for shape, dtype in outputs]
        made: list[mx.array] = mx.depends(templates, [x for x in inputs if _is_array(x)])
        return made

    def marked(self, constant: mx.array) -> StandIn | None:
        """The stand-in whose templates are made of ``constant``."""
        if constant.dtype != mx.int32 or constant.size != 1:
            return None
        number: Any = constant.item()
        index = int(number) - MARK
        return self.made[index] if 0 <= index < len(self.made) else None

    def one(self, stand_in: StandIn, inputs: Sequence[Any], like: mx.array) -> mx.array:
        return self.operation(stand_in, inputs, [(like.shape, like.dtype)])[0]

    def contiguous(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return self.one(StandIn("contiguous"), [x], x)

    def to_fp8(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return self.operation(StandIn("fp8"), [x], [(x.shape, mx.uint8)])[0]

    def from_fp8(self, x: mx.array, dtype: mx.Dtype = mx.bfloat16, **_: Any) -> mx.array:
        return self.operation(StandIn("fp8"), [x], [(x.shape, dtype)])[0]

    def rms_norm(self, x: mx.array, weight: Any, *_: Any, **__: Any) -> mx.array:
        return self.one(StandIn("rms_norm", donors=(0,)), [x, weight], x)

    def layer_norm(self, x: mx.array, weight: Any, bias: Any, *_: Any, **__: Any) -> mx.array:
        return self.one(StandIn("layer_norm", donors=(0,)), [x, weight, bias], x)

    def cross_entropy(self, logits: mx.array, targets: mx.array) -> mx.array:
        inputs, out = [logits, targets], (targets.shape, mx.float32)
        return self.operation(StandIn("cross_entropy"), inputs, [out])[0]

    def slope(
        self, logits: mx.array, targets: mx.array, losses: mx.array, cotangent: mx.array
    ) -> mx.array:
        """The gradient of ``cross_entropy``, over the logits where nothing else needs them."""
        inputs = [logits, targets, losses, cotangent]
        return self.one(StandIn("cross_entropy", donors=(0,)), inputs, logits)

    def rope(self, x: mx.array, *_: Any, freqs: Any = None, offset: Any = 0, **__: Any) -> mx.array:
        return self.one(StandIn("rope", donors=(0,)), [x, freqs, offset], x)

    def attention(self, fallback: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Fused where Metal has a kernel that it uses, else decomposed as there."""

        def attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
            batch, heads, queries, width = q.shape
            if not fused(q.shape, k.shape, v.shape):
                return fallback(q, k, v, **options)
            inputs = [q, k, v, options.get("mask"), options.get("sinks")]
            out = (batch, queries, heads, v.shape[-1])
            if queries > FEW_QUERIES:
                found = self.operation(StandIn("attention"), inputs, [(out, q.dtype)])[0]
                return found.transpose(0, 2, 1, 3)
            donors = (0,) if width == v.shape[-1] else ()
            space = _two_pass(q, k, v) if k.shape[2] >= VECTOR_KEYS else 0
            out = (batch, heads, queries, v.shape[-1])
            return self.operation(StandIn("attention", space, donors), inputs, [(out, q.dtype)])[0]

        return attend

    def kernel(self, name: str) -> Callable[..., list[mx.array]]:
        def call(
            *, inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            outputs = list(zip(output_shapes, output_dtypes, strict=True))
            return self.operation(StandIn(name), inputs, outputs)

        return call

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One operation where the result has the size of an input, as elementwise ones have."""

        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            inputs = [x for x in (*arguments, *options.values()) if _is_array(x)]
            largest = max((x.size for x in inputs), default=0)
            if not _is_array(result) or result.size != largest:
                return result
            donors = tuple(i for i, x in enumerate(inputs) if x.size == largest)
            return self.one(StandIn("compiled", donors=donors), inputs, result)

        return call


def fused(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> bool:
    """Whether Metal runs a fused kernel: ``use_fallback``, ``has_fused_kernel`` of the source."""
    queries, width, values = q[2], q[3], v[3]
    if queries > FEW_QUERIES:
        return width == values and width in FUSED_MANY
    head = (width == values and width in FUSED_FEW) or (width, values) == (192, 128)
    return head and queries <= k[2] and queries * (q[1] // k[1]) <= MAX_GROUPED_QUERIES


def _two_pass(q: mx.array, k: mx.array, v: mx.array) -> int:
    """Partial results of ``sdpa_vector_2pass`` with their sums and maxima."""
    batch, heads, queries, _ = q.shape
    rows = int(batch * heads * queries) * VECTOR_BLOCKS
    return rows * (int(v.shape[-1]) * q.dtype.size + 2 * FLOAT32)


def _distinct(zeros: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.zeros`` whose arrays differ: the export merges equal ones, which evaluation does not.

    It would take the keys' and the values' new slots of a growing cache for one array.
    """
    count = itertools.count(1)

    def distinct(shape: Any, dtype: Any = mx.float32, **options: Any) -> mx.array:
        if dtype == mx.bool_:
            return zeros(shape, dtype, **options)
        return mx.full(shape, mx.array(next(count) % SMALL_INTEGERS, dtype))

    return distinct


def _is_array(x: Any) -> bool:
    return isinstance(x, mx.array)


@contextmanager
def replaced(stand_ins: StandIns, backend: Backend) -> Iterator[None]:
    """Replace the operations while a model is traced."""
    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        for name in ("contiguous", "to_fp8", "from_fp8"):
            stack.enter_context(patch.object(mx, name, getattr(stand_ins, name)))
        stack.enter_context(patch.object(mx, "zeros", _distinct(mx.zeros)))
        if backend == "metal":
            for owner, name, new in _metal(stand_ins):
                stack.enter_context(patch.object(owner, name, new))
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run functions given to ``mx.compile`` as they are; MLX cannot say whether it does already."""
    runs: list[None] = []

    def probe(x: mx.array) -> mx.array:
        runs.append(None)
        return x

    compiled = mx.compile(probe)
    for _ in range(2):
        compiled(mx.array(0))
    mx.disable_compile()
    try:
        yield
    finally:
        if len(runs) == 1:
            mx.enable_compile()


def _metal(stand_ins: StandIns) -> Iterator[tuple[Any, str, Any]]:
    yield mx, "default_device", lambda: mx.gpu
    yield mx.metal, "is_available", lambda: True
    attention = mx.fast.scaled_dot_product_attention
    yield mx.fast, "scaled_dot_product_attention", stand_ins.attention(attention)
    for name in ("rms_norm", "layer_norm", "rope"):
        yield mx.fast, name, getattr(stand_ins, name)
    for module, kernel, name in KERNELS:
        if module in sys.modules:
            yield sys.modules[module], kernel, stand_ins.kernel(name)
    yield from _compiled(stand_ins)


def _compiled(stand_ins: StandIns) -> Iterator[tuple[Any, str, Any]]:
    """Compiled functions among the globals of mlx.nn and of the modules of mlx-lm loaded."""
    kind = type(mx.compile(lambda x: x))
    for name, module in list(sys.modules.items()):
        if name.startswith(("mlx_lm.models", "mlx.nn.layers")) or name == "mlx.nn":
            for key, value in list(vars(module).items()):
                if type(value) is kind:
                    yield module, key, stand_ins.compiled(value)
