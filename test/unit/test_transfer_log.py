"""Metrics and request lines, from events to what `/metrics` and `sglang-pd trace` read."""

import ast
import threading
import time
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, multiprocess
from transfer_log import KINDS, MAX_PEERS, METRICS, STATES, RequestRecord, TransferLog, failure_kind
from transfer_log import log as transfer_log
from transfer_log import rooms as rooms_module
from transfer_log import series as series_module
from transfer_log.files import SeriesFiles
from transfer_log.peers import PeerActivity
from transfer_log.records import RecordFile
from transfer_log.rooms import Rooms
from transfer_log.series import Series, sample_names

ROOT = Path(__file__).resolve().parents[2]
PEER = "10.0.0.2:30000"


def rank_rooms(side="prefill", is_first_rank=True) -> Rooms:
    return Rooms(side, "TP 0/1 PP 0/1", "nixl", is_first_rank, Series())


def all_samples(series: Series) -> list[tuple[tuple[str, ...], float]]:
    """Each sample's name and labels' values, and its value."""
    return [
        ((name, *named.values()), number)
        for metric, labels, numbers in series.numbers()
        for (name, named), number in zip(sample_names(metric, labels), numbers, strict=True)
    ]


def samples(series: Series) -> dict:
    """The samples that are not zero, by name and the labels' values."""
    return {key: value for key, value in all_samples(series) if value}


def test_prefill_room_passes_its_states():
    rooms = rank_rooms()
    rooms.opened(10.0, 7, "rid", "", 100)
    rooms.entered(11.0, 7, "prefilling")
    rooms.sent(15.0, 7, PEER, "kv", "packed", 4096, 2, 1.0)
    rooms.sent(15.5, 7, PEER, "aux", "whole", 64, 1, 0.25)
    assert samples(rooms.series)["sglang_pd_rooms", "prefill", "sending"] == 1
    rooms.ended(16.0, 7)
    (record,) = rooms.records
    assert record.seconds == {"bootstrapping": 1.0, "prefilling": 3.0, "sending": 2.0}
    assert (record.peer, record.tokens, record.bytes, record.copies) == (PEER, 100, 4160, 3)
    assert record.paths == ["packed"] and record.ended == "success" and not record.kind
    found = samples(rooms.series)
    assert found["sglang_pd_transfer_bytes_total", "nixl", PEER, "kv", "packed"] == 4096
    assert found["sglang_pd_descriptors_total", "nixl", PEER, "aux", "whole"] == 1
    assert found["sglang_pd_transfer_seconds_sum", "nixl", PEER, "kv", "packed"] == 1.0
    assert found["sglang_pd_requests_total", "prefill", PEER, "success"] == 1
    assert found["sglang_pd_room_seconds_bucket", "prefill", "prefilling", "3.0"] == 1
    assert not rooms.rooms
    assert not [key for key in found if key[0] == "sglang_pd_rooms"]  # all zero


def test_states_that_a_transport_does_not_tell_are_left_out():
    rooms = rank_rooms("decode")
    rooms.opened(0.0, 7, "", PEER, 5)
    rooms.entered(1.0, 7, "waiting")
    rooms.entered(4.0, 7, "queued")
    rooms.entered(5.0, 7, "receiving")  # too late
    rooms.ended(6.0, 7)
    assert rooms.records[0].seconds == {"allocating": 1.0, "waiting": 3.0, "queued": 2.0}


def test_first_reason_of_a_failure_counts():
    rooms = rank_rooms()
    rooms.opened(1.0, 7, "", PEER, 5)
    rooms.failed(2.0, 7, "decode 10.0.0.2:9000 has not answered for 10 s")
    rooms.failed(3.0, 7, "Aborted by AbortReq.")
    rooms.ended(9.0, 7)
    (record,) = rooms.records
    assert (record.kind, record.ended, record.seconds) == (
        "peer_lost",
        "failed",
        {"bootstrapping": 1.0},
    )
    assert samples(rooms.series)["sglang_pd_failures_total", "prefill", PEER, "peer_lost"] == 1


@pytest.mark.parametrize(
    "reasons, kind",
    [
        # The engine aborts requests to a prefill server that does not answer as clients do.
        pytest.param(
            (
                "Aborted by AbortReq.",
                "Bootstrap server h:1 did not return the prefill server's sizes and ranks",
            ),
            "peer_lost",
            id="abort by the engine",
        ),
        # Prefill tells all ranks what the first of them has said.
        pytest.param(
            ("Prefill failed: Aborted by decode", "Aborted by AbortReq."),
            "aborted_by_client",
            id="abort of another rank",
        ),
        # The other server, which decode has told of it, reports an abort, too, or does not answer.
        pytest.param(
            (
                "Aborted by AbortReq.",
                "Prefill failed: Decode aborted the request: Aborted by AbortReq.",
                "not all prefill ranks confirmed that they stopped writing",
            ),
            "aborted_by_client",
            id="abort and what follows from it",
        ),
    ],
)
def test_kind_of_several_reasons(reasons, kind):
    rooms = rank_rooms("decode")
    rooms.opened(1.0, 7, "", PEER, 5)
    for at, reason in enumerate(reasons, 2):
        rooms.failed(float(at), 7, reason)
    rooms.ended(60.0, 7)
    assert rooms.records[0].kind == kind


def test_failed_write_counts_without_its_time():
    rooms = rank_rooms()
    rooms.opened(1.0, 7, "", PEER, 5)
    rooms.sent(2.0, 7, PEER, "kv", "whole", 10, 1, None)
    found = samples(rooms.series)
    assert found["sglang_pd_transfer_bytes_total", "nixl", PEER, "kv", "whole"] == 10
    assert not [key for key in found if key[0].startswith("sglang_pd_transfer_seconds")]
    assert rooms.rooms[7].state == "sending"


def test_dropped_room_has_failed():
    """With its first reason, if it has one; if it has none, another rank has it."""
    rooms = rank_rooms("decode")
    for room in (7, 8, 9):
        rooms.opened(1.0, room, "", PEER, 5)
    rooms.failed(2.0, 7, "decode could not interleave KV heads: no room")
    rooms.dropped(3.0, 7, "Metadata corruption detected")
    rooms.dropped(3.0, 8, "Metadata corruption detected")
    rooms.dropped(3.0, 9, "")
    rooms.dropped(4.0, 9, "it is over")
    assert [one.kind for one in rooms.records] == ["transport", "mismatch", "another_rank"]
    assert samples(rooms.series)["sglang_pd_requests_total", "decode", PEER, "failed"] == 3


def test_failure_without_a_reason_is_another_ranks():
    rooms = rank_rooms()
    rooms.opened(1.0, 7, "", PEER, 5)
    rooms.failed(2.0, 7, "")
    rooms.ended(3.0, 7)
    found = samples(rooms.series)
    assert found["sglang_pd_requests_total", "prefill", PEER, "failed"] == 1
    assert not [key for key in found if key[0] == "sglang_pd_failures_total"]


def test_failed_room_that_nothing_ends_is_ended_later():
    rooms = rank_rooms()
    for room in (7, 8):
        rooms.opened(1.0, room, "", PEER, 5)
    rooms.failed(2.0, 7, "Aborted by AbortReq.")
    rooms.tick(2.0 + rooms_module.FAILED_SECONDS, 2, dict)
    assert set(rooms.rooms) == {7, 8}
    rooms.tick(2.1 + rooms_module.FAILED_SECONDS, 2, dict)
    assert set(rooms.rooms) == {8} and rooms.records[0].kind == "aborted_by_client"


def test_reused_room_ends_the_earlier_request():
    """A client may get its answer, and use the room again, before the next poll."""
    rooms = rank_rooms("decode")
    rooms.opened(1.0, 7, "first", PEER, 5)
    rooms.entered(1.5, 7, "queued")
    rooms.opened(2.0, 7, "second", PEER, 5)
    rooms.opened(3.0, 7, "second", PEER, 5)  # the same request is prefilled again
    ends = [(record.rid, record.ended) for record in rooms.records]
    assert ends == [("first", "success"), ("second", "success")]
    assert rooms.rooms[7].rid == "second" and not rooms.rooms[7].failed


def test_two_requests_with_one_room_are_both_rejected():
    rooms = rank_rooms()
    rooms.opened(1.0, 7, "first", PEER, 5)
    rooms.opened(2.0, 7, "second", PEER, 5)
    rooms.ended(3.0, 7)
    rooms.ended(3.0, 7)
    assert [(one.rid, one.kind) for one in rooms.records] == [
        ("first", "rejected"),
        ("second", "rejected"),
    ]


def test_rejected_request_counts_without_a_room():
    rooms = rank_rooms()
    rooms.rejected(1.0, 7, "Prefill refused the request: too long")
    assert samples(rooms.series)["sglang_pd_failures_total", "prefill", "unknown", "rejected"] == 1
    assert not rooms.rooms


def test_only_the_first_rank_counts_requests():
    rooms = rank_rooms(is_first_rank=False)
    rooms.opened(1.0, 7, "", PEER, 5)
    rooms.sent(2.0, 7, PEER, "kv", "whole", 10, 1, 0.5)
    rooms.failed(3.0, 7, "Prefill could not send KV: NIXL")
    rooms.ended(3.0, 7)
    rooms.tick(4.0, 4, lambda: {"patched": 1})
    names = {name for name, *_ in samples(rooms.series)}
    assert "sglang_pd_transfer_bytes_total" in names and "sglang_pd_failures_total" in names
    for name in ("rooms", "requests_total", "room_seconds_sum", "peers"):
        assert f"sglang_pd_{name}" not in names
    assert len(rooms.records) == 1


def test_events_of_unknown_rooms_change_no_room():
    rooms = rank_rooms()
    rooms.entered(1.0, 7, "prefilling")
    rooms.failed(1.0, 7, "late")
    rooms.ended(1.0, 7)
    rooms.sent(1.0, 7, "", "kv", "whole", 10, 1, 0.5)
    assert not rooms.rooms and not rooms.records
    assert samples(rooms.series)["sglang_pd_transfer_bytes_total", "nixl", "unknown", "kv", "whole"]


def test_rooms_are_bounded(monkeypatch):
    monkeypatch.setattr(rooms_module, "MAX_ROOMS", 2)
    rooms = rank_rooms()
    for room in range(3):
        rooms.opened(float(room), room, "", PEER, 5)
    assert set(rooms.rooms) == {1, 2} and rooms.records[0].ended == "failed"
    assert samples(rooms.series)["sglang_pd_rooms", "prefill", "bootstrapping"] == 2


def test_peers_are_bounded_and_expire():
    rooms = rank_rooms()
    for number in range(MAX_PEERS + 2):
        rooms.sent(1.0, number, f"host:{number}", "kv", "whole", 1, 1, 0.1)

    def peers_with_bytes():
        return {key[2] for key in samples(rooms.series) if key[0].endswith("bytes_total")}

    assert len(peers_with_bytes()) == MAX_PEERS + 1 and "other" in peers_with_bytes()
    rooms.tick(1.0, 1, dict)
    last = 1.0 + series_module.PEER_SECONDS
    rooms.sent(last, 1, "host:1", "kv", "whole", 1, 1, 0.1)
    rooms.tick(last + 1, last + 1, dict)
    assert peers_with_bytes() == {"host:1", "other"}
    assert {key[2] for key in samples(rooms.series) if "seconds" in key[0]} == {"host:1", "other"}


def test_failures_of_the_last_hour():
    rooms = rank_rooms()
    rooms._epoch = 0.0
    for minute in (1, 31, 60):
        rooms.opened(60.0 * minute, 7, "", PEER, 5)
        rooms.failed(60.0 * minute, 7, "decode 10.0.0.2:9000 has not answered for 10 s")
        rooms.ended(60.0 * minute, 7)

    def recent(minute: float) -> float:
        rooms.series.expire(60.0 * minute)
        key = "sglang_pd_failures_last_hour", "prefill", PEER, "peer_lost"
        return samples(rooms.series).get(key, 0)

    assert [recent(minute) for minute in (60, 62, 92, 119.9)] == [3, 2, 1, 1]
    assert recent(122) == 0


def test_file_of_series_that_are_gone_is_replaced(tmp_path):
    series = Series()
    series.add_failure(0.0, "prefill", PEER, "timeout")
    series.expire(60.0)
    files = SeriesFiles(tmp_path, "sglang-pd-1-0")
    files.write(series)
    series.expire(2 * 3600.0)
    files.write(series)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    found = {family.name for family in registry.collect() if family.samples}
    assert found == {"sglang_pd_failures"}  # a counter of no peer goes with its peer


def test_ranks_drop_a_peer_at_the_same_time(tmp_path):
    """Else the sum of their series would fall, which Prometheus takes for a restart."""
    ranks = [Series(PeerActivity(tmp_path)) for _ in range(2)]
    for series in ranks:
        series.add(series_module.BYTES, 10, "nixl", series.peer(PEER), "kv", "whole")
        series.expire(1000)
    ranks[1].peer(PEER)
    ranks[1].expire(2000)

    def known(second: float) -> list[bool]:
        for series in ranks:
            series.expire(second)
        return [bool(series.values) for series in ranks]

    assert known(2000 + series_module.PEER_SECONDS) == [True, True]
    assert known(2001 + series_module.PEER_SECONDS) == [False, False]


def test_peer_is_touched_once_a_minute(tmp_path):
    activity = PeerActivity(tmp_path)
    for second, noted in ((100.0, 100.0), (159.0, 100.0), (160.0, 160.0)):
        activity.note(PEER, second)
        assert activity.last(PEER) == noted


def test_unchanged_series_are_not_written(tmp_path):
    series = Series()
    series.add(series_module.MALFORMED, 1, "prefill")
    files = SeriesFiles(tmp_path, "sglang-pd-1-0")
    files.write(series)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    files.write(series)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    series.add(series_module.MALFORMED, 1, "prefill")
    files.write(series)
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"counter_sglang-pd-1-0.db"}


def test_names_are_encoded_once(tmp_path, monkeypatch):
    """To encode them takes most of a write, in which the scheduler may want to run."""
    rooms = rank_rooms()
    rooms.sent(1.0, 7, PEER, "kv", "whole", 10, 1, 0.5)
    files = SeriesFiles(tmp_path, "sglang-pd-1-0")
    files.write(rooms.series)
    before = (tmp_path / "histogram_sglang-pd-1-0.db").read_bytes()
    rooms.sent(2.0, 7, PEER, "kv", "whole", 10, 1, 0.5)
    monkeypatch.setattr("prometheus_client.mmap_dict.mmap_key", None)
    files.write(rooms.series)
    assert (tmp_path / "histogram_sglang-pd-1-0.db").read_bytes() != before


def test_idle_rank_writes_nothing(tmp_path, monkeypatch):
    rooms, written = rank_rooms(), []
    writer = transfer_log._Writer(transfer_log.deque(), rooms, dict, str(tmp_path), None)
    monkeypatch.setattr(writer.files, "write", written.append)
    for _ in range(3):
        writer.write()
    assert written == [rooms.series]
    rooms.series.add(series_module.MALFORMED, 1, "prefill")
    writer.write()
    assert len(written) == 2


def test_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    series = Series()
    series.add(series_module.MALFORMED, 1, "prefill")
    files = SeriesFiles(tmp_path, "sglang-pd-1-0")
    files.write(series)
    whole = (tmp_path / "counter_sglang-pd-1-0.db").read_bytes()
    series.add(series_module.MALFORMED, 1, "prefill")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", _no_space)
        with pytest.raises(OSError):
            files.write(series)
    assert (tmp_path / "counter_sglang-pd-1-0.db").read_bytes() == whole
    assert not list(tmp_path.glob("*.new"))
    files.write(series)
    assert (tmp_path / "counter_sglang-pd-1-0.db").read_bytes() != whole


def _no_space(path: Path, data: bytes):
    with path.open("wb") as file:
        file.write(data[:10])
    raise OSError(28, "No space left on device")


def test_request_lines_that_find_no_space_are_counted(tmp_path, monkeypatch):
    rooms, records = rank_rooms(), RecordFile(tmp_path / "lines.jsonl")
    writer = transfer_log._Writer(transfer_log.deque(), rooms, dict, "", records)
    for room in (1, 2):
        rooms.opened(1.0, room, "", PEER, 5)
        rooms.ended(2.0, room)
    with monkeypatch.context() as full, open("/dev/full", "ab", buffering=0) as file:
        full.setattr(records, "_file", file)
        writer.write()
    assert samples(rooms.series)["sglang_pd_lost_events_total", "prefill"] == 2
    rooms.opened(1.0, 3, "", PEER, 5)
    rooms.ended(2.0, 3)
    writer.write()
    text = (tmp_path / "lines.jsonl").read_text()
    assert text.startswith("\n") and text.count('"room":3') == 1  # the line before may be torn


def test_room_that_nothing_ends_is_ended():
    rooms = rank_rooms()
    rooms.opened(1.0, 7, "", PEER, 5)
    rooms.tick(1.0 + rooms_module.SILENT_SECONDS, 1, dict)
    assert rooms.rooms
    rooms.tick(1.1 + rooms_module.SILENT_SECONDS, 1, dict)
    assert not rooms.rooms and rooms.records[0].ended == "failed"


def test_failed_room_enters_no_state():
    rooms = rank_rooms("decode")
    rooms.opened(1.0, 7, "", PEER, 5)
    rooms.failed(2.0, 7, "prefill rank h:1 has not answered for 10 s")
    rooms.entered(5.0, 7, "receiving")
    rooms.ended(6.0, 7)
    assert rooms.records[0].seconds == {"allocating": 1.0}


def test_prometheus_reads_the_files_of_all_ranks(tmp_path):
    for rank in range(2):
        rooms = rank_rooms(is_first_rank=rank == 0)
        rooms.opened(0.0, 7, "", "", 5)
        for seconds in (0.002, 0.7, 100.0):
            rooms.sent(1.0, 7, PEER, "kv", "slices", 10, 3, seconds)
        rooms.tick(1.0, 1, lambda: {"patched": 2, "refused": 1})
        files = SeriesFiles(tmp_path, f"sglang-pd-1-{rank}")
        for _ in range(2):  # replaced, not added
            files.write(rooms.series)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"backend": "nixl", "peer": PEER, "kind": "kv", "path": "slices"}
    value = registry.get_sample_value
    assert value("sglang_pd_transfer_bytes_total", labels) == 60
    assert value("sglang_pd_transfer_seconds_count", labels) == 6
    assert value("sglang_pd_transfer_seconds_bucket", {**labels, "le": "1.0"}) == 4
    assert value("sglang_pd_transfer_seconds_bucket", {**labels, "le": "+Inf"}) == 6
    assert value("sglang_pd_rooms", {"side": "prefill", "state": "sending"}) == 1
    assert value("sglang_pd_peers", {"side": "prefill", "kind": "refused"}) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".db"}


REASONS = {
    "Aborted by AbortReq.": "aborted_by_client",
    "Aborted by decode-side abort notification.": "aborted_by_peer",
    "Decode aborted the request: Aborted by AbortReq.": "aborted_by_peer",
    "Aborted by decode": "aborted_by_peer",
    "Prefill failed: Aborted by decode": "another_rank",
    "Prefill failed: Aborted on prefill": "aborted_by_peer",
    "Prefill failed: Aborted by AbortReq.": "aborted_by_peer",
    "Aborted before it was sent": "aborted_by_client",
    "Prefill refused the request: Input is too long": "rejected",
    "Prefill failed: Prefill refused the request: no reason given": "rejected",
    "Prefill cannot serve this decode server: prefill has page size 1, decode 64": "refused",
    "Prefill 10.0.0.1:8998 cannot serve this decode server: page sizes differ": "refused",
    "prefill sends 5 pages where decode has set aside 4; the two servers disagree about": "refused",
    "Request 7 timed out after 300.1s in KVPoll.WaitingForInput": "timeout",
    "decode 10.0.0.2:9000 has not answered for 10 s (SGLANG_PD_SILENT_SECONDS)": "peer_lost",
    "decode 10.0.0.2:9000 was replaced by another process": "peer_lost",
    "Lost connection with prefill instance (bootstrap_addr: 10.0.0.1:8998)": "peer_lost",
    "Decode instance could be dead, remote mooncake session a:1 is not alive": "peer_lost",
    "Prefill could not send KV: NIXL reported an error": "transport",
    "Failed to send kv chunk of 7 to 10.0.0.2:9000": "transport",
    "KV verification failed: layer 3 of KV differs": "mismatch",
    "Decode transfer failed for request 7 with exception NIXL": "another_rank",
    "bootstrap_room is already in use by another request": "rejected",
    "bootstrap_room 7 is already in use": "rejected",
    "prefill page size 1 and decode page size 64 differ": "refused",
    "another prefill rank failed": "another_rank",
    "KV did not arrive within 300 s; SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets": "timeout",
    "the request failed on another rank, whose log may have the reason": "another_rank",
    "": "another_rank",
    "words that nobody has written yet": "other",
}


# Failures that are none of the kinds: errors of the patch set itself.
UNEXPECTED = {
    "decode X requested room X and is not registered with this prefill rank",
    "Prefill could not wait for the pages of a cached prefix: X",
    "decode could not restore the cached prefix from HiCache",
    "Prefill failed: X",  # what prefill says decides
}
CALLS = ("record_failure", "fail", "_fail", "abort_room", "conclude_failure", "fail_room")


def recorded_reasons() -> set[str]:
    """The texts for which the patch set fails a room, with an X for each value in them."""
    found = set()
    for file in (ROOT / "python").glob("*/**/disaggregation/**/*.py"):
        if file.parts[-2] == "kv_layout":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            texts: list[ast.AST] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in CALLS:
                    texts = [*node.args, *(word.value for word in node.keywords)]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reason":
                texts = [node.value]
            found |= {text for one in texts if (text := with_values(one))}
    return found


def with_values(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(with_values(part) or "X" for part in node.values)
    return ""


def test_reasons_of_the_patch_set_have_a_kind():
    found = recorded_reasons()
    assert len(found) > 15
    unknown = {reason for reason in found if reason and failure_kind(reason) == "other"}
    assert unknown <= UNEXPECTED, unknown - UNEXPECTED


@pytest.mark.parametrize("reason", REASONS)
def test_failure_kind(reason):
    assert failure_kind(reason) == REASONS[reason]


def test_every_kind_of_failure_has_an_example():
    assert set(REASONS.values()) == set(KINDS)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a prefill rank's log, which writes at once."""
    monkeypatch.setattr(transfer_log, "WRITE_SECONDS", 0.01)
    monkeypatch.setenv("SGLANG_PD_REQUEST_LOG", str(tmp_path / "requests"))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)

    def started(peers=dict) -> TransferLog:
        log = TransferLog()
        log.start("prefill", "DP 1 TP 0/2 PP 0/1", "nixl", True, peers)
        return log

    return started


def lines(tmp_path) -> list[RequestRecord]:
    (path,) = (tmp_path / "requests").iterdir()
    assert path.name.startswith("prefill-dp-1-tp-0of2-pp-0of1-")
    return [msgspec.json.decode(line, type=RequestRecord) for line in path.open("rb")]


def wait_for_lines(tmp_path, count: int) -> list[RequestRecord]:
    deadline = time.monotonic() + 20
    while len(found := lines(tmp_path)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_log_writes_a_line_for_each_request(start, tmp_path):
    log = start()
    assert log.is_on
    now = time.time()
    log.opened(7, "rid", "", 5)
    log.entered(7, "prefilling")
    log.sent(7, PEER, "kv", "whole", 10, 1, 0.0)
    log.failed(7, "Aborted by AbortReq.")
    log.ended(7)
    log.rejected(8, "Prefill refused the request: too long")
    first, second = wait_for_lines(tmp_path, 2)
    assert (first.rid, first.peer, first.kind) == ("rid", PEER, "aborted_by_client")
    assert list(first.seconds) == list(STATES["prefill"]) and abs(first.opened - now) < 5
    assert (second.room, second.kind) == (8, "rejected")


def test_log_survives_errors(start, tmp_path, caplog):
    """Such as a label of the wrong type, or a manager's tables that change meanwhile."""
    broken = threading.Event()

    def peers():
        if not broken.is_set():
            raise RuntimeError("dictionary changed size during iteration")
        return {}

    log = start(peers)
    log.opened(7, "rid", PEER, 5)
    log._note(lambda rooms, at: 1 / 0)
    time.sleep(0.1)
    broken.set()
    log.ended(7)
    assert wait_for_lines(tmp_path, 1)[0].rid == "rid"
    for step in ("count", "tick"):
        assert 1 <= caplog.text.count(f"Metrics of KV transfers: cannot {step}") <= 2


def test_events_beyond_the_maximum_are_counted_as_lost(monkeypatch):
    monkeypatch.setattr(transfer_log, "MAX_EVENTS", 3)
    log = TransferLog()
    log._events = transfer_log.deque()
    for _ in range(20):
        log.malformed()
    rooms = rank_rooms()
    transfer_log._Writer(log._events, rooms, dict, "", None).write()
    found = samples(rooms.series)
    assert found["sglang_pd_malformed_messages_total", "prefill"] == 3
    assert found["sglang_pd_lost_events_total", "prefill"] == 3


def test_end_may_be_noted_late():
    log = TransferLog()
    log._events = transfer_log.deque()
    log.opened(7, "", PEER, 5)
    log.ended(7, seconds_ago=5.0)
    (_, opened, _), (_, ended, _) = log._events
    assert -5.5 < ended - opened < -4.5


def test_counters_without_a_peer_begin_at_zero():
    """Prometheus sees no increase if their first sample is above that."""
    found = dict(all_samples(rank_rooms("decode").series))
    for name in ("malformed_messages", "lost_events"):
        assert found[f"sglang_pd_{name}_total", "decode"] == 0
    for queue in ("prealloc", "transfer"):
        assert found["sglang_pd_stalls_total", "decode", queue] == 0
        assert found["sglang_pd_stall_seconds_total", "decode", queue] == 0


def test_stalls_are_counted():
    log = TransferLog()
    log._events = transfer_log.deque()
    log.polled("inflight", time.monotonic())
    log.polled("inflight", time.monotonic() - 1.0)
    rooms = rank_rooms()
    transfer_log._Writer(log._events, rooms, dict, "", None).write()
    found = samples(rooms.series)
    assert found["sglang_pd_stalls_total", "prefill", "inflight"] == 1
    assert 1.0 <= found["sglang_pd_stall_seconds_total", "prefill", "inflight"] < 5.0


@pytest.mark.parametrize("beside_the_engines", [False, True])
def test_log_is_off_by_default_and_with_the_engines_metrics_alone(
    monkeypatch, tmp_path, beside_the_engines
):
    for name in ("SGLANG_PD_REQUEST_LOG", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    if beside_the_engines:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        monkeypatch.setenv("SGLANG_PD_METRICS", "0")
    log, threads = TransferLog(), threading.active_count()
    log.start("prefill", "TP 0/1", "nixl", True, dict)
    log.opened(7, "rid", PEER, 5)
    log.polled("inflight", 0.0)
    assert not log.is_on and threading.active_count() == threads


def test_wrong_folder_stops_the_server(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGLANG_PD_REQUEST_LOG", str(tmp_path / "file"))
    with pytest.raises(OSError):
        TransferLog().start("prefill", "TP 0/1", "nixl", True, dict)


def test_all_metrics_have_a_name_of_the_patch_set():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("sglang_pd_") for name in names)


def count_series(side: str, peers: int) -> int:
    """Series of a server with so many peers, all of which it sends to by all paths that it may."""
    rooms = rank_rooms(side)
    for number in range(peers):
        name = f"host:{number}"
        if side == "prefill":
            for kind, path in (
                ("kv", "packed"),
                ("kv", "slices"),
                ("state", "whole"),
                ("aux",) * 2,
            ):
                rooms.sent(1.0, -1, name, kind, path, 1, 1, 0.1)
        else:
            rooms.verified(1.0, name, True)
        for reason in ("", *REASONS):
            rooms.opened(1.0, number, "", name, 5)
            for state in STATES[side][1:]:
                rooms.entered(2.0, number, state)
            if reason:
                rooms.failed(3.0, number, reason)
            rooms.ended(3.0, number)
    rooms.tick(1.0, 1, lambda: dict.fromkeys(("patched", "stock", "refused", "silent"), 1))
    return len(all_samples(rooms.series)) + len(rooms.series.histograms)  # a `_count` for each


def test_documented_number_of_series():
    counts = [count_series(side, peers) for side in STATES for peers in (1, 8)]
    bound = f"| prefill | {counts[0]} | {counts[1]} |", f"| decode | {counts[2]} | {counts[3]} |"
    text = (ROOT / "docs" / "operate.md").read_text()
    assert all(row in text for row in bound), bound
