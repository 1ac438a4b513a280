"""Metrics of real transfers: bytes and copies by peer, kind and path, as verification counts."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from engine_release import SINCE_0_5_18
from fleet import Fleet
from transfer_checks import REQUESTS, assert_all_right, assert_eventually, nightly_except
from transport_cases import ASCEND, HEADS, STAGES, with_environment, with_fields

pytestmark = pytest.mark.transport

FLEETS = {
    "nixl-tp1_to_1": (HEADS["tp1_to_1"], {"whole"}),
    "nixl-tp2_to_1": (HEADS["tp2_to_1"], {"packed"}),
    "nixl-tp1_to_2": (HEADS["tp1_to_2"], {"packed"}),
    "nixl-pp2_odd": (STAGES["pp2_odd"], {"whole"}),
    "mooncake-tp1_to_1": (with_fields(HEADS["tp1_to_1"], backend="mooncake"), {"whole"}),
    "mooncake-tp1_to_2": (with_fields(HEADS["tp1_to_2"], backend="mooncake"), {"packed"}),
    "ascend-fia_tp2_to_1": (ASCEND["fia_tp2_to_1"], {"packed"}),
    "ascend-mla_index_keys_draft": (ASCEND["mla_index_keys_draft_unequal"], {"whole"}),
}
ROOM = 77
SLICED = {"SGLANG_PD_PACKED": "0"}


def scrape(folder: Path) -> dict[tuple, float]:
    """The samples that `/metrics` would show of all ranks, by name and labels' values."""
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client import multiprocess

    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def sums(folder: Path, name: str, label: int) -> dict[str, float]:
    """Sums a counter by one of its labels: 0 backend, 1 kind, 2 path, 3 peer."""
    found = defaultdict(float)
    for key, value in scrape(folder).items():
        if key[0] == name:
            found[key[1 + label]] += value
    return dict(found)


def metered(fleet: Fleet, folder: Path, **environment: str) -> Fleet:
    places = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return with_environment(fleet, SGLANG_PD_VERIFY="1", **places, **environment)


def assert_counted(servers, folder: Path, paths: set[str]) -> None:
    for rank in servers.prefill:
        rank.call("record_writes")
    assert_all_right(servers)
    pairs = [one.call("verify_results")["pairs"].values() for one in servers.decode]
    compared = sum(count["bytes"] for counts in pairs for count in counts)

    def counted() -> tuple[float, bool]:
        """Bytes of KV and state, and whether there are any of metadata, which come last."""
        of_kind = sums(folder, "sglang_pd_transfer_bytes_total", 1)
        return of_kind.get("kv", 0) + of_kind.get("state", 0), of_kind.get("aux", 0) > 0

    assert_eventually(counted, (compared, True), 10)
    used = sums(folder, "sglang_pd_transfer_bytes_total", 2)
    assert used.keys() - {"whole"} == paths - {"whole"} and used["whole"] > 0  # aux is whole
    backend = servers.fleet.backend
    assert set(sums(folder, "sglang_pd_descriptors_total", 0)) == {backend}
    if backend != "nixl" or not SINCE_0_5_18:  # there NIXL's log lacks what is prepared
        written = [rank.call("written") for rank in servers.prefill]
        for metric, what in (("descriptors", "count"), ("transfer_bytes", "bytes")):
            name, expected = f"sglang_pd_{metric}_total", sum(one[what] for one in written)
            assert_eventually(lambda name=name: sums(folder, name, 0)[backend], expected, 10)
    (peer,) = sums(folder, "sglang_pd_descriptors_total", 3)
    assert ":" in peer and "unknown" not in peer
    # A rank writes each kind of metric to a file of its own, one after the other.
    assert_eventually(lambda: bool(sums(folder, "sglang_pd_transfer_seconds_count", 0)), True, 10)
    patched = ("sglang_pd_peers", "patched", "prefill")
    assert_eventually(lambda: scrape(folder).get(patched), 1, 10)
    none_lost = {"prefill": 0, "decode": 0}
    assert_eventually(lambda: sums(folder, "sglang_pd_lost_events_total", 0), none_lost, 10)


@pytest.mark.parametrize(
    "name", nightly_except(FLEETS, "nixl-tp2_to_1", "nixl-tp1_to_1", "mooncake-tp1_to_2")
)
def test_bytes_agree_with_verification(serve, tmp_path, name):
    fleet, paths = FLEETS[name]
    with serve(metered(fleet, tmp_path)) as servers:
        assert_counted(servers, tmp_path, paths)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_slices_are_counted_as_such(serve, tmp_path, backend):
    fleet = with_fields(HEADS["tp2_to_1"], backend=backend)
    with serve(metered(fleet, tmp_path, **SLICED)) as servers:
        assert_counted(servers, tmp_path, {"slices"})
    copies = sums(tmp_path, "sglang_pd_descriptors_total", 2)
    assert copies["slices"] > 10 * copies["whole"]


def test_nothing_is_kept_or_metered_unless_asked(serve):
    with serve(HEADS["tp1_to_1"]) as servers:
        assert_all_right(servers, REQUESTS[:1])
        for rank in (*servers.prefill, *servers.decode):
            assert rank.call("transfer_log") == {"is_on": False, "is_metered": False}


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_failure_has_a_reason_and_a_peer(serve, tmp_path, backend):
    fleet = metered(with_fields(HEADS["tp1_to_1"], backend=backend), tmp_path)
    with serve(fleet) as servers:
        assert_all_right(servers, REQUESTS[:1])
        assert_eventually(lambda: len(sums(tmp_path, "sglang_pd_descriptors_total", 3)), 1, 10)
        (peer,) = sums(tmp_path, "sglang_pd_descriptors_total", 3)
        prefill, decode = servers.prefill[0], servers.decode[0]
        prefill.call("start_request", room=ROOM)
        prefill.call("note_request", room=ROOM)
        decode.call("open_room", room=ROOM, pages=[1, 2])
        prefilling = ("sglang_pd_rooms", "prefill", "prefilling")
        assert_eventually(lambda: scrape(tmp_path).get(prefilling), 1, 10)
        decode.call("abort", room=ROOM)
        prefill.call("wait_for_room", room=ROOM, seconds=10)
        failure = ("sglang_pd_failures_total", peer, "aborted_by_peer", "prefill")
        assert_eventually(lambda: scrape(tmp_path).get(failure), 1, 10)
        assert_eventually(lambda: scrape(tmp_path)[prefilling], 0, 10)


def exchange(servers) -> None:
    """Runs a request that both ranks note, as schedulers do; it may fail."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    request = {"room": ROOM, "pages": [1, 2]}
    prefill.call("start_request", room=ROOM)
    prefill.call("note_request", room=ROOM)
    decode.call("open_room", **request)
    decode.call("note_request", room=ROOM)
    prefill.call("send", **request, chunks=[2], seconds=10)
    decode.call("wait_for_room", room=ROOM, seconds=10)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_wrong_and_failed_writes_have_reasons_of_their_own(serve, tmp_path, backend):
    fleet = metered(with_fields(HEADS["tp1_to_1"], backend=backend), tmp_path)
    with serve(fleet) as servers:
        (prefill,), (decode,) = servers.prefill, servers.decode

        def failures() -> dict[tuple, float]:
            """How many requests failed, by peer, reason and side."""
            found = {key: value for key, value in scrape(tmp_path).items() if value}
            name = "sglang_pd_failures_total"
            return {key[1:]: value for key, value in found.items() if key[0] == name}

        exchange(servers)
        prefill.call("corrupt_transfers", what="pages")
        exchange(servers)
        server = f"127.0.0.1:{decode.config['bootstrap_port']}"
        assert_eventually(failures, {(server, "mismatch", "decode"): 1}, 10)
        prefill.call("corrupt_transfers", what="")
        prefill.call("plan_faults", how="status", at=[1])
        exchange(servers)
        (peer,) = sums(tmp_path, "sglang_pd_descriptors_total", 3)
        assert_eventually(lambda: failures().get((peer, "transport", "prefill")), 1, 10)


def test_request_has_a_line(serve, tmp_path):
    fleet = with_environment(HEADS["tp1_to_1"], SGLANG_PD_REQUEST_LOG=str(tmp_path))
    with serve(fleet) as servers:
        prefill, decode = servers.prefill[0], servers.decode[0]
        for rank in (prefill, decode):
            rank.call("start_request", room=ROOM)
            rank.call("note_request", room=ROOM)
        for rank in (prefill, decode):
            rank.call("abort", room=ROOM)
            rank.call("wait_for_room", room=ROOM, seconds=10)

        def lines() -> dict[str, dict]:
            read = [json.loads(file.read_text() or "{}") for file in tmp_path.glob("*.jsonl")]
            return {one["side"]: one for one in read if one}

        assert_eventually(lambda: lines().keys(), {"prefill", "decode"}, 10)
    for one in lines().values():
        assert (one["room"], one["rid"], one["tokens"]) == (ROOM, f"rid-{ROOM}", 5)
        assert (one["ended"], one["kind"]) == ("failed", "aborted_by_client")
