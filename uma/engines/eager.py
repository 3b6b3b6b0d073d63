"""Models whose attention has no fused form in transformers."""

# torch's scaled dot product has no form for soft caps and sinks: ``_supports_sdpa`` of their
# classes is false (transformers 5.24), and eager attention is the default, in training too.
EAGER_BY_DEFAULT = frozenset({"bloom", "deepseek_v4", "gemma2", "gpt_oss", "mimo_v2_flash", "mpt"})
