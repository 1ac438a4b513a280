/* What the parts of the made-up driver share: driver.c is the device, nic.c its network card. */
#include <stddef.h>
#include <stdint.h>

#define FAILED 507899 /* the runtime's "driver error" */

/* Writes a call to PD_DRIVER_LOG. */
void note(const char *call, uint64_t a, uint64_t b, uint64_t c);

/* Whether the fault that a test has asked for lets this copy between processes happen. */
int is_carried(void);

/* From or to a process's memory; its own, too, for an address may be no memory any more. */
int move(int pid, void *here, uintptr_t there, size_t size, int is_write);

/* Does a task of a stream if it is the card's: the ring of a doorbell, the wait for a notify. */
int nic_task(const uint32_t *task);
