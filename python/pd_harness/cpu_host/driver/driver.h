/* Shared by the parts of the stand-in driver: driver.c is the device, nic.c its network card. */
#include <stddef.h>
#include <stdint.h>

#define FAILED 507899 /* the runtime's "driver error" */

/* Writes a call and its arguments to PD_DRIVER_LOG. */
void log_call(const char *call, uint64_t a, uint64_t b, uint64_t c);

/* Whether PD_DRIVER_FAULT lets this copy between processes succeed; a slow fault delays it. */
int is_copy_allowed(void);

/* Copies from or to a process's memory; also this process's, since an address may be unmapped. */
int copy_process_memory(int pid, void *here, uintptr_t there, size_t size, int is_write);

/* Runs a stream's task if it is the card's: ringing a doorbell, waiting for a notify. */
int nic_task(const uint32_t *task);
