#include "storage/piece_copy.h"

#include <stdlib.h>

#include "storage/file.h"
#include "storage/piece_format.h"

struct mu_piece_copy {
    struct mu_file_out out;
};

enum mu_status mu_piece_copy_new(const char *dir, const char *file, uint64_t size_bytes,
                                 struct mu_piece_copy **ret_copy, struct mu_error *err)
{
    if (!mu_piece_file_name_is_valid(file))
        return mu_fail(err, MU_ERR_INVALID, "'%s': the piece name '%s' is not allowed", dir, file);
    struct mu_piece_copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s/%s': no memory for a copy", dir, file);
    enum mu_status status = mu_file_out_open(&copy->out, dir, file, size_bytes, err);
    copy->out.transient = copy->out.withdraw = true;
    if (status == MU_OK)
        *ret_copy = copy;
    else
        mu_piece_copy_free(copy);
    return status;
}

enum mu_status mu_piece_copy_append(struct mu_piece_copy *copy, const void *block, size_t block_bytes,
                                    struct mu_error *err)
{
    return mu_file_out_append(&copy->out, block, block_bytes, err);
}

enum mu_status mu_piece_copy_finish(struct mu_piece_copy *copy, struct mu_hash128 checksum, struct mu_error *err)
{
    struct mu_file_out *out = &copy->out;
    enum mu_status status = MU_OK;
    if (out->appended_bytes != out->size_bytes || !mu_hash128_equal(mu_file_out_hash(out), checksum))
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': what came is not the piece that was written (%llu of %llu bytes)",
                       out->label, (unsigned long long)out->appended_bytes, (unsigned long long)out->size_bytes);
    if ((status = mu_file_out_sync(out, err)) || (status = mu_file_out_rename(out, err)))
        return status;
    return mu_file_out_sync_dir(out, err);
}

void mu_piece_copy_free(struct mu_piece_copy *copy)
{
    if (!copy)
        return;
    mu_file_out_fini(&copy->out);
    free(copy);
}
