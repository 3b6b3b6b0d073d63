"""`uma compare` as it is called: its table, JSON and CSV, exit codes, and what it refuses."""

import csv
import io
import json
import re
from typing import Any

import pytest

from uma.cli import main

PLAN_CONTRACT = {
    "machine",
    "kind",
    "devices",
    "technique",
    "device_bytes",
    "host_bytes",
    "disk_bytes",
    "budget_bytes",
    "verdict",
    "decode_tps",
    "prompt_tps",
    "price_usd",
    "notes",
}
ASKED = (
    "compare llama-3-70b --context 16384 --machine mac-studio-m2-ultra-192 --machine rtx-4090 "
    "--machine 2xrtx-3090 --machine h100"
)


def document(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    assert main([*command.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_document_has_the_contracts_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ASKED)
    assert {"schema_version", "model", "workload", "plans"} <= set(found)
    assert len(found["plans"]) == 4
    for plan in found["plans"]:
        assert set(plan) >= PLAN_CONTRACT
        assert plan["kind"] == ("unified" if "mac" in plan["machine"] else "discrete")
        assert plan["decode_tps_low"] < plan["decode_tps"] < plan["decode_tps_high"]
        assert plan["prompt_tps_low"] < plan["prompt_tps"] < plan["prompt_tps_high"]
        assert plan["ttft_s"] > 16_384 / plan["prompt_tps"]


def test_what_is_unknown_is_null_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "compare llama-3-70b --machine 8xh100")["plans"][0]
    assert plan["engine"] == "vllm"
    assert plan["prompt_tps"] is None
    assert "vllm" in plan["prompt_tps_reason"]
    assert plan["price_usd"] is None
    assert "--host-price" in plan["price_reason"]
    assert plan["devices_price_usd"] == 240_000


def test_each_user_of_several_has_a_part_of_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "compare llama-3.1-8b --machine h100 --concurrency 8")["plans"][0]
    assert plan["total_decode_tps"] == pytest.approx(8 * plan["decode_tps"], rel=1e-3)


def test_the_table_says_what_was_asked_and_why_nothing_is_better(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(ASKED.split()) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith(
        "llama-3-70b at 16,384 tokens of context, one request at a time; at least 4 bits"
    )
    assert "--host-ram" in text
    assert "why nothing better:" in text
    assert "rtx-4090: F16" in text
    assert "####" in text


def test_the_default_is_this_machine_and_twelve_others(capsys: pytest.CaptureFixture[str]) -> None:
    plans = document(capsys, "compare llama-3.1-8b")["plans"]
    assert len(plans) == 13
    assert plans[0]["machine"] == "this machine"
    assert all(plan["sold"] for plan in plans[1:])
    assert {plan["kind"] for plan in plans[1:]} == {"unified", "discrete"}
    kinds = [plan["kind"] for plan in plans[1:]]
    assert kinds.count("unified") == kinds.count("discrete") == 6


def test_a_context_beyond_the_models_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-8b --machine h100 --machine mac-studio-m2-ultra-192 --context"
    said = "the model was made for 8,192 tokens of context"
    assert all(said in plan["notes"] for plan in document(capsys, f"{command} 8193")["plans"])
    assert not any(said in plan["notes"] for plan in document(capsys, f"{command} 8192")["plans"])


def test_a_spreadsheet_has_a_line_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED.split(), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["machine"] for row in rows].count("rtx-4090") == 1
    assert len(rows) == 4
    assert PLAN_CONTRACT - {"notes"} <= set(rows[0])


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("compare llama-3-70b --machine rtx-4060-8gb --host-ram 16GB", 3, ""),
        ("compare llama-3-70b --machine nonsense-*", 2, "uma machines"),
        ("compare llama-3-70b --machine 2xdgx-*", 2, "only graphics cards and Macs are counted"),
        ("compare llama-3-70b --machine 5xmac-studio-m3-ultra-512", 2, "at most 4"),
        ("compare no-such-model --machine h100", 2, "no model is called"),
        ("compare llama-3-70b --machine h100 --csv --json", 2, "one of them"),
        ("compare llama-3-70b --machine h100 --all", 2, "leave out"),
        ("compare llama-3-70b --price 4090", 2, "NAME=USD"),
        ("compare llama-3-70b --price nonsense=5 --machine h100", 2, "nonsense"),
        ("compare llama-3-70b --min-tps nan", 2, "--min-tps nan"),
        ("compare llama-3-70b --host-bandwidth inf", 2, "not in the range"),
        ("compare llama-3-70b --context 8k,x --machine h100", 2, "'x' is not a number of tokens"),
        ("compare llama-3-70b --context 99999999", 2, "16,777,216"),
        ("compare llama-3-70b --price h100=-5", 2, "NAME=USD"),
        ("compare llama-3-70b --rent h100=free", 2, "NAME=USD/h"),
        ("compare llama-3-70b --rent nonsense=2 --machine h100", 2, "nonsense"),
        ("compare llama-3-70b --years nan", 2, "--years nan"),
        ("compare llama-3-70b --machine 999xh100", 3, ""),
        ("compare llama-3-70b --rank 8", 2, "give --train too"),
        ("compare llama-3-70b --train lora --concurrency 2", 2, "--concurrency is for generating"),
        ("compare llama-3-70b --train lora --machine 2xmac-studio-m3-ultra-512", 3, ""),
        ("compare llama-3-70b --train full --host-disk 2", 2, "--host-disk"),
        ("compare qwen3-30b-a3b --train dora --machine h200", 0, ""),
        ("compare qwen3-30b-a3b --train dora --machine mac-studio-m3-ultra-512", 3, ""),
        ("compare llama-3-8b --train rslora --machine h200", 0, ""),
        ("compare llama-3-70b --train lora --emit vllm --machine h100", 2, "leave out --train"),
        ("compare llama-3-70b --emit deepspeed --machine h100", 2, "give --train"),
        ("compare llama-3-8b --train qlora --emit fsdp --machine dgx-spark", 2, "fsdp and"),
        ("compare llama-3-70b --train qlora --emit fsdp --machine rtx-4090", 2, "does not shard"),
        ("compare llama-3-8b --train qlora --emit mlx --machine h100", 2, "mlx is for Macs"),
        ("compare llama-3-8b --train qlora --emit peft --machine mac-mini-m4-24", 2, "peft for"),
        ("compare llama-3-70b --train full --emit peft --machine rtx-4090", 3, "no plan fits"),
        ("compare llama-3-8b --emit mlx --machine 2xmac-studio-m3-ultra-512", 2, "mlx.launch"),
        ("compare llama-3-8b --emit vllm --machine h100 --context 4k,8k", 2, "one --context"),
    ],
)
def test_exit_codes_and_what_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, code: int, said: str
) -> None:
    assert main(command.split()) == code
    assert said in capsys.readouterr().err


def test_a_host_that_is_described_decides_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-70b --machine rtx-4090 --min-bits 8"
    small = document(capsys, command)["plans"][0]
    large = document(capsys, f"{command} --host-ram 256GB --host-bandwidth 400")["plans"][0]
    assert large["decode_tps"] > 2 * small["decode_tps"]
    assert main([*command.split(), "--host-ram", "32GB"]) == 3


def test_ones_own_price_and_that_of_the_host_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3.1-8b --machine rtx-4090 --price rtx-4090=1800 --host-price 900"
    found = document(capsys, command)
    assert found["plans"][0]["price_usd"] == 2700
    assert found["cheapest"] == "rtx-4090"


def test_a_list_of_contexts_is_a_column_each(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3.1-8b --machine h100 --machine rtx-4060-8gb --context"
    assert main([*command.split(), "8k,128k", "--context", "20,000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama-3.1-8b at 3 lengths of context, one request at a time")
    head = next(line for line in lines if line.startswith("machine"))
    assert head.split() == ["machine", "8,192", "20,000", "131,072"]
    h100 = next(line for line in lines if line.startswith("h100"))
    alone = document(capsys, f"{command} 20000".replace("--machine rtx-4060-8gb ", ""))["plans"][0]
    assert f"{alone['format']} {alone['decode_tps']:.1f}" in h100 or alone["decode_tps"] >= 100
    found = document(capsys, f"{command} 8k,128k")
    assert {plan["context_tokens"] for plan in found["plans"]} == {8192, 131_072}
    assert [one["context_tokens"] for one in found["contexts"]] == [8192, 131_072]
    assert main([*command.split(), "8k,128k", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["context_tokens"] for row in rows] == ["8192", "8192", "131072", "131072"]


def test_several_requests_show_their_caches_and_when_the_last_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "compare llama-3.1-8b --machine h100 --concurrency 8"
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "8 requests at once, tokens/s of each" in text
    assert all(title in text for title in ("all/s", "first token", "cache GiB"))
    plan = document(capsys, command)["plans"][0]
    assert plan["kv_cache_bytes"] == 8 * 2 * 32 * 8 * 128 * 8192 * 2
    assert plan["ttft_s"] is None or plan["ttft_s"] > 8 * 8192 / plan["prompt_tps"]


def test_a_document_of_training_says_how_it_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-8b --train qlora --machine rtx-4090 --machine mac-mini-m4-16"
    found = document(capsys, command)
    assert found["workload"]["train"] == "qlora"
    card, mac = sorted(found["plans"], key=lambda plan: plan["kind"])
    assert set(card) >= PLAN_CONTRACT
    assert (card["decode_tps"], card["prompt_tps"]) == (None, None)
    assert card["train_tps_low"] < card["train_tps"] < card["train_tps_high"]
    assert (card["engine"], card["quantized"], card["optimizer"]) == (
        "transformers",
        "nf4-double",
        "adamw",
    )
    assert card["sharding"]["zero_stage"] == 0
    assert (mac["engine"], mac["format"]) == ("mlx", "4bit")
    assert main([*command.split(), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["optimizer"] for row in rows} == {"adamw"}


def test_the_table_of_training_says_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "llama-3-70b", "--train", "full", "--machine", "8xh100"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith(
        "llama-3-70b trained (full, all its weights), a row of 2,048 tokens at once on each device"
    )
    assert "prompt/s" not in text
    assert "full, FSDP, checkpointing, torch" in text
    assert "bf16, float32 states full, FSDP, checkpointing: " in text
    assert "small updates are rounded away" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--train qlora --machine rtx-4090 --emit peft", "LoraConfig"),
        ("--train full --machine 8xh100 --emit deepspeed", '"zero_optimization"'),
        ("--train full --machine 8xh100 --emit fsdp", "fsdp_version"),
        ("--train full --machine 8xh100 --emit peft", "ds.json (--emit deepspeed)"),
        ("--train qlora --machine 2xrtx-4090 --emit fsdp", "the script of --emit peft-fsdp"),
        ("--train qlora --machine 2xrtx-4090 --emit peft-fsdp", "bnb_4bit_quant_storage"),
        ("--train lora --machine 2xh100 --emit peft-deepspeed", "ds.json (--emit deepspeed)"),
        ("--train qlora --machine t4 --emit peft", "dtype=torch.float16"),
        ("--train qlora --machine mac-mini-m4-24 --emit mlx", "uma convert meta-llama/"),
    ],
)
def test_the_plan_of_a_training_is_written_for_the_program_that_runs_it(
    capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    assert main(["compare", "llama-3-8b", *options.split()]) == 0
    assert said in capsys.readouterr().out


def test_a_file_and_the_script_beside_it_are_of_one_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    titles = []
    for emit in ("fsdp", "peft-fsdp"):
        command = f"compare llama-3-8b --train qlora --machine 2xrtx-4090 --emit {emit}"
        assert main(command.split()) == 0
        text = capsys.readouterr().out
        titles.append(text.partition(";")[0])
        # Trainer refuses both of them together (training_args.py).
        assert ("fsdp_activation_checkpointing: true" in text) == (emit == "fsdp")
        assert "gradient_checkpointing=True" not in text
    assert titles[0] == titles[1]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("gpt-oss-20b --train lora --machine h100", 0, "Mxfp4Config(dequantize=True)"),
        ("gpt-oss-20b --train qlora --machine h100", 2, "stored in mxfp4"),
        ("deepseek-v3 --train qlora --machine 8xh200 --host-ram 2TB", 2, "stored in fp8"),
    ],
)
def test_weights_that_are_stored_in_fewer_bits_are_made_16_or_refused(
    capsys: pytest.CaptureFixture[str], options: str, code: int, said: str
) -> None:
    """transformers 5.24, quantizers/auto.py and quantizer_mxfp4.py: nothing else is trained."""
    assert main(["compare", *options.split(), "--emit", "peft"]) == code
    found = capsys.readouterr()
    assert said in found.out + found.err


def test_the_command_for_a_mac_is_one_that_uma_takes(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-8b --train dora --rank 16 --machine mac-mini-m4-24 --emit mlx"
    assert main(command.split()) == 0
    _, _, convert, _, _, train = capsys.readouterr().out.splitlines()
    options = dict(zip(train.split()[4::2], train.split()[5::2], strict=True))
    assert options["--rank"] == "16"
    assert options["--num-layers"] == "-1"
    assert options["--fine-tune-type"] == "dora"
    for line, names in ((convert, ["convert"]), (train, ["lora", "train"])):
        assert line.split()[: 1 + len(names)] == ["uma", *names]
        assert main([*names, "--help"]) == 0
        known = capsys.readouterr().out
        assert all(part in known for part in line.split() if part.startswith("--"))


def test_the_cost_of_its_use_is_told_with_rent_and_electricity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = (
        "compare llama-3-70b --machine mac-studio-m5-ultra-96 --rent h100=2.49/h --hours-per-day 8 "
        "--years 3 --kwh 0.30 --launch-prices"
    )
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "of those with a price: mac-studio-m5-ultra-96, US$ 6,511 in 3 years" in text
    assert "costs in US$ over 8,760 hours of work, 0.3 US$/kWh at full power:" in text
    assert "2.49/h rent" in text
    plans = {plan["machine"]: plan for plan in document(capsys, command)["plans"]}
    mac, card = plans["mac-studio-m5-ultra-96"], plans["h100"]
    assert mac["total_cost_usd"] == pytest.approx(6510.78)
    assert mac["break_even_against"] == "h100"
    assert mac["break_even_hours"] == pytest.approx(5499 / (2.49 - 0.385 * 0.3), abs=0.01)
    assert card["rent_cost_usd"] == pytest.approx(8760 * 2.49)
    assert (card["total_cost_usd"], card["power_w"]) == (None, None)
    assert "--host-price" in card["total_cost_reason"]


def test_without_being_told_the_use_there_is_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "compare llama-3-70b --machine mac-studio-m5-ultra-96")["plans"][0]
    assert plan["total_cost_usd"] is None
    assert "--hours-per-day" in plan["total_cost_reason"]
    assert plan["power_w"] == 385
    assert plan["tokens_per_joule"] == pytest.approx(plan["decode_tps"] / 385, rel=1e-3)


def test_a_longer_context_can_be_kept_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3.1-8b --machine h100"
    short = document(capsys, command)["plans"][0]
    found = document(capsys, f"{command} --min-context 128k")
    long = found["plans"][0]
    assert found["workload"]["min_context_tokens"] == 131_072
    assert long["decode_tps"] == short["decode_tps"]
    cache = 2 * 32 * 8 * 128 * (131_072 - 8192) * 2
    assert long["device_bytes"] - short["device_bytes"] >= cache
    assert main([*command.split(), "--min-context", "128k"]) == 0
    text = capsys.readouterr().out
    assert "at 8,192 tokens of context with room for 131,072, one request" in text
    own = [*command.split(), "--min-context", "128k", "--price", "h100=9", "--host-price", "1"]
    assert main(own) == 0
    said = "cheapest with 10 tokens/s and room for 131,072, of those with a price of today: h100"
    assert f"{said}, US$ 10 user" in capsys.readouterr().out


def test_each_node_of_several_macs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["compare", "deepseek-v3", "--machine", "2xmac-studio-m3-ultra-512", "--min-bits", "8"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "over Thunderbolt, mlx" in text
    assert "each of 2 Macs holds" in text
    assert "mlx.launch --backend jaccl" in text


@pytest.mark.parametrize(
    "options",
    [
        "--host-bandwidth 1e308",
        "--train full --host-disk 4TB --disk-bandwidth 1e308",
        "--kwh 1e308 --hours-per-day 24 --years 100 --json",
        "--min-tps 1e308",
        f"--host-power {'9' * 400}",
        f"--price h100=1{'0' * 400} --hours-per-day 8 --years 3 --kwh 0.3",
        f"--rent h100={'9' * 400}",
        "--host-ram -5GB",
    ],
)
def test_numbers_that_no_machine_has_are_refused(
    capsys: pytest.CaptureFixture[str], options: str
) -> None:
    assert main(f"compare llama-3-8b --machine h100 {options}".split()) == 2
    assert "GiB" not in capsys.readouterr().err


def test_each_context_has_its_own_cheapest_and_front_among_all_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = document(capsys, "compare gemma-3-27b -c 8k")
    found = document(capsys, "compare gemma-3-27b -c 8k,128k")
    short, _ = found["contexts"]
    assert short["cheapest"] == alone["cheapest"] is not None
    assert short["pareto_front"] == alone["pareto_front"]
    assert short["cheapest"] in {plan["machine"] for plan in found["plans"]}


def test_a_row_of_contexts_says_what_else_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "compare llama-3-8b --machine h100 --machine mac-mini-m5-pro-24 -c 8k,32k --concurrency 4 "
        "--hours-per-day 8 --years 3 --kwh 0.3"
    )
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "costs in US$ over 8,760 hours of work" in text
    assert "each / all together, first token of the last" in text
    assert "mac-mini-m5-pro-24, 32,768: 4bit resident: " in text
    assert " too much for the limit of " in text


def test_a_spreadsheet_has_the_same_columns_whatever_its_rows_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = []
    for machines in ("gaudi-3 rtx-4090", "rtx-4090 gaudi-3", "mac-mini-m4-16"):
        named = [word for name in machines.split() for word in ("--machine", name)]
        assert main(["compare", "llama-3-70b", "--csv", *named]) in (0, 3)
        heads.append(capsys.readouterr().out.splitlines()[0])
    assert len(set(heads)) == 1
    assert {"options", "devices"} <= set(heads[0].split(","))


def test_two_macs_have_the_title_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "compare llama-3-8b --machine 2xmac-studio-m3-ultra-512")
    assert found["plans"][0]["title"] == "2 x Mac Studio M3 Ultra, 512 GiB"


def test_why_nothing_trains_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        ("lora --machine 2xmac-studio-m3-ultra-512", "several Macs together is not planned"),
        ("lora --machine rtx-3090+rtx-4090", "cards of several kinds is not planned"),
        ("qlora --min-bits 8 --machine rtx-4090", "qlora is in 4 bits on cards"),
    ):
        assert main(f"compare llama-3-8b --train {options}".split()) == 3
        assert said in capsys.readouterr().out


def test_a_training_that_does_not_fit_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-70b --train qlora --machine rtx-4090 --host-ram 32GB"
    assert main(command.split()) == 3
    text = capsys.readouterr().out
    line = next(one for one in text.splitlines() if one.startswith("rtx-4090"))
    assert re.search(r"exceeds +\? ", line)
    assert "too much even without torch's pool of freed blocks" in text


def test_notes_that_differ_in_the_machines_name_alone_are_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "llama-3-70b", "--all"]) == 0
    notes = [one for one in capsys.readouterr().out.splitlines() if one.startswith("note:")]
    assert len(notes) < 20
    assert any(one.endswith("tokens/s: its memory bandwidth is not known") for one in notes)


def test_what_is_not_beaten_says_what_speaks_against_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("mac-studio-m3-ultra-512", "mac-studio-m5-max-128", "mac-studio-m5-ultra-96")
    named = [word for name in names for word in ("--machine", name)]
    assert main(["compare", "llama-3-70b", *named]) == 0
    text = capsys.readouterr().out
    assert "mac-studio-m3-ultra-512 (not sold now)" in text
    assert "mac-studio-m5-ultra-96 (launch 2026)" in text
