"""What `uma compare --emit` writes is what the programs take, and does what the plan says."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.cli import main
from uma.plan.emit.device_map import Device, Module, auto_device_map, modules_of
from uma.units import GIB

DATA = Path(__file__).parent / "data"
CONFIGS = Path(__file__).parent.parent / "uma/data/models"
MAPS = json.loads((DATA / "device_maps.json").read_text())
LLAMA_CPP_FLAGS = set((DATA / "llama_cpp_flags.txt").read_text().splitlines()[1:])
VLLM = (DATA / "vllm_flags.txt").read_text().splitlines()
VLLM_FLAGS = {line.split()[0]: line.split()[1:] for line in VLLM[1:]}


def emitted(capsys: pytest.CaptureFixture[str], command: str) -> list[str]:
    assert main(["compare", *command.split()]) == 0
    return capsys.readouterr().out.splitlines()


def rooms_of(limits: dict[str, int]) -> dict[Device, int]:
    return {int(name) if name.isdigit() else name: room for name, room in limits.items()}


@pytest.mark.parametrize(
    "recorded", MAPS["maps"], ids=lambda one: f"{one['model']}-{one['limits']}"
)
def test_modules_are_placed_as_accelerate_places_them(recorded: dict[str, Any]) -> None:
    config = json.loads((CONFIGS / f"{recorded['model']}.json").read_text())
    architecture = architecture_from_config(config)
    found = auto_device_map(
        modules_of(architecture),
        rooms_of(recorded["limits"]),
        tied_head=architecture.tie_word_embeddings,
    )
    assert found == recorded["device_map"]


def test_the_recorded_maps_are_of_llama_of_experts_and_of_a_tied_head() -> None:
    models = {one["model"].split("__")[1][:8] for one in MAPS["maps"]}
    assert {"Meta-Lla", "Qwen3-30", "gemma-3-"} <= models
    places = {frozenset(map(str, one["device_map"].values())) for one in MAPS["maps"]}
    assert frozenset({"0", "cpu", "disk"}) in places
    assert MAPS["tiny"]["max_abs_error"] < 1e-5
    assert "disk" in MAPS["tiny"]["device_map"].values()


def test_the_first_card_keeps_room_for_the_largest_layer_that_is_left() -> None:
    layers = tuple(Module(f"model.layers.{index}", 10) for index in range(4))
    found = auto_device_map([Module("model", 40, layers)], {0: 30, "cpu": 100})
    assert [found[f"model.layers.{index}"] for index in range(4)] == [0, 0, "cpu", "cpu"]


@pytest.mark.parametrize(
    "command",
    [
        "llama-3-70b --machine rtx-4090",
        "llama-3-70b --machine 2xrtx-3090 --concurrency 2",
        "qwen3-30b-a3b --machine rtx-4060-8gb",
        "llama-3.1-8b --machine mac-studio-m2-ultra-192",
        "llama-3.1-8b --machine rtx-4090 --kv-bits 8",
    ],
)
def test_llama_cpp_knows_every_flag(capsys: pytest.CaptureFixture[str], command: str) -> None:
    *comments, line = emitted(capsys, f"{command} --emit llama.cpp")
    assert all(comment.startswith("# ") for comment in comments)
    arguments = shlex.split(line)
    flags = {word for word in arguments if word.startswith("-") and not word[1:].isdigit()}
    assert arguments[0] == "llama-server"
    assert {"-m", "-ngl", "-c", "-np"} <= flags <= LLAMA_CPP_FLAGS
    assert ("-ctk" in flags) == ("--kv-bits" in command)
    for flag in flags & {"-ngl", "-c", "-ncmoe", "-sm", "-ctk", "-ctv"}:
        assert any(comment.startswith(f"# {flag} ") for comment in comments)


def test_llama_cpp_has_a_context_for_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    command = "llama-3.1-8b --machine h100 --context 4096 --concurrency 3 --emit llama.cpp"
    arguments = shlex.split(emitted(capsys, command)[-1])
    assert arguments[arguments.index("-c") + 1] == "12288"
    assert arguments[arguments.index("-np") + 1] == "3"


def test_layers_on_the_host_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "llama-3-70b", "--machine", "rtx-4090", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    arguments = shlex.split(emitted(capsys, "llama-3-70b --machine rtx-4090 --emit llama.cpp")[-1])
    assert arguments[arguments.index("-ngl") + 1] == plan["options"][1]


@pytest.mark.parametrize("machine", ["2xrtx-3090", "8xh100", "rtx-4090 --kv-bits 8", "h100"])
def test_vllm_knows_every_flag(capsys: pytest.CaptureFixture[str], machine: str) -> None:
    """The options of vLLM 0.33.0 (scripts/record_vllm_flags.py), whose memory we know."""
    assert VLLM[0] == "# vllm serve of vLLM 0.33.0"
    line = emitted(capsys, f"llama-3.1-8b --machine {machine} --emit vllm")[-1]
    arguments = shlex.split(line)
    assert arguments[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    given = dict(zip(arguments[3::2], arguments[4::2], strict=True))
    assert {"--max-model-len", "--tensor-parallel-size"} <= given.keys() <= VLLM_FLAGS.keys()
    for flag, value in given.items():
        assert value in VLLM_FLAGS[flag] or not VLLM_FLAGS[flag]


def test_ones_own_command_is_taken_by_uma_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = emitted(
        capsys, "llama-3.2-1b --machine mac-mini-m4-16 --context 2048 --kv-bits 8 --emit mlx"
    )
    program, *arguments = shlex.split(lines[-1])
    assert program == "uma"
    assert main([*arguments, "--dry-run", "--force"]) == 0


def test_a_raised_limit_is_told_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = "llama-3-70b --machine mac-studio-m1-max-64 --macos 15 --context 12288 --min-bits 5"
    lines = emitted(capsys, f"{command} --min-tps 1 --emit mlx")
    assert lines[-4].startswith("sudo sysctl iogpu.wired_limit_mb=")
    assert "--bits 5" in lines[-1]


def test_the_script_for_accelerate_is_python_with_accelerates_own_map(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "llama-3-70b --machine rtx-4090 --host-ram 192GB --min-bits 16 --emit accelerate"
    tree = ast.parse("\n".join(emitted(capsys, command)))
    assigned = {
        node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
        for node in tree.body
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)
    }
    rooms, found = assigned["MAX_MEMORY"], assigned["DEVICE_MAP"]
    config = json.loads((CONFIGS / "meta-llama__Meta-Llama-3-70B-Instruct.json").read_text())
    architecture = architecture_from_config(config)
    assert found == auto_device_map(modules_of(architecture), rooms)
    layer_bytes = 2 * 855_654_400  # q, k, v, o, three of the feed-forward part and two norms
    held = sum(1 for name, device in found.items() if "layers." in name and device == 0)
    matrix = 2 * 128_256 * 8192
    assert held * layer_bytes + 2 * matrix <= rooms[0] < (held + 1) * layer_bytes + 2 * matrix


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("llama-3-70b --machine rtx-4090 --emit mlx", 2, "mlx is for Macs"),
        ("llama-3-70b --machine mac-studio-m2-ultra-192 --emit vllm", 2, "for cards"),
        ("llama-3-70b --machine rtx-4060-8gb --emit accelerate", 3, "too much for"),
        ("llama-3-70b -c 32k --machine rtx-4060-8gb --emit accelerate", 3, "hold no layer"),
        ("llama-3-8b --machine rtx-2060-6gb --emit accelerate", 2, "link between rtx-2060-6gb"),
        ("llama-3-8b --machine h100 --kv-bits 4 --emit vllm", 2, "no cache of 4 bits; it has 8"),
        ("llama-3-8b --machine h100 --kv-bits 8 --emit accelerate", 2, "it quantizes none"),
        ("llama-3-8b --machine 3xrtx-3090 --emit vllm", 2, "fewer than 3 cards"),
        ("llama-3-8b --machine rx-7900-xtx --emit vllm", 2, "known on NVIDIA's cards"),
        ("deepseek-v3 --machine 8xh200 --host-ram 2TB --emit accelerate", 1, "modules of deepseek"),
        ("gemma-3-27b --machine h100 --emit accelerate", 2, "text and images"),
        ("llama-3-70b --machine h100 --machine rtx-4090 --emit vllm", 2, "one machine"),
        ("llama-3-70b --machine h100 --emit vllm --json", 2, "leave out"),
    ],
)
def test_what_cannot_be_emitted_says_why(
    capsys: pytest.CaptureFixture[str], command: str, code: int, said: str
) -> None:
    assert main(["compare", *command.split()]) == code
    assert said in capsys.readouterr().err


def test_llama_cpp_is_told_what_each_of_two_cards_holds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = emitted(capsys, "llama-3-70b --machine 2xrtx-3090 --emit llama.cpp")
    cards = [line for line in lines if line.startswith("# card ")]
    assert [line.split(",")[0] for line in cards] == ["# card 0: 41 layers", "# card 1: 39 layers"]
    assert "-sm layer" in lines[-1]


def test_accelerate_writes_8_and_4_bits_over_cards_and_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "\n".join(emitted(capsys, "llama-3-70b --machine 2xrtx-3090 --emit accelerate"))
    tree = ast.parse(text)
    (found,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEVICE_MAP"
    ]
    assert set(found.values()) == {0, 1, "cpu"}
    assert "llm_int8_enable_fp32_cpu_offload=True" in text
    assert "load_in_4bit=True" in text


def accelerate_script(capsys: pytest.CaptureFixture[str], command: str) -> tuple[str, Any, Any]:
    """Its first line, and the limits and the map in it."""
    lines = emitted(capsys, f"{command} --emit accelerate")
    found = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)
    }
    return lines[0], found["MAX_MEMORY"], found["DEVICE_MAP"]


def layer_elements(model: str) -> list[int]:
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    layers = architecture_from_config(config.get("config", config)).layers
    return [sum(parameter.size for parameter in layer.parameters) for layer in layers]


LARGE_HOST = "--host-ram 256GB"


@pytest.mark.parametrize(
    "command",
    [
        f"llama-3-70b --machine 8xrtx-3060-12gb {LARGE_HOST}",
        f"llama-3-70b --machine 4xrtx-3060-12gb {LARGE_HOST}",
        f"llama-3-70b --machine rtx-4090 {LARGE_HOST} --min-bits 16",
        "llama-3-70b --machine 2xrtx-3090",
    ],
)
def test_the_map_of_accelerate_is_the_plan_that_stands_above_it(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """What is on the host are whole modules in 16 bits: layers, and embeddings or head."""
    title, rooms, found = accelerate_script(capsys, command)
    layer = 2 * layer_elements("meta-llama__Meta-Llama-3-70B-Instruct")[0]
    matrix = 2 * 128_256 * 8192
    on_host = sum(layer for name, place in found.items() if "layers." in name and place == "cpu")
    on_host += matrix if found["lm_head"] == "cpu" else 0
    told = re.search(r"([\d.]+) GiB on the host", title)
    assert float(told[1] if told else 0) == pytest.approx(on_host / GIB, abs=0.01)
    held, budget = map(float, re.findall(r"([\d.]+) GiB", title)[:2])
    assert held <= budget
    assert min(rooms.values()) > 0
    assert 0 in found.values()


def test_caches_of_layers_on_the_host_are_on_the_first_card(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where they run: the other cards leave more to weights by the caches of fewer layers."""
    command = f"llama-3-70b --machine 4xrtx-3060-12gb {LARGE_HOST} --context 16384"
    _, rooms, found = accelerate_script(capsys, command)
    places = [place for name, place in found.items() if "layers." in name]
    run = {card: places.count(card) for card in (0, 1)}
    cache = 2 * 8 * 128 * 16_384 * 2  # of a layer
    assert places.count("cpu") > 20
    more = (run[0] + places.count("cpu") - run[1]) * cache
    assert rooms[1] - rooms[0] == pytest.approx(more, abs=2 * cache)


def test_a_disk_takes_what_the_host_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    command = "llama-3-70b --machine rtx-4090 --host-disk 2TB --disk-bandwidth 7"
    title, _, found = accelerate_script(capsys, command)
    assert set(found.values()) == {0, "cpu", "disk"}
    assert "GiB on the disk" in title
    assert main(["compare", *command.split(), "--min-bits", "16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    slowest = plan["disk_bytes"] / 7e9 + (plan["host_bytes"] + plan["disk_bytes"]) / 31.5e9
    assert plan["disk_bytes"] > 40 * GIB
    assert plan["decode_tps"] < 1.02 / slowest


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    config = json.loads((CONFIGS / "meta-llama__Llama-3.2-1B-Instruct.json").read_text())
    (folder / "config.json").write_text(json.dumps(config.get("config", config)))
    return folder


@pytest.mark.parametrize(
    ("target", "machine"), [("mlx", "mac-mini-m4-16"), ("llama.cpp", "h100"), ("vllm", "h100")]
)
def test_a_name_with_a_new_line_runs_nothing_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, machine: str
) -> None:
    folder = folder_of(tmp_path, "x\ntouch PWNED;#")
    command = ["compare", str(folder), "--machine", machine, "--emit", target]
    assert main(command) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-c", text], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert "touch" in text
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("target", "machine"),
    [("llama.cpp", "h100"), ("accelerate", "h100"), ("vllm", "h100"), ("mlx", "mac-mini-m4-16")],
)
def test_a_folder_of_a_configuration_alone_is_emitted_by_its_name(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    machine: str,
) -> None:
    folder_of(tmp_path, "plain")
    monkeypatch.chdir(tmp_path)
    assert "plain" in "\n".join(emitted(capsys, f"plain --machine {machine} --emit {target}"))


@pytest.mark.parametrize(
    ("command", "served", "said"),
    [
        ("llama-3-70b --machine 2xrtx-3090", "<a repository of meta-llama/", "in place of <...>"),
        ("gpt-oss-120b --machine h100", "openai/gpt-oss-120b", "stored in mxfp4"),
        ("deepseek-v3 --machine 8xh200", "deepseek-ai/DeepSeek-V3", "stored in fp8"),
        ("llama-3-70b --machine h100 --min-bits 8", "meta-llama/", "while they are loaded"),
    ],
)
def test_vllm_serves_what_is_stored_as_planned_or_nothing(
    capsys: pytest.CaptureFixture[str], command: str, served: str, said: str
) -> None:
    lines = emitted(capsys, f"{command} --emit vllm")
    arguments = shlex.split(lines[-1])
    assert arguments[2].startswith(served)
    assert said in "\n".join(lines[:-1])
    assert ("--quantization" in arguments) == (said == "while they are loaded")


def test_several_requests_on_a_mac_are_served_by_mlx_lms_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "llama-3-70b --machine mac-studio-m2-ultra-192 --min-tps 15 --concurrency 4"
    *_, convert, _, _, _, line = emitted(capsys, f"{command} --emit mlx")
    program, *arguments = shlex.split(line)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert program == "mlx_lm.server"
    assert given["--decode-concurrency"] == given["--prompt-concurrency"] == "4"
    assert int(given["--prompt-cache-bytes"]) == 4 * 2 * 80 * 8 * 128 * 8192 * 2
    assert shlex.split(convert)[-1] == given["--model"]
    source = importlib.util.find_spec("mlx_lm.server")
    assert source is not None
    assert source.origin is not None
    known = Path(source.origin).read_text("utf-8")
    assert all(f'"{flag}"' in known for flag in given)
    assert main(["compare", *command.split(), "--kv-bits", "8", "--emit", "mlx"]) == 2
    assert "one request at a time" in capsys.readouterr().err
