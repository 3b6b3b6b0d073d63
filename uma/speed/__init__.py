"""How fast: tokens per second of prompts and of generated text, as intervals."""

from uma.speed.decode import Host, Streamed, decode_tps, speculative_tps
from uma.speed.links import JACCL, RING, Link
from uma.speed.prefill import prompt_tps, time_to_first_token_s
from uma.speed.processor import Processor, processors_of
from uma.speed.rate import Calibration, NotKnown, Rate, Split
from uma.speed.stored import even_reads, gguf_reads, mlx_reads
from uma.speed.training import HostMemory, training_tps

__all__ = [
    "JACCL",
    "RING",
    "Calibration",
    "Host",
    "HostMemory",
    "Link",
    "NotKnown",
    "Processor",
    "Rate",
    "Split",
    "Streamed",
    "decode_tps",
    "even_reads",
    "gguf_reads",
    "mlx_reads",
    "processors_of",
    "prompt_tps",
    "speculative_tps",
    "time_to_first_token_s",
    "training_tps",
]
