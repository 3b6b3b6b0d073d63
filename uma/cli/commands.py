"""The commands of ``uma``: where each stands, and what it does in one line.

A command's module is imported when it is called or its own ``--help`` is asked for. Nothing here
imports typer, so that ``uma --help`` takes little more than Python itself.
"""

COMMANDS = {
    # name: the module, which has a function of that name, or a typer.Typer for a group; its line
    "run": ("uma.cli.run", "Answer a prompt, a pipe or a chat inside a memory budget."),
    "estimate": ("uma.cli.estimate", "Predict a model's memory, term by term."),
    "compare": ("uma.cli.compare", "Compare Macs and graphics cards for a model."),
    "report": ("uma.cli.report", "Show what a machine can hold and how fast, as a document."),
    "bench": ("uma.cli.bench", "Time a model, and hold its memory against the prediction."),
    "lora": ("uma.cli.lora.app", "Fine-tune a model, and check the data for it."),
    "convert": ("uma.cli.convert", "Write a model as an MLX folder, in little memory."),
    "measure": ("uma.cli.measure", "Show what memory holds, and what it gives."),
    "models": ("uma.cli.models", "List the models of the catalog, smallest first."),
    "doctor": ("uma.cli.doctor", "Check this installation, and calibrate estimates to it."),
    "machines": ("uma.cli.machines", "List the machines of the catalog."),
}

_HELP = """\
Usage: uma [OPTIONS] COMMAND [ARGS]...

  Run language models inside the memory you have: predicted, enforced,
  measured.

  Every option can be set for good: as a variable UMA_NAME, or as a line in
  config.toml.

Options:
  --version             Print the version.
  --install-completion  Install completion for the current shell.
  --show-completion     Show completion for the current shell, to copy it or
                        customize the installation.
  -h, --help            Show this message and exit.

Commands:
"""


def help_text() -> str:
    """What ``uma --help`` prints: what typer would on 80 columns, as a test holds it to."""
    width = max(map(len, COMMANDS))
    return _HELP + "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
