"""Modules of the patch set between `kv_layout` and the engine's modules that it patches.

In all releases, the same in each:

    back_off             pauses transfers to decode ranks that keep failing (Mooncake, Ascend)
    copy_batches         hands copies to synchronous transfer engines (Mooncake, Ascend)
    device_rdma          keeps calls within the queue of MemFabric's device_rdma (Ascend A2)
    early_connections    connects to decode ranks when they register (NIXL)
    environment          reads numbers from environment variables
    file_guard           compares the engine's files with what was applied
    interleaving         interleaves KV heads that decode has received packed
    memory_registration  names buffers, and registers them with a transfer engine
    packed_mode          reads whether to pack KV heads, and in how much memory
    packing              packs the KV heads of one decode rank on prefill
    page_digests         computes digests of pages where they lie
    peer_plans           makes the plan for a decode rank that registers
    peer_queue           queues chunks so that a blocked decode server delays no other
    peer_silence         fails requests of decode ranks that do not answer
    peer_sockets         sends messages without waiting, and watches connections
    per_instance         makes a manager's attribute when it is first used
    pool_views           views buffers as tensors of bytes
    refused_requests     notifies decode of requests that prefill refused
    session_ids          parses session ids of Mooncake and MemFabric
    side_stream          computes on an accelerator beside the forward passes
    threads              starts threads, or logs that none can start
    verify               compares what decode received with what prefill has
    verify_mode          reads whether to verify
    verify_reports       gathers the results of verify at prefill's bootstrap server
    write_bounds         keeps unplanned writes within registered memory

In all releases, not the same in all:

    local_layout         describes this rank's buffers
    message_checks       drops messages that cannot be read
    peers                keeps plans for registered decode ranks, and checks their requests
    prefill_servers      queries bootstrap servers, and notices prefill servers that are lost
    receiver             one request on decode
    room_failures        keeps why rooms failed, and notifies the decode ranks that wait for them
    verify_exchange      sends digests to decode, and keeps there those that arrive

In 0.5.9 only:

    layer_pointers       pairs pointers of the same layers for the engine's own methods
    nixl_transfers       writes, reports failed rooms, and reconnects after a lost connection (NIXL)
    packed_sends         threads that pack and write chunks (NIXL)
    rank_consensus       makes ranks of one server change a request's state together
    sender               one request on prefill

From 0.5.18 on:

    compatibility        checks sizes of prefill servers, and aborts on them what decode refuses
    forward_events       waits for the forward pass that writes a chunk's pages
    host_memory          names the memory kind of pools on the host (NIXL)
    mooncake_sends       registers memory, and writes by plan (Mooncake, Ascend)
    nixl_sends           registers decode ranks, and writes by plan (NIXL)
    prefill_manager      overrides of the engine's managers on prefill, the same for all backends
    rank_manager         overrides of the engine's managers on both sides
    rank_routes          adds to a rank's address what the patch set supports there
    state_slices         slices recurrent state between TP sizes
    unit_exchange        tells decode which chunks to interleave, before their request succeeds

In 0.5.18 only:

    held_pages           keeps a failed request's pages on decode until prefill writes no more
    room_conclusions     ends rooms on prefill, and acknowledges decode's aborts
    status_messages      tells decode how a room ended on prefill
    watched_agent        notes what workers do with NIXL's agent, and reads its notifications

No module imports a backend. Classes are bases that the patched modules put before the engine's own;
their docstrings name what they need from a backend.
"""
