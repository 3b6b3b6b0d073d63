#!/usr/bin/env python3
"""Record what DeepSpeed, PyTorch's FSDP and accelerate keep on one device, and what they print.

Usage: check_sharding.py FILE.json  (in an environment with torch, deepspeed and accelerate)

Small models of bfloat16 take one step on the CPU under DeepSpeed's stages 1, 2 and 3 (one process a
device, gloo) and under ``fully_shard`` (the first of several devices of a pretended group), and the
bytes of the first device's own objects are counted. DeepSpeed's estimators
(``runtime/zero/stage_1_and_2.py``, ``stage3.py``) and accelerate's (``commands/estimate.py``) are
called. ``tests/data/torch_sharding.json`` is what this wrote; ``tests/test_sharding.py`` compares.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

WIDTHS = {"even": (64, 96, 32), "odd": (37, 101, 11)}  # of two linear layers
STAGES, DEVICES, SHARDS = (1, 2, 3), 2, 4
ESTIMATED = ((2_851_000_000, 32_000_000), (7_241_732_096, 218_112_000), (70_553_706_496, 1 << 30))
GROUPS = ((8, 1), (1, 1), (8, 4))  # devices of a node, nodes
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def model_of(name: str) -> torch.nn.Module:
    first, second, third = WIDTHS[name]
    layers = torch.nn.Linear(first, second), torch.nn.ReLU(), torch.nn.Linear(second, third)
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


def state_bytes(optimizer: Any) -> int:
    states = (v for s in optimizer.state.values() for k, v in s.items() if k != "step")
    return sum(_local(v).nbytes for v in states)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def deepspeed_process(rank: int, name: str, stage: int, port: int, folder: str) -> None:
    """One device: a step, and the sizes of what it keeps."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": DEVICES, "LOCAL_SIZE": DEVICES}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=DEVICES)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled here
    model = model_of(name)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, zero, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        dist_init_required=False,
        config=config,
    )
    engine.backward(engine(torch.ones(1, WIDTHS[name][0], dtype=torch.bfloat16)).float().sum())
    engine.step()
    parameters = list(engine.module.parameters())
    own = [p.ds_tensor for p in parameters] if stage == 3 else parameters
    flat = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    found = {
        "parameter_bytes": sum(p.nbytes for p in own),
        "master_bytes": sum(p.nbytes for p in flat),
        "state_bytes": state_bytes(zero.optimizer),
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


def deepspeed_rows() -> list[dict[str, Any]]:
    rows = []
    for number, (name, stage) in enumerate((n, s) for n in WIDTHS for s in STAGES):
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(
                deepspeed_process, args=(name, stage, 29650 + number, folder), nprocs=DEVICES
            )
            found = json.loads(Path(folder, "found.json").read_text())
        rows.append({"model": name, "stage": stage, "devices": DEVICES, **found})
    return rows


def fsdp_rows() -> list[dict[str, Any]]:
    """``fully_shard`` as the first of ``SHARDS`` devices sees it; nothing is sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SHARDS)
    mesh = init_device_mesh("cpu", (SHARDS,))
    rows = []
    for name in WIDTHS:
        model = model_of(name)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.ones(1, WIDTHS[name][0], dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        found = {
            "parameter_bytes": sum(_local(p).nbytes for p in model.parameters()),
            "gradient_bytes": sum(_local(p.grad).nbytes for p in model.parameters()),
            "state_bytes": state_bytes(optimizer),
        }
        rows.append({"model": name, "devices": SHARDS, **found})
    dist.destroy_process_group()
    return rows


def estimates() -> list[dict[str, Any]]:
    """What DeepSpeed prints for models and groups of devices."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as third
    from deepspeed.runtime.zero.stage_1_and_2 import (
        estimate_zero2_model_states_mem_needs as second,
    )

    rows = []
    for parameters, largest in ESTIMATED:
        for devices, nodes in GROUPS:
            asked = {"parameters": parameters, "largest_layer": largest}
            asked |= {"devices": devices, "nodes": nodes}
            for offload in ("", "optimizer"):
                host, device = second(parameters, devices, nodes, cpu_offload=bool(offload))
                found = {"device_bytes": device, "host_bytes": host}
                rows.append({**asked, "stage": 2, "offload": offload, **found})
            for offload in ("", "optimizer", "all"):
                host, device, _ = third(
                    parameters,
                    largest,
                    devices,
                    nodes,
                    cpu_offload=bool(offload),
                    cpu_offload_params=offload == "all",
                    zero_init=False,
                )
                found = {"device_bytes": device, "host_bytes": host}
                rows.append({**asked, "stage": 3, "offload": offload, **found})
    return rows


def main(path: Path) -> int:
    import accelerate
    import deepspeed
    from accelerate.commands.estimate import estimate_training_usage

    shapes = {name: [list(p.shape) for p in model_of(name).parameters()] for name in WIDTHS}
    document = {
        "versions": {m.__name__: m.__version__ for m in (torch, deepspeed, accelerate)},
        "shapes": shapes,
        "deepspeed": deepspeed_rows(),
        "fsdp": fsdp_rows(),
        "estimates": estimates(),
        "accelerate": {"bytes": 4_000_000, **estimate_training_usage(4_000_000, "float32")},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
