"""`sglang-pd doctor`: what of a host, an image or running servers keeps PD from working, and why.

findings    what a check says
host        what the checks look at; tests give another
engine      the engine, its release, the patches
packages    torch, torch_npu, CANN, and the transport's library
memfabric   its releases, and the engines that serve over them
system      limits, shared memory, RDMA devices, NPUs
ports       those that a server opens, and those that it must reach
variables   of the environment
ascend      those of MemFabric
network     those of addresses, devices and proxies
servers     running ones, alone and two by two
examine     all of them
show        as a table, or as JSON
"""
