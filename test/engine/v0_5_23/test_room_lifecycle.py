"""A room on a prefill rank, for events in any order: its notifications and its table entries."""

import gc

import fake_managers
import pytest
from fake_managers import BACKENDS, DECODE, SENDERS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
RANKS = (0, 1)
ranks = st.sampled_from(RANKS)


class Room(RuleBasedStateMachine):
    """One room, a prefill rank and two decode ranks, which may use the room again.

    Attributes:
        sender: The sender of prefill's request; None without a request.
        has_failed: Whether the request has failed, and the scheduler has not seen that yet.
        waiting: Decode ranks that sent metadata and have not been notified of the result.
        known: Decode ranks that were notified of the result, or aborted. They use the room again
            once prefill is done with it, too.
    """

    backend = ""

    @initialize()
    def start(self):
        self.prefill = fake_managers.make_manager(self.backend, fake_managers.mla_layout())
        self.decode = []
        for number in RANKS:
            rank = fake_managers.make_manager(self.backend, fake_managers.mla_layout(), DECODE)
            rank.rank_port += number
            if self.backend == "nixl":
                rank.agent.name += str(number)
            else:
                rank.engine.session += str(number)
            self.decode.append(rank)
        self.ports = [str(rank.rank_port) for rank in self.decode]
        self.sender, self.has_failed = None, False
        self.waiting: set[int] = set()
        self.known: set[int] = set()

    # Prefill

    @precondition(lambda self: self.sender is None)
    @rule()
    def request_arrives(self):
        self.sender = SENDERS[self.backend](self.prefill, "127.0.0.1:8998", ROOM)
        # A decode rank may have aborted the room before.
        self.has_failed = self.prefill.request_status[ROOM] == KVPoll.Failed

    @precondition(lambda self: self.sender is not None and not self.has_failed)
    @rule()
    def client_disconnects(self):
        self.sender.abort()
        self.close_failed_room()

    @precondition(lambda self: self.sender is not None and not self.has_failed)
    @rule()
    def transfer_fails(self):
        self.prefill.conclude_failure(bootstrap_room=ROOM, failure_reason="a write failed")
        self.has_failed = True
        self.read_notifications()

    @precondition(lambda self: self.sender is not None and self.has_failed)
    @rule()
    def scheduler_polls(self):
        self.close_failed_room()

    @precondition(lambda self: self.sender is not None and self.has_failed)
    @rule()
    def sender_is_collected(self):
        """The scheduler drops a request without clearing it."""
        self.sender = None
        gc.collect()
        self.prefill.drop_collected_rooms()
        self.has_failed = False
        self.read_notifications()
        assert not self.waiting
        self.known.clear()

    @precondition(
        lambda self: (
            self.sender is not None
            and not self.has_failed
            and self.prefill.request_status[ROOM] == KVPoll.WaitingForInput
        )
    )
    @rule()
    def transfer_succeeds(self):
        self.prefill.conclude_transfer(bootstrap_room=ROOM, status=KVPoll.Success)
        assert self.sender.poll() == KVPoll.Success
        self.sender.clear()
        self.sender = None
        self.read_notifications(KVPoll.Success)
        assert not self.waiting
        self.known.clear()

    # Decode

    @precondition(lambda self: len(self.waiting) < len(RANKS))
    @rule(number=ranks)
    def metadata_arrives(self, number):
        if number in self.waiting or number in self.known:
            return
        self.waiting.add(number)
        message = fake_managers.metadata_message(
            self.decode[number], ROOM, range(4), required_dst_info_num=len(RANKS)
        )
        fake_managers.process_messages(self.prefill, message)
        self.read_notifications()

    @precondition(lambda self: self.waiting)
    @rule(number=ranks)
    def decode_aborts(self, number):
        if number not in self.waiting:
            return
        self.waiting.discard(number)
        self.known.add(number)
        port = self.ports[number].encode("ascii")
        fake_managers.process_messages(
            self.prefill, [common.ABORT_TAG, b"%d" % ROOM, b"127.0.0.1", port]
        )
        self.has_failed = self.sender is not None
        self.read_notifications()

    # Invariants

    def close_failed_room(self):
        """Lets the scheduler see the failure; then no decode rank may wait for the request."""
        assert self.sender.poll() == KVPoll.Failed
        with pytest.raises(common.KVTransferError):
            self.sender.failure_exception()
        self.sender, self.has_failed = None, False
        self.read_notifications()
        assert not self.waiting, "a decode rank waits for a request that has failed"
        self.known.clear()

    def read_notifications(self, expected: KVPoll = KVPoll.Failed):
        """Checks that each notification goes to a waiting decode rank, once."""
        ports = [endpoint.rsplit(":", 1)[1] for endpoint, _ in self.prefill.notified]
        statuses = fake_managers.sent_statuses(self.prefill)
        self.prefill.notified.clear()
        for port, (room, status, _) in zip(ports, statuses):
            number = self.ports.index(port)
            assert (room, status) == (ROOM, expected)
            assert number in self.waiting, "this decode rank has no request, or a new one"
            self.waiting.discard(number)
            self.known.add(number)

    @invariant()
    def no_metadata_is_lost(self):
        if getattr(self, "sender", None) is None or self.has_failed:
            return
        state = self.prefill.request_status[ROOM]
        all_asked = self.waiting == set(RANKS)
        assert state == (KVPoll.WaitingForInput if all_asked else KVPoll.Bootstrapping)

    @invariant()
    def only_this_room_is_kept(self):
        if not hasattr(self, "prefill"):
            return
        for table in (self.prefill.request_status, self.prefill.transfer_infos):
            assert set(table) <= {ROOM}

    def teardown(self):
        if not hasattr(self, "prefill"):
            return
        if self.sender is not None:
            if not self.has_failed:
                self.sender.abort()
            self.close_failed_room()
        for number in list(self.waiting):
            self.decode_aborts(number)
        kept = set(self.prefill.request_status) | set(self.prefill.transfer_infos)
        assert kept <= set(self.prefill.failures.rooms_without_sender), (
            "nothing bounds what is kept"
        )
        assert not self.prefill.failures.senders


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("examples", [50, pytest.param(200, marks=pytest.mark.nightly)])
def test_room_survives_events_in_any_order(backend, examples):
    machine = type("Room", (Room,), {"backend": backend})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None)
    )
