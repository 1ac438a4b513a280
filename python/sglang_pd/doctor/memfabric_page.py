"""For developers: `python -m sglang_pd.doctor.memfabric_page [RUNS.json...] > docs/memfabric.md`.

Takes the runs of these files into memfabric_runs.json, and prints the page. They have its form,
{"runs": [{"memfabric": "1.3.0", "engine": "0.5.23", "patched": true, "fleet": "mla",
"outcome": "right"}, ...]}; a run takes the place of an older one of the same fleet.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from sglang_pd.doctor.memfabric import RUNS, Kind, Run, Table, table
from sglang_pd.patchset.patches import age, read_data, supported

HEAD = """\
# MemFabric, by release

Made by `python -m sglang_pd.doctor.memfabric_page` from `memfabric.toml` and `memfabric_runs.json`
in `python/sglang_pd/doctor/`. `sglang-pd doctor --backend ascend` knows the same.

MemFabric (`memfabric-hybrid`) carries KV between NPUs: the `ascend` backend. The published wheels
ran on a machine without an NPU, with a stand-in for the driver's copy; nothing has run on an NPU
yet.

## Which release with which engine

A cell is of fleets whose layouts a stock engine serves: "right" where every byte arrived; "fails",
every request does; "hangs", until a time-out. In brackets the releases of MemFabric that were run.
"""
FACTS = """
## What the releases do

Session ids and ports are what each release answered. The rest was seen with 1.0.8 and with all from
1.1.3 on; that 1.0.0 and 1.0.3 use the store was read in the source.
"""
NOTES = """
- **Session id**: what a decode rank tells prefill ranks of itself. It takes an IP address; a host
  name is refused, in `SGLANG_HOST_IP` as well.
- **Port known**: before `initialize` the later releases answer 0, with which stock 0.5.9 makes its
  session ids: `HOST:0`.
- **Store**: where it is used, a rank that cannot reach it does not start. Where it is not, decode
  ranks listen themselves, and prefill ranks connect to them. `ASCEND_MF_STORE_URL` must be set all
  the same, to anything: without it a server does not start. `MF_CONFIG_STORE_URL`, its name in
  later releases of MemFabric, is read by neither engine.
- **Ports**: where the store is not used, each rank takes one of 9000 to 65535, or of
  `MF_CONFIG_STORE_PORT_START` to `MF_CONFIG_STORE_PORT_END`, none below 1024. Decode ranks listen
  on theirs.
- **Registered again**: memory in a 2 MiB page of which some is registered. A refusal is logged as
  `this addr has registered`.
- No release unregisters memory, and none has `send_probe`.
- **A decode rank that is gone**: prefill's MemFabric keeps what it has for it. With 1.3.0 a prefill
  rank held 6 files and 5 threads more for each of 50 decode ranks that came and went. Give it
  65,536 open files, and start it anew after some thousands of them.
- **1.0.8**: when two ranks join the store at the same moment, one of them may fail with
  `smem trans create failed`; its server ends (seen once). Start it again.
- **1.2.1**: the first write to a decode rank may never end (seen in about one of ten pairs), and
  holds up one of prefill's four transfer threads. Another release is the only way out.
- **1.3.0**: when two prefill ranks join a decode rank at the same moment, one of them may lose part
  of that rank's memory. Each of its writes there then fails, and MemFabric's log says
  `failed to auto infer copy direction` (seen once in several hundred fleets). Start prefill again.
- **`device_rdma`** (A2): a batch that fails may have been written in part, and a pair of ranks with
  a failed write does not recover by itself. This was seen over the stand-in for the driver.
"""


def merged(runs: Iterable[Run], newer: Iterable[Run]) -> list[Run]:
    """In a fixed order."""
    by_fleet = {_fleet(one): one for one in (*runs, *newer)}
    return [by_fleet[key] for key in sorted(by_fleet)]


def _fleet(run: Run) -> tuple:
    return tuple(age(run.engine)), run.patched, tuple(age(run.memfabric)), run.fleet


def as_json(runs: Iterable[Run]) -> str:
    """A run a line."""
    lines = ",\n".join(msgspec.json.encode(one).decode() for one in runs)
    return f'{{"runs": [\n{lines}\n]}}\n'


def markdown(table: Table, engines: list[str]) -> str:
    """The page. engines: the releases that have columns."""
    columns = [(engine, patched) for engine in engines for patched in (False, True)]
    names = [f"{'patched' if patched else 'stock'} {engine}" for engine, patched in columns]
    rows = [_row(["MemFabric", *names]), _row(["---"] * (len(names) + 1))]
    for kind in table.kinds:
        cells = (_cell(table, kind, *column) for column in columns)
        rows.append(_row([", ".join(kind.releases), *cells]))
    return "\n".join([HEAD, *rows, FACTS, *_facts(table.kinds), NOTES])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(table: Table, kind: Kind, engine: str, patched: bool) -> str:
    """As `fails (1.1.3), right (1.1.4, 1.1.6)`."""
    tried = table.tried(engine, patched)
    outcomes = [(tried[one], one) for one in kind.releases if one in tried]
    said = groupby(sorted(outcomes, key=lambda one: one[0]), key=lambda one: one[0])
    return (
        ", ".join(f"{word} ({', '.join(one[1] for one in run)})" for word, run in said) or "not run"
    )


def _facts(kinds: list[Kind]) -> Iterator[str]:
    yield _row(["MemFabric", "session id", "port known", "store", "registered again", "start"])
    yield _row(["---"] * 6)
    for kind in kinds:
        store = "used" if kind.store else "not used"
        facts = [f"`{kind.session_id}`", kind.port, store, kind.again, kind.start]
        yield _row([", ".join(kind.releases), *facts])


def page() -> str:
    """docs/memfabric.md as it must be today."""
    return markdown(table(), supported())


def main(files: list[str]) -> None:
    runs = table().runs
    for file in files:
        runs = merged(runs, read_data(Path(file), dict[str, list[Run]])["runs"])
    if files:
        RUNS.write_text(as_json(runs))
        table.cache_clear()
    print(page(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
