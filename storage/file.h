/* Durable files: the one place that knows the order temporary name -> allocate -> write -> fsync -> rename ->
 * fsync(directory).
 *
 * Large files are written past the page cache where the file system can (storage/file_writer.h): a buffered write
 * copies every byte on a core that computes, and takes many times what the disk needs when all cores are busy. Whole
 * pages that begin at a page in memory go to the disk from where they are, in the background; the rest goes through one
 * aligned buffer.
 *
 * A failed fsync is final for its file: the kernel has marked the pages clean, so a second fsync would lie. The caller
 * begins again with a new file from memory. One thread per object; internal to storage/. */
#ifndef MU_STORAGE_FILE_H
#define MU_STORAGE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/hash.h"
#include "common/status.h"

enum {
    MU_FILE_NAME_SIZE = 128,       /* of a file in its directory, with the terminating 0 */
    MU_FILE_BLOCK_BYTES = 8 << 20, /* one write; smaller ones cost half the disk's rate */
    MU_FILE_WRITEBACK_BLOCKS = 8, /* buffered: blocks on their way to the disk before the writer waits for the oldest */
    MU_FILE_DIRECT_BYTES = 1 << 20, /* files from this size on are written directly */
};

struct mu_file_out {
    int dir_fd, fd;
    char label[512 + MU_FILE_NAME_SIZE]; /* "dir/name", for messages */
    char name[MU_FILE_NAME_SIZE], temporary[MU_FILE_NAME_SIZE + 32];
    uint64_t size_bytes;                   /* announced */
    uint64_t appended_bytes, handed_bytes; /* the difference is in the stage */
    struct mu_file_writer *writer;         /* NULL: buffered */
    uint8_t *stage;                        /* one block, page-aligned: what was appended and is not written yet */
    void *hash;                            /* XXH3 state over everything appended */
    bool is_renamed, is_published;
    bool transient; /* what is appended need not stay: all of it goes through the stage */
    bool withdraw;  /* an unpublished file that has its final name already is removed by _fini */
};

/* Creates the temporary file in `dir` and allocates exactly size_bytes (so that a full disk shows before anything is
 * written). The object is always safe to _fini afterwards. */
enum mu_status mu_file_out_open(struct mu_file_out *out, const char *dir, const char *name, uint64_t size_bytes,
                                struct mu_error *err) MU_WARN_UNUSED;
/* Appends; whole blocks go to the file and to the disk in the background. The data must stay until mu_file_out_sync, or
 * _fini, has returned. */
enum mu_status mu_file_out_append(struct mu_file_out *out, const void *data, size_t data_bytes,
                                  struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_file_out_sync(struct mu_file_out *out,
                                struct mu_error *err) MU_WARN_UNUSED; /* the rest, then fsync */
enum mu_status mu_file_out_rename(struct mu_file_out *out, struct mu_error *err) MU_WARN_UNUSED; /* to its name */
enum mu_status mu_file_out_sync_dir(struct mu_file_out *out,
                                    struct mu_error *err) MU_WARN_UNUSED; /* now it is published */
struct mu_hash128 mu_file_out_hash(const struct mu_file_out *out);
/* Closes; removes the temporary file unless published. */
void mu_file_out_fini(struct mu_file_out *out);

/* All of the above for a small file. */
enum mu_status mu_file_publish(const char *dir, const char *name, const void *data, size_t data_bytes,
                               struct mu_error *err) MU_WARN_UNUSED;

enum mu_status mu_file_sync_dir(const char *path, struct mu_error *err) MU_WARN_UNUSED;
/* mkdir -p, each new directory synced into its parent. */
enum mu_status mu_file_make_dirs(const char *path, struct mu_error *err) MU_WARN_UNUSED;
/* The directory that holds `path` ("." if it names none). */
void mu_file_parent(const char *path, char *out, size_t out_size);

/* Opens for reading: regular files only (a FIFO would block for ever). */
enum mu_status mu_file_open_regular(const char *path, int *ret_fd, uint64_t *ret_size_bytes,
                                    struct mu_error *err) MU_WARN_UNUSED;
/* Exactly size_bytes from `offset`; MU_ERR_CORRUPT when the file ends early. */
enum mu_status mu_file_read_at(int fd, const char *path, uint64_t offset, void *dst, size_t size_bytes,
                               struct mu_error *err) MU_WARN_UNUSED;
/* A whole file of at most limit_bytes, terminated by a 0 that is not counted; *ret_bytes is from malloc. */
enum mu_status mu_file_read_all(const char *path, size_t limit_bytes, char **ret_bytes, size_t *ret_size_bytes,
                                struct mu_error *err) MU_WARN_UNUSED;

#endif
