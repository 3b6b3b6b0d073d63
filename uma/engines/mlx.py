"""The memory of mlx-lm's inference, all terms together (mlx 0.32.4, mlx-lm 0.32.2).

What MLX's own counters leave out (the process, Metal's context) is not a term.
"""

from dataclasses import replace

from uma.architecture.layers import (
    Architecture,
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    Recurrent,
)
from uma.engines.mlx_phases import STEPS_IN_FLIGHT, Generation, Moment, Shared, chunks
from uma.engines.mlx_within import decode_within, prefill_within
from uma.memory.activations import (
    Call,
    attended_tokens,
    kv_widths,
    pair_bytes,
    score_bytes,
)
from uma.memory.metal_activations import is_fused
from uma.memory.term import MemoryTerm, Phase
from uma.quantization import FLOAT32
from uma.workload import Backend, Inference

SAMPLING_ARRAYS = 4  # sample_utils.py, top-p: order, sorted and summed probabilities, restored
PAIRS_AHEAD = 5  # ssm.py, ssm_attn: arrays over pairs within nine operations
NUM_DRAFT_TOKENS = 3  # generate.py, --num-draft-tokens

# Kinds of recurrent layers whose temporaries were measured; of others the sizes are only similar.
MEASURED_RECURRENT = frozenset({"gated_delta", "mamba", "mamba2", "short_conv"})

Known = dict[tuple[str, Inference], Moment]

CPU_SOURCE = "arrays alive together in MLX's order of evaluation"
METAL_SOURCE = "command buffers in flight, from MLX's source; not run on a Mac"


def inference_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    *,
    backend: Backend = "metal",
    activation_bytes: int = 2,
    known: Known | None = None,
    shared: Shared | None = None,
) -> tuple[MemoryTerm, ...]:
    """Every term of one generation, by phase; their sum in a phase is its predicted peak.

    ``activation_bytes`` is 4 where the weights were made float32. On the CPU backend evaluation
    stays at these sizes only under a memory limit (``largest_output_bytes``); without one it runs
    ahead of them. ``known`` keeps what was worked out for other workloads of the same model in the
    same form, and ``shared`` what holds for every form of it with activations as wide. MLX's pool
    of freed buffers is not among them: its size is a choice of the plan.
    """
    run = Generation(
        architecture,
        workload,
        weights.size_bytes,
        backend,
        activation_bytes,
        {} if known is None else known,
        {} if shared is None else shared,
    )
    source = METAL_SOURCE if backend == "metal" else CPU_SOURCE
    terms = [weights]
    if run.state_bytes:
        states = run.state_bytes
        terms.append(MemoryTerm("recurrent_state", states, "exact", "cache.py, ArraysCache"))
    if workload.longest_prompt_tokens > 1:
        terms += _phase_terms("prefill", _prompts(run), source)
    terms += _phase_terms("decode", decode_within(run), source)
    logits = _logits_bytes(architecture.vocab_size, workload.batch_size, activation_bytes)
    terms.append(MemoryTerm("logits", logits, "bound", "generate.py, two steps", "decode"))
    return tuple(terms)


def _prompts(run: Generation) -> Moment:
    """Prefill of the prompts that run together, beside the caches of all sequences."""
    workload = run.workload
    together = min(workload.prefill_batch_size or workload.batch_size, workload.batch_size)
    if together == workload.batch_size:
        return prefill_within(run)
    fewer = replace(workload, batch_size=together)
    moment = prefill_within(replace(run, workload=fewer))
    return Moment(moment.cache_bytes * workload.batch_size // together, moment.transient)


def _phase_terms(phase: Phase, moment: Moment, source: str) -> list[MemoryTerm]:
    transient = moment.transient
    terms = [
        MemoryTerm("kv_cache", moment.cache_bytes, "exact", "cache.py, by shape", phase),
        MemoryTerm("activations", transient.activations, "bound", source, phase),
        MemoryTerm("attention", transient.attention, "bound", source, phase),
    ]
    return [term for term in terms if term.size_bytes or term.name == "activations"]


def notes(architecture: Architecture) -> tuple[str, ...]:
    """What the terms of this architecture do not model closely."""
    mixers = [mixer for layer in architecture.layers for mixer in layer.mixers]
    found = []
    kinds = sorted({m.kind for m in mixers if isinstance(m, Recurrent)} - MEASURED_RECURRENT)
    if kinds:
        found.append(f"temporaries of {', '.join(kinds)} layers are taken from similar ones")
    if any(isinstance(m, LatentAttention) and m.index_head_dim is not None for m in mixers):
        found.append("the sparse-attention indexer's temporaries are not modelled")
    return tuple(found)


def draft_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    *,
    activation_bytes: int = 2,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> tuple[MemoryTerm, ...]:
    """What a draft model adds: its weights, its cache, and logits of the tokens to verify.

    It runs before or after the main model, never beside it, so its smaller temporaries add none.
    """
    run = Generation(
        architecture, replace(workload, kv_bits=None), weights.size_bytes, "cpu", activation_bytes
    )
    token = 2 * architecture.vocab_size * activation_bytes
    more = workload.batch_size * num_draft_tokens * token
    terms = [replace(weights, name="draft_weights")]
    if workload.longest_prompt_tokens > 1:
        terms.append(_draft_cache("prefill", prefill_within(run).cache_bytes + run.state_bytes))
    terms.append(_draft_cache("decode", decode_within(run).cache_bytes + run.state_bytes))
    terms.append(MemoryTerm("logits", more, "bound", "tokens to verify", "decode"))
    return tuple(terms)


def _draft_cache(phase: Phase, size_bytes: int) -> MemoryTerm:
    return MemoryTerm("draft_kv_cache", size_bytes, "exact", "cache.py, by shape", phase)


def largest_matrix_bytes(architecture: Architecture, weights: MemoryTerm) -> int:
    """The largest single array of the weights, taken as all in the same bits."""
    largest = architecture.largest_parameter
    return largest * weights.size_bytes // max(1, architecture.num_parameters)


def largest_buffer_bytes(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    *,
    backend: Backend = "metal",
    activation_bytes: int = 2,
) -> int:
    """The largest single array: a matrix of the weights, or what a run computes."""
    output = largest_output_bytes(
        architecture, weights, workload, backend=backend, activation_bytes=activation_bytes
    )
    return max(largest_matrix_bytes(architecture, weights), output)


def largest_output_bytes(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    *,
    backend: Backend = "metal",
    activation_bytes: int = 2,
) -> int:
    """The largest array that a run computes: keys or values, scores, projections, logits.

    Under ``mx.set_memory_limit`` of the predicted peak less this, the peak holds: MLX compares
    after it has allocated the outputs of an operation, and only then waits for running ones
    (mlx 0.32.4, ``transforms.cpp``, ``eval_impl``). A Mamba-2 block makes several equal arrays
    before that, which count together. Waiting takes time: on the CPU about half of prefill's more
    at this limit, a tenth at the peak itself (``scripts/probe_peak.py``).
    """
    run = Generation(architecture, workload, weights.size_bytes, backend, activation_bytes)
    sizes = [workload.batch_size * architecture.vocab_size * activation_bytes]
    ends = [(tokens, cached) for _, tokens, cached in chunks(workload)]
    for tokens, cached in (*ends, (1, workload.context_tokens - 1)):
        call = run.call(tokens, cached)
        sizes += [_layer_output(layer, call, backend) for layer, _ in run.kinds]
    return max(sizes)


def _layer_output(layer: Layer, call: Call, backend: Backend) -> int:
    sizes = [0]
    for part in layer.feed_forward:
        if isinstance(part, FeedForward):
            sizes.append(call.array(part.intermediate_size))
        else:
            width = max(part.moe_intermediate_size, call.activation_bytes)
            sizes.append(call.array(part.num_experts_per_tok * width))
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrent):
            sizes.append(PAIRS_AHEAD * pair_bytes(mixer, call) if mixer.kind == "mamba2" else 0)
            continue
        fused = backend == "metal" and isinstance(mixer, Attention) and is_fused(mixer, call)
        sizes.append(0 if fused else score_bytes(mixer, call))
        keys = call.batch_size * attended_tokens(mixer, call) * max(kv_widths(mixer))
        sizes.append(keys * call.activation_bytes)
    return max(sizes)


def _logits_bytes(vocab_size: int, batch_size: int, activation_bytes: int) -> int:
    """Logits and log-probabilities of the steps in flight, and one sampler's arrays."""
    per_token = 2 * STEPS_IN_FLIGHT * activation_bytes + SAMPLING_ARRAYS * FLOAT32
    return batch_size * vocab_size * per_token
