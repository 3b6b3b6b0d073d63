"""What is collected: tests, and the modules' doctests where what they import is installed."""

from importlib.util import find_spec

collect_ignore_glob = ["tests/[!t]*.py", "tests/oracle/*"]  # helpers
if find_spec("mlx") is None or find_spec("mlx_lm") is None:
    collect_ignore_glob.append("uma/runtime/*")
