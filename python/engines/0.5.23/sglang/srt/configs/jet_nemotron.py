"""JetNemotron's linear attention, whose window has V last; Mamba 2's has its x first."""

from dataclasses import replace

from sglang.srt.configs.mamba_utils import Mamba2CacheParams


class JetNemotronConfig:
    RENAMED = (("mamba2_cache_params", "_engine_mamba2_cache_params"),)

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """The engine's, with the channels of q, k and v in the whole model."""
        params = self._engine_mamba2_cache_params
        shape = params.shape
        values = shape.num_heads * shape.head_dim
        keys = shape.num_heads * shape.state_size
        return replace(params, shape=replace(shape, conv_shard_groups=[keys, keys, values]))
