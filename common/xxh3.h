/* XXH3 as everything here includes it: by the widest vectors that the processor has, where the library can choose them
 * at run time (several times the speed of what it is compiled for; the values are the same). */
#ifndef MU_COMMON_XXH3_H
#define MU_COMMON_XXH3_H

#ifdef MU_XXH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#endif
