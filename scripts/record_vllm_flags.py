"""Record the options of ``vllm serve``: tests/data/vllm_flags.txt.

    python scripts/record_vllm_flags.py SOURCE

SOURCE is vLLM's unpacked source distribution (``pip download --no-deps --no-binary vllm vllm``).
The options are the names that are added to its parsers, with values that vLLM declares for two of
them; nothing of vLLM is imported, which would need a card.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

FLAGS = Path(__file__).resolve().parent.parent / "tests/data/vllm_flags.txt"
PARSERS = ("engine/arg_utils.py", "entrypoints/common/cli_args.py")
VALUES = {
    "--kv-cache-dtype": ("config/cache.py", "CacheDType"),
    "--quantization": ("model_executor/layers/quantization/__init__.py", "QuantizationMethods"),
}


def flags(tree: ast.AST) -> Iterator[str]:
    """The first names of every ``add_argument``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr != "add_argument":
                continue
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                    yield str(argument.value)


def literal(tree: ast.AST, name: str) -> list[str]:
    """The texts of ``name = Literal[...]``."""
    for node in ast.walk(tree):
        named = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and getattr(named, "id", None) == name:
            return [str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)]
    raise SystemExit(f"{name} is not a literal there")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    source = parser.parse_args().source

    def tree(path: str) -> ast.Module:
        return ast.parse((source / "vllm" / path).read_text("utf-8"))

    version = re.search(r"^Version: (.+)$", (source / "PKG-INFO").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    found = {flag: "" for path in PARSERS for flag in flags(tree(path))}
    for flag, (path, name) in VALUES.items():
        found[flag] = " " + " ".join(literal(tree(path), name))
    lines = [f"{flag}{values}" for flag, values in sorted(found.items())]
    FLAGS.write_text("\n".join([f"# vllm serve of vLLM {version[1]}", *lines]) + "\n", "utf-8")
    print(f"{len(lines)} options of vLLM {version[1]}")


if __name__ == "__main__":
    main()
