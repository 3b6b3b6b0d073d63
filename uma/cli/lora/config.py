"""Settings of ``uma lora train`` from YAML with mlx_lm.lora's keys, and those written as JSON.

Keys: mlx-lm 0.32.2, ``lora.py``, ``CONFIG_DEFAULTS``, and what ``load_dataset`` reads beside them.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from uma.cli.lora.asked import Asked
from uma.cli.lora.precedence import FROM_FILE, OF_ADAPTERS
from uma.cli.progress import say
from uma.errors import UsageError

_FORMER = {"lora_layers": "num_layers", "training_mode": "fine_tune_type"}
"""Keys of former versions of mlx-lm and of its forks, and what they are now."""
_FEATURES = ("prompt_feature", "completion_feature", "text_feature", "chat_feature")
_LARGEST = 1 << 20  # bytes of a file of settings
_NEVER = ("config", "help", "model_argument", "json", "dry_run", "detach", "progress", "yes")


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the file's values for the options that the command line does not give.

    Other commands than ``train`` pass over what is its alone.

    Raises:
        UsageError: If it cannot be read, or has a key or value that is not known.
    """
    if path is None:
        return None
    options = {p.name: p for p in context.command.params if p.name not in _NEVER}
    training = "iters" in options
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name in options and name not in _SPECIAL:
            values[name] = value
        elif name in _SPECIAL:
            values |= _SPECIAL[name](path, value) if training or name == "hf_dataset" else {}
        elif training or name in _NEVER or name not in Asked.__dataclass_fields__:
            raise UsageError(
                f"{path}: unknown key {key!r}; {_meant(name, {*map(str, options), *_SPECIAL})}"
            )
    for name, value in values.items():
        _require(path, options[name], name, value)
        if getattr(options[name], "multiple", False) and value is not None:
            values[name] = value if isinstance(value, list) else [value]
    # ``null`` is mlx_lm's own default, and says nothing.
    values = {name: value for name, value in values.items() if value is not None}
    context.meta[FROM_FILE] = frozenset(values)
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _meant(name: str, known: set[str]) -> str:
    """The key that was meant, or all of them."""
    from difflib import get_close_matches

    near = _FORMER.get(name) or next(iter(get_close_matches(name, known, 1, 0.75)), None)
    return f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"


def _read(path: Path) -> dict[str, Any]:
    from importlib.util import find_spec

    if find_spec("yaml") is None:
        raise UsageError("--config needs PyYAML, which mlx-lm brings: pip install pyyaml")
    yaml: Any = import_module("yaml")
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UsageError(f"--config {path} is larger than 1 MiB: give a file of settings alone")
        found = yaml.load(content.decode(), _loader(yaml))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {path} holds no keys with values")
    return found


def _loader(yaml: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as text; mlx_lm reads it as a number, and so do we.

    Aliases, and keys that are given twice, are refused.
    """
    import re

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few of them can stand for terabytes
                raise yaml.YAMLError(f"*{self.peek_event().anchor} is an alias: write it out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [str(key.value).replace("-", "_") for key, _ in node.value]
            if twice := [name for name in names if names.count(name) > 1]:
                raise yaml.YAMLError(f"{twice[0]} is given twice")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?([eE][-+]?\d+)|[-+]?\d+\.\d*|[-+]?\.\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def _require(path: Path, option: Any, name: str, value: Any) -> None:
    """Refuse a value that the option does not take, by the file's name."""
    if value is None:
        return
    many = getattr(option, "multiple", False)
    values = value if many and isinstance(value, list) else [value]
    for one in values:
        try:
            if isinstance(one, list | dict):
                raise ValueError(f"{one!r} instead of one value")
            if isinstance(one, bool) is not bool(getattr(option, "is_flag", False)):
                raise ValueError(f"{one!r} is not {'true or false' if option.is_flag else 'right'}")
            if isinstance(one, float) and one.is_integer():
                one = int(one)  # 1e3
            option.type.convert(one if isinstance(one, str) else str(one), option, None)
        except Exception as error:  # of typer's own copy of click
            raise UsageError(f"{path}: {name}: {getattr(error, 'message', error)}") from None


def _adapter(path: Path, value: Any) -> dict[str, Any]:
    """``lora_parameters``, which may be ``null``, as for full fine-tuning."""
    if value is None:
        return {}
    found = _mapping(path, "lora_parameters", value)
    if "alpha" in found:
        raise UsageError(
            f"{path}: lora_parameters has alpha; mlx-lm's layers have scale instead, which is "
            f"alpha / rank: {found['alpha']} / {found.get('rank', 8)}"
        )
    _require_known(path, "lora_parameters", found, OF_ADAPTERS)
    return found


def _text(name: str) -> Callable[[Path, Any], dict[str, Any]]:
    """A mapping that its option takes as JSON."""
    return lambda path, value: {
        name: None if value is None else json.dumps(_mapping(path, name, value))
    }


def _train(path: Path, value: Any) -> dict[str, Any]:
    if value is False:
        raise UsageError(f"{path}: train is false; to evaluate alone: uma lora eval")
    return {}


def _test(path: Path, value: Any) -> dict[str, Any]:
    if value:
        say(f"note: {path}: test is not run; afterwards: uma lora eval --split test")
    return {}


def _passed_over(path: Path, value: Any) -> dict[str, Any]:
    """What is always so, or bounded by the plan."""
    return {}


def _refused(name: str, why: str) -> Callable[[Path, Any], dict[str, Any]]:
    def check(path: Path, value: Any) -> dict[str, Any]:
        if value:
            raise UsageError(f"{path}: {name}: {why}")
        return {}

    return check


def _hub_data(path: Path, value: Any) -> dict[str, Any]:
    """``hf_dataset``: one data set of the hub, as ``--data`` takes it."""
    if not value:
        return {}
    return {"data": json.dumps(_mapping(path, "hf_dataset", value))}


_SPECIAL: dict[str, Callable[[Path, Any], dict[str, Any]]] = {
    "lora_parameters": _adapter,
    "lr_schedule": _text("lr_schedule"),
    "optimizer_config": _text("optimizer_config"),
    "hf_dataset": _hub_data,
    "train": _train,
    "test": _test,
    "test_batches": _passed_over,
    "config": _passed_over,
    "grad_checkpoint": _passed_over,
    "clear_cache_threshold": _passed_over,
    "resume_adapter_file": _refused("resume_adapter_file", "continue a run with --resume"),
    "trust_remote_code": _refused("trust_remote_code", "no model's own code is run"),
} | {
    name: _refused(name, f"give the rows of the data set the key {name.split('_')[0]!r}")
    for name in _FEATURES
}


def _mapping(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {name} is {value!r} instead of keys with values")
    return value


def _require_known(path: Path, name: str, found: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in found:
        if key not in known:
            raise UsageError(f"{path}: {name} has no {key!r}; it has {', '.join(known)}")


def mapping_of(text: str | None, name: str) -> dict[str, Any] | None:
    """What an option holds as JSON.

    Raises:
        UsageError: If it is no JSON object.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f'{name} must be a JSON object, such as {{"name": "value"}}')
    return found


def settings_of(optimizer: str, text: str | None) -> dict[str, Any] | None:
    """The settings of one optimizer; a file may hold those of several, by name."""
    found = mapping_of(text, "--optimizer-config")
    if found and all(isinstance(value, dict) for value in found.values()):
        own: dict[str, Any] | None = found.get(optimizer)
        return own or None
    return found or None


def check_optimizer(
    optimizer: str, lr_schedule: str | None, optimizer_config: str | None, report_to: str | None
) -> None:
    """Refuse now what would be refused after the model is loaded.

    Raises:
        UsageError, RuntimeUnavailable: As the optimizer and the trackers do.
    """
    schedule = mapping_of(lr_schedule, "--lr-schedule")
    settings = settings_of(optimizer, optimizer_config)
    if schedule or settings:
        from uma.cli.session import require_mlx

        require_mlx(quiet=True)
        from uma.runtime.lora.optimizer import make_optimizer

        make_optimizer(optimizer, 0.0, schedule=schedule, settings=settings)
    if report_to:
        from uma.runtime.lora.trackers import trackers

        trackers(report_to)
