"""The folders that ``uma`` writes to.

``platformdirs`` says where the system keeps such things; ``UMA_CACHE_DIR``, ``UMA_STATE_DIR`` and
``UMA_CONFIG_DIR`` override it. Nothing is created here.
"""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Models that were fetched and converted: safe to delete."""
    import platformdirs

    return _folder("UMA_CACHE_DIR", platformdirs.user_cache_path("uma", appauthor=False))


def state_folder() -> Path:
    """Records of runs, and the lock of the heavy commands."""
    import platformdirs

    return _folder("UMA_STATE_DIR", platformdirs.user_state_path("uma", appauthor=False))


def records_folder() -> Path:
    """One file for each run."""
    return state_folder() / "records"


def config_folder() -> Path:
    """Where ``config.toml`` is looked for.

    Every command looks there, so on Linux the rule stands here: importing ``platformdirs`` takes
    longer than reading the file.
    """
    if sys.platform == "linux":
        home = os.environ.get("XDG_CONFIG_HOME", "").strip() or os.path.expanduser("~/.config")
        return _folder("UMA_CONFIG_DIR", Path(home, "uma"))
    import platformdirs

    return _folder("UMA_CONFIG_DIR", platformdirs.user_config_path("uma", appauthor=False))


def _folder(variable: str, default: Path) -> Path:
    own = os.environ.get(variable)
    return Path(own).expanduser().absolute() if own else default
