"""`sglang-pd trace`: joining lines, the table, one request's time, and its picture."""

import importlib.util
import json
import re

import msgspec
import pytest
from typer.testing import CliRunner

from sglang_pd import cli
from sglang_pd.cli import app
from sglang_pd.errors import ExitCode
from sglang_pd.trace.requests import Record, join

runner = CliRunner()
NOW = 1_000_000.0
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="no matplotlib: this environment is older than scripts/requirements/common.txt",
)


def prefill(room=7, rank=0, opened=0.0, seconds=(1.0, 2.0, 0.5), **more):
    states = dict(zip(("bootstrapping", "prefilling", "sending"), seconds))
    sent = {"bytes": 1 << 20, "copies": 3, "paths": ["packed"], "ended": "success"}
    known = {"rid": "abc", "peer": "decode:30000", "tokens": 100, "seconds": states}
    rank_name = f"TP {rank}/2 PP 0/1"
    return Record("prefill", rank_name, room, NOW + opened, **{**known, **sent, **more})


def decode(room=7, opened=0.0, seconds=(1.0, 2.0, 0.5, 0.1, 0.2), **more):
    names = ("allocating", "waiting", "receiving", "interleaving", "queued")
    known = {"peer": "prefill:8998", "tokens": 100, "ended": "success"}
    times = dict(zip(names, seconds))
    return Record(
        "decode", "TP 0/1 PP 0/1", room, NOW + opened, **{**known, "seconds": times, **more}
    )


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Runs the command on records, a file for each side; returns exit code, stdout and stderr."""

    def run(records, *words: str, junk: bytes = b""):
        for side in ("prefill", "decode"):
            lines = [msgspec.json.encode(one) for one in records if one.side == side]
            (tmp_path / "logs").mkdir(exist_ok=True)
            (tmp_path / "logs" / f"{side}.jsonl").write_bytes(b"\n".join([*lines, junk]))
        for console in (cli.out, cli.err):
            monkeypatch.setattr(console, "width", 200)
        got = runner.invoke(app, ["trace", str(tmp_path / "logs"), *words])
        return got.exit_code, got.stdout, got.stderr

    return run


def test_table_joins_both_sides(trace):
    records = [prefill(), prefill(rank=1, seconds=(1.0, 2.0, 0.9)), decode()]
    code, text, _ = trace(records)
    assert code == 0
    lines = text.splitlines()
    (at,) = [at for at, line in enumerate(lines) if re.search(r"\b7\b.*prefill:8998", line)]
    row = lines[at]
    assert "decode:30000" in lines[at + 1]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:6] == ["7", "prefill:8998", "packed", "100", "2.0", "6"]
    assert cells[6:9] == ["1.000", "2.000", "0.900"]  # of the slowest rank
    assert cells[9:14] == ["1.000", "2.000", "0.500", "0.100", "0.200"]
    assert cells[-1] == "success"


def test_slowest_come_first_and_medians_last(trace):
    records = [
        one
        for room in range(1, 31)
        for one in (prefill(room, seconds=(0.0, room / 10, 0.0)), decode(room, seconds=(0.0,)))
    ]
    _, text, _ = trace(records, "--limit", "3")
    rows = re.findall(r"^│ +(\d+) ", text, re.MULTILINE)
    assert rows == ["30", "29", "28"]
    assert "3 of 30 requests" in text and "median of all" in text and "1.550" in text


def test_failures_are_counted_with_an_example(trace):
    lost = {"ended": "failed", "kind": "peer_lost", "reason": "decode has not answered for 10 s"}
    elsewhere = {"ended": "failed", "kind": "another_rank"}
    records = [prefill(), prefill(rank=1, **lost), decode(**elsewhere), prefill(8), decode(8)]
    _, text, _ = trace(records)
    assert "1 failed: peer_lost, such as: decode has not answered for 10 s" in text
    _, text, _ = trace(records, "--failed", "--json")
    (request,) = json.loads(text)["requests"]
    assert (request["room"], request["kind"], request["ended"]) == (7, "peer_lost", "failed")


def test_half_written_lines_are_counted(trace):
    code, text, _ = trace([prefill(), decode()], junk=b'{"side":"pre')
    assert code == 0 and "2 lines could not be read" in text
    assert json.loads(trace([prefill()], "--json")[1])["unread_lines"] == 0


def test_missing_side_is_reported(trace):
    assert "no line of a decode server" in trace([prefill()])[1]


def test_reused_room_is_another_request():
    first, second = prefill(), prefill(opened=60.0, rid="def")
    requests = join([second, decode(opened=60.1), first, decode(opened=0.1)])
    assert [one.rid for one in requests] == ["abc", "def"]
    assert all(len(one.records) == 2 for one in requests)


def test_one_requests_time(trace):
    code, text, _ = trace([prefill(), decode()], "--room", "7")
    assert code == 0
    said = "prefill waited for decode for 1.000 s; decode waited for prefill for 2.000 s; success"
    assert f"room 7, rid abc: {said}" in text
    assert re.search(r"prefill TP 0/2 PP 0/1 │ ░+▒+█+", text)
    assert re.search(r"decode TP 0/1 PP 0/1 +│ ░+▒+█+▓+·+", text)
    assert "decode interleaves KV heads: 0.100 s (interleaving)" in text
    assert "clock" not in text


@pytest.mark.parametrize("off", [100.0, -100.0])
def test_clocks_that_differ_are_aligned(trace, off):
    _, text, _ = trace([prefill(), decode(opened=off)], "--room", "7")
    shown = float(re.search(r"decode's clock is off by about (-?[0-9.]+) s", text)[1])
    assert abs(shown - off) < 0.01
    assert "0 to 3.800 s" in text or "0 to 3.8" in text


def test_clocks_of_a_failed_request_are_aligned_by_what_decode_asked():
    lost = {"ended": "failed", "kind": "peer_lost"}
    (began,) = join([prefill(seconds=(1.0, 2.0), **lost), decode(opened=50.0, seconds=(1.0,))])
    assert began.decode_shift == -50.0
    (waited,) = join([prefill(seconds=(1.0,), **lost), decode(opened=50.0, seconds=(1.0,))])
    assert waited.decode_shift == 0.0


def test_unknown_room_is_refused(trace):
    code, _, text = trace([prefill(), decode()], "--room", "8")
    assert code == ExitCode.NO_REQUEST and "no line of room 8" in text


def test_picture_needs_a_room(trace, tmp_path):
    assert trace([prefill()], "--picture", str(tmp_path / "one.svg"))[0] == 2


@needs_matplotlib
def test_picture(trace, tmp_path):
    file = tmp_path / "one.svg"
    code, _, _ = trace([prefill(), decode()], "--room", "7", "--picture", str(file))
    text = file.read_text()
    assert code == 0 and "prefill TP 0/2 PP 0/1" in text and "decode interleaves KV heads" in text
