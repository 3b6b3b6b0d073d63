"""``python -m uma``."""

from uma.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
