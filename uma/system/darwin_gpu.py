"""macOS: the GPU as the IORegistry describes it.

Pure; what an answer lacks is ``None``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NUMBER = r'"([^"\n]{1,80})"\s*=\s*([0-9]{1,18})(?![0-9])'


@dataclass(frozen=True, slots=True)
class Accelerator:
    """``AGXAccelerator``: sizes in bytes, of the whole machine.

    ``alloc`` is all that any program has allocated, swapped out or not; ``in_use`` what the GPU
    refers to at the moment. ``device_util_pct`` is the one of the three utilizations that compute
    work moves. ``recovery_count`` counts resets of the GPU since the machine started.
    """

    model: str | None
    gpu_cores: int | None
    alloc: int | None
    in_use: int | None
    in_use_driver: int | None
    device_util_pct: int | None
    recovery_count: int | None


def parse_ioreg(text: str) -> Accelerator | None:
    """The accelerator in ``ioreg``'s text; ``None`` where there are no statistics of one."""
    statistics = re.search(r'"PerformanceStatistics"\s*=\s*\{([^}]*)\}', text)
    numbers = dict(re.findall(_NUMBER, statistics[1])) if statistics else {}
    if not numbers:
        return None
    model = re.search(r'"model"\s*=\s*"([^"\n]{1,80})"', text)
    cores = re.search(r'"gpu-core-count"\s*=\s*([0-9]{1,4})\s', text)
    return _accelerator(model[1] if model else None, int(cores[1]) if cores else None, numbers)


def _accelerator(model: str | None, cores: int | None, numbers: Mapping[str, str]) -> Accelerator:
    def number(key: str) -> int | None:
        return int(numbers[key]) if key in numbers else None

    return Accelerator(
        model=model,
        gpu_cores=cores,
        alloc=number("Alloc system memory"),
        in_use=number("In use system memory"),
        in_use_driver=number("In use system memory (driver)"),
        device_util_pct=number("Device Utilization %"),
        recovery_count=number("recoveryCount"),
    )
