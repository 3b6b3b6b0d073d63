"""scripts/accuracy.py on the rows of the project, and on rows made to break it."""

import csv
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uma.units import GIB

ROOT = Path(__file__).resolve().parent.parent
TRUTH = ROOT / "uma/data/truth"
sys.path.insert(0, str(ROOT / "scripts"))

import accuracy  # noqa: E402
from scoring import fits, memory, sizes, summary  # noqa: E402
from scoring.rows import (  # noqa: E402
    REASONS,
    Skipped,
    contradicts,
    known_model,
    outcome_of,
    read_rows,
)

Row = dict[str, str]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows(TRUTH / "inference.csv")


@pytest.fixture(scope="module")
def groups(rows: list[Row]) -> dict[str, summary.Group]:
    return memory.score(rows) | fits.score(rows)


@pytest.fixture
def row(rows: list[Row]) -> Callable[..., Row]:
    """A row of mlx-lm's own table, with other values in some columns."""
    base = next(row for row in rows if row["rec_id"] == "hand_mlx1-1840")

    def changed(**columns: str) -> Row:
        return {**base, **columns}

    return changed


def only_reason(row: Row) -> str:
    (group,) = memory.score([row]).values()
    (reason,) = group.skipped.values()
    return reason


def test_every_row_that_measured_memory_is_in_one_group_of_memory(
    rows: list[Row], groups: dict[str, summary.Group]
) -> None:
    measured = [row["rec_id"] for row in rows if row["kind"] == "memory"]
    grouped = [
        rec_id
        for group in groups.values()
        if group.quantity == "memory"
        for rec_id in (*group.errors, *group.skipped)
    ]
    assert sorted(grouped) == sorted(measured)


def test_reasons_are_the_closed_list(groups: dict[str, summary.Group]) -> None:
    used = {reason for group in groups.values() for reason in group.skipped.values()}
    assert used <= set(REASONS)


def test_mlx_lm_peaks_are_within_the_promised_errors(groups: dict[str, summary.Group]) -> None:
    found = summary.statistics(groups["mlx-lm"].errors)
    assert len(groups["mlx-lm"].errors) >= 60
    assert found["median_abs_error"] <= 0.04
    assert found["p90_abs_error"] <= 0.12


def test_torch_peaks_of_the_qwen_pages_are_within_the_promised_errors(
    groups: dict[str, summary.Group],
) -> None:
    for name in ("transformers, torch peak", "transformers, allocated in decode"):
        found = summary.statistics(groups[name].errors)
        assert found["median_abs_error"] <= 0.05, name
        assert found["p90_abs_error"] <= 0.12, name


def test_a_prediction_is_compared_with_the_unit_that_the_row_is_sure_of(
    row: Callable[..., Row],
) -> None:
    base = row()
    (group,) = memory.score([base]).values()
    doubled = row(mem_gib_norm=str(2 * float(base["mem_gib_norm"])))
    (half,) = memory.score([doubled]).values()
    error, halved = group.errors["hand_mlx1-1840"], half.errors["hand_mlx1-1840"]
    assert halved == pytest.approx((error + 1) / 2 - 1, rel=1e-6)
    assert only_reason(row(mem_gib_norm="")) == "metric not comparable"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"engine": "oMLX"}, "engine not claimed"),
        ({"mem_metric": "incremental wired footprint"}, "metric not comparable"),
        ({"model": "mlx-community/Laguna-S-2.1-4bit"}, "model unknown"),
        ({"arch": "L40 H2048 A32 KV4"}, "model unknown"),
        ({"model": "mlx-community/Qwen3-30B-A3B-OptiQ-4bit"}, "format not claimed"),
        ({"kv_dtype": "turbo4v2"}, "format not claimed"),
        ({"quant": "8bit"}, "configuration incomplete"),  # the name says 4bit
        ({"prompt_tokens": "", "gen_tokens": ""}, "configuration incomplete"),
        ({"confidence": "C"}, "marked untrustworthy"),
        ({"notes": "decimal split reconstructed - verify before use"}, "marked untrustworthy"),
    ],
)
def test_a_row_that_cannot_be_compared_is_counted_under_its_reason(
    row: Callable[..., Row], columns: Row, reason: str
) -> None:
    assert only_reason(row(**columns)) == reason


def test_the_fork_of_mlx_swift_runs_prompts_in_its_own_chunks(row: Callable[..., Row]) -> None:
    """Gemma 4 in chunks of 4,096 holds more than twice what it does in chunks of 1,024."""
    gemma = row(
        model="mlx-community/gemma-4-31b-it-4bit", quant="4bit", arch="", prompt_tokens="8192"
    )
    (large,) = memory.score([{**gemma, "engine": "mlx-swift-lm (fork)"}]).values()
    (small,) = memory.score([{**gemma, "engine": "mlx-swift-lm (fork)", "ubatch": "1024"}]).values()
    measured = float(gemma["mem_gib_norm"]) * GIB
    (more,), (less,) = large.errors.values(), small.errors.values()
    assert (more - less) * measured > 3 * GIB


def test_a_model_whose_row_has_other_shapes_is_not_that_model() -> None:
    _, llama = known_model("LLaMA-7B")
    assert not contradicts("L32 H4096 A32 KV32 FF11008 V32000", llama)
    assert contradicts("L40 H5120 A40 KV40 FF13824 V32000", llama)
    with pytest.raises(Skipped):
        known_model("Laguna-S-2.1")


def test_experts_published_in_mxfp4_stay_so_when_the_rest_is_quantized() -> None:
    """mlx-community/gpt-oss-20b-MXFP4-Q8 has 12,025,908,224 bytes, by exo's model card."""
    repository = {
        "mlx_repo": "mlx-community/gpt-oss-20b-MXFP4-Q8",
        "quantization": "MXFP4-Q8",
        "storage_bytes": "12025908224",
    }
    (group,) = sizes.score([repository]).values()
    assert abs(group.errors[repository["mlx_repo"]]) < 0.005


def test_sizes_of_text_models_are_exact() -> None:
    (group,) = sizes.score(read_rows(TRUTH / "mlx_repo_sizes.csv")).values()
    exact = [repo for repo, error in group.errors.items() if abs(error) < 1e-5]
    assert len(exact) >= 15


@pytest.mark.parametrize("size", ["", "n/a", "nan", "-1", "0", "1e300", "696 MiB"])
def test_a_size_that_is_no_number_of_bytes_is_not_compared(size: str) -> None:
    repository = {
        "mlx_repo": "mlx-community/Llama-3.2-1B-Instruct-4bit",
        "quantization": "4bit",
        "storage_bytes": size,
    }
    (group,) = sizes.score([repository]).values()
    assert list(group.skipped.values()) == ["metric not comparable"]


@pytest.mark.parametrize(
    ("repository", "size"),
    [  # exo's model cards at commit b5375f8
        ("mlx-community/gemma-4-e2b-it-bf16", 10_246_357_958),
        ("mlx-community/gemma-4-31b-it-bf16", 62_546_177_752),
        ("mlx-community/Qwen3.5-2B-MLX-8bit", 2_662_787_264),
    ],
)
def test_towers_and_matrices_that_no_layer_uses_are_in_a_repository(
    repository: str, size: int
) -> None:
    row = {"mlx_repo": repository, "quantization": "", "storage_bytes": str(size)}
    (group,) = sizes.score([row]).values()
    assert abs(group.errors[repository]) < 1e-4


@pytest.mark.parametrize(
    ("memory_gb", "outcome", "cell"),
    [
        ("32", "ok", "true_fits"),
        ("16", "ok", "false_exceeds"),
        ("16", "OOM", "true_exceeds"),
        ("32", "OOM", "false_fits"),
    ],
)
def test_a_verdict_is_held_against_the_outcome(
    row: Callable[..., Row], memory_gb: str, outcome: str, cell: str
) -> None:
    told = row(chip="Apple M4", mem_per_device_gb=memory_gb, outcome=outcome)
    (group,) = fits.score([told]).values()
    assert dict(group.confusion) == {cell: 1}


def test_paged_runs_are_a_group_of_their_own(row: Callable[..., Row]) -> None:
    found = fits.score([row(outcome="ok (above 48 GiB working set -> paging/slow)")])
    assert list(found) == ["swapped, spilled or limited"]


# What nvidia-smi reports, less the 205 MiB that the driver keeps at least, and 358 MiB for the
# context of each further card.
@pytest.mark.parametrize(
    ("chip", "memory_gb", "count", "mib"),
    [
        ("NVIDIA RTX 3090", "24", "1", 24576 - 205),
        ("NVIDIA RTX 4090", "24", "2", 2 * (24564 - 205) - 358),
        ("NVIDIA A100 80GB", "80", "1", 81920 - 205),
        ("NVIDIA H100 PCIe", "80", "1", 81559 - 205),
        ("NVIDIA H100 80GB (79.22GiB)", "80", "1", 81559 - 205),
        ("NVIDIA RTX 3080", "10", "1", 10240 - 205),
        ("AMD Ryzen AI Max+ 395 (Radeon 8060S, unified LPDDR5X)", "128", "1", 120 * 1024),
    ],
)
def test_a_device_has_the_memory_of_the_catalog(
    row: Callable[..., Row], chip: str, memory_gb: str, count: str, mib: int
) -> None:
    found = fits.limits_bytes(row(chip=chip, mem_per_device_gb=memory_gb, gpu_count=count))
    assert found == (mib << 20, mib << 20)


def test_a_mac_whose_memory_is_not_told_has_that_of_its_smallest_and_largest(
    row: Callable[..., Row],
) -> None:
    unsized = row(chip="Apple M3 Pro", mem_per_device_gb="", machine="", source_date="2023-11")
    assert fits.limits_bytes(unsized) == (12 << 30, 27 << 30)  # 2/3 of 18, 3/4 of 36 GiB
    told = row(chip="Apple M4", mem_per_device_gb="", machine="M4 Mac mini (10 core - 32GB)")
    assert len(set(fits.limits_bytes(told))) == 1


def test_a_verdict_that_hangs_on_untold_memory_or_lengths_is_none(row: Callable[..., Row]) -> None:
    llama = row(
        engine="llama.cpp", model="Llama-2-7B", quant="Q8_0", arch="", chip="Apple M1", machine="",
        mem_per_device_gb="", prompt_tokens="512", gen_tokens="128",
    )  # fmt: skip
    (group,) = fits.score([llama]).values()
    assert list(group.skipped.values()) == ["machine unknown"]
    without = {"prompt_tokens": "", "gen_tokens": "", "chip": "NVIDIA RTX 4090", "quant": "Q4_0"}
    (group,) = fits.score([{**llama, **without}]).values()
    assert list(group.skipped.values()) == ["configuration incomplete"]


@pytest.mark.parametrize(
    "chip", ["NVIDIA RTX 2080 Ti Laptop", "NVIDIA RTX 4090 + RTX 9999", "", "24GB NVIDIA GPU"]
)
def test_a_card_that_is_not_one_of_the_catalog_is_unknown(
    row: Callable[..., Row], chip: str
) -> None:
    with pytest.raises(Skipped, match="machine unknown"):
        fits.limits_bytes(row(chip=chip, mem_per_device_gb="24"))


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("ok", "fits"),
        ("100% GPU", "fits"),
        ("runs fine", "fits"),
        ("OOM (silent)", "exceeds"),
        ("CUDA out of memory", "exceeds"),
        ("does not fit (N/A)", "exceeds"),
        ("broken", ""),
        ("kernel panic (watchdog)", "other"),
        ("spills to CPU (5%/95%)", "other"),
        ("", ""),
    ],
)
def test_an_outcome_is_read_by_its_words(row: Callable[..., Row], words: str, outcome: str) -> None:
    assert outcome_of(row(outcome=words)) == outcome


def test_a_percentile_is_that_of_the_statistics_module() -> None:
    values = sorted([0.5, 0.01, 0.2, 0.03, 0.11, 0.4, 0.07])
    expected = statistics.quantiles(values, n=10, method="inclusive")[8]
    assert summary.percentile(values, 0.9) == pytest.approx(expected)


def test_json_has_the_keys_that_other_programs_rely_on(tmp_path: Path) -> None:
    file = tmp_path / "never_seen.csv"
    rows = read_rows(TRUTH / "inference.csv")[:40]
    with open(file, "w", newline="", encoding="utf-8") as output:
        writer = csv.DictWriter(output, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(ROOT / "scripts/accuracy.py"), "--inference", str(file)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema_version"] == 1
    for group in found["groups"].values():
        assert {"quantity", "engine", "kind", "rows", "scored", "skipped", "median_abs_error"} <= (
            group.keys()
        )
        assert group["rows"] == group["scored"] + sum(group["skipped"].values())
        if group["quantity"] == "fit":
            assert sum(group["confusion"].values()) == group["scored"]


def test_the_forks_gemma_with_experts_computes_in_float32(groups: dict[str, summary.Group]) -> None:
    """It prints a cache of 0.6953 GiB after 8,192 tokens, twice what 16-bit numbers take."""
    rows = {row["rec_id"]: row for row in read_rows(TRUTH / "inference.csv")}
    errors = [
        error
        for rec_id, error in groups["mlx-swift A"].errors.items()
        if "gemma-4-26b" in rows[rec_id]["model"] and rows[rec_id]["source_date"] == "2026-04-29"
    ]
    assert len(errors) >= 4
    assert max(map(abs, errors)) < 0.04


def test_llama_cpp_logs_the_weights_and_the_cache_that_we_predict(
    groups: dict[str, summary.Group],
) -> None:
    for name in ("llama.cpp, buffers", "llama.cpp, Metal allocated"):
        for part in ("weights", "kv"):
            found = summary.statistics(groups[name].parts[part])
            assert found["p90_abs_error"] <= 0.005, (name, part)


ODD = (
    "n/a", "NaN", "inf", "-inf", "1e400", "-5", "99999999999999999999", "0", "12 GiB", "4k",
    "8,192", "?", "unknown", "\u221e", "\u0663", "\x7f", "true", "1.5e3", "10000000", "--", '"',
)  # fmt: skip
ODD_MODELS = ("", "Foo-9000B", "llama", "../../etc", "(((", "a" * 3000, "Q4_K_M 4bit AWQ GPTQ")


KINDS = ("inference", "training", "sizes")


def scored_alone(kind: str, file: Path) -> dict[str, summary.Group]:
    return accuracy.scored(*(file if kind == one else None for one in KINDS))


def odd_rows(kind: str, seed: int) -> list[Row]:
    """Rows of a file of ours with cells that no collector would be proud of."""
    files = {"inference": "inference", "training": "training", "sizes": "mlx_repo_sizes"}
    known = read_rows(TRUTH / f"{files[kind]}.csv")
    chance = random.Random(seed)
    found = []
    for _ in range(150):
        changed = dict(chance.choice(known))
        for column in chance.sample(sorted(changed), chance.randint(1, 8)):
            changed[column] = chance.choice(ODD)
        if chance.random() < 0.2:
            changed["mlx_repo" if kind == "sizes" else "model"] = chance.choice(ODD_MODELS)
        found.append(changed)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left_out", [0, 6])
def test_rows_that_nobody_foresaw_are_scored_or_skipped_for_a_reason(
    tmp_path: Path, kind: str, left_out: int
) -> None:
    rows = odd_rows(kind, seed=left_out)
    columns = sorted(rows[0])[left_out:]
    file = tmp_path / "odd.csv"
    with open(file, "w", newline="", encoding="utf-8-sig") as output:
        output.write("# collected by hand\n")
        writer = csv.DictWriter(output, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        output.write("only,three,cells\n" + "," * 80 + "\n\n")
    groups = scored_alone(kind, file)
    primary = [g for g in groups.values() if g.quantity in ("memory", "size", "training")]
    ids = {row["rec_id"] for row in read_rows(file)}
    assert len(ids) >= len(rows)
    seen = [name for group in primary for name in (*group.errors, *group.skipped)]
    assert set(seen) <= ids
    assert len(set(seen)) == len(seen)
    for group in groups.values():
        assert set(group.skipped.values()) <= set(REASONS)
        assert all(math.isfinite(error) for error in group.errors.values())


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "empty.csv"
    for text in ("", "# only a comment\n", "rec_id,kind,engine\n"):
        file.write_text(text)
        for kind in KINDS:
            found = scored_alone(kind, file)
            assert all(group.rows == 0 for group in found.values())


def test_rows_of_one_id_are_counted_each(row: Callable[..., Row], tmp_path: Path) -> None:
    file = tmp_path / "twice.csv"
    with open(file, "w", newline="", encoding="utf-8") as output:
        writer = csv.DictWriter(output, sorted(row()))
        writer.writeheader()
        writer.writerows([row(), row(), row(rec_id="")])
    (group,) = memory.score(read_rows(file)).values()
    assert group.scored == 3


def test_a_packed_repository_of_its_maker_has_scales_without_biases() -> None:
    """moonshotai/Kimi-K2.6 has 595,148,192,736 bytes, by exo's model card."""
    row = {"mlx_repo": "moonshotai/Kimi-K2.6", "quantization": "", "storage_bytes": "595148192736"}
    (group,) = sizes.score([row]).values()
    assert abs(group.errors["moonshotai/Kimi-K2.6"]) < 1e-5
