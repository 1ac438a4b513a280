"""What the NPU pools of these releases are, and what the patch set makes of them."""

import inspect
import itertools

import engine_calls
import pytest
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool

pytestmark = pytest.mark.engine

CASES = list(itertools.product([False, True], [1, 16, 128], [0, 3]))


def test_stock_takes_tokens_for_pages_with_fia(stock):
    """PR #15852: only with FIA, and only where a page is more than a token."""
    answers = stock(*(["fia_pages", *case] for case in CASES))
    assert answers == [not fia or page_size == 1 for fia, page_size, _ in CASES]


@pytest.mark.parametrize("fia", [False, True])
def test_buffer_infos_with_narrower_v(fia):
    """Later releases' pools have a narrower V, which has its own bytes a page."""
    pool = engine_calls.mha_pool(fia, page_size=4)
    narrow = [layer[..., : engine_calls.WIDTH // 2].contiguous() for layer in pool.v_buffer]
    pool.v_buffer = narrow
    infos = pool.get_contiguous_buf_infos()
    assert engine_calls.reported_pages(infos) == engine_calls.pages([*pool.k_buffer, *narrow], 4)


def test_torch_npu_is_imported_only_on_an_npu(stock):
    assert stock(["imports_torch_npu_unconditionally"]) == [True]
    assert not engine_calls.imports_torch_npu_unconditionally()


def test_inherited_users_of_the_missing_kv_buffer_are_known():
    """On an NPU latents and RoPE parts lie apart, and there is no `kv_buffer` for MLA.

    Those that remain are called by attention backends of CUDA and XPU, or by nobody.
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
