"""scripts/accuracy.py on the rows of the project, and on rows made to break it."""

import csv
import json
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

from scoring import fits, memory, sizes, summary  # noqa: E402
from scoring.rows import REASONS, Skipped, contradicts, known_model, read_rows  # noqa: E402

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


def test_rounded_sizes_are_not_scored() -> None:
    (group,) = sizes.score(
        [
            {
                "mlx_repo": "mlx-community/Llama-3.2-1B-Instruct-4bit",
                "quantization": "4bit",
                "storage_bytes": "729808896",
            }
        ]
    ).values()
    assert list(group.skipped.values()) == ["marked untrustworthy"]


@pytest.mark.parametrize(
    ("memory_gb", "outcome", "cell"),
    [
        ("64", "ok", "true_fits"),
        ("16", "ok", "false_exceeds"),
        ("16", "OOM", "true_exceeds"),
        ("64", "OOM", "false_fits"),
    ],
)
def test_a_verdict_is_held_against_the_outcome(
    row: Callable[..., Row], memory_gb: str, outcome: str, cell: str
) -> None:
    (group,) = fits.score([row(mem_per_device_gb=memory_gb, outcome=outcome)]).values()
    assert dict(group.confusion) == {cell: 1}


def test_paged_runs_are_a_group_of_their_own(row: Callable[..., Row]) -> None:
    found = fits.score([row(outcome="ok (above 48 GiB working set -> paging/slow)")])
    assert list(found) == ["swapped, spilled or limited"]


@pytest.mark.parametrize(
    ("chip", "memory_gb", "count", "mib"),
    [
        ("NVIDIA RTX 3090", "24", "1", 24576),
        ("NVIDIA RTX 4090", "24", "2", 2 * 24564),
        ("NVIDIA A100 80GB", "80", "1", 81920),
        ("NVIDIA H100 PCIe", "80", "1", 81559),
        ("NVIDIA RTX 3080", "10", "1", 10240),
    ],
)
def test_a_card_has_the_memory_that_its_driver_reports(
    row: Callable[..., Row], chip: str, memory_gb: str, count: str, mib: int
) -> None:
    found = fits.limit_bytes(row(chip=chip, mem_per_device_gb=memory_gb, gpu_count=count))
    assert found == mib << 20


@pytest.mark.parametrize("chip", ["NVIDIA RTX 2080 Ti Laptop", "NVIDIA RTX 4090 + RTX 3070 Ti", ""])
def test_a_card_that_is_not_one_of_the_catalog_is_unknown(
    row: Callable[..., Row], chip: str
) -> None:
    with pytest.raises(Skipped, match="machine unknown"):
        fits.limit_bytes(row(chip=chip, mem_per_device_gb="24"))


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
