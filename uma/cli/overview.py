"""What bare ``uma`` prints: this machine's memory, and where to go from there."""

from uma.units import format_gib

NEXT = """\
  uma run --prompt "..."                      ask the small default model
  uma run --model llama-3-70b --dry-run       would it fit? nothing is loaded
  uma --help                                  all commands"""


def print_overview() -> None:
    """This machine's limit and budget, and the next three commands."""
    from uma.machine import budget_of, read_machine

    machine = read_machine()
    budget = budget_of(machine)
    print(machine.name)
    print(f"  memory  {format_gib(machine.memory_bytes)}")
    print(f"  limit   {format_gib(budget.limit_bytes)}  {machine.limit_source}")
    print(f"  budget  {format_gib(budget.budget_bytes)}  {budget.winner}")
    for note in machine.notes:
        print(f"  note: {note}")
    print(f"\nNext:\n{NEXT}")
