"""The program in which a chat template runs: read a JSON request, write a JSON answer.

Started by ``uma.runtime.template`` as a process of its own, without the package: a template comes
with the model, from anyone, and may try to loop, to fill memory, or to reach Python. The
environment is that of transformers 5.24 (``utils/chat_template_utils.py``), which templates are
written for: sandboxed, blocks trimmed, ``break`` and ``continue``, ``generation`` blocks.
"""

import contextlib
import json
import sys
from datetime import datetime
from typing import Any

MEMORY_BYTES = 300 << 20

ADDED_CHARACTERS = 1 << 18
"""What a template may write beside its variables; real ones write a few thousand."""


class TooLong(Exception):
    """The template wrote more than it may."""


def rendered(env: Any, template: str, variables: dict[str, Any]) -> str:
    """The text of a template, which may quote each variable a few times."""
    longest = ADDED_CHARACTERS + 4 * len(json.dumps(variables))
    parts, length = [], 0
    for part in env.from_string(template).generate(variables):
        parts.append(part)
        length += len(part)
        if length > longest:
            raise TooLong(f"it wrote more than {longest:,} characters")
    return "".join(parts)


def environment() -> Any:
    """A sandbox with the names that chat templates use."""
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  jinja2 reads a class attribute

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class SafeNamespace(Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace cannot hold {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **kwargs: Any) -> Namespace:
        made = SafeNamespace()
        for name, value in dict(*args, **kwargs).items():
            made[name] = value
        return made

    def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=make_dict,
        namespace=namespace,
    )
    return env


def limit_memory() -> None:
    """Let the system refuse memory; where it cannot, the parent watches."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def main() -> None:
    request = json.load(sys.stdin)
    limit_memory()
    try:
        env = environment()
        sys.stdout.write("\n")  # ready: the parent's clock starts
        sys.stdout.flush()
        answer = {"text": rendered(env, request["template"], request["variables"])}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    main()
