"""Every error that ``uma`` raises on purpose.

::

    UmaError                      exit code 1
    ├── UsageError                2   the command was given something it cannot take
    │   ├── UnknownName           2   no model, machine or format of that name
    │   └── Unconfirmed           2   a download or a long step that nobody confirmed
    ├── DoesNotFit                3   the plan exceeds the limit
    ├── CheckpointError           1   a model file is missing, cut, or malformed
    ├── DataError                 1   a training file cannot be used
    ├── UnsupportedModel          1   an architecture, layer kind, tokenizer or format is unknown
    ├── HubError                  1   the hub or the package index cannot be reached, or refuses
    ├── RuntimeUnavailable        1   MLX is not installed or cannot run here
    ├── Busy                      1   another heavy command holds the lock
    └── StorageError              1   a disk is full, or a folder cannot be written

Only ``uma.cli`` catches them. The text says what was given, what is allowed, and what to do next.
"""


class UmaError(Exception):
    """Base of all errors of ``uma``."""

    exit_code = 1


class UsageError(UmaError):
    """An argument has a value that the command cannot take."""

    exit_code = 2


class UnknownName(UsageError):
    """No model, machine, engine or format of that name is known."""


class Unconfirmed(UsageError):
    """A download needs a yes, and there is no terminal to ask."""


class DoesNotFit(UmaError):
    """The plan exceeds what the device allows, or the user's own budget."""

    exit_code = 3


class CheckpointError(UmaError):
    """A model file is missing, truncated, or malformed."""


class DataError(UmaError):
    """A training file that cannot be used; the text names file, line and column."""


class UnsupportedModel(UmaError):
    """The architecture, a layer kind, the tokenizer or a number format is not known."""


class HubError(UmaError):
    """The hub or the package index cannot be reached, or refused the request."""


class RuntimeUnavailable(UmaError):
    """MLX is not installed, or cannot run on this machine."""


class Busy(UmaError):
    """Another heavy ``uma`` command is running."""


class StorageError(UmaError):
    """A disk is full, or a folder cannot be written."""
