/* Driver functions, all of which MemFabric's releases 1.0.8 to 1.3.0 must find. */

/* HCCL */
SUCCEEDS(HcclCommDestroy) SUCCEEDS(HcclCommInitClusterInfoMemConfig)
SUCCEEDS(HcomUrmaDestroyEndpoint) SUCCEEDS(HcommBatchModeEnd) SUCCEEDS(HcommBatchModeStart)
SUCCEEDS(HcommBatchTransferOnThread) SUCCEEDS(HcommChannelCreate) SUCCEEDS(HcommChannelDestroy)
SUCCEEDS(HcommChannelFence) SUCCEEDS(HcommChannelFenceOnThread) SUCCEEDS(HcommChannelGetStatus)
SUCCEEDS(HcommChannelUpdateMemInfo) SUCCEEDS(HcommEndpointCreate) SUCCEEDS(HcommEndpointDestroy)
SUCCEEDS(HcommEndpointGetListenPort) SUCCEEDS(HcommMemExport) SUCCEEDS(HcommMemGetAllMemHandles)
SUCCEEDS(HcommMemImport) SUCCEEDS(HcommMemReg) SUCCEEDS(HcommMemUnimport) SUCCEEDS(HcommMemUnreg)
SUCCEEDS(HcommReadNbi) SUCCEEDS(HcommReadNbiOnThread) SUCCEEDS(HcommReadOnThread)
SUCCEEDS(HcommThreadAlloc) SUCCEEDS(HcommThreadFree) SUCCEEDS(HcommWriteNbi)
SUCCEEDS(HcommWriteNbiOnThread) SUCCEEDS(HcommWriteOnThread)

/* HCCP */
SUCCEEDS(RaAiQpCreate) SUCCEEDS(RaDeregisterMr) SUCCEEDS(RaGetIfaddrs) SUCCEEDS(RaGetIfnum)
SUCCEEDS(RaGetNotifyBaseAddr) SUCCEEDS(RaGetNotifyMrInfo) SUCCEEDS(RaGetQpStatus)
SUCCEEDS(RaGetSockets) SUCCEEDS(RaInit) SUCCEEDS(RaQpConnectAsync) SUCCEEDS(RaQpCreate)
SUCCEEDS(RaQpCreateWithAttrs) SUCCEEDS(RaQpDestroy) SUCCEEDS(RaRdevGetHandle) SUCCEEDS(RaRdevInit)
SUCCEEDS(RaRdevInitV2) SUCCEEDS(RaRegisterMr) SUCCEEDS(RaSendWr) SUCCEEDS(RaSendWrV2)
SUCCEEDS(RaSetQpAttrQos) SUCCEEDS(RaSocketBatchClose) SUCCEEDS(RaSocketBatchConnect)
SUCCEEDS(RaSocketDeinit) SUCCEEDS(RaSocketInit) SUCCEEDS(RaSocketListenStart)
SUCCEEDS(RaSocketListenStop) SUCCEEDS(RaSocketWhiteListAdd) SUCCEEDS(RaSocketWhiteListDel)
SUCCEEDS(TsdOpen) SUCCEEDS(ra_ai_qp_create) SUCCEEDS(ra_get_interface_version) SUCCEEDS(ra_init)
SUCCEEDS(ra_mr_dereg) SUCCEEDS(ra_mr_reg) SUCCEEDS(ra_poll_cq) SUCCEEDS(ra_send_wr)
SUCCEEDS(ra_set_qp_attr_qos) SUCCEEDS(ra_socket_batch_abort) SUCCEEDS(ra_socket_deinit)
SUCCEEDS(ra_socket_recv) SUCCEEDS(ra_socket_send) SUCCEEDS(ra_socket_white_list_add)
SUCCEEDS(ra_socket_white_list_del)

/* ACL */
SUCCEEDS(aclCreateTensor) SUCCEEDS(aclDestroyTensor) SUCCEEDS(aclnnShmemSdmaStarsQuery)
SUCCEEDS(aclnnShmemSdmaStarsQueryGetWorkspaceSize) SUCCEEDS(aclrtBinaryGetFunction)
SUCCEEDS(aclrtBinaryLoadFromFile) SUCCEEDS(aclrtCreateNotify) SUCCEEDS(aclrtDestroyNotify)
SUCCEEDS(aclrtDestroyStream) SUCCEEDS(aclrtDeviceEnablePeerAccess) SUCCEEDS(aclrtGetNotifyId)
SUCCEEDS(aclrtKernelArgsAppend) SUCCEEDS(aclrtKernelArgsFinalize) SUCCEEDS(aclrtKernelArgsInit)
SUCCEEDS(aclrtLaunchKernelWithConfig) SUCCEEDS(aclrtMemcpy2d) SUCCEEDS(aclrtMemcpy2dAsync)
SUCCEEDS(aclrtSetDevice) SUCCEEDS(aclrtSetStreamAttribute) SUCCEEDS(aclrtStreamAbort)
SUCCEEDS(aclrtStreamGetId) SUCCEEDS(aclrtSynchronizeStream) SUCCEEDS(aclrtWaitAndResetNotify)

/* DCMI */
SUCCEEDS(dcmiv2_get_affinity_cpu_info_by_dev_id) SUCCEEDS(dcmiv2_get_device_pcie_info)
SUCCEEDS(dcmiv2_get_eid_list_by_urma_dev_index) SUCCEEDS(dcmiv2_get_urma_device_cnt)
SUCCEEDS(dcmiv2_init)

/* the driver */
SUCCEEDS(devmm_alloc_rbtree_node) SUCCEEDS(devmm_assign_rbtree_node_data)
SUCCEEDS(devmm_free_rbtree_node) SUCCEEDS(devmm_get_heap_list_by_type)
SUCCEEDS(devmm_ioctl_enable_heap) SUCCEEDS(devmm_ioctl_free_pages)
SUCCEEDS(devmm_rbtree_erase_idle_size_tree) SUCCEEDS(devmm_rbtree_erase_idle_va_tree)
SUCCEEDS(devmm_rbtree_get_alloced_node_in_range) SUCCEEDS(devmm_rbtree_get_idle_va_node_in_range)
SUCCEEDS(devmm_rbtree_insert_alloced_tree) SUCCEEDS(devmm_rbtree_insert_idle_size_tree)
SUCCEEDS(devmm_rbtree_insert_idle_va_tree) SUCCEEDS(devmm_va_to_heap) SUCCEEDS(devmm_va_to_heap_idx)
SUCCEEDS(devmm_virt_alloc_mem_from_base) SUCCEEDS(devmm_virt_destroy_heap)
SUCCEEDS(devmm_virt_get_heap_from_queue) SUCCEEDS(devmm_virt_get_heap_mgmt)
SUCCEEDS(devmm_virt_normal_heap_update_info) SUCCEEDS(devmm_virt_set_heap_idle)
SUCCEEDS(halHostUnregisterEx) SUCCEEDS(halMemCreate) SUCCEEDS(halMemGetAllocationGranularity)
SUCCEEDS(halMemRelease) SUCCEEDS(halMemSetAccess) SUCCEEDS(halMemShareHandleSetAttribute)
SUCCEEDS(halResourceConfig) SUCCEEDS(halResourceIdFree) SUCCEEDS(halSqCqFree)
SUCCEEDS(svm_module_alloced_size_inc)

/* the runtime */
SUCCEEDS(rtDisableP2P) SUCCEEDS(rtEnableP2P) SUCCEEDS(rtGetDevResAddress)
SUCCEEDS(rtIpcDestroyMemoryName) SUCCEEDS(rtSetIpcMemorySuperPodPid) SUCCEEDS(rtStreamGetCqid)
SUCCEEDS(rtStreamGetSqid)
