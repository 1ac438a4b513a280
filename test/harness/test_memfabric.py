"""The real MemFabric's behaviour on this machine, by release; our patches and docs rely on it.

If a test fails with a newer release, check the code and docs that rely on the behaviour.
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
from fleet import install_library
from memfabric_end import MIB, PAGE
from serving_checks import LOST_MEMORY

from pd_harness.cpu_host import memfabric
from pd_harness.cpu_host.memfabric import DEFAULT_MEMFABRIC, MAY_HANG, MEMFABRIC_VARIABLE, RELEASES
from pd_harness.device import device
from pd_harness.polling import wait_until
from pd_harness.ports import HOST, free_ports

END = Path(__file__).resolve().parents[1] / "support" / "memfabric_end.py"
JOIN_SECONDS = 30  # after which 1.0 knows a peer and its registered memory
BUFFER, OTHER = [100, MIB], [8 * MIB + 4096, 3 * MIB]  # offset and size
DATA = 7

pytestmark = pytest.mark.skipif(device() != "cpu", reason="NPUs have a driver: test/npu")


class EndProcess:
    """A process of `memfabric_end`; calling the object calls the process."""

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
                MEMFABRIC_VARIABLE: release,
                "PD_DRIVER_LOG": str(self.log),
                "PD_DRIVER_FAULT": str(self.fault),
            },
        )
        self.seconds = 0.0  # of the last call

    def begin(self, *call) -> None:
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def end(self, seconds: float = 60):
        """Returns the result of the call that `begin` started.

        Raises:
            TimeoutError: There is no result within `seconds`.
        """
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
        """Counts MemFabric's requests to its driver to export memory to peers."""
        return self.log.read_text().count(" export ") if self.log.exists() else 0


@dataclass
class EndPair:
    """A prefill and a decode end.

    Attributes:
        session: Decode's session id.
        remote_address: Address of decode's memory.
        ports: Decode's ports before and after the start of its engine.
        early_exports: Prefill's exports (see `EndProcess.exports`) before its first write.
    """

    release: str
    prefill: EndProcess
    decode: EndProcess
    session: str = ""
    remote_address: int = 0
    ports: tuple = ()
    early_exports: int = 0

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, self.release.split(".")))

    def write(self, *copies: list[int]) -> int:
        return self.prefill("write", self.session, self.remote_address, *copies)

    def arrives(self, copy: list[int]) -> bool:
        """Returns whether a copy is accepted and arrives."""
        _, offset, size = copy
        self.decode("fill", 0, offset, size)
        # Releases before 1.1.3 may need a while.
        if self.version < (1, 1, 3):
            wait_until(lambda: self.write(copy) == 0, JOIN_SECONDS, pause=1)
        return self.write(copy) == 0 and self.decode("count", DATA, offset, size) == size


ROLES = ("prefill", "decode")
ATTEMPTS = 5


@contextlib.contextmanager
def running_pair(release: str, folder: Path, protocol: str = "SDMA"):
    """Runs a pair that has written; both ends have registered BUFFER and OTHER."""
    install_library("memfabric", release)
    for attempt in range(ATTEMPTS):
        place = folder / str(attempt)
        place.mkdir()
        pair = EndPair(
            release, *(EndProcess(role, i, release, place) for i, role in enumerate(ROLES))
        )
        try:
            try:
                connect(pair, protocol)
            except TimeoutError:
                if release not in MAY_HANG:
                    raise
                continue
            assert pair.arrives([100, *BUFFER])
            yield pair
            return
        finally:
            pair.prefill.close()
            pair.decode.close()
    pytest.fail(f"MemFabric {release} hung in each of {ATTEMPTS} first writes")


def connect(pair: EndPair, protocol: str) -> None:
    """Starts both ends, registers their memory, and writes for the first time.

    Raises:
        TimeoutError: The write hangs.
    """
    (port,) = free_ports(1)
    url = f"tcp://{HOST}:{port}"
    ends = (pair.prefill, pair.decode)
    assert pair.prefill("create_store", url) == 0
    for end in ends:  # concurrently, because in 1.0 one end waits for the other
        end.begin("start_engine", url, HOST, protocol)
    _, found = (end.end() for end in ends)
    assert found["status"] == 0, found
    pair.ports = (found["before"], found["after"])
    # Before 1.1.3 the session id is only a name, and the name sent to the store is the valid one.
    pair.session = f"{HOST}:{found['before'] or found['after']}"
    pair.remote_address = pair.decode("where")
    pair.prefill("fill", DATA, 0, 32 * MIB)
    for end in ends:
        assert end("register", BUFFER, OTHER) == 0
    pair.early_exports = pair.prefill.exports()
    pair.prefill.begin("write", pair.session, pair.remote_address, [100, *BUFFER])
    pair.prefill.end(15)


def nightly_unless_default(release: str):
    return pytest.param(
        release, marks=[] if release == DEFAULT_MEMFABRIC else [pytest.mark.nightly]
    )


@pytest.fixture(scope="module", params=[nightly_unless_default(release) for release in RELEASES])
def pair(request, tmp_path_factory):
    with running_pair(request.param, tmp_path_factory.mktemp("memfabric")) as pair:
        yield pair


def test_session_port_depends_on_release(pair):
    before, after = pair.ports
    if pair.version < (1, 1, 3):  # a name that int() accepts
        port, pid = before.split("_")
        assert (port.isdecimal(), int(pid)) == (True, pair.decode.process.pid)
    else:
        assert before == 0 < after < 1 << 16


def test_prefill_exports_memory_on_first_write(pair):
    assert (pair.early_exports == 0) == (pair.version >= (1, 1, 3))
    assert pair.prefill.exports() > 0
    assert pair.decode.exports() > 0


def test_write_changes_only_the_buffer(pair):
    assert pair.arrives([100, *BUFFER])
    for offset in (0, BUFFER[0] + BUFFER[1]):
        assert pair.decode("count", DATA, offset, 100) == 0


@pytest.mark.parametrize("offset", [0, BUFFER[0] + BUFFER[1]], ids=["before", "behind"])
def test_rest_of_registered_page_is_writable(pair, offset):
    assert pair.write([100, offset, 16]) == 0
    assert pair.decode("count", DATA, offset, 16) == 16
    pair.decode("fill", 0, offset, 16)


def test_other_pages_are_not_writable(pair):
    """MemFabric does not log this as lost memory, after which tests would restart the servers."""
    for offset in (PAGE - 8, 2 * PAGE, -PAGE, sum(OTHER) + PAGE, 1 << 40):
        assert pair.write([100, offset, 16]) < 0
    assert pair.decode("count", DATA, PAGE, PAGE) == 0
    assert "SMEM API smem_trans_write" in pair.prefill.output.read_text()
    assert LOST_MEMORY not in pair.prefill.output.read_text()


def test_source_need_not_be_registered(pair):
    assert pair.arrives([30 * MIB, 100, 16])


def test_bad_address_fails_the_whole_batch(pair):
    pair.decode("fill", 0, *BUFFER)
    assert pair.write([100, 100, 8], [200, 2 * PAGE, 8]) < 0
    assert pair.decode("count", DATA, *BUFFER) == 0


def test_empty_copies_are_refused(pair):
    assert pair.write([100, 100, 0]) < 0
    assert pair.write() < 0


def test_registering_a_page_twice_fails_in_some_releases(pair):
    refused = (1, 1, 4) <= pair.version <= (1, 2, 1)
    offset, size = OTHER
    assert (pair.decode("register", BUFFER) != 0) == refused
    assert (pair.decode("register", [offset + 4096, size // 2]) != 0) == refused
    assert pair.arrives([offset, offset, size])


def test_copy_across_adjacent_registrations(pair):
    """Adjacent registrations stay two ranges from 1.1.3 on; in older releases they become one."""
    assert pair.decode("register", [20 * MIB, 4 * MIB], [24 * MIB, 4 * MIB]) == 0
    assert pair.arrives([20 * MIB, 20 * MIB, 4 * MIB])
    assert pair.arrives([20 * MIB, 24 * MIB, 4 * MIB])
    assert (pair.write([20 * MIB, 22 * MIB, 4 * MIB]) < 0) == (pair.version >= (1, 1, 3))


def test_unregistering_has_no_effect(pair):
    address = pair.remote_address + BUFFER[0]
    assert pair.decode("unregister_memory", address) == 0
    assert pair.arrives([100, *BUFFER])


def test_functions_missing_in_all_releases(pair):
    for name in ("send_probe", "batch_unregister_memory", "get_engine"):
        assert pair.decode("has", name) is False


def test_sessions_need_an_ip_address(pair):
    port = pair.session.partition(":")[2]
    for session in (f"localhost:{port}", f"{HOST}:9", "nobody"):
        assert pair.prefill("write", session, pair.remote_address, [100, 100, 16]) < 0


def test_engine_needs_a_store_url(pair):
    engine = pair.decode("start_engine", None, HOST)
    assert "raised" in engine or engine["status"] != 0, engine


def test_batch_of_many_copies_arrives(pair):
    copies = [[at, at, 24] for at in range(OTHER[0], OTHER[0] + 20_000 * 48, 48)]
    pair.decode("fill", 0, *OTHER)
    assert pair.write(*copies) == 0
    assert pair.decode("count", DATA, OTHER[0], 20_000 * 48) == 20_000 * 24


def test_driver_failure_fails_batch_but_next_succeeds(pair):
    """Copies before the failure stay written; the next batch is right."""
    pair.decode("fill", 0, *BUFFER)
    copies = [[at, at, 16] for at in range(1000, 1000 + 10 * 64, 64)]
    pair.prefill.fault.write_text("fail 3\n")
    assert pair.write(*copies) < 0
    assert pair.decode("count", DATA, *BUFFER) == 3 * 16
    pair.prefill.fault.unlink()
    assert pair.write(*copies) == 0
    assert pair.decode("count", DATA, *BUFFER) == 10 * 16


def run_check(before: str = "", release: str = DEFAULT_MEMFABRIC, **changed: Path) -> str:
    """Runs the MemFabric check of `scripts/setup.sh`; returns its error.

    Args:
        before: Code that runs first.
        changed: Values of the module's constants.
    """
    code = ["from pathlib import PosixPath", "from pd_harness.cpu_host import memfabric"]
    code += [f"memfabric.{name} = {value!r}" for name, value in changed.items()]
    code += [before, f"memfabric.check({release!r})"]
    command = [sys.executable, "-c", "\n".join(code)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == (1 if found.stderr else 0)
    return found.stderr


def test_default_release_passes_check():
    assert run_check() == ""


def test_unknown_memfabric_release_is_named():
    said = run_check(release="0.1")
    assert f"{MEMFABRIC_VARIABLE} is 0.1; set it to one of 1.0.8, 1.1.6, 1.2.1, 1.3.0" in said


def test_missing_driver_is_named(tmp_path):
    said = run_check(FOLDER=memfabric.FOLDER / "none")
    assert ".pd-env/memfabric/none/1.3.0 is missing; run `scripts/setup.sh --memfabric" in said


def test_driver_of_another_architecture_is_named(tmp_path):
    """Bytes 18 and 19 of an ELF file are the machine's number; 243 is RISC-V."""
    library = bytearray(memfabric.LIBRARY.read_bytes())
    library[18:20] = (243).to_bytes(2, "little")
    (tmp_path / "driver.so").write_bytes(library)
    said = run_check(LIBRARY=tmp_path / "driver.so")
    assert "the stand-in for the Ascend driver does not load" in said
    assert f"it must be built for {os.uname().machine}" in said


def test_unloadable_wheel_is_named(tmp_path):
    package = tmp_path / DEFAULT_MEMFABRIC / "memfabric_hybrid"
    package.mkdir(parents=True)
    (package / "libmf_smem.so").write_bytes(b"no library")
    load = "import ctypes, os; ctypes.CDLL(os.path.dirname(__file__) + '/libmf_smem.so')"
    (package / "__init__.py").write_text(load)
    said = run_check(CHECKOUT=tmp_path, FOLDER=tmp_path)
    assert f"MemFabric {DEFAULT_MEMFABRIC} cannot be imported" in said and "libmf_smem.so" in said


# Forbids this process to write into another, as a container's seccomp profile may do.
FORBID_PROCESS_WRITES = """
import ctypes, errno, os, struct
number = {"x86_64": 311, "aarch64": 271}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | errno.EPERM)]
steps += [(6, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter) == 0, ctypes.get_errno()
"""


def test_container_that_forbids_process_vm_writev_is_named():
    said = run_check(FORBID_PROCESS_WRITES)
    assert "process_vm_writev is refused here (EPERM, Operation not permitted)" in said
    assert "seccomp" in said and "SYS_PTRACE" in said


def test_wheel_linked_with_another_checkouts_driver_is_set_up_again(tmp_path, monkeypatch):
    """A folder copied from another checkout names that checkout's driver."""
    import setup_memfabric

    folder, installed = tmp_path / DEFAULT_MEMFABRIC, []

    def install(python, *words) -> None:
        folder.mkdir(exist_ok=True)
        installed.extend(word for word in words if word == folder)

    monkeypatch.setattr(setup_memfabric, "FOLDER", tmp_path)
    monkeypatch.setattr(setup_memfabric, "TOOLS", tmp_path)
    monkeypatch.setattr(setup_memfabric, "uv_install", install)
    monkeypatch.setattr(setup_memfabric, "unsupported_reason", lambda version: "")
    for checkout, times in (("original", 1), ("original", 1), ("copy", 2)):
        monkeypatch.setattr(setup_memfabric, "LIBRARY", tmp_path / checkout / "lib64" / "hal.so")
        setup_memfabric.wheel("MemFabric", DEFAULT_MEMFABRIC)
        assert len(installed) == times


@pytest.mark.nightly
def test_missing_compiler_is_installed_from_wheel(tmp_path):
    """The wheel has 100 MB and is fetched once."""
    for tool in ("bash", "dirname", "awk", "env", "python3.11"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    import setup_memfabric

    built = tmp_path / "driver.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        cc = setup_memfabric.compiler()
    assert "ziglang" in cc
    sources = sorted(setup_memfabric.SOURCE.glob("*.c"))
    command = [*cc, *setup_memfabric.SHARED, "-o", built, *sources, "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True)
    assert run_check(LIBRARY=built) == ""


@pytest.mark.parametrize("release", [nightly_unless_default(release) for release in RELEASES])
def test_peer_death_during_batch_fails_the_call(release, tmp_path):
    """The call returns an error, and so does the next one."""
    copies = [[at, at, 16] for at in range(1000, 1000 + 200 * 64, 64)]
    with running_pair(release, tmp_path) as pair:
        pair.prefill.fault.write_text("slow 10000\n")
        pair.prefill.begin("write", pair.session, pair.remote_address, *copies)
        time.sleep(1)
        os.kill(pair.decode.process.pid, signal.SIGKILL)
        assert pair.prefill.end() < 0
        assert 0.9 < pair.prefill.seconds < 5
        assert pair.write([100, 100, 16]) < 0
        assert pair.prefill.seconds < 5


# With DEVICE_RDMA, 1.1.6 registers NPU memory only.
RDMA_RELEASES = [nightly_unless_default(release) for release in RELEASES if release != "1.1.6"]
SEND_QUEUE = 1024
FITS = SEND_QUEUE - 3  # two entries stay empty, and one is for the notification


@pytest.fixture(scope="module", params=RDMA_RELEASES)
def rdma(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PD_DRIVER_SEND_QUEUE", str(SEND_QUEUE))
        folder = tmp_path_factory.mktemp("rdma")
        with running_pair(request.param, folder, "DEVICE_RDMA") as pair:
            yield pair


def blocks(count: int) -> list[list[int]]:
    """Returns `count` copies that MemFabric cannot merge."""
    return [[at, at, 16] for at in range(OTHER[0], OTHER[0] + count * 64, 64)]


def test_rdma_writes_through_the_nic(rdma):
    assert rdma.arrives([100, *BUFFER])
    assert " write " in rdma.prefill.log.read_text()
    assert " copy " not in rdma.prefill.log.read_text().partition(" write ")[2]


def test_rdma_requires_registered_sources(rdma):
    """1.0 copies unregistered sources through its own buffer; later ones have none by default."""
    taken = rdma.write([30 * MIB, 100, 16]) == 0
    assert taken == (rdma.version < (1, 1, 3))


def test_rdma_batch_is_limited_by_send_queue(rdma):
    """MemFabric writes the part of a longer batch that fits, and the call fails."""
    rdma.decode("fill", 0, *OTHER)
    assert rdma.write(*blocks(FITS)) == 0
    assert rdma.decode("count", DATA, *OTHER) == FITS * 16
    rdma.decode("fill", 0, *OTHER)
    assert rdma.write(*blocks(4 * FITS)) < 0
    assert rdma.decode("count", DATA, *OTHER) == (SEND_QUEUE - 2) * 16
    assert rdma.write(*blocks(1)) < 0  # the queue is still full
    time.sleep(1.5)
    assert rdma.write(*blocks(FITS)) == 0


def test_rdma_does_not_recover_from_failed_copy(rdma):
    """Must be this pair's last test, because its session accepts no further writes."""
    rdma.decode("fill", 0, *OTHER)
    rdma.prefill.fault.write_text("fail 3\n")
    assert rdma.write(*blocks(10)) < 0
    assert rdma.decode("count", DATA, *OTHER) == 3 * 16
    rdma.prefill.fault.unlink()
    time.sleep(1.5)
    assert rdma.write(*blocks(10)) < 0
    assert rdma.decode("count", DATA, *OTHER) == 3 * 16
