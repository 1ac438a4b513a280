"""One of two servers is stopped or killed; the other one's requests are answered.

The tests stop a prefill server while a decode server has requests of both prefill servers, and a
decode server in mid-prompt.
"""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from engine_release import IS_DEFAULT, SINCE_0_5_23
from scheduler_dumps import dump_schedulers, longest_pause_ms, paused_in_mid_prompt
from server_pairs import assert_freed
from serving_checks import holds_nothing, stopped
from serving_scenarios import NEW_TOKENS, SEVEN_LAYERS, long_prompt, prompts
from three_servers import (
    CHUNK,
    MARKS,
    PATIENCE,
    ask,
    record_attack,
    tokens,
    tokens_of,
    two_decode_servers,
    two_prefill_servers,
)

from pd_harness.cluster import Server
from pd_harness.polling import is_in_time, wait_until

pytestmark = MARKS

AT_ONCE = 3  # seconds, for an answer of the surviving server
# Milliseconds that the attack may add to a pause of the event loop. A pause also includes forward
# passes, and with two stages the other stage's. A loop that waits for a peer pauses longer.
ADDED_MS = 50
ADDED_TO_STAGES_MS = 150
LONG_PAUSE = 4  # seconds; stock's scheduler waits for a bootstrap server for 5
# Seconds, for requests to the stopped server. Before 0.5.23 they fail after 40: 5 until ZeroMQ
# notices, 5 of silence, and 30 in which their pages may be written to; with 0.5.9's Mooncake 30 s
# later.
FAILURE_SECONDS = 40 if SINCE_0_5_23 else 80
ROUNDS = 12  # of one request to each server, a second apart
STOPS = 2 if IS_DEFAULT else 1  # of a decode server in mid-prompt; each takes half a minute


@contextlib.contextmanager
def killed(server: Server):
    server.stop()
    yield


@pytest.mark.alone
@pytest.mark.parametrize("attack, backend", [(stopped, "mooncake"), (killed, "nixl")])
def test_stopped_prefill_server_does_not_delay_the_other(backend, attack):
    with two_prefill_servers("stopped", backend, "patched") as servers:
        first, second, decode = servers
        with ThreadPoolExecutor(ROUNDS) as pool:
            served, _ = request_both(pool, servers)
            before_ms = longest_pause_ms(dump_schedulers(decode))
            assert {one.result()[0].status_code for one in served} == {200}
            with attack(first):
                dump_schedulers(decode)
                lost, seconds = request_both(pool, servers, to_first=False)
                pause_ms = longest_pause_ms(dump_schedulers(decode))
                for one in lost:
                    answer, waited = one.result()
                    assert answer.status_code >= 500, answer.text
                    assert is_in_time(waited, FAILURE_SECONDS), waited
            alive = [second, decode]
            if attack is stopped:
                assert wait_until(lambda: ask(first, decode)[0].status_code == 200, 60, 1)
                alive.append(first)
        assert_freed(*alive)
    case = f"prefill server {attack.__name__}"
    record_attack(case, backend, "patched", pause_ms, seconds, {}, before_ms=before_ms)
    assert is_in_time(max(seconds), AT_ONCE), seconds
    assert is_in_time(pause_ms - before_ms, ADDED_MS), (pause_ms, before_ms)


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_stock_decode_blocks_on_a_stopped_prefill_server(backend):
    with (
        two_prefill_servers("stopped", backend, "stock") as servers,
        ThreadPoolExecutor(ROUNDS) as pool,
    ):
        first, _, decode = servers
        with stopped(first):
            dump_schedulers(decode)
            _, seconds = request_both(pool, servers, to_first=False, until=LONG_PAUSE)
            pause_ms = longest_pause_ms(dump_schedulers(decode))
            decode.stop()  # it would answer no other request for minutes
    record_attack("prefill server stopped", backend, "stock", pause_ms, seconds, None)
    assert pause_ms > 1000 * LONG_PAUSE, (pause_ms, seconds)


def request_both(
    pool, servers, to_first: bool = True, until: float = PATIENCE
) -> tuple[list[Future], list[float]]:
    """Sends requests for both prefill servers, until the second one takes ``until`` seconds.

    Returns futures of the first server's answers, and the seconds of the second server's. Without
    ``to_first``, only decode gets the first server's requests, because a stopped server would not
    accept them.
    """
    first, second, decode = servers
    of_first, answered = [], []
    dump_schedulers(decode)
    for _ in range(ROUNDS):
        of_first.append(pool.submit(ask, first, decode, to_prefill=to_first))
        try:
            answer, seconds = ask(second, decode)
        except httpx.ReadTimeout:
            answered.append(PATIENCE)
            break
        assert answer.status_code == 200, answer.text
        answered.append(round(seconds, 2))
        if seconds >= until:
            break
        time.sleep(1)
    return of_first, answered


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["nixl", "mooncake", "ascend"])
def test_stopped_decode_server_does_not_delay_the_other(backend, reference):
    """The first decode server is stopped in mid-prompt, and is served again each time."""
    long_prompts = [long_prompt(seed) for seed in range(1 + STOPS)]
    answers = reference(SEVEN_LAYERS, NEW_TOKENS, [*prompts(), *long_prompts])
    ids = [list(answer.ids) for answer in answers]
    right, (at_first, *after_stops) = ids[: -len(long_prompts)], ids[-len(long_prompts) :]
    with two_decode_servers(backend) as servers, ThreadPoolExecutor(1) as pool:
        prefill, first, second = servers

        def is_right(decode: Server) -> bool:
            return tokens_of(prefill, decode)[0] == right

        assert is_right(first) and is_right(second)
        dump_schedulers(prefill)
        beside = pool.submit(ask, prefill, first, long_prompts[0])
        assert is_right(second)
        assert tokens(beside.result()[0]) == at_first
        before_ms, pause_ms, slowest = longest_pause_ms(dump_schedulers(prefill)), 0.0, 0.0
        for prompt, expected in zip(long_prompts[1:], after_stops):
            with contextlib.ExitStack() as while_it_stands:
                with paused_in_mid_prompt(prefill, 3 * CHUNK) as reached:
                    lost = pool.submit(ask, prefill, first, prompt)
                    reached()
                    while_it_stands.enter_context(stopped(first))
                time.sleep(0.1)  # prefill resumes
                dump_schedulers(prefill)
                found, seconds = tokens_of(prefill, second)
                assert found == right
                slowest = max(slowest, seconds)
                # Writes to the stopped server fail, or its memory accepts them.
                assert wait_until(lambda: holds_nothing(prefill), FAILURE_SECONDS, 1)
                pause_ms = max(pause_ms, longest_pause_ms(dump_schedulers(prefill)))
            answer, _ = lost.result()
            assert answer.status_code >= 500 or tokens(answer) == expected, answer.text
            assert wait_until(lambda: is_right(first), PATIENCE, 1)
        assert_freed(*servers)
    case = "decode server stopped in mid-prompt"
    record_attack(case, backend, "patched", pause_ms, [round(slowest, 2)], {}, before_ms=before_ms)
    assert is_in_time(slowest, AT_ONCE), slowest
    assert is_in_time(pause_ms - before_ms, ADDED_TO_STAGES_MS), (pause_ms, before_ms)
