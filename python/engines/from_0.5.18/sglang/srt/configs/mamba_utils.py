"""Recurrent state: the convolutions that share one buffer."""

from typing import Any, List, Optional


class Mamba2StateShape:
    RENAMED = (("create", "_engine_create"),)

    @staticmethod
    def create(
        *,
        intermediate_size: int,
        n_groups: int,
        state_size: int,
        conv_shard_groups: Optional[List[int]] = None,
        **sizes: Any,
    ) -> "Mamba2StateShape":
        """Creates the shape. Extends the engine's: adds the whole model's channels of x, B and C.

        Args:
            conv_shard_groups: Channels of each part of the convolution in the whole model; None for
                Mamba 2, whose parts are x, B and C.
        """
        if conv_shard_groups is None and n_groups * state_size:
            conv_shard_groups = [intermediate_size, *[n_groups * state_size] * 2]
        return Mamba2StateShape._engine_create(
            intermediate_size=intermediate_size,
            n_groups=n_groups,
            state_size=state_size,
            conv_shard_groups=conv_shard_groups,
            **sizes,
        )
