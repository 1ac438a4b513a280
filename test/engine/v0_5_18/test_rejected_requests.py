"""Prefill answers a request that is too long, and notifies decode; stock queues a token of it."""

from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.disaggregation import prefill
from sglang.srt.managers.schedule_batch import FINISH_ABORT

pytestmark = pytest.mark.engine


def queue_and_request(end):
    queue = object.__new__(prefill.PrefillBootstrapQueue)
    queue.__dict__.update(queue=[], scheduler=mock.Mock(), kv_manager=mock.Mock())
    queue.create_sender = lambda req, heads: True
    req = SimpleNamespace(
        rid="1",
        to_finish=end,
        finished_reason=None,
        disagg_kv_sender=None,
        bootstrap_room=7,
        return_logprob=False,
        session=mock.Mock(),
    )
    return queue, req


def test_rejected_request_is_answered():
    queue, req = queue_and_request(FINISH_ABORT("too long", 400))
    queue.add(req, 1)
    assert queue.queue == []
    assert (req.finished_reason.message, req.finished_reason.status_code) == ("too long", 400)
    queue.scheduler.output_streamer.stream_output.assert_called_once_with([req], False)
    req.session.abort_req.assert_called_once_with()
    queue.kv_manager.refuse.assert_called_once_with(7, "Prefill refused the request: too long")


def test_stock_queues_it():
    queue, req = queue_and_request(FINISH_ABORT("too long", 400))
    prefill.EnginePrefillBootstrapQueue.add(queue, req, 1)
    assert queue.queue == [req]


def test_others_are_queued():
    queue, req = queue_and_request(None)
    queue.add(req, 1)
    retracted, sent = queue_and_request(FINISH_ABORT("aborted", 500))
    sent.disagg_kv_sender = mock.Mock()
    retracted.add(sent, 1)
    assert (queue.queue, retracted.queue) == ([req], [sent])
    queue.scheduler.output_streamer.stream_output.assert_not_called()
