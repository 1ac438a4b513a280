"""Prototype of the proposed changes, set on the patched classes (never for the repository)."""
import contextlib, threading, sys, os
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.common import conn as C
from sglang.srt.disaggregation.mooncake import conn as M
from sglang.srt.disaggregation.nixl import conn as N
from sglang.srt.disaggregation.ascend import conn as A
from sglang.srt.disaggregation import prefill as P, decode as D, utils as U
from sglang.srt.disaggregation.pd import prefill_manager as PM, room_failures as RF, write_bounds as W, peer_queue as Q, local_layout as L
from sglang.srt.disaggregation.common.utils import FastQueue

def default(cls, name, make):
    d = PerInstance(make); d.__set_name__(cls, name); setattr(cls, name, d)
# 1 class defaults
for name in ("decode_kv_args_table", "transfer_infos", "request_status", "failure_records"):
    default(C.CommonKVManager, name, dict)
default(C.CommonKVManager, "failure_lock", threading.Lock)
default(C.CommonKVManager, "_deferred_ack_poisoned_rooms", set)
C.CommonKVManager.disaggregation_mode = None
# 2 failed_sessions
def conclude(self, *, bootstrap_room, status, **more):
    if status == KVPoll.Success:
        s = getattr(self, "failed_sessions", None)
        if isinstance(s, M.FailedSessions): s.reset(self.transfer_infos.get(bootstrap_room, ()))
    return super(M.MooncakeKVManager, self).conclude_transfer(bootstrap_room=bootstrap_room, status=status, **more)
M.MooncakeKVManager.conclude_transfer = conclude
# 3 unregistered peers are left to the worker
def refusal(self, room, index_slice):
    if self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed: return ""
    silent = self.silence_reason(room)
    if silent: return silent
    for peer, info in list(self.transfer_infos.get(room, {}).items()):
        known = self.decode_kv_args_table.get(peer)
        if known is None or not hasattr(known, "refusal") or info.is_dummy: continue
        why = PM.chunk_refusal(room, peer, known, index_slice, len(info.dst_kv_indices))
        if why: return why
    return ""
PM.PrefillManager._refusal_reason = refusal
# 4 queues that are not the engine's stay
def set_queues(self, made):
    if any(not isinstance(q, FastQueue) for q in made):
        self._queues = list(made); return
    q = lambda: Q.PeerQueue(self._note_queued, self._note_taken)
    self._queues = [q() for _ in made] if (self.enable_staging or not made) else [q()] * len(made)
Q.PeerQueues.transfer_queues = property(lambda self: self._queues, set_queues)
# 5 who to notify is asked only if anyone may be notified
def fail_room(self, room, reason, notified):
    self.failures.record_failed_room(room, reason, notified)
    if self.is_release_safe(room):
        targets = self.failures.take_unnotified(room, self._room_notify_targets(room))
        self._send_failed_status(room, targets, reason)
PM.PrefillManager.fail_room = fail_room
# 6
N.NixlKVManager._is_listening = staticmethod(lambda info: info is not None and (not hasattr(info, "endpoint") or N.PeerSocket.to(info.endpoint, info.dst_port).is_listening()))
# 9
def prefetch(self, room):
    if self.request_status.get(room) not in (KVPoll.Failed, KVPoll.Bootstrapping):
        super(PM.PrefillManager, self)._prefetch_staging_reqs(room)
PM.PrefillManager._prefetch_staging_reqs = prefetch
# 10
old = L.set_local_layout
def set_local_layout(kv_args, *a):
    try: return old(kv_args, *a)
    except AttributeError: kv_args.layout, kv_args.memory = None, "VRAM"
U.set_local_layout = set_local_layout
# 11
def blocks(src_dim, dst_dim, src_attn_tp_size, dst_attn_tp_size, dst_tp_rank_in_group, local_tp_rank_in_group, conv_shard_groups=None, _old=U.compute_mamba_state_slice_blocks):
    return _old(src_dim=src_dim, dst_dim=dst_dim, src_attn_tp_size=src_attn_tp_size, dst_attn_tp_size=dst_attn_tp_size, dst_tp_rank_in_group=dst_tp_rank_in_group, local_tp_rank_in_group=local_tp_rank_in_group, conv_shard_groups=conv_shard_groups)
for m in (U, M, N): m.compute_mamba_state_slice_blocks = blocks
# 12
def add(self, req, num_kv_heads):
    P.EnginePrefillBootstrapQueue.add(self, req, num_kv_heads)
    P.notify_refused(getattr(self, "kv_manager", None), req)
P.PrefillBootstrapQueue.add = add
def rank(self, req):
    if D._bootstrap_addr(req) in getattr(self.kv_manager, "pending_queries", ()): return None
    return D.EngineDecodePreallocQueue._resolve_prefill_dp_rank(self, req)
D.DecodePreallocQueue._resolve_prefill_dp_rank = rank
# 13
def update_status(self, bootstrap_room, status):
    with vars(self).setdefault("status_lock", threading.RLock()):
        if status != KVPoll.Failed:
            return C.EngineCommonKVManager.update_status(self, bootstrap_room, status)
        if bootstrap_room not in self.request_status: return
        self.request_status[bootstrap_room] = status
    if self.deferred_bootstrap is not None:
        self._notify_bootstrap(bootstrap_room, self.deferred_bootstrap.fail(bootstrap_room))
C.CommonKVManager.update_status = update_status
# 14
def timeout(self):
    status = C.EngineCommonKVSender._check_bootstrap_timeout(self)
    if status is not None and isinstance(self, RF.NotifyingSender): self._notify_failed()
    return status
def abort(self):
    if getattr(self, "is_cleared", False): return
    C.EngineCommonKVSender.abort(self)
    if not isinstance(self, RF.NotifyingSender): return
    self._notify_failed()
    if self._notifies_decode():
        self.clear(); self._drop_reason()
C.CommonKVSender._check_bootstrap_timeout, C.CommonKVSender.abort = timeout, abort
# 15
def check_bounds(self, session, src, dst):
    peer = getattr(self, "decode_kv_args_table", {}).get(session)
    if peer is None: return
    theirs = peer.bounds
    why = self.own_bounds.outside_error(*src)
    if not why and theirs is not None: why = theirs.outside_error(*dst)
    if why: raise RuntimeError(f"{why}; nothing of this transfer is written")
W.BoundedWrites.check_bounds = check_bounds
def transfer(self, mooncake_session_id, transfer_blocks):
    blocks = [b for b in transfer_blocks if b[2]]
    if not blocks: return 0
    src, dst, sizes = (list(c) for c in zip(*blocks))
    check_bounds(self, mooncake_session_id, (src, sizes), (dst, sizes))
    return self.engine.batch_transfer_sync(mooncake_session_id, src, dst, sizes)
W.BoundedWrites._transfer_data = transfer
def check_lists(self, req, own):
    known = self.decode_kv_args_table.get(req.mooncake_session_id)
    for kind, ours, ptrs, theirs in M.zip_longest(self.kv_args.state_types, own, known.dst_state_data_ptrs if known else own, req.dst_state_indices):
        if kind not in M.STATE_WITHOUT_PAGES and ours is not None and ptrs:
            M.check_state_pages(kind, ours, theirs or ())
M.MooncakeKVManager._check_state_lists = check_lists
oldpages = M.MooncakeKVManager._check_pages
M.MooncakeKVManager._check_pages = lambda self, session, *a: oldpages(self, session, *a) if session in self.decode_kv_args_table else None
# 16 each handle is asked once when it is done
import time
def await_handles(self, handles, *, failure_seen):
    left = list(handles)
    while left and not failure_seen:
        try:
            states = [(h, self.agent.check_xfer_state(h)) for h in left]
        except Exception:
            break
        if any(s == "ERR" for _, s in states): break
        left = [h for h, s in states if s != "DONE"]
        if not left: break
        failure_seen = not self.worker_state.peers.isdisjoint(self.silent_peers)
        time.sleep(0)
    return super(N.NixlKVManager, self)._await_handles(left, failure_seen=failure_seen)
N.NixlKVManager._await_handles = await_handles
# 17 digests are looked up first
from sglang.srt.disaggregation.pd import verify_exchange as V
def vclear(self):
    super(V.VerifyingReceiver, self).clear()
    if self.bootstrap_room in self.kv_mgr.arrived_digests and self.bootstrap_room not in self.kv_mgr.request_status:
        self.kv_mgr.arrived_digests.pop(self.bootstrap_room, None)
V.VerifyingReceiver.clear = vclear
