"""What plain mlx-lm 0.32.2 does with data and adapters, run here, beside what we do.

A case is named by its number in the collection that this project was begun with (V, F and G: seen
in mlx-lm, adapters and conversion, data; those of group E are in ``test_cases_training.py``).
``COVERED`` names the tests elsewhere that answer one; what is about memory is measured in
``test_cases_lora_memory.py``.
"""

import json
import re
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.datasets import CacheDataset, ChatDataset, TextDataset, load_local_dataset
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.trainer import (
    TrainingArgs,
    default_loss,
    grad_checkpoint,
    iterate_batches,
    train,
)
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import _parse_size
from models import CONFIGS, build_model
from test_dataset import Letters, Thinking, chat_row, example, shown, written

from uma.dataset.batches import batch_plan, padded_length
from uma.dataset.examples import example_of, fit
from uma.dataset.rows import read_rows
from uma.errors import CheckpointError, DataError, UnsupportedModel, UsageError
from uma.measurement.run_folder import Progress, State, require_free
from uma.runtime.lora.adapter import Adapter, load_adapter, put_adapter, save_adapter
from uma.runtime.lora.batching import batch_of
from uma.runtime.lora.calls import intercepted, own_call
from uma.runtime.lora.checkpoint import save_checkpoint
from uma.units import GIB, parse_bytes

TESTS = Path(__file__).parent
COVERED = {
    "V3": "test_lora_fuse.py::test_what_few_bits_would_swallow_is_refused_and_nothing_written",
    "V29": "test_lora_eval.py::test_the_loss_does_not_depend_on_the_batch",
    "V31": "test_lora_peft.py::test_the_commands_convert_there_and_back",
    "F1": "test_lora_fuse.py::test_what_few_bits_would_swallow_is_refused_and_nothing_written",
    "F2": "test_lora_gguf.py::test_a_quantized_fusion_and_other_vocabularies_are_refused"
    "_before_loading",
    "F3": "test_lora_fuse.py::test_the_fused_matrices_may_have_more_bits_than_the_others",
    "F4": "test_lora_peft.py::test_an_imported_adapter_gives_the_logits_of_peft",
    "F5": "test_lora_config.py::test_what_is_wrong_in_the_file_is_named",
    "G2": "test_lora_eval.py::test_the_loss_does_not_depend_on_the_batch",
}
CASES = [*(f"V{n}" for n in (*range(3, 12), *range(20, 32))), *(f"F{n}" for n in range(1, 9))]
CASES += [f"G{n}" for n in range(1, 6)]


def cases_of(file: str) -> set[str]:
    """The numbers that begin the docstrings of a file's tests."""
    text = (TESTS / file).read_text(encoding="utf-8")
    found = re.findall(r'^    """((?:[EFGV]\d+(?:, )?)+):', text, re.MULTILINE)
    return {case for line in found for case in line.split(", ")}


def test_every_case_is_tested_here_or_where_it_is_said_to_be() -> None:
    here = cases_of("test_cases_lora.py") | cases_of("test_cases_lora_memory.py")
    assert {*COVERED, *here} - {f"E{n}" for n in range(1, 24)} == set(CASES)
    for case, place in COVERED.items():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), case


class Theirs:
    """A tokenizer as mlx-lm's data sets call one, over the letters of ``test_dataset``."""

    eos_token_id = Letters.eos_token_id

    def __init__(self, ours: Letters) -> None:
        self.ours = ours

    def encode(self, text: str) -> list[int]:
        return self.ours.text(text)

    def apply_chat_template(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> list[int]:
        return self.ours.chat(messages, tools, add_generation_prompt)


def test_dora_on_odd_bits_is_refused_by_name() -> None:
    """V4, E17: it is built with the wrong width, and fails in the first product of matrices."""
    layer = nn.QuantizedLinear.from_linear(nn.Linear(960, 64, bias=False), 64, 6)
    with pytest.raises(ValueError, match="matmul"):
        DoRALinear.from_base(layer)(mx.zeros((1, 960)))
    model = build_model(CONFIGS["full"])
    nn.quantize(model, 32, 6)
    with pytest.raises(UnsupportedModel, match="which has 6 bits"):
        put_adapter(model, Adapter(method="dora", num_layers=1))


def test_rows_of_like_length_share_a_batch() -> None:
    """V5, G3: rows are sorted by the number of their keys, 1 of each, so not at all."""
    lengths = [10, 900, 20, 800, 30, 700, 40, 600]
    data = CacheDataset(TextDataset([{"text": "a" * n} for n in lengths], Theirs(Letters())))
    assert {data.itemlen(n) for n in range(8)} == {1}
    theirs = sum(batch.size for batch, _ in iterate_batches(data, 2, 2048))
    plan = batch_plan([n + 1 for n in lengths], 2, seed=0, epoch=0)
    ours = sum(len(b) * padded_length(max(lengths[n] for n in b)) for b in plan)
    assert theirs > 1.6 * ours


def test_a_row_that_loses_every_answer_is_dropped() -> None:
    """V6, E8: nothing is supervised, the loss is 0 / 0, and every gradient is NaN."""

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

        def __call__(self, x: mx.array) -> Any:
            return self.head(self.embed(x))

    batch = next(iter(iterate_batches([([1] * 300, 290)], 1, 128)))
    model = Model()
    (loss, tokens), gradients = nn.value_and_grad(model, default_loss)(model, *batch)
    assert tokens.item() == 0
    assert mx.isnan(loss).item()
    assert mx.isnan(gradients["head"]["weight"]).any().item()
    fitted = fit([example(300, supervised_from=290, line=7)], 128, "truncate")
    assert (fitted.examples, fitted.unsupervised_lines) == ((), (7,))


def test_a_thought_in_the_generation_prompt_leaves_the_answer_supervised() -> None:
    """V7, E8: the offset is past the end of the row: nothing is supervised, as above."""
    row = chat_row("hi", "y")
    data = ChatDataset([row.data], Theirs(Thinking()), mask_prompt=True)
    tokens, offset = data.process(row.data)
    assert offset >= len(tokens) - 1
    assert shown(example_of(row, Thinking(), mask_prompt=True)).strip(".") == "y$"


def test_every_answer_of_a_chat_is_supervised() -> None:
    """V8, E9: one offset, behind all answers but the last."""
    row = chat_row("hi", "first", "and", "second")
    data = ChatDataset([row.data], Theirs(Letters()), mask_prompt=True)
    tokens, offset = data.process(row.data)
    assert "first" in "".join(map(chr, tokens[:offset]))
    ours = shown(example_of(row, Letters(), mask_prompt=True))
    assert re.sub(r"\.+", " ", ours).split() == ["first$", "second$"]


def test_rows_that_lose_their_end_are_counted_and_can_be_split() -> None:
    """V9, G4: the end-of-sequence token is cut off with a warning that names no row."""
    batch, _ = next(iter(iterate_batches([([1] * 200 + [0], 0)], 1, 128)))
    assert batch[0, -1].item() == 1
    long = example(201, line=5)
    assert fit([long], 128, "truncate").lost_ends == 1
    pieces = fit([long], 128, "split")
    assert (pieces.lost_ends, pieces.lost_tokens) == (0, 0)
    assert pieces.examples[-1].tokens[-1] == long.tokens[-1]


def test_the_padding_after_a_row_is_not_predicted() -> None:
    """The mask of mlx-lm holds for as many targets as a row has tokens: one too many."""
    batch, lengths = next(iter(iterate_batches([(list(range(1, 41)), 0)], 1, 2048)))
    _, tokens = default_loss(nn.Embedding(64, 64), batch, lengths)
    assert (batch.shape[1], tokens.item()) == (65, 40)
    assert example(40).targets == 39
    assert batch_of([[example(40)]]).weights.sum() == 39


SETTINGS = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
QUERY = "model.layers.3.self_attn.q_proj"


def adapted() -> Any:
    model = build_model(CONFIGS["full"])
    model.freeze()
    linear_to_lora_layers(model, 1, SETTINGS)
    return model


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            {"model.layers.3.self_attn.v_proj.lora_a": (64, 4)},
            r"q_proj\.lora_a is missing",
        ),
        (
            {f"{QUERY}.lora_a": (64, 16), f"{QUERY}.lora_b": (16, 128)},
            r"q_proj\.lora_a is \(64, 16\) instead of \(64, 4\)",
        ),
    ],
)
def test_another_adapter_is_refused_with_what_differs(
    tmp_path: Path, arrays: dict[str, tuple[int, ...]], text: str
) -> None:
    """V10, E14: other keys are passed over, another rank takes the place of the asked one."""
    file = tmp_path / "adapters.safetensors"
    mx.save_safetensors(str(file), {name: mx.ones(shape) for name, shape in arrays.items()})
    theirs = adapted()
    theirs.load_weights(str(file), strict=False)  # mlx_lm.lora --resume-adapter-file
    rank = theirs.layers[3].self_attn.q_proj.lora_a.shape[1]
    assert rank == (16 if "q_proj" in str(arrays) else 4)
    trained = dict(tree_flatten(adapted().trainable_parameters()))
    with pytest.raises(CheckpointError, match=text):
        load_adapter(file, trained)


def test_an_adapter_is_all_that_trains(tmp_path: Path) -> None:
    """V11, E13: after ``load_adapters`` the whole base would train."""
    asked = Adapter(num_layers=1, rank=4, keys=("self_attn.q_proj",))
    trained = put_adapter(build_model(CONFIGS["full"]), asked)
    save_adapter(tmp_path, trained, asked.config())
    theirs = load_adapters(build_model(CONFIGS["full"]), str(tmp_path))
    assert len(tree_flatten(theirs.trainable_parameters())) > 30
    assert sorted(trained) == [f"{QUERY}.lora_a", f"{QUERY}.lora_b"]


def test_a_checkpoint_holds_more_than_the_adapter(tmp_path: Path) -> None:
    """E12: numbered files of the adapter alone, over which a second run writes its own."""
    data = [(list(range(1, 33)), 0)]
    arguments = TrainingArgs(
        batch_size=1, iters=1, steps_per_save=1, adapter_file=str(tmp_path / "adapters.safetensors")
    )
    written = []
    for rate in (1e-3, 1e-2):
        model = adapted()
        train(model, optim.Adam(rate), data, args=arguments)
        (numbered,) = tmp_path.glob("0*.safetensors")
        written.append(mx.load(str(numbered)))
        mx.eval(written[-1])  # before the file has other contents
    first, second = written
    assert first.keys() == second.keys() == dict(tree_flatten(model.trainable_parameters())).keys()
    assert not mx.array_equal(first[f"{QUERY}.lora_b"], second[f"{QUERY}.lora_b"]).item()
    optimizer = optim.Adam(1e-3)
    optimizer.init(model.trainable_parameters())
    kept = save_checkpoint(tmp_path, model, optimizer, State(Progress(iteration=1), 0, {}, {}))
    assert {file.stem for file in kept.iterdir()} == {"adapters", "optimizer", "state"}
    with pytest.raises(UsageError, match="holds another run"):
        require_free(tmp_path, resume=False)


def test_layers_are_recomputed_without_changing_their_class() -> None:
    """V27: ``grad_checkpoint`` patches the class for the whole process, once more at each call."""
    model = build_model(CONFIGS["full"])
    kind = type(model.layers[0])
    own = kind.__call__
    try:
        grad_checkpoint(model.layers[0])
        once = kind.__call__
        grad_checkpoint(model.layers[0])
        assert own is not once is not kind.__call__
    finally:
        kind.__call__ = own
    calls = []

    def hook(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(layer)
        return own_call(layer, *args, **kwargs)

    with intercepted(model.layers, hook):
        model(mx.array([[1, 2]]))
    assert len(calls) == 4
    assert kind.__call__ is own
    assert {type(layer) for layer in model.layers} == {kind}


@pytest.mark.parametrize(
    ("content", "theirs", "ours"),
    [
        ('{"text": "a"}\n\n', "Expecting value", None),
        ('{\n  "text": "a"\n}\n', "Expecting property name", "JSON over several lines"),
        ('\ufeff{"text": "a"}\n', "BOM", None),
        ('[{"text": "a"}]\n', "format", "JSON array"),
        ("", "index", "is empty"),
    ],
)
def test_files_that_people_bring_are_read_or_refused_with_their_place(
    tmp_path: Path, content: str, theirs: str, ours: str | None
) -> None:
    """V28, G1: a bare decode or index error, without file and line."""
    path = tmp_path / "train.jsonl"
    path.write_text(content, encoding="utf-8")
    config = types.SimpleNamespace(mask_prompt=False)
    with pytest.raises(Exception, match=theirs) as error:
        load_local_dataset(tmp_path, Theirs(Letters()), config)
    assert "train.jsonl" not in str(error.value)
    if ours is None:
        assert [row.data for row in read_rows(path).rows] == [{"text": "a"}]
        return
    told = told_of(path)
    assert ours in told
    assert str(path) in told


def told_of(path: Path) -> str:
    """The first problem of a file, or why all of it is refused."""
    try:
        found = read_rows(path)
    except DataError as refused:
        return str(refused)
    return found.located(found.problems[0])


def test_rows_may_have_different_formats(tmp_path: Path) -> None:
    """G5: the format of the first row is taken for that of all."""
    chat = chat_row("hi", "yes").data
    path = written(tmp_path, chat, {"text": "abc"})
    config = types.SimpleNamespace(mask_prompt=False)
    data = load_local_dataset(tmp_path, Theirs(Letters()), config)[0]
    with pytest.raises(KeyError, match="messages"):
        data.process(data[1])
    rows = read_rows(path).rows
    assert [shown(example_of(row, Letters(), mask_prompt=True)) for row in rows][1] == "abc$"
    assert json.loads(path.read_text().splitlines()[1]) == rows[1].data


def test_sizes_are_written_in_one_way() -> None:
    """V30: ``26G`` is 26 * 10^9, and ``8GiB`` a ``KeyError``."""
    assert _parse_size("26G") == 26 * 10**9
    with pytest.raises(KeyError, match="GIB"):
        _parse_size("8GiB")
    assert parse_bytes("8GiB") == 8 * GIB
