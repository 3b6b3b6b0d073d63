"""Time the estimator: commands from a cold start, and every model on every Mac as a library.

An estimate of the second kind has all terms, the verdict and the largest buffer; with
``--inverses`` the largest context that fits as well. The models are the first ``MODELS`` of the
catalog, the Macs one of each chip and memory.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODELS, MACS = 252, 56
LIMIT_S, COLD_LIMIT_MS = 5.0, 120.0
COLD = ["estimate", "llama-3-70b", "--machine", "mac-studio-m2-ultra-192"]
TRAINING_LIMIT_MS = 150.0
TRAINING = (  # fits with inverses; exceeds, so that what makes it fit is looked for
    "llama-3-8b --train lora --machine rtx-4090 --quant nf4 --grad-checkpoint",
    "llama-3-8b --train full --machine rtx-4090 --host-ram 128GB",
    "llama-3-70b --train full --machine 8xh100 --devices 8 --zero-stage 3 --host-ram 1024GB",
    "llama-3-70b --train lora --machine 2xrtx-4090 --devices 2 --fsdp full --host-ram 64GB",
    "deepseek-v3 --train lora --machine 8xh100 --host-ram 2048GB",
    "llama-3-8b --train lora --machine mac-studio-m2-ultra-192",
    "llama-3-8b --train dora --machine mac-studio-m2-ultra-192 --trainer uma",
    "gemma-3-27b --train lora --machine macbook-pro-m3-max-36gb",
    "qwen3-30b-a3b --train lora --machine mac-studio-m2-ultra-192",
)


def cold_ms(arguments: list[str], runs: int, cache: str) -> float:
    """Processor time of a Python process in milliseconds, the least of some runs.

    Its bytecode is kept in the folder ``cache``, and written by a run that does not count.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, 3):  # 3: it does not fit
            raise SystemExit(f"{' '.join(command)} left {done.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)

    once()
    return 1000 * min(once() for _ in range(runs))


def macs(count: int) -> list[Any]:
    """Machines of the catalog, one of each chip and memory."""
    from uma.machine.named import machine_of_rows
    from uma.machine.names import Found, sold_machines

    entries = [entry for entry in sold_machines() if entry[0].apple]
    found = [machine_of_rows(Found(one, memory_gib=one[0].memory_gib)) for one in entries]
    return list({(mac.chip, mac.memory_bytes): mac for mac in found}.values())[:count]


def sources(count: int) -> Iterator[Any]:
    """Models of the catalog in 4 bits, in its order."""
    from uma.catalog import models
    from uma.checkpoint.source import locate

    for model in models()[:count]:
        yield locate(model.hf_id, bits=4)


def every_estimate(count: int, machines: list[Any], inverses: bool) -> tuple[int, int]:
    """Estimate models on machines; how many estimates, and how many of them fit."""
    from uma.errors import UmaError
    from uma.plan.inference import Request
    from uma.plan.inverses import largest_context
    from uma.plan.mlx_case import mlx_case

    done = fitting = 0
    request = Request(context_tokens=8192)
    for source in sources(count):
        try:
            case = mlx_case(source, machines[0], request)
        except UmaError as error:
            print(f"{source.name}: {error}", file=sys.stderr)
            continue
        for machine in machines:
            one = case.on(machine)
            fitting += one.estimate().ledger.verdict == "fits"
            if inverses:
                largest_context(one)
            done += 1
    return done, fitting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=MODELS)
    parser.add_argument("--macs", type=int, default=MACS)
    parser.add_argument("--inverses", action="store_true")
    parser.add_argument("--runs", type=int, default=7, help="cold starts; the least counts")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        bare = cold_ms(["-c", "pass"], chosen.runs, cache)
        cold = cold_ms(["-m", "uma", *COLD], chosen.runs, cache)
        training = {
            words: round(cold_ms(["-m", "uma", "estimate", *words.split()], chosen.runs, cache), 1)
            for words in TRAINING
        }
    machines = macs(chosen.macs)
    gc.disable()  # as the commands do
    start = time.process_time()
    done, fitting = every_estimate(chosen.models, machines, chosen.inverses)
    spent = time.process_time() - start
    figures = {
        "cold_ms": round(cold, 1),
        "python_ms": round(bare, 1),
        "cold_ratio": round(cold / COLD_LIMIT_MS, 3),
        "training_ms": training,
        "training_ratio": round(max(training.values()) / TRAINING_LIMIT_MS, 3),
        "estimates": done,
        "fitting": fitting,
        "macs": len(machines),
        "all_s": round(spent, 3),
        "all_ratio": round(spent / LIMIT_S, 3),
        "per_estimate_us": round(1e6 * spent / max(1, done), 1),
    }
    if chosen.json:
        print(json.dumps(figures, indent=2))
    else:
        print(f"uma {' '.join(COLD)}: {cold:.0f} ms CPU, Python itself {bare:.0f};")
        print(f"  {figures['cold_ratio']} of the {COLD_LIMIT_MS:.0f} ms that are allowed")
        for words, spent_ms in training.items():
            print(f"uma estimate {words}: {spent_ms:.0f} ms CPU")
        print(f"  {figures['training_ratio']} of the {TRAINING_LIMIT_MS:.0f} ms that are allowed")
        print(f"{done:,} estimates on {len(machines)} Macs: {spent:.2f} s CPU, {fitting:,} fit;")
        print(f"  {figures['all_ratio']} of the {LIMIT_S:.0f} s that are allowed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
