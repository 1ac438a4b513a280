"""What the real MemFabric does here, by release: our patches and docs rely on it.

Where one of these fails with a newer release, what relies on it must be looked at.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import prepare
from memfabric_end import MIB, PAGE
from serving_checks import LOST_MEMORY

from pd_harness.cpu_host import memfabric
from pd_harness.cpu_host.memfabric import DEFAULT, MAY_HANG, RELEASES, VARIABLE
from pd_harness.device import device
from pd_harness.ports import HOST, free_ports
from pd_harness.waiting import awaited

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
END = Path(__file__).resolve().parents[1] / "support" / "memfabric_end.py"
JOINS_WITHIN = 30  # seconds, after which 1.0 knows a peer and what it has registered
BUFFER, OTHER = [100, MIB], [8 * MIB + 4096, 3 * MIB]  # offset and size
DATA = 7

pytestmark = pytest.mark.skipif(device() != "cpu", reason="NPUs have a driver: test/npu")


class End:
    """A process of `memfabric_end`, and calls to it."""

    def __init__(self, role: str, device: int, release: str, folder: Path):
        self.log, self.fault = folder / f"{role}.driver", folder / f"{role}.fault"
        self.output = folder / f"{role}.log"
        self.process = subprocess.Popen(
            [sys.executable, str(END), role, str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output.open("w"),
            text=True,
            env={
                **os.environ,
                VARIABLE: release,
                "PD_DRIVER_LOG": str(self.log),
                "PD_DRIVER_FAULT": str(self.fault),
            },
        )
        self.seconds = 0.0  # of the last call

    def begin(self, *call) -> None:
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def end(self, seconds: float = 60):
        """The result of the call. Raises TimeoutError if there is none."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no answer within {seconds} s")
        value, self.seconds = json.loads(self.process.stdout.readline())
        return value

    def __call__(self, *call):
        self.begin(*call)
        return self.end()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def exports(self) -> int:
        """How often MemFabric has asked its driver to let peers reach memory."""
        return self.log.read_text().count(" export ") if self.log.exists() else 0


@dataclass
class Pair:
    """A prefill and a decode end. `ports` are decode's before and after its start, `early` is how
    often prefill had asked its driver to let peers reach memory before it first wrote."""

    release: str
    prefill: End
    decode: End
    session: str = ""
    there: int = 0
    ports: tuple = ()
    early: int = 0

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, self.release.split(".")))

    def write(self, *copies: list[int]) -> int:
        return self.prefill("write", self.session, self.there, *copies)

    def arrives(self, copy: list[int]) -> bool:
        """Whether it is taken and found there; 1.0 may need a while."""
        _, offset, size = copy
        self.decode("fill", 0, offset, size)
        # From 1.1.3 on at once.
        if self.version < (1, 1, 3):
            awaited(lambda: self.write(copy) == 0, JOINS_WITHIN, pause=1)
        return self.write(copy) == 0 and self.decode("count", DATA, offset, size) == size


ROLES = ("prefill", "decode")
ATTEMPTS = 5


@contextlib.contextmanager
def started(release: str, folder: Path, protocol: str = "SDMA"):
    """A pair whose ends know each other; decode has registered BUFFER and OTHER, as prefill has."""
    prepare("memfabric", release)
    for attempt in range(ATTEMPTS):
        place = folder / str(attempt)
        place.mkdir()
        pair = Pair(release, *(End(role, i, release, place) for i, role in enumerate(ROLES)))
        try:
            try:
                meet(pair, protocol)
            except TimeoutError:
                if release not in MAY_HANG:
                    raise
                continue
            yield pair
            return
        finally:
            pair.prefill.close()
            pair.decode.close()
    pytest.fail(f"MemFabric {release} hung in each of {ATTEMPTS} first writes")


def meet(pair: Pair, protocol: str) -> None:
    """Start both ends, register, and write for the first time.

    Raises:
        TimeoutError: that does not end.
    """
    (port,) = free_ports(1)
    url = f"tcp://{HOST}:{port}"
    ends = (pair.prefill, pair.decode)
    assert pair.prefill("create_store", url) == 0
    for end in ends:  # at once: in 1.0 one waits for the other
        end.begin("start_engine", url, HOST, protocol)
    _, found = (end.end() for end in ends)
    assert found["status"] == 0, found
    pair.ports = (found["before"], found["after"])
    # Before 1.1.3 it is a name, and the one that was said to the store counts.
    pair.session = f"{HOST}:{found['before'] or found['after']}"
    pair.there = pair.decode("where")
    pair.prefill("fill", DATA, 0, 32 * MIB)
    for end in ends:
        assert end("register", BUFFER, OTHER) == 0
    pair.early = pair.prefill.exports()
    pair.prefill.begin("write", pair.session, pair.there, [100, *BUFFER])
    pair.prefill.end(15)


def at_night(release: str):
    return pytest.param(release, marks=[] if release == DEFAULT else [pytest.mark.nightly])


@pytest.fixture(scope="module", params=[at_night(release) for release in RELEASES])
def pair(request, tmp_path_factory):
    with started(request.param, tmp_path_factory.mktemp("memfabric")) as pair:
        yield pair


def test_the_port_of_a_session(pair):
    before, after = pair.ports
    if pair.version < (1, 1, 3):  # a name, which int() reads
        port, pid = before.split("_")
        assert (port.isdecimal(), int(pid)) == (True, pair.decode.process.pid)
    else:
        assert before == 0 < after < 1 << 16


def test_prefill_registers_when_it_first_writes(pair):
    assert (pair.early == 0) == (pair.version >= (1, 1, 3))
    assert pair.arrives([100, *BUFFER])
    assert pair.prefill.exports() > 0
    assert pair.decode.exports() > 0


def test_a_buffer_arrives_and_nothing_beside_it(pair):
    assert pair.arrives([100, *BUFFER])
    for offset in (0, BUFFER[0] + BUFFER[1]):
        assert pair.decode("count", DATA, offset, 100) == 0


@pytest.mark.parametrize("offset", [0, BUFFER[0] + BUFFER[1]], ids=["before", "behind"])
def test_what_lies_beside_a_buffer_in_its_page_can_be_written(pair, offset):
    assert pair.arrives([100, *BUFFER])
    assert pair.write([100, offset, 16]) == 0
    assert pair.decode("count", DATA, offset, 16) == 16
    pair.decode("fill", 0, offset, 16)


def test_no_other_page_can_be_written(pair):
    assert pair.arrives([100, *BUFFER])
    for offset in (PAGE - 8, 2 * PAGE):
        assert pair.write([100, offset, 16]) < 0
        assert pair.decode("count", DATA, PAGE, PAGE) == 0


def test_a_wrong_address_is_no_reason_to_start_servers_again(pair):
    """They are where MemFabric has lost memory; a wrong pointer of ours must fail the test."""
    assert pair.arrives([100, *BUFFER])
    for offset in (PAGE - 8, 2 * PAGE, -PAGE, sum(OTHER) + PAGE, 1 << 40):
        assert pair.write([100, offset, 16]) < 0
    assert "SMEM API smem_trans_write" in pair.prefill.output.read_text()
    assert LOST_MEMORY not in pair.prefill.output.read_text()


def test_a_source_need_not_be_registered(pair):
    assert pair.arrives([30 * MIB, 100, 16])


def test_one_bad_address_keeps_the_whole_batch_from_being_written(pair):
    assert pair.arrives([100, *BUFFER])
    pair.decode("fill", 0, *BUFFER)
    assert pair.write([100, 100, 8], [200, 2 * PAGE, 8]) < 0
    assert pair.decode("count", DATA, *BUFFER) == 0


def test_copies_of_nothing_are_refused(pair):
    assert pair.arrives([100, *BUFFER])
    assert pair.write([100, 100, 0]) < 0
    assert pair.write() < 0


def test_registering_a_page_again(pair):
    refused = (1, 1, 4) <= pair.version <= (1, 2, 1)
    offset, size = OTHER
    assert (pair.decode("register", BUFFER) != 0) == refused
    assert (pair.decode("register", [offset + 4096, size // 2]) != 0) == refused
    assert pair.arrives([offset, offset, size])


def test_a_copy_over_the_border_of_neighbours(pair):
    """From 1.1.3 on they stay two ranges; before, they become one."""
    assert pair.decode("register", [20 * MIB, 4 * MIB], [24 * MIB, 4 * MIB]) == 0
    assert pair.arrives([20 * MIB, 20 * MIB, 4 * MIB])
    assert pair.arrives([20 * MIB, 24 * MIB, 4 * MIB])
    assert (pair.write([20 * MIB, 22 * MIB, 4 * MIB]) < 0) == (pair.version >= (1, 1, 3))


def test_unregistering_changes_nothing(pair):
    assert pair.arrives([100, *BUFFER])
    address = pair.there + BUFFER[0]
    assert pair.decode("unregister_memory", address) == 0
    assert pair.arrives([100, *BUFFER])


def test_what_no_release_has(pair):
    for name in ("send_probe", "batch_unregister_memory", "get_engine"):
        assert pair.decode("has", name) is False


def test_sessions_need_an_ip_address(pair):
    assert pair.arrives([100, *BUFFER])
    port = pair.session.partition(":")[2]
    for session in (f"localhost:{port}", f"{HOST}:9", "nobody"):
        assert pair.prefill("write", session, pair.there, [100, 100, 16]) < 0


def test_a_store_has_a_url(pair):
    engine = pair.decode("start_engine", None, HOST)
    assert "raised" in engine or engine["status"] != 0, engine


def test_many_copies_in_a_batch(pair):
    assert pair.arrives([100, *BUFFER])
    copies = [[at, at, 24] for at in range(OTHER[0], OTHER[0] + 20_000 * 48, 48)]
    pair.decode("fill", 0, *OTHER)
    assert pair.write(*copies) == 0
    assert pair.decode("count", DATA, OTHER[0], 20_000 * 48) == 20_000 * 24


def test_a_copy_that_fails_in_the_driver(pair):
    """What was written before it stays; the next batch is right."""
    assert pair.arrives([100, *BUFFER])
    pair.decode("fill", 0, *BUFFER)
    copies = [[at, at, 16] for at in range(1000, 1000 + 10 * 64, 64)]
    pair.prefill.fault.write_text("fail 3\n")
    assert pair.write(*copies) < 0
    assert pair.decode("count", DATA, *BUFFER) == 3 * 16
    pair.prefill.fault.unlink()
    assert pair.write(*copies) == 0
    assert pair.decode("count", DATA, *BUFFER) == 10 * 16


def checked(*, driver: Path | None = None, release: str = DEFAULT, before: str = "") -> str:
    """What `scripts/setup.sh` is told of MemFabric, after a process has run the code `before`."""
    code = ["import sys", "from pathlib import Path", "from pd_harness.cpu_host import memfabric"]
    if driver:
        code += [f"memfabric.LIBRARY = Path({str(driver)!r})"]
    code += [before, f"memfabric.check({release!r})"]
    command = [sys.executable, "-c", "\n".join(code)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == (1 if found.stderr else 0)
    return found.stderr


def test_what_is_there_runs():
    assert checked() == ""


def test_a_release_that_is_not_known_is_named():
    assert f"{VARIABLE} is 0.1; set it to one of 1.0.8, 1.1.6, 1.2.1, 1.3.0" in checked(
        release="0.1"
    )


def test_a_driver_that_was_not_built_is_named(tmp_path):
    said = checked(before=f"memfabric.FOLDER = Path({str(memfabric.FOLDER / 'none')!r})")
    assert ".pd-env/memfabric/none/1.3.0 is missing; run `scripts/setup.sh --memfabric" in said


def test_a_driver_of_another_architecture_is_named(tmp_path):
    """The number of the machine is in bytes 18 and 19 of an ELF file; 243 is RISC-V's."""
    library = bytearray(memfabric.LIBRARY.read_bytes())
    library[18:20] = (243).to_bytes(2, "little")
    (tmp_path / "driver.so").write_bytes(library)
    said = checked(driver=tmp_path / "driver.so")
    assert "the stand-in for the Ascend driver does not load" in said
    assert f"here it must be built for {os.uname().machine}" in said


def test_a_wheel_that_does_not_load_is_named(tmp_path):
    package = tmp_path / DEFAULT / "memfabric_hybrid"
    package.mkdir(parents=True)
    (package / "libmf_smem.so").write_bytes(b"no library")
    load = "import ctypes, os; ctypes.CDLL(os.path.dirname(__file__) + '/libmf_smem.so')"
    (package / "__init__.py").write_text(load)
    moved = f"memfabric.CHECKOUT = memfabric.FOLDER = Path({str(tmp_path)!r})"
    said = checked(before=moved)
    assert f"MemFabric {DEFAULT} cannot be imported" in said and "libmf_smem.so" in said


# A process that may not write into another, as in a container whose seccomp profile says so.
REFUSED = """
import ctypes, errno, os, struct
number = {"x86_64": 311, "aarch64": 271}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | errno.EPERM)]
steps += [(6, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter) == 0, ctypes.get_errno()
"""


def test_a_container_that_refuses_the_drivers_copies_is_named():
    said = checked(before=REFUSED)
    assert "process_vm_writev is refused here (EPERM, Operation not permitted)" in said
    assert "seccomp" in said and "SYS_PTRACE" in said


@pytest.mark.nightly
def test_without_a_compiler_one_comes_from_a_wheel(tmp_path):
    """100 MB, and fetched once."""
    for tool in ("bash", "dirname", "awk", "env", "python3.11"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    sys.path.insert(0, str(SCRIPTS))
    import setup_memfabric

    built = tmp_path / "driver.so"
    path, os.environ["PATH"] = os.environ["PATH"], str(tmp_path)
    try:
        cc = setup_memfabric.compiler()
    finally:
        os.environ["PATH"] = path
        sys.path.remove(str(SCRIPTS))
    assert "ziglang" in cc
    sources = sorted(setup_memfabric.SOURCE.glob("*.c"))
    command = [*cc, *setup_memfabric.SHARED, "-o", built, *sources, "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True)
    assert checked(driver=built) == ""


@pytest.mark.parametrize("release", [at_night(release) for release in RELEASES])
def test_a_peer_that_dies_in_the_middle_of_a_batch(release, tmp_path):
    """The call ends, with an error; so does the next one."""
    copies = [[at, at, 16] for at in range(1000, 1000 + 200 * 64, 64)]
    with started(release, tmp_path) as pair:
        assert pair.arrives([100, *BUFFER])
        pair.prefill.fault.write_text("slow 10000\n")
        pair.prefill.begin("write", pair.session, pair.there, *copies)
        time.sleep(1)
        os.kill(pair.decode.process.pid, signal.SIGKILL)
        assert pair.prefill.end() < 0
        assert 0.9 < pair.prefill.seconds < 5
        assert pair.write([100, 100, 16]) < 0
        assert pair.prefill.seconds < 5


# DEVICE_RDMA: with it, 1.1.6 registers addresses of an NPU's memory only.
RDMA_RELEASES = [at_night(release) for release in RELEASES if release != "1.1.6"]
SEND_QUEUE = 1024
FITS = SEND_QUEUE - 3  # two entries stay empty, and one is the notify's


@pytest.fixture(scope="module", params=RDMA_RELEASES)
def rdma(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PD_DRIVER_SEND_QUEUE", str(SEND_QUEUE))
        folder = tmp_path_factory.mktemp("rdma")
        with started(request.param, folder, "DEVICE_RDMA") as pair:
            assert pair.arrives([100, *BUFFER])
            yield pair


def blocks(count: int) -> list[list[int]]:
    """Copies that MemFabric cannot join."""
    return [[at, at, 16] for at in range(OTHER[0], OTHER[0] + count * 64, 64)]


def test_rdma_goes_through_the_card(rdma):
    assert rdma.arrives([100, *BUFFER])
    assert " write " in rdma.prefill.log.read_text()
    assert " copy " not in rdma.prefill.log.read_text().partition(" write ")[2]


def test_rdma_wants_registered_sources(rdma):
    """1.0 copies what is not registered by a buffer of its own; later ones have none by default."""
    taken = rdma.write([30 * MIB, 100, 16]) == 0
    assert taken == (rdma.version < (1, 1, 3))


def test_rdma_batches_are_as_long_as_the_send_queue(rdma):
    """Of one that is longer, all that fits is written, and the call fails."""
    rdma.decode("fill", 0, *OTHER)
    assert rdma.write(*blocks(FITS)) == 0
    assert rdma.decode("count", DATA, *OTHER) == FITS * 16
    rdma.decode("fill", 0, *OTHER)
    assert rdma.write(*blocks(4 * FITS)) < 0
    assert rdma.decode("count", DATA, *OTHER) == (SEND_QUEUE - 2) * 16
    assert rdma.write(*blocks(1)) < 0  # it is still full
    time.sleep(1.5)
    assert rdma.write(*blocks(FITS)) == 0


def test_rdma_does_not_recover_from_a_copy_that_fails(rdma):
    """The last test of this pair: its session takes no more."""
    rdma.decode("fill", 0, *OTHER)
    rdma.prefill.fault.write_text("fail 3\n")
    assert rdma.write(*blocks(10)) < 0
    assert rdma.decode("count", DATA, *OTHER) == 3 * 16
    rdma.prefill.fault.unlink()
    time.sleep(1.5)
    assert rdma.write(*blocks(10)) < 0
    assert rdma.decode("count", DATA, *OTHER) == 3 * 16
