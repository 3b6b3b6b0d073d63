"""What joins Macs: MLX's messages over Thunderbolt, and what they add to a pass of the model."""

from collections.abc import Callable
from dataclasses import replace

from uma.frozen import dataclass
from uma.speed.rate import NotKnown, Rate

SMALL_BYTES = 32 * 1024  # jaccl/lib/jaccl/mesh.cpp, MeshGroup::all_reduce: above it in two steps
MOST_MACS = 8  # jaccl/lib/jaccl/mesh_impl.h, MESH_MAX_PEERS; JACCL needs a cable for each pair
ALL_REDUCES = 2  # of a layer whose matrices are split: after attention, after the feed-forward part


@dataclass(frozen=True, slots=True)
class Link:
    """What joins machines: the time of a message without content, and its rate.

    ``crossing_s`` is what each message waits for besides: MLX sends from the CPU, so that the GPU
    hands over to it and takes back. ``crossing_range_s`` are its least and its most. ``mesh`` says
    that each pair has a cable of its own; in a ring each machine has two neighbours.
    """

    latency_s: float
    bytes_per_s: float
    crossing_s: float = 0.0
    crossing_range_s: tuple[float, float] = (0.0, 0.0)
    mesh: bool = True

    def message_s(self, size_bytes: float) -> float:
        return self.crossing_s + self.latency_s + size_bytes / self.bytes_per_s

    def all_reduce_s(self, size_bytes: float, count: int) -> float:
        """The time until each of ``count`` machines has the sum of all.

        A mesh sends everything to everyone, or large messages in two steps of a part each; a ring
        passes parts on in ``2 (count - 1)`` steps (MLX 0.32.4, ``distributed/jaccl/lib/jaccl/
        mesh.cpp`` and ``distributed/ring/ring.cpp``, ``all_reduce``).
        """
        if count == 1:
            return 0.0
        steps, part = 2 * (count - 1), size_bytes / count
        if self.mesh:
            whole = count == 2 or size_bytes <= SMALL_BYTES
            steps, part = (1, size_bytes) if whole else (2, size_bytes / count)
        return self.crossing_s + steps * (self.latency_s + part / self.bytes_per_s)

    def tensor_s(self, size_bytes: float, count: int, layers: float) -> float:
        """Of one pass with every matrix split; ``size_bytes`` are its hidden states."""
        return ALL_REDUCES * layers * self.all_reduce_s(size_bytes, count)

    def pipeline_s(self, size_bytes: float, count: int) -> float:
        """Of one pass with whole layers on each: to every next one, and the result to all.

        mlx-lm 0.32.2, ``models/llama.py`` and others: ``send`` and ``recv``, then ``all_gather``.
        """
        return count * self.message_s(size_bytes) if count > 1 else 0.0


def over(link: Link | None, rate_over: Callable[[Link | None], Rate | NotKnown]) -> Rate | NotKnown:
    """The rate over a link, from the low of its longest crossing to the high of its shortest."""
    found = rate_over(link)
    if link is None or isinstance(found, NotKnown):
        return found
    high, low = (rate_over(replace(link, crossing_s=end)) for end in link.crossing_range_s)
    assert isinstance(low, Rate)
    assert isinstance(high, Rate)
    return replace(found, low=low.low, high=high.high)


# With its default fence MLX takes 180 us for a collective between operations of the GPU, with
# MLX_METAL_FAST_SYNCH=1, which can hang it, 4 (M3 Ultra; github.com/ml-explore/mlx/issues/4438 and
# 3142). Published rates of models lie between what the two give, for which the middle is taken.
CROSSINGS_S = (4e-6, 180e-6)
CROSSING_S = sum(CROSSINGS_S) / 2
# Over Thunderbolt 5, RDMA (macOS 26.2): 27 to 31 us and 6.1 to 6.5 GB/s between an M3 Ultra and an
# M5 Max (github.com/jundot/omlx/pull/3118); 25.5 us and 8.05 GB/s between two M4 Pro
# (github.com/omar-karray/mlx-jaccl-cluster). TCP: half of 0.38 to 0.95 ms
# (github.com/exo-explore/exo/issues/2295), 3 GB/s (github.com/ml-explore/mlx-lm/pull/1905, USB4).
JACCL = Link(29e-6, 6.3e9, CROSSING_S, CROSSINGS_S)
RING = Link(0.33e-3, 3e9, CROSSING_S, CROSSINGS_S, mesh=False)
