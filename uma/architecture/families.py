"""Which file of this folder lays out which module: read before any of them is imported."""

from importlib import import_module

from uma.architecture.config import Module, Modules

# ``elsewhere`` and ``older`` have the models that mlx-lm lacks; the others are named by its files
# (0.32.2).
FAMILIES = {
    "bailing": (
        "bailing_hybrid",
        "bailing_moe",
        "bailing_moe_linear",
        "bailing_moe_v3",
    ),
    "bitnet": ("bitnet",),
    "convolution": (
        "jamba",
        "lfm2",
        "lfm2_moe",
        "mamba",
    ),
    "deepseek_v4": ("deepseek_v41",),
    "dense": (
        "cohere",
        "cohere2",
        "exaone4",
        "glm4",
        "llama",
        "mimo",
        "ministral3",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
        "telechat3",
    ),
    "dense_variants": (
        "apertus",
        "ernie4_5",
        "glm",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "internlm2",
        "internlm3",
        "minicpm",
        "nemotron",
        "nemotron-nas",
        "phi",
        "seed_oss",
        "stablelm",
    ),
    "earlier": (
        "gptj",
        "lille-130m",
        "olmo",
        "openelm",
        "phi3small",
        "phixtral",
        "plamo",
        "talkie",
    ),
    "experts": (
        "glm4_moe",
        "gpt_oss",
        "llama4",
        "minimax",
        "mixtral",
        "phimoe",
        "qwen3_moe",
    ),
    "experts_by_layer": (
        "dbrx",
        "exaone_moe",
        "laguna",
        "mellum",
        "mimo_v2_flash",
        "minimax_m3_vl",
    ),
    "experts_variants": (
        "afmoe",
        "deepseek",
        "dots1",
        "ernie4_5_moe",
        "granitemoe",
        "olmoe",
        "qwen2_moe",
        "solar_open",
    ),
    "gemma": (
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n",
        "gemma4_text",
    ),
    "gpt": (
        "exaone",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "nanochat",
        "qwen",
    ),
    "kimi": (
        "kimi_k3",
        "kimi_linear",
    ),
    "latent": (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "minicpm3",
        "mistral4",
        "youtu_llm",
    ),
    "linear_attention": (
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_next",
    ),
    "looped": (
        "afm7",
        "iquestloopcoder",
        "longcat_flash",
        "longcat_flash_ngram",
        "nanbeige",
    ),
    "mamba": (
        "falcon_h1",
        "granitemoehybrid",
        "mamba2",
        "nemotron_h",
    ),
    "muse": (
        "muse_glimmer",
        "muse_spark",
    ),
    "recurrences": (
        "baichuan_m1",
        "gear",
        "plamo2",
        "plamo3",
        "recurrent_gemma",
        "rwkv7",
    ),
    "step": (
        "Klear",
        "hunyuan",
        "llama4_text",
        "spark2_5",
        "step3p5",
    ),
    "older": (
        "bloom",
        "mpt",
        "opt",
    ),
    "elsewhere": (
        "arcee",
        "deepseek_ref",
        "deepseek_v4",
        "exaone4_5",
        "falcon",
        "glm5_next",
        "grok-1",
        "hunyuan_v1_moe",
        "hy_v3",
        "minimax_m1",
        "minimax_m3",
        "minimax_text_01",
        "mistral_large4",
        "mllama",
        "olmo_hf",
        "qwen4_exp",
        "step3p7",
    ),
}
NAMES = {name: family for family, names in FAMILIES.items() for name in names}
ELSEWHERE = frozenset(FAMILIES["elsewhere"] + FAMILIES["older"])
MODULES = NAMES.keys() - ELSEWHERE


def module_named(name: str) -> Module:
    """The function that lays out ``name``, one of ``NAMES``, and its defaults."""
    return modules_of(NAMES[name])[name]


def modules_of(family: str) -> Modules:
    """All that one file lays out, by name."""
    modules: Modules = import_module(f"uma.architecture.{family}").MODULES
    return modules
