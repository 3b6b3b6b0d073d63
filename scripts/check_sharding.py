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
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

WIDTHS = {"even": (64, 96, 32), "odd": (37, 101, 11)}  # of two linear layers
STAGES, DEVICES, SHARDS = (1, 2, 3), 2, 4
GATHERED = {  # as a large model is: nothing stays between passes
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
DEEPSPEED = [
    {"model": model, "stage": stage, "offload": offload, "batches": batches}
    for model, stage, offload, batches in product(WIDTHS, STAGES, ("", "optimizer", "all"), (1, 3))
    if offload != "all" or stage == 3
]
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


COLLECTIVES = {
    "all_reduce": ("all_reduce",),
    "reduce_scatter": ("reduce_scatter_fn", "reduce_scatter_tensor", "reduce_scatter"),
    "all_gather": ("allgather_fn", "all_gather_into_tensor", "all_gather"),
}


class Sent:
    """Bytes of tensors that DeepSpeed gives to each kind of collective operation."""

    def __init__(self, comm: Any) -> None:
        self.found = dict.fromkeys(COLLECTIVES, 0)
        for kind, names in COLLECTIVES.items():
            for name in names:
                setattr(comm, name, self._counting(kind, getattr(comm, name)))

    def _counting(self, kind: str, call: Any) -> Any:
        def counted(first: Any, *rest: Any, **more: Any) -> Any:
            tensors = [t for t in (first, *rest) if isinstance(t, torch.Tensor)]
            before = dict(self.found)
            result = call(first, *rest, **more)  # which may call another of them
            if self.found == before:
                self.found[kind] += max(t.nbytes for t in tensors)
            return result

        return counted


def deepspeed_process(rank: int, file: str) -> None:
    """One device: an update of each kind, and the sizes of what it keeps and sends."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": DEVICES, "LOCAL_SIZE": DEVICES}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29650", DS_ACCELERATOR="cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=DEVICES)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled here
    sent = Sent(deepspeed.comm)
    rows = [{**asked, "devices": DEVICES, **updated(asked, sent)} for asked in DEEPSPEED]
    if rank == 0:
        Path(file).write_text(json.dumps(rows))


def updated(asked: dict[str, Any], sent: Sent) -> dict[str, Any]:
    import deepspeed

    model = model_of(asked["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, zero, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, dist_init_required=False, config=config_of(asked)
    )
    sent.found = dict.fromkeys(sent.found, 0)
    row = torch.ones(1, WIDTHS[asked["model"]][0], dtype=torch.bfloat16)
    for _ in range(asked["batches"]):
        engine.backward(engine(row).float().sum())
        engine.step()
    return {**kept_bytes(engine, zero, asked), "sent_bytes": dict(sent.found)}


def config_of(asked: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": asked["stage"], **GATHERED}
    if asked["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    if asked["offload"] == "all":
        zero["offload_param"] = {"device": "cpu"}
    batches = {"gradient_accumulation_steps": asked["batches"]}
    return {**CONFIG, **batches, "zero_optimization": zero}


def kept_bytes(engine: Any, zero: Any, asked: dict[str, Any]) -> dict[str, int]:
    """What the objects of one device keep after the update, on the device and on the host."""
    third = asked["stage"] == 3
    parameters = list(engine.module.parameters())
    own = [p.ds_tensor for p in parameters] if third else parameters
    flat = zero.fp32_partitioned_groups_flat if third else zero.single_partition_of_fp32_groups
    buffers = {
        "float32_gradient_bytes": [p.grad for p in flat if p.grad is not None],
        "gradient_buffer_bytes": [zero.grad_partitions_flat_buffer] if third else [],
        "weight_copy_bytes": getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", []),
        "sum_bytes": list(getattr(zero, "accumulated_grads_in_cpu", {}).values()),
        "largest_bytes": [getattr(zero, "temp_grad_buffer_for_cpu_offload", torch.empty(0))],
        "largest_on_device_bytes": [
            getattr(zero, "temp_grad_buffer_for_gpu_offload", torch.empty(0))
        ],
    }
    return {
        "parameter_bytes": sum(p.nbytes for p in own),
        "master_bytes": sum(p.nbytes for p in flat),
        "state_bytes": state_bytes(zero.optimizer),
        **{name: sum(t.nbytes for t in tensors) for name, tensors in buffers.items()},
    }


def deepspeed_rows() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        processes.spawn(deepspeed_process, args=(str(file),), nprocs=DEVICES)
        return list(json.loads(file.read_text()))


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
