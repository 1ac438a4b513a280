"""`sglang-pd doctor`: what keeps PD from working on a host, in an image or between servers.

findings     the result of a check
host         the host under check, and the launch options; tests substitute a host
engine       the engine, its release, the patches
packages     torch, torch_npu, CANN, and the transport's library
memfabric    MemFabric's releases, and the engines that serve over them
system       limits, shared memory, RDMA devices, NPUs
ports        ports that a server opens, and ports that it must reach
environment  environment variables
ascend       variables of MemFabric
network      variables for addresses, network devices and proxies
servers      running servers, alone and in pairs
run_checks   all checks
show         output as a table, or as JSON
"""
