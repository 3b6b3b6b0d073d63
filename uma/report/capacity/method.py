"""What a report says of itself: how its numbers come about, and what they leave out."""

METHOD = (
    "Memory is predicted term by term from a model's configuration, without loading it: the same "
    "figures as `uma estimate MODEL --machine NAME --json` gives for the same choice.",
    "A model fits if its largest phase is within the budget, is tight above it but within the "
    "limit, and exceeds above the limit. The budget is the smallest of the GPU's limit, the memory "
    "less a reserve for the system, and what the user allows.",
    "A context is prompt plus answer; the prompt that needs most memory is taken. Verdicts are for "
    "the whole context.",
    "Speeds follow from the bytes and operations of a step over the machine's bandwidth and rate, "
    "fitted to public measurements: eight in ten of those are within the interval.",
    "Machines with cards are compared by the best plan of `uma compare` for each.",
)

TERMS = {
    "weights": "the parameters in the format, scales included",
    "kv_cache": "keys and values of the context",
    "recurrent_state": "states of recurrent layers, which do not grow with the context",
    "activations": "what a step computes and has not freed yet",
    "attention": "scores of attention where they are stored",
    "logits": "scores of the vocabulary, and what sampling makes of them",
    "runtime_context": "what the process or the driver holds besides",
    "buffer_pool": "freed buffers kept for reuse, within what the budget leaves over",
    "other": "what making the weights takes while loading",
    "adapters": "the matrices of LoRA and DoRA",
    "gradients": "of what is trained",
    "optimizer_states": "moments of the optimizer",
    "master_weights": "copies in 32 bits where weights are trained in 16",
}

NOT_MODELLED = (
    "how good a model's answers are: size and bits are no ranking of quality",
    "images, sound and their encoders, beside the text decoder",
    "other programs that take memory or bandwidth at the same time",
    "throttling by heat, Low Power Mode, and running from a battery",
    "time to load a model, and to fetch it",
    "paging in MLX: its caches are contiguous; the column says what an engine with pages could do",
)

NEVER_RUN = (
    "this tool itself has not been run on a Mac by its developers: Metal's temporaries follow from "
    "MLX's source, and memory is checked against public measurements of others",
    "raised GPU limits, and training on Metal",
    "the plans on cards, which follow from public measurements",
)

SOURCES = (
    "chips, Macs, cards and models: the catalog of uma, each row with its source (uma/data)",
    "GPU limits of Macs: public readings of what Metal reports (uma/data/working_set.csv)",
    "memory of mlx-lm: its own classes, without weights, for every architecture (docs/memory.md)",
    "speeds: public measurements (docs/speed.md), with errors in docs/accuracy.md",
    "prices and power: makers' pages and launch prices, with their dates (uma/data)",
)
