"""mlx-lm's own classes, built without evaluating them, to compare with."""
