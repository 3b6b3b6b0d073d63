"""Adapters: which matrices get one, and the arrays that it is made of."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from itertools import chain

from uma.architecture.layers import Architecture, Layer, Parameter
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.workload import TrainingWorkload

# Stacks of heads that mlx-lm multiplies by a module of its own (models/mla.py, MultiLinear), which
# its linear_to_lora_layers does not know.
NOT_LINEAR = (".embed_q", ".unembed_out")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The factors of one matrix, and DoRA's magnitude of each of its rows.

    ``count`` is the number of experts, 1 elsewhere.
    """

    parameter: Parameter
    rank: int
    magnitude: bool = False

    @property
    def count(self) -> int:
        return self.parameter.shape[0] if len(self.parameter.shape) == 3 else 1

    @property
    def rows(self) -> int:
        return self.parameter.shape[-2]

    @property
    def columns(self) -> int:
        return self.parameter.shape[-1]

    @property
    def size(self) -> int:
        """Elements: ``count * rank * (rows + columns)``, and ``rows`` of magnitudes."""
        magnitudes = self.rows if self.magnitude else 0
        return self.count * (self.rank * (self.rows + self.columns) + magnitudes)


def trained_layers(architecture: Architecture, workload: TrainingWorkload) -> tuple[Layer, ...]:
    """The last ``num_layers`` layers.

    Raises:
        UsageError: If the model has fewer.
    """
    layers = architecture.layers
    if workload.num_layers is None:
        return layers
    if workload.num_layers > len(layers):
        raise UsageError(
            f"--num-layers {workload.num_layers}: the model has {len(layers)} layers; leave it "
            "out, or give -1, to train all of them"
        )
    return layers[-workload.num_layers :]


def is_adaptable(parameter: Parameter) -> bool:
    """Whether it is the weight of a linear layer, a stack of experts, or an embedding."""
    if parameter.name.endswith(NOT_LINEAR):
        return False
    return parameter.kind in ("matrix", "embedding")


def is_target(parameter: Parameter, targets: tuple[str, ...]) -> bool:
    """Whether ``targets``, last parts of names or patterns, name it; empty names all."""
    name = f".{parameter.name}"
    return not targets or any(fnmatch(name, f"*.{target}") for target in targets)


def adapters(architecture: Architecture, workload: TrainingWorkload) -> Iterator[Adapter]:
    """The adapters of every trained layer, in the layers' order; none where none is named."""
    for layer in trained_layers(architecture, workload):
        yield from layer_adapters(layer, workload)


def none_named(
    names: tuple[str, ...], among: Iterable[Parameter], workload: TrainingWorkload
) -> UsageError:
    """That no matrix has one of ``names``, with those that there are ``among`` trained layers."""
    known = ", ".join(sorted({p.name.rpartition(".")[2] for p in among if is_adaptable(p)}))
    last = workload.num_layers
    where = "this model has" if last is None else f"its last {last} layers have"
    what = f"is named {', '.join(names)}" if names else "takes an adapter"
    return UsageError(f"no matrix {what}; {where} {known or 'none'}")


def layer_adapters(layer: Layer, workload: TrainingWorkload) -> Iterator[Adapter]:
    """The adapters of one layer; none for full fine-tuning."""
    if workload.method == "full":
        return
    for parameter in layer.parameters:
        if is_adaptable(parameter) and is_target(parameter, workload.targets):
            yield Adapter(parameter, workload.rank, workload.method == "dora")


def mlx_adapters(architecture: Architecture, workload: TrainingWorkload) -> Iterator[Adapter]:
    """Those of mlx-lm, whose DoRA has no form for stacked experts (0.32.2, ``tuner/utils.py``).

    Raises:
        UsageError: If it is asked for one.
    """
    for adapter in adapters(architecture, workload):
        require_form(adapter)
        yield adapter


def require_form(adapter: Adapter) -> None:
    """
    Raises:
        UsageError: If it is DoRA of a stack of experts.
    """
    if adapter.magnitude and len(adapter.parameter.shape) == 3:
        raise UsageError(
            f"DoRA has no form for the stacked experts of {adapter.parameter.name}; train LoRA, "
            "or name other targets"
        )


def adapter_elements(architecture: Architecture, workload: TrainingWorkload) -> int:
    """Trained elements of all adapters.

    Raises:
        UsageError: If no matrix of the trained layers is named by ``targets``.
    """
    found = sum(adapter.size for adapter in adapters(architecture, workload))
    if not found and workload.method != "full":
        layers = trained_layers(architecture, workload)
        raise none_named(workload.targets, chain(*(x.parameters for x in layers)), workload)
    return found
