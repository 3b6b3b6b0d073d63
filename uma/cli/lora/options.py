"""Options that the commands of ``uma lora`` share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from uma.cli.lora.config import use_config

Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with train.jsonl, valid.jsonl and test.jsonl, or a data set of the hub."
    ),
]
MaskPrompt = Annotated[
    bool, typer.Option("--mask-prompt", help="Train on the assistant's turns alone, all of them.")
]
MaxSeqLength = Annotated[int, typer.Option(min=2, help="Longest row, in tokens.")]
Overlong = Annotated[
    Literal["truncate", "split", "drop"], typer.Option(help="What to do with longer rows.")
]
Optimizer = Literal["adam", "adamw", "adamw8bit", "adafactor", "lion", "muon", "sgd"]
LrSchedule = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="A schedule as in mlx_lm.lora, instead of --learning-rate, --warmup and --cosine: "
        '{"name": "cosine_decay", "arguments": [1e-5, 1000], "warmup": 100}.',
    ),
]
OptimizerConfig = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Settings of the optimizer, such as {"weight_decay": 0.1}.'),
]
ReportTo = Annotated[
    str | None,
    typer.Option(help="Report to wandb, swanlab, tensorboard or jsonl; several with commas."),
]
ProjectName = Annotated[
    str | None, typer.Option(help="Project there. [default: the name of this folder]")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        callback=use_config,
        is_eager=True,
        metavar="FILE",
        help="YAML file of mlx_lm.lora's keys or these options; flags overrule it.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a batch.")]
