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
        """The engine's, with the channels in the whole model of Mamba 2's convolutions: x, B, C.

        conv_shard_groups: those of another kind of model, whose configuration names them.
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
