"""A script that trains a planned workload with transformers' Trainer and PEFT, and nothing more.

Names: transformers 5.24 (``training_args.py``), PEFT 0.21 (``tuners/lora/config.py``).
"""

from collections.abc import Iterator

from uma.errors import UsageError
from uma.frozen import dataclass
from uma.plan.training.checks import float16_reasons
from uma.plan.training.stack import Stack
from uma.workload import TrainingWorkload

# uma's names of optimizers in transformers' Trainer; Adam is its AdamW, whose decay is 0.
OPTIMIZERS = {
    "adam": "adamw_torch_fused",  # makes nothing beside its states
    "adamw": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion": "lion_32bit",
}
LEARNING_RATES = {"lora": 1e-4, "dora": 1e-4, "full": 1e-5}
ALPHA = 2  # of the rank


MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "'no'"}


# Stored formats that are made 16 bits at loading (transformers 5.24, quantization_config.py);
# transformers refuses bitsandbytes over them (quantizers/auto.py, merge_quantization_configs).
_DEQUANTIZED = {
    "mxfp4": "Mxfp4Config",
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
}
_BASES = {
    "int8": "load_in_8bit=True",
    "nf4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4"',
    "nf4-double": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True',
}


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained: a repository's or a folder's model, and the workload that was planned.

    ``title`` says in a line for which machine, and that it fits. ``stack`` is what the plan counted
    with. ``stored`` is how the repository's weights are quantized, if they are.
    """

    model: str
    workload: TrainingWorkload
    title: str = ""
    stack: Stack = Stack()
    stored: str = ""

    @property
    def mixes(self) -> bool:
        """Whether products are in fewer bits than weights.

        FSDP makes float32 of trained weights where it does (accelerate 1.15, ``utils/
        fsdp_utils.py``, ``fsdp2_prepare_model``), which a plan with all in 16 bits has no room for.
        """
        asked = self.workload
        precision, whole = self.stack.precision, asked.sharding.fsdp and asked.method == "full"
        held = precision == "pure" or (whole and precision == "16-bit")
        return asked.dtype != "float32" and not held

    @property
    def dequantizer(self) -> str:
        """The configuration that makes 16 bits of what is stored in fewer."""
        return _DEQUANTIZED.get(self.stored, "")

    @property
    def prepares(self) -> bool:
        return bool(self.workload.quantized) and self.stack.prepare_kbit


def check_trainer(training: Training) -> None:
    """Refuse what Trainer does not do.

    Raises:
        UsageError: With what to do instead.
    """
    asked, spread = training.workload, training.workload.sharding
    same = training.stored == "bitsandbytes" and asked.quantized
    if training.stored and not same and (asked.quantized or not training.dequantizer):
        raise UsageError(
            f"{training.model} is stored in {training.stored}, of which transformers makes no "
            f"{asked.quantized or '16 bits'}: give a repository, or a folder, in 16 bits"
        )
    if asked.dtype == "float16":
        for reason in float16_reasons(training.stack, asked):
            raise UsageError(reason)
    if spread.tensor * spread.pipeline * spread.sequence > 1:
        raise UsageError(
            "tensor, pipeline and sequence parallelism are not of transformers' Trainer: plan with "
            "data parallelism, ZeRO or FSDP"
        )
    if asked.optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UsageError(
            f"transformers' Trainer has no optimizer {asked.optimizer!r}; it has {known}"
        )
    if asked.grad_checkpoint > 1:
        raise UsageError("transformers keeps the inputs of every layer: --checkpoint-every 1")
    if asked.loss == "sliced":
        raise UsageError("transformers has no loss in slices of tokens: --loss naive or fused")
    if asked.quantized and asked.quantized not in _BASES:
        known = ", ".join(_BASES)
        raise UsageError(f"no adapters are emitted for a base in {asked.quantized}; for {known}")


def peft_script(training: Training) -> Iterator[str]:
    """A script with transformers' Trainer, for one device or started by a launcher for several."""
    asked = training.workload
    adapters = asked.method != "full"
    yield from _launch(training)
    yield from _imports(training)
    yield f"MODEL = {training.model!r}"
    yield 'DATA = sys.argv[1]  # a file with a JSON object in each line, its text under "text"'
    yield "DEEPSPEED = sys.argv[2] if len(sys.argv) > 2 else None  # what --emit deepspeed printed"
    yield f"LENGTH = {asked.max_seq_length}  # tokens of a row at most: what the plan was made for"
    yield ""
    yield "arguments = TrainingArguments("
    yield from (f"    {line}" for line in _arguments(training))
    yield ")"
    yield from _loaded(training)
    if adapters:
        yield from _adapters(training)
    elif asked.num_layers is not None:
        yield f"for layer in model.model.layers[:-{asked.num_layers}]:"
        yield "    layer.requires_grad_(False)"
    yield ""
    yield "tokenizer = AutoTokenizer.from_pretrained(MODEL)"
    yield "if tokenizer.pad_token is None:"
    yield "    tokenizer.pad_token = tokenizer.eos_token"
    yield 'with open(DATA, encoding="utf-8") as file:'
    yield '    texts = [json.loads(line)["text"] for line in file]'
    yield "rows = [tokenizer(text, truncation=True, max_length=LENGTH) for text in texts]"
    yield "collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)"
    yield "Trainer(model, arguments, data_collator=collator, train_dataset=rows).train()"
    yield f"model.save_pretrained({'adapters' if adapters else 'trained'!r})"


def _launch(training: Training) -> Iterator[str]:
    spread = training.workload.sharding
    if spread.data == 1 and not spread.zero_stage:
        yield "# python train.py DATA.jsonl"
    elif spread.fsdp:
        yield "# accelerate launch --config_file fsdp.yaml train.py DATA.jsonl (--emit fsdp)"
    elif spread.zero_stage:
        yield f"# deepspeed --num_gpus {spread.data} train.py DATA.jsonl ds.json (--emit deepspeed)"
    else:
        yield f"# torchrun --nproc-per-node {spread.data} train.py DATA.jsonl"


def _imports(training: Training) -> Iterator[str]:
    asked = training.workload
    yield "import json"
    if asked.quantized and asked.sharding.zero_stage != 3:
        yield "import os"
    yield "import sys"
    yield ""
    yield "import torch"
    if asked.method != "full":
        prepared = ", prepare_model_for_kbit_training" if training.prepares else ""
        yield f"from peft import LoraConfig, get_peft_model{prepared}"
    yield "from transformers import (  # 5.24"
    yield "    AutoModelForCausalLM,"
    yield "    AutoTokenizer,"
    if asked.quantized:
        yield "    BitsAndBytesConfig,"
    yield "    DataCollatorForLanguageModeling,"
    if training.dequantizer:
        yield f"    {training.dequantizer},"
    yield "    Trainer,"
    yield "    TrainingArguments,"
    yield ")"
    yield ""


def _arguments(training: Training) -> Iterator[str]:
    asked, spread = training.workload, training.workload.sharding
    yield 'output_dir="training",'
    yield f"per_device_train_batch_size={asked.batch_size},"
    yield f"gradient_accumulation_steps={asked.grad_accumulation_steps},"
    rows = asked.batch_size * asked.grad_accumulation_steps * spread.data
    yield f"learning_rate={LEARNING_RATES[asked.method]},  # for {rows} rows a step"
    if asked.grad_checkpoint and not spread.fsdp:
        yield "gradient_checkpointing=True,  # only the inputs of layers are kept"
        yield 'gradient_checkpointing_kwargs={"use_reentrant": False},'
    yield f'optim="{OPTIMIZERS[asked.optimizer]}",'
    if training.mixes:
        yield f"{MIXED[asked.dtype]}=True,  # what is multiplied"
    if asked.loss == "fused":
        yield "use_liger_kernel=True,  # logits in slices (pip install liger-kernel)"
    yield "logging_steps=1,"
    yield "deepspeed=DEEPSPEED,"


def _loaded(training: Training) -> Iterator[str]:
    asked, spread = training.workload, training.workload.sharding
    wide = training.stack.precision == "mixed" or asked.dtype == "float16"
    width = "float32" if wide and asked.method == "full" else asked.dtype
    yield "model = AutoModelForCausalLM.from_pretrained("
    yield "    MODEL,"
    yield f"    dtype=torch.{width},"
    if training.dequantizer:
        made = f"{training.dequantizer}(dequantize=True)"
        yield f"    quantization_config={made},  # to 16 bits, which are trained"
    if asked.quantized:
        yield "    quantization_config=BitsAndBytesConfig("
        yield f"        {_BASES[asked.quantized]},"
        if asked.quantized != "int8":
            yield f"        bnb_4bit_compute_dtype=torch.{asked.dtype},"
            if spread.zero_stage == 3:
                yield f"        bnb_4bit_quant_storage=torch.{asked.dtype},  # shards have one type"
        yield "    ),"
        if spread.zero_stage != 3:
            yield '    device_map={"": int(os.environ.get("LOCAL_RANK", 0))},  # whole, on each'
    yield ")"


def _adapters(training: Training) -> Iterator[str]:
    asked = training.workload
    if training.prepares:
        again = bool(asked.grad_checkpoint)
        yield f"model = prepare_model_for_kbit_training(model, use_gradient_checkpointing={again})"
    targets = repr(list(asked.targets) or "all-linear")
    if asked.num_layers is not None and not asked.targets:  # PEFT wants names where layers are told
        yield "modules = model.model.layers[0].named_modules()"
        yield "linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]"
        targets = 'sorted({name.rpartition(".")[2] for name in linear})'
    yield "config = LoraConfig("
    yield f"    r={asked.rank},"
    yield f"    lora_alpha={ALPHA * asked.rank},"
    yield f"    target_modules={targets},"
    if asked.method == "dora":
        yield "    use_dora=True,"
    if asked.num_layers is not None:
        layers = f"list(range(model.config.num_hidden_layers))[-{asked.num_layers}:]"
        yield f"    layers_to_transform={layers},"
    yield '    task_type="CAUSAL_LM",'
    yield ")"
    yield "model = get_peft_model(model, config)"
    if asked.grad_checkpoint and not training.prepares:
        yield "model.enable_input_require_grads()  # else nothing flows back through kept inputs"
