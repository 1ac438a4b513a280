"""What is the same for every engine release and every backend, between `kv_layout` and the seams.

    describe           what this rank's registered buffers hold
    registration       decode ranks that register: their plan, or why they are refused
    pairs              pointers of the same layers, as the engine asks for them
    rooms              the state of each request, why it failed, who knows
    sender, receiver   one request on prefill and on decode
    prefill_servers    decode asks bootstrap servers, and notes which prefill servers are lost
    agreement          ranks of one server change a request's state together
    messages           sockets, and threads that read them
    session_ids        of Mooncake and MemFabric
    memory             buffers by name, and their registration with a transfer engine
    verify             decode compares what arrived with what prefill has, where that is asked for
    page_digests       digests of pages, computed where they lie
    verify_reports     what was compared, gathered at prefill's bootstrap server

For NIXL:

    writes             transfers of its agent, and connections that are lost
    notifications      what they say, on both sides

For Mooncake and Ascend:

    queued             chunks in queues, written by synchronous calls
    status_messages    how prefill ranks say that a room has ended
    back_off           decode ranks to which transfers fail again and again
    device_rdma        what MemFabric's queue bears on Ascend A2

No backend is imported here. Classes are bases that the seams put before the engine's own; what they
need of a backend is named in their docstrings.
"""
