"""The NPU pools of releases before 0.5.20, in stock and with the patch set."""

import inspect
import itertools

import engine_calls
import pytest
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool

pytestmark = pytest.mark.engine

CASES = list(itertools.product([False, True], [1, 16, 128], [0, 3]))


def test_stock_confuses_tokens_with_pages_under_fia(stock):
    """PR #15852: only with FIA, and only if a page has more than one token."""
    answers = stock(*(["fia_pages", *case] for case in CASES))
    assert answers == [not fia or page_size == 1 for fia, page_size, _ in CASES]


@pytest.mark.parametrize("fia", [False, True])
def test_buffer_infos_with_narrower_v(fia):
    """Pools of later releases have a narrower V, with fewer bytes per page than K."""
    pool = engine_calls.mha_pool(fia, page_size=4)
    narrow = [layer[..., : engine_calls.WIDTH // 2].contiguous() for layer in pool.v_buffer]
    pool.v_buffer = narrow
    infos = pool.get_contiguous_buf_infos()
    assert engine_calls.reported_pages(infos) == engine_calls.pages([*pool.k_buffer, *narrow], 4)


def test_torch_npu_is_imported_only_on_an_npu(stock):
    assert stock(["imports_torch_npu_unconditionally"]) == [True]
    assert not engine_calls.imports_torch_npu_unconditionally()


def test_inherited_users_of_the_missing_kv_buffer_are_known():
    """NPU pools of MLA keep latents and RoPE parts apart, without a `kv_buffer`.

    Only attention backends of CUDA and XPU call its remaining users, if anything does.
    """
    own = vars(NPUMLATokenToKVPool)
    inherited = {
        name: member
        for kind in reversed(NPUMLATokenToKVPool.__mro__[1:])
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and name not in own
    }
    users = {name for name, member in inherited.items() if "kv_buffer" in member.__code__.co_names}
    assert users == {"_create_buffers", "_clear_buffers", "set_mla_kv_buffer"}
