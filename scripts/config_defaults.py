"""Write ``uma/data/config_defaults.csv``: what a key of ``config.json`` is where the file lacks it.

python scripts/config_defaults.py [FILE]

Needs transformers. A row is one default of the configuration class of a ``model_type``, for the
keys that ``uma.architecture`` reads, as the class declares it.
"""

import csv
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from uma.architecture import REMAPPING, WRAPPERS
from uma.architecture.config import ESSENTIAL
from uma.architecture.families import NAMES

ROOT = Path(__file__).parents[1]
FILE = ROOT / "uma" / "data" / "config_defaults.csv"
DATE = "2026-11-30"
COLUMNS = ("model_type", "key", "value", "source")
READ = re.compile(r"""\bc(?:onfig)?\.([A-Za-z_]\w*)|["']([A-Za-z_]\w*)["']""")

NOT_DEFAULTS = ESSENTIAL | {"model_type", "dtype", "architectures", "text_config", "vision_config"}
NOT_DEFAULTS |= {"rope_theta"}  # checked where it stands, and no size depends on it

# Sizes of the only models of a type, where transformers has none or not theirs.
MINIMAX_M1 = "MiniMaxAI/MiniMax-M1-80k in llmfit 1.1.17"
STEP = "parameter count of stepfun-ai/Step-3.5-Flash"
OWN = [
    (model_type, key, json.dumps(value), MINIMAX_M1)
    for model_type in ("minimax_m1", "minimax_text_01")
    for key, value in {
        "num_attention_heads": 64,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "vocab_size": 200064,
    }.items()
] + [("step3p7", "num_sliding_attention_heads", "96", STEP)]


def keys_read() -> set[str]:
    """The words of ``uma.architecture`` that may name a key of ``config.json``."""
    text = "".join(file.read_text("utf-8") for file in (ROOT / "uma/architecture").glob("*.py"))
    return {name for pair in READ.findall(text) for name in pair if name}


def known(model_type: str) -> bool:
    """Whether ``model_type``, or the text model that it names, is one that we lay out."""
    names = (model_type, model_type.removesuffix("_model").removesuffix("_text"))
    return any(REMAPPING.get(n, n) in NAMES | WRAPPERS for n in names)


def class_defaults(model_type: str, keys: set[str]) -> dict[str, Any]:
    """Declared defaults of the text model's configuration class, before it derives others."""
    config = CONFIG_MAPPING[model_type]().get_text_config()
    declared = {field.name: field for field in dataclasses.fields(config)}
    return {
        key: _plain(declared[key].default)
        for key in sorted(keys & declared.keys())
        if _plain(declared[key].default) is not dataclasses.MISSING
    }


def _plain(value: Any) -> Any:
    """The default as JSON has it; groups of keys are configurations of their own."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def rows() -> list[tuple[str, str, str, str]]:
    """All rows, ordered by ``model_type`` and key."""
    keys = keys_read() - NOT_DEFAULTS
    own = {(model_type, key) for model_type, key, *_ in OWN}
    table = list(OWN)
    for model_type in sorted(CONFIG_MAPPING):
        if known(model_type):
            name = type(CONFIG_MAPPING[model_type]().get_text_config()).__name__
            source = f"transformers {transformers.__version__} {name}"
            for key, value in class_defaults(model_type, keys).items():
                if (model_type, key) not in own:
                    table.append((model_type, key, json.dumps(value), source))
    return sorted(table)


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    with file.open("w", encoding="utf-8", newline="") as out:
        out.write(f"# config_defaults.csv - 1 - {DATE}\n")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())


if __name__ == "__main__":
    main()
