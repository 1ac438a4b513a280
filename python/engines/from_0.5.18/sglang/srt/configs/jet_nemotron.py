"""JetNemotron's linear attention, whose convolution has q, k and v; Mamba 2's has x, B and C."""

from dataclasses import replace

from sglang.srt.configs.mamba_utils import Mamba2CacheParams


class JetNemotronConfig:
    RENAMED = (("mamba2_cache_params", "_engine_mamba2_cache_params"),)

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """Extends the engine's: adds the whole model's channels of q, k and v."""
        params = self._engine_mamba2_cache_params
        shape = params.shape
        values = shape.num_heads * shape.head_dim
        keys = shape.num_heads * shape.state_size
        return replace(params, shape=replace(shape, conv_shard_groups=[keys, keys, values]))
