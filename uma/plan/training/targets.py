"""Which matrices get an adapter, by the names that were asked for: what is said of them."""

from collections.abc import Iterator

from uma.architecture.layers import Parameter
from uma.errors import UsageError
from uma.memory.adapters import (
    Adapter,
    is_adaptable,
    is_target,
    layer_adapters,
    none_named,
    require_form,
    trained_layers,
)
from uma.plan.training.case import TrainingCase


def check_targets(case: TrainingCase) -> None:
    """
    Raises:
        UsageError: If a target names no matrix, or all of them such as nothing is known of.
    """
    matrices = _matrices(case)
    for target in case.workload.targets:
        if not any(is_target(parameter, (target,)) for parameter in matrices):
            raise none_named((target,), matrices, case.workload)
    found = _adapters(case)
    for adapter in found:
        require_form(adapter)
    silent = _silent(case, found)
    if found and silent == {_last(adapter.parameter) for adapter in found}:
        from uma.engines.torch_roles import roles_of

        known = ", ".join(sorted({_last(p) for p in matrices if roles_of(p)}))
        raise UsageError(
            f"what adapters of {', '.join(sorted(silent))} keep is not known: name others, or "
            f"others too, of {known}"
        )


def target_notes(case: TrainingCase) -> Iterator[str]:
    """What holds for the matrices that are trained, and is not in the numbers."""
    from uma.engines.torch_roles import roles_of

    workload, found = case.workload, _adapters(case)
    known = [a for a in found if roles_of(a.parameter)]  # without gates of a single row
    narrow = min((min(a.rows, a.columns) for a in known), default=workload.rank)
    if workload.rank > narrow:
        yield f"a rank of {workload.rank} is above {narrow}, the full rank of a trained matrix"
    silent = _silent(case, found) if workload.targets else set()
    if silent:
        yield f"values that adapters of {', '.join(sorted(silent))} keep are not counted"


def _matrices(case: TrainingCase) -> list[Parameter]:
    """Those that may have an adapter; routers of transformers 5 are bare parameters."""
    layers = trained_layers(case.architecture, case.workload)
    found = [p for layer in layers for p in layer.parameters if is_adaptable(p)]
    if case.engine == "mlx" or case.settings.expert_modules:
        return found
    from uma.engines.schemes import ROUTERS

    return [p for p in found if not p.name.endswith(ROUTERS)]


def _adapters(case: TrainingCase) -> list[Adapter]:
    """Of the trained layers, those of a kind once."""
    count = len(trained_layers(case.architecture, case.workload))
    kinds = {id(kind): kind for kind in case.architecture.kinds[-count:]}.values()
    if case.engine == "mlx":
        return [adapter for kind in kinds for adapter in layer_adapters(kind, case.workload)]
    from uma.engines.torch_model import adapters_of

    model = case.torch_model
    return [adapter for kind in kinds for adapter in adapters_of(kind, model)]


def _silent(case: TrainingCase, found: list[Adapter]) -> set[str]:
    """Names of matrices whose adapters torch's layout of a layer has no values of."""
    if case.engine == "mlx":
        return set()
    from uma.engines.torch_roles import roles_of

    return {_last(a.parameter) for a in found if not roles_of(a.parameter)}


def _last(parameter: Parameter) -> str:
    return parameter.name.rpartition(".")[2]
