/* The stand-in for NVIDIA's management library, a shared object as the real one: how a test steers it. The functions
 * are found with dlsym in the same object. */
#ifndef CUDASIM_NVML_H
#define CUDASIM_NVML_H

#define CUDASIM_NVML_BUS_ID "0000:10:00.0" /* it knows the GPUs of this domain, and tells the same of each */

/* Value of a field (NVML_FI_...), or of a function by its name ("nvmlDeviceGetPowerUsage"; the percent of memory is
 * "memory", bytes are "used", "total"). */
typedef void nvml_sim_set_field(unsigned int field, unsigned long long value);
typedef void nvml_sim_set(const char *name, unsigned long long value);
/* Every call of it returns `code` from now on; 0: no more. "field:82" is one field. */
typedef void nvml_sim_fail(const char *function, int code);
/* The next wait for events gets this error number. */
typedef void nvml_sim_xid(unsigned int number);
/* Calls of it wait until this is called again with NULL. */
typedef void nvml_sim_hang(const char *function);
/* How many calls are waiting now. */
typedef int nvml_sim_hung(void);

/* The same from outside: lines that are appended to the file named by CUDASIM_NVML are obeyed at the next call: "xid
 * 79", "field 82 71", "set nvmlDeviceGetPowerUsage 650000", "fail nvmlDeviceGetFieldValues 15", "hang
 * nvmlDeviceGetTemperature". */

#endif
