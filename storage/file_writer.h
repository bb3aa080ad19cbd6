/* Writes the blocks of one file one after the other, past the page cache (O_DIRECT), on a thread of its own: the caller
 * makes the next block ready meanwhile, and the disk never waits for a core.
 *
 * Internal to storage/file.c. One caller; blocks belong to it and must stay until drained. */
#ifndef MU_STORAGE_FILE_WRITER_H
#define MU_STORAGE_FILE_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum { MU_FILE_PAGE_BYTES = 4096 };

struct mu_file_writer;

/* NULL where the file system has no direct output (tmpfs, some network file systems) or no thread can be had: then the
 * caller writes by itself. `label` names the file in errors; both outlive the writer. */
struct mu_file_writer *mu_file_writer_new(int fd, const char *label);
/* Data and offset at page boundaries, a whole number of pages. Returns as soon as it is one of two under way; tells
 * what went wrong with earlier ones. */
enum mu_status mu_file_writer_put(struct mu_file_writer *writer, const void *data, size_t data_bytes, uint64_t offset,
                                  struct mu_error *err) MU_WARN_UNUSED;
/* Until all is written. */
enum mu_status mu_file_writer_drain(struct mu_file_writer *writer, struct mu_error *err) MU_WARN_UNUSED;
/* Drops what has not begun, waits for what has; the descriptor is back to buffered output. NULL is fine. */
void mu_file_writer_free(struct mu_file_writer *writer);

/* The plain loop around pwrite. *is_direct: the descriptor has O_DIRECT; taken back where the disk refuses a write for
 * its shape (sectors larger than a page, the rest of a short write): the file goes on through the page cache. */
enum mu_status mu_file_write_at(int fd, const char *label, const void *data, size_t data_bytes, uint64_t offset,
                                bool *is_direct, struct mu_error *err) MU_WARN_UNUSED;

#endif
