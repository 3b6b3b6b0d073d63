"""Chat templates: rendered as transformers renders them, and harmless whatever they try."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_lm.tokenizer_utils import load as load_tokenizer
from models import save_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from uma.errors import CheckpointError
from uma.runtime import template, template_worker
from uma.runtime.template import chat_tokens, render

MESSAGES = [
    {"role": "system", "content": "Be <brief> & clear."},
    {"role": "user", "content": "Où est 日本? 🦙"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "  Where?\n"},
]

# One line for each thing that the templates of the large families do (Llama 3, Qwen 3, Mistral,
# Gemma, Phi, DeepSeek, gpt-oss): slices, namespaces, loop controls, macros, filters, dates.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "blocks are trimmed": "{% for m in messages %}\n    {%- if loop.first %}\n  {{ bos_token }}\n"
    "    {% endif %}\n  [{{ loop.index0 }}] {{ m.content | trim }}\n{% endfor %}\n",
    "a namespace": "{% set ns = namespace(seen=false, last=0) %}{% for m in messages[::-1] %}"
    "{% if m.role == 'user' and not ns.seen %}{% set ns.seen = true %}"
    "{% set ns.last = loop.index %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.seen }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "a generation block": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "string methods": "{% set c = messages[1].content %}{{ c.split(' ')[-1].strip('?') }}"
    "{{ c.startswith('O') }}{{ c.upper() }}{{ '%s!' % c }}{{ c | length }}",
    "a macro": "{% macro show(m) -%}<{{ m.role | capitalize }}>{%- endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "switches": "{{ enable_thinking is defined and enable_thinking }}{{ tools is none }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ dict(a=1)['a'] }}{{ missing | default('none') }}",
}
VARIABLES = {"bos_token": "<s>", "add_generation_prompt": True, "enable_thinking": False}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_what_transformers_gives(name: str) -> None:
    source = TEMPLATES[name]
    variables = {k: v for k, v in VARIABLES.items() if k != "add_generation_prompt"}
    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **variables
    )
    ours = render(source, {"messages": MESSAGES, "tools": None, "documents": None} | VARIABLES)
    assert ours == theirs[0]


HOSTILE = {
    "loops for ever": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "recurses for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a huge string": "{{ 'x' * 10000000000 }}",
    "a huge number": "{{ (10 ** 10) ** (10 ** 9) }}",
    "a wide format": "{{ '%0999999999d' % 1 }}",
    "doubles a string": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    # CVE-2024-34359 (llama-cpp-python): out of the sandbox through an object of Jinja's own.
    "globals of a helper": "{{ cycler.__init__.__globals__.os.popen('touch HARM').read() }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "attr filter": "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
    "format strings": "{{ '{0.__class__.__mro__}'.format('').upper() }}",
    "a hidden namespace name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch HARM') }}",
    "megabytes in one piece": "{{ 'x' * 3000000 }}",
    "megabytes bit by bit": "{% for i in range(90000) %}{{ i * 'word ' }}{% endfor %}",
    "its own refusal": "{{ raise_exception('Only user messages, please.') }}",
    "bad syntax": "{{ messages",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_in_bounded_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="the model's chat template"):
        render(HOSTILE[name], {"messages": MESSAGES})
    assert time.monotonic() - start < 5  # 2 s of its own, and the start of a process
    assert list(tmp_path.iterdir()) == []


def test_a_slow_start_is_not_held_against_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a cold disk: the process takes longer to start than a template may take."""
    slow = tmp_path / "worker.py"
    worker = Path(template_worker.__file__).read_text(encoding="utf-8")
    slow.write_text(f"import time\ntime.sleep(1)\n{worker}", encoding="utf-8")
    monkeypatch.setattr(template_worker, "__file__", str(slow))
    monkeypatch.setattr(template, "SECONDS", 0.5)
    assert render("{{ messages }}", {"messages": "Hi"}) == "Hi"


def test_a_template_may_quote_a_long_message_and_add_little(tmp_path: Path) -> None:
    long = "文 " * 500_000
    assert render("<{{ m }}>", {"m": long}) == f"<{long}>"
    most = template_worker.ADDED_CHARACTERS
    assert render("{{ 'x' * n }}", {"n": most}) == "x" * most
    with pytest.raises(CheckpointError, match="wrote more than 26"):
        render("{{ 'x' * n }}", {"n": most + 100})


def test_the_words_of_a_template_reach_the_user() -> None:
    with pytest.raises(CheckpointError, match=r"Only user messages, please\."):
        render(HOSTILE["its own refusal"], {"messages": MESSAGES})


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_tokens_are_those_of_mlx_lm(thinking: bool | None, tokenizer: Any) -> None:
    switch = {} if thinking is None else {"enable_thinking": thinking}
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, **switch)
    found = chat_tokens(tokenizer, MESSAGES, thinking=thinking)
    assert found == expected
    assert ("</think>" in tokenizer.decode(found)) == (thinking is False)


def test_template_variables_are_passed_on(tokenizer: Any) -> None:
    tokenizer._tokenizer.chat_template = "{{ mood }}{{ eos_token }}"
    found = chat_tokens(tokenizer, MESSAGES, template_config={"mood": "calm"})
    assert tokenizer.decode(found) == "calm<|im_end|>"


def test_without_a_template_the_text_stands_alone(tokenizer: Any) -> None:
    tokenizer.has_chat_template = False
    found = chat_tokens(tokenizer, MESSAGES[1:2])
    assert tokenizer.decode(found, skip_special_tokens=True) == MESSAGES[1]["content"]
