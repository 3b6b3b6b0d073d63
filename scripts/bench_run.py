"""What `uma run` promises, measured: ledger, speed, tokens, start-up, budget, cache kinds.

    python scripts/bench_run.py [SECTION ...] [--model FOLDER] [--json]

Sections (all by default): ledger speed tokens startup budget terms. Speeds are ratios against
`mlx_lm.generate` in the same run, the two alternating. MODEL is an MLX folder; without it the
embedded default model is fetched and converted into uma's cache.
"""

import argparse
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALONE = ["--no-record", "--allow-concurrent"]
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # a checkout runs it without an installation
QUESTION = "What is the capital of France?"
LONG = (
    "Here is a report on a small town by a river. " * 16
    + "Summarize the report in one sentence, and name the river if it is named."
)
TOKENS = 32

Row = dict[str, Any]


def uma(*arguments: str, check: bool = True) -> Row:
    """The document that `uma run --json` prints, with the exit code."""
    command = [sys.executable, "-m", "uma", "run", *arguments, "--json", *ALONE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    document: Row = json.loads(done.stdout) if done.stdout else {}
    return document | {"exit_code": done.returncode}


def ledger(folder: Path) -> list[Row]:
    """Must show 1: a right answer, peak within 5 %, weights and cache exact."""
    run = uma(str(folder), QUESTION, "--temp", "0")
    rows = [{"check": "answer", "value": run["text"], "holds": "Paris" in run["text"]}]
    terms = [t for t in run["ledger"]["terms"] if t["name"] in ("weights", "kv_cache")]
    for t in terms:
        equal = t["predicted_bytes"] == t["measured_bytes"]
        rows.append({"check": f"{t['name']} {t['phase']}", "value": t, "holds": equal})
    return [*rows, peak_row("peak", run["ledger"], 0.05)]


def peak_row(name: str, found: Row, tolerance: float) -> Row:
    predicted, measured = found["predicted_peak_bytes"], found["measured_peak_bytes"]
    error = predicted / measured - 1
    value = {"predicted": predicted, "measured": measured, "error": round(error, 4)}
    return {"check": name, "value": value, "holds": abs(error) <= tolerance}


def first_output_s(command: list[str], skip: bytes = b"") -> tuple[float, str]:
    """Seconds until ``command`` writes to stdout after ``skip``, and all that it wrote."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    written, first = b"", 0.0
    while True:
        select.select([process.stdout], [], [])
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            break
        written += part
        answer = written.partition(skip)[2] if skip else written
        if not first and answer.strip():
            first = time.perf_counter() - start
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return first, written.decode()


def mlx_lm_run(folder: Path, prompt: str) -> tuple[float, float, float]:
    """First output in seconds, prompt and generation tokens/s of `mlx_lm.generate`."""
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", str(folder)]
    command += ["--prompt", prompt, "--max-tokens", str(TOKENS), "--temp", "0"]
    first, written = first_output_s(command, b"==========\n")
    rates = re.findall(r"([\d.]+) tokens-per-sec", written)
    return first, float(rates[0]), float(rates[1])


def uma_run(folder: Path, prompt: str) -> tuple[float, float, float]:
    """The same of `uma run`: the first output of one run, the rates of another."""
    options = [str(folder), prompt, "--max-tokens", str(TOKENS), "--temp", "0"]
    command = [sys.executable, "-m", "uma", "run", *options, *ALONE]
    first, _ = first_output_s(command)
    run = uma(*options)
    return first, run["prompt_tps"], run["generation_tps"]


def speed(folder: Path) -> list[Row]:
    """Must show 2: decode 2 times, prefill 8 times, first token in half the time.

    Medians of three alternating rounds. Both take the folder with its scales in float32, the form
    in which `mlx_lm.generate` is fastest on the CPU: in bfloat16 it takes 8 times as long, in the
    float16 that a GGUF file has, 30 times.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = cast_copy(folder, Path(temporary), "float32")
        rounds = [(mlx_lm_run(copy, LONG), uma_run(copy, LONG)) for _ in range(3)]
    theirs, ours = (
        [statistics.median(r[side][i] for r in rounds) for i in range(3)] for side in (0, 1)
    )
    return [
        ratio_row("decode", ours[2], theirs[2], lambda r: r >= 2),
        ratio_row("prefill", ours[1], theirs[1], lambda r: r >= 8),
        ratio_row("process start to first token", ours[0], theirs[0], lambda r: r <= 0.5),
    ]


def ratio_row(name: str, ours: float, theirs: float, holds: Callable[[float], bool]) -> Row:
    ratio = ours / theirs
    value = {"ours": round(ours, 2), "mlx_lm": round(theirs, 2), "ratio": round(ratio, 3)}
    return {"check": name, "value": value, "holds": holds(ratio)}


def cast_copy(folder: Path, target: Path, dtype: str) -> Path:
    """The folder with every floating-point array, scales too, in ``dtype``."""
    import shutil

    import mlx.core as mx

    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    for path in folder.glob("*.safetensors"):
        arrays = {
            name: a.astype(getattr(mx, dtype)) if mx.issubdtype(a.dtype, mx.floating) else a
            for name, a in mx.load(str(path)).items()
        }
        mx.save_safetensors(str(target / path.name), arrays, {"format": "mlx"})
    return target


TOLERANCE = 1e-3
"""Two best logits closer than this may change places: sums of float32 in another order."""


def tokens(folder: Path) -> list[Row]:
    """Must show 3: mlx-lm's greedy tokens, with and without a prompt cache, and 8-bit caches."""
    from uma.paths import cache_folder
    from uma.runtime.blas import prepare_cpu

    prepare_cpu(cache_folder())
    import mlx.core as mx
    from mlx_lm import load as mlx_lm_load
    from mlx_lm import stream_generate

    from uma.runtime.cache import prompt_cache
    from uma.runtime.generate import Settings, generate
    from uma.runtime.load import load
    from uma.runtime.template import chat_tokens

    loaded = load(folder, dequantize_to="float32")
    prompt = chat_tokens(loaded.tokenizer, [{"role": "user", "content": QUESTION}])
    prompt += loaded.tokenizer.encode("Paris is the capital of France. It is known for")
    with tempfile.TemporaryDirectory() as temporary:
        # In float32 the scales keep their values, and both sides compute alike.
        copy = cast_copy(folder, Path(temporary), "float32")
        model, tokenizer = mlx_lm_load(str(copy))
        tokenizer.eos_token_ids = loaded.tokenizer.eos_token_ids = set()  # 64 tokens, come what may
        stream = stream_generate(model, tokenizer, prompt, max_tokens=64)
        theirs = [r.token for r in stream]
        del model

    def ours(kv_bits: int | None, warm: int) -> tuple[list[int], list[Any]]:
        cache = prompt_cache(loaded.model, context_tokens=512, kv_bits=kv_bits, kv_group_size=32)
        if warm:
            list(generate(loaded, prompt[:warm], cache, Settings(max_tokens=1)))
        settings = Settings(max_tokens=64, logprobs=True)
        pieces = [p for p in generate(loaded, prompt, cache, settings) if p.token is not None]
        return [p.token for p in pieces if p.token is not None], [p.logprobs for p in pieces]

    plain, exact = ours(None, 0)
    warm, _ = ours(None, len(prompt) // 2)
    rounded, near = ours(8, 0)
    gaps = [(best := mx.sort(e)[-2:].tolist())[1] - best[0] for e in exact]
    close = next((i for i, gap in enumerate(gaps) if gap < TOLERANCE), None)
    compared = min(len(plain), len(theirs)) if close is None else close
    same = next(
        (i for i, (a, b) in enumerate(zip(plain, rounded, strict=False)) if a != b), len(plain)
    )
    steps = zip(exact[: same + 1], near[: same + 1], strict=True)
    difference = max(mx.abs(e - n).max().item() for e, n in steps)
    row = {"first_close_position": close, "tolerance": TOLERANCE, "compared": compared}
    return [
        {"check": "greedy", "value": row, "holds": plain[:compared] == theirs[:compared]},
        {"check": "with a prompt cache", "value": len(warm), "holds": warm == plain},
        {
            "check": "--kv-bits 8, largest difference of a log-probability",
            "value": {"difference": round(difference, 4), "same_tokens": same},
            "holds": difference <= 0.5,
        },
    ]


def startup(_: Path) -> list[Row]:
    """Must show 4: `import uma` 40 ms of CPU above bare Python, `uma --help` 100 ms."""
    script = ROOT / "scripts" / "import_time.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"], cwd=ROOT, capture_output=True, check=True
    )
    times = json.loads(done.stdout)
    bare, helped = times["python -c pass"], times["uma --help"]
    imported = {key: round(ms - bare[key], 1) for key, ms in times["import uma"].items()}
    return [
        {
            "check": "import uma, ms above bare Python",
            "value": imported,
            "holds": imported["median"] <= 40,
        },
        {"check": "uma --help, ms", "value": helped, "holds": helped["median"] <= 100},
    ]


def tiny_models(folder: Path, **overrides: Any) -> dict[str, Path]:
    from models import CONFIGS, saved_model

    return {kind: saved_model(kind, folder / kind, **overrides) for kind in CONFIGS}


def filling_prompt(folder: Path, tokens: int) -> tuple[str, int]:
    """A question repeated to about ``tokens`` tokens, and their count in the model's template."""
    from mlx_lm.utils import load_tokenizer

    from uma.runtime.template import chat_tokens

    tokenizer = load_tokenizer(folder)
    each = len(tokenizer.encode(QUESTION + " ", add_special_tokens=False))
    prompt = (QUESTION + " ") * -(-tokens // each)
    return prompt, len(chat_tokens(tokenizer, [{"role": "user", "content": prompt}]))


DEFAULT_STEP = 2048


def budget(folder: Path) -> list[Row]:
    """Must show 5: five models, prompts that fill their contexts, stay within two budgets.

    One is 5 % above the predicted peak. The other is 20 % below it, so that the step is lowered;
    the form of the weights is fixed, or a smaller form would make it fit.
    """
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        tiny = tiny_models(Path(temporary))
        kinds = ("full", "moe", "sliding", "expanded")
        # Four thousand tokens: with fewer, the default model's weights and cache are 80 % already.
        cases = [(folder, 4700, ["--dequantize", "always"])]
        cases += [(tiny[kind], 3000, ["--bits", "16"]) for kind in kinds]
        for path, about, form in cases:
            prompt, tokens = filling_prompt(path, about)
            options = [str(path), prompt, "--context", str(tokens + 16), "--max-tokens", "16"]
            options += form
            peak = uma(*options, "--dry-run")["ledger"]["predicted_peak_bytes"]
            for share, name in ((1.05, "5 % above"), (0.8, "20 % below")):
                run = uma(*options, "--budget", f"{int(share * peak)}B", check=False)
                held = (run.get("ledger") or {}).get("measured_peak_bytes")
                step = (run.get("settings") or {}).get("prefill_step_size")
                value = {"budget": int(share * peak), "held": held, "step": step}
                value |= {"prompt_tokens": run.get("prompt_tokens"), "peak": peak}
                lowered = step is not None and step < DEFAULT_STEP
                holds = held is not None and held <= share * peak and lowered == (share < 1)
                rows.append({"check": f"{path.name}, {name}", "value": value, "holds": holds})
    return rows


def terms(_: Path) -> list[Row]:
    """Must show 6: predicted against measured for a tiny random model of each cache kind.

    With a short prompt, and with one that is read in three chunks.
    """
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind, path in tiny_models(Path(temporary)).items():
            for times, step in ((12, DEFAULT_STEP), (90, 512)):
                rows += terms_of(kind, path, times, step)
    return rows


def terms_of(kind: str, path: Path, times: int, step: int) -> list[Row]:
    options = ["--bits", "16", "--context", "2048", "--max-tokens", "40"]
    run = uma(str(path), QUESTION * times, *options, "--prefill-step-size", str(step))
    kind = f"{kind}, {run['prompt_tokens']} tokens"
    rows = []
    for t in run["ledger"]["terms"]:
        predicted, measured = t["predicted_bytes"], t["measured_bytes"]
        if measured is None:
            continue
        within = measured <= predicted
        holds = measured == predicted if t["basis"] == "exact" else within
        value = {"predicted": predicted, "measured": measured, "basis": t["basis"]}
        rows.append({"check": f"{kind}: {t['name']} {t['phase']}", "value": value, "holds": holds})
    return rows


SECTIONS: dict[str, Callable[[Path], list[Row]]] = {
    "ledger": ledger,
    "speed": speed,
    "tokens": tokens,
    "startup": startup,
    "budget": budget,
    "terms": terms,
}


def default_model() -> Path:
    """The folder of the embedded model, fetched and converted by a first run."""
    from uma.paths import cache_folder

    uma("--prompt", QUESTION, "--max-tokens", "1")
    found = sorted(cache_folder().rglob("SmolLM2*/config.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise SystemExit("the embedded model is not in the cache; give --model FOLDER")
    return found[-1].parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    folder = (chosen.model or default_model()).resolve()
    report = {}
    for name in chosen.sections or SECTIONS:
        report[name] = SECTIONS[name](folder)
        if not chosen.json:
            print(f"\n{name}: {SECTIONS[name].__doc__.splitlines()[0]}")
            for row in report[name]:
                print(f"  {'ok  ' if row['holds'] else 'FAIL'} {row['check']}: {row['value']}")
    if chosen.json:
        print(json.dumps(report, indent=2))
    return 0 if all(row["holds"] for rows in report.values() for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
