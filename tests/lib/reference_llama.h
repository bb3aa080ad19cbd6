/* The loss of a whole model, GPT-2 or Llama, in double precision, written for clarity and with nothing in common with
 * the kernels: what gradients are judged by (central differences). */
#ifndef MU_TESTS_LIB_REFERENCE_LLAMA_H
#define MU_TESTS_LIB_REFERENCE_LLAMA_H

#include <stdint.h>

#include "plan/model_spec.h"

struct ref_sequences {
    uint32_t sequences, length;
    const int32_t *tokens, *targets; /* [sequences, length]; targets of -1 do not count */
};

/* Sum of the token losses. `spec` has one slice; params is its flat space. No dropout. */
double ref_model_loss(const struct mu_model_spec *spec, const double *params, const struct ref_sequences *data);

#endif
