"""The models of the catalog, as a list to look through."""

from typing import Any, Literal, get_args

from uma.catalog import has_words, model_config, models, short_name
from uma.catalog.rows import Model
from uma.errors import UnknownName
from uma.frozen import dataclass
from uma.units import GB

Kind = Literal["dense", "moe"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# How configurations call what a list of models shows.
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "n_ctx")
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as it is looked for: under the shortest name that means it."""

    name: str
    hf_id: str
    kind: Kind
    parameters: int | None
    active_parameters: int | None
    context_tokens: int | None
    release_date: str


def listed_models(
    text: str = "", *, kind: str | None = None, max_parameters: int | None = None
) -> list[ListedModel]:
    """The models of that kind and size, smallest first, whose names have the words of ``text``.

    Raises:
        UnknownName: If there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise UnknownName(f"--kind {kind} is no kind of model; known: {', '.join(KINDS)}")
    found = [_listed(m) for m in models() if has_words(f"{m.hf_id} {m.family}", text)]
    return sorted(
        (
            one
            for one in found
            if kind in (None, one.kind)
            and (max_parameters is None or (one.parameters or max_parameters + 1) <= max_parameters)
        ),
        key=lambda one: (one.parameters is None, one.parameters, one.name),
    )


def _listed(model: Model) -> ListedModel:
    config = _flat(model_config(model).values)
    experts = any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERT_KEYS)
    active = model.active_parameters
    if active is None and model.vendor_active_b is not None:
        active = round(model.vendor_active_b * GB)
    return ListedModel(
        name=short_name(model),
        hf_id=model.hf_id,
        kind="moe" if experts else "dense",
        parameters=model.parameters or model.parameters_hf,
        active_parameters=active if experts else None,
        context_tokens=next((config[key] for key in _CONTEXT_KEYS if key in config), None),
        release_date=model.release_date,
    )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration with those of its text part, which win."""
    for part in ("text_config", "llm_config", "language_config", "thinker_config", "ffn_config"):
        if isinstance(config.get(part), dict):
            return _flat({k: v for k, v in config.items() if k != part} | config[part])
    return config
