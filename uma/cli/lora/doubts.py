"""Settings that are possible, and from which nothing would be learned."""

from collections.abc import Iterator

from uma.cli.lora.asked import Asked

MOST_SCALE = 1000.0
"""mlx_lm's default is 20; of a rank of 8, published alphas go to 512: our judgment."""


def doubts(asked: Asked, updates: int) -> Iterator[str]:
    """What a reader should know of the settings of a run of so many updates, a sentence each."""
    if asked.lr_schedule is None:
        if not asked.learning_rate:
            yield "with --learning-rate 0 nothing is trained"
        elif asked.warmup >= updates:
            yield (
                f"--warmup {asked.warmup:,} is not over after the {updates:,} updates of this run: "
                f"the learning rate does not come to {asked.learning_rate:g}"
            )
    if asked.max_grad_norm == 0:
        yield "with --max-grad-norm 0 nothing is trained: leave it out for no bound"
    if asked.fine_tune_type != "full":
        if not asked.scale:
            yield "with --scale 0 the adapter does nothing"
        elif abs(asked.scale) > MOST_SCALE:
            yield f"--scale {asked.scale:g} is far from usual (1 to 64): it may not learn"
